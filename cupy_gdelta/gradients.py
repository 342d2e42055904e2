"""What a backward pass returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """The gradient of each argument, in its shape and dtype; None where it was not given."""

    q: Any
    k: Any
    v: Any
    gate: Any  # that of log_gate where the gate was given so
    beta: Any
    initial_state: Any
