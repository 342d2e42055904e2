"""Gated linear recurrences of modern sequence models for NumPy, CuPy and torch arrays."""

from .api import gated_delta_rule, gated_linear_attention

__version__ = "0.1.0"
__all__ = ["__version__", "gated_delta_rule", "gated_linear_attention"]
