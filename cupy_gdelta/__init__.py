"""Gated linear recurrences of modern sequence models for NumPy, CuPy and torch arrays."""

from .api import gated_delta_rule, gated_linear_attention
from .grad import gated_delta_rule_grad, gated_linear_attention_grad
from .gradients import Gradients
from .step import gated_delta_rule_step, gated_linear_attention_step

__version__ = "0.1.0"
__all__ = [
    "Gradients",
    "__version__",
    "gated_delta_rule",
    "gated_delta_rule_grad",
    "gated_delta_rule_step",
    "gated_linear_attention",
    "gated_linear_attention_grad",
    "gated_linear_attention_step",
]
