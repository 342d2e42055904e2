"""One line instead of a traceback: what the command line says when it will not go on."""

from __future__ import annotations

NO_CUPY = "CuPy is not installed: it comes with the extra cuda12, or cuda13 for CUDA 13"
_OPTIONAL = ("rich", "safetensors", "matplotlib", "torch")


class Refusal(Exception):
    """The input, the machine or an option is at fault; the text is the whole message."""


def missing(error: ModuleNotFoundError) -> Refusal:
    """The pip command for a package that an extra installs; any other import error is a bug.

    It names the package: that of an extra would not be the same in a checkout.
    """
    name = (error.name or "").partition(".")[0]
    if name in _OPTIONAL:
        return Refusal(f"{name} is not installed: pip install {name}")
    if name == "cupy":
        return Refusal(NO_CUPY)
    if name == "ml_dtypes":
        return Refusal("bfloat16 needs ml_dtypes: pip install ml_dtypes")
    raise error
