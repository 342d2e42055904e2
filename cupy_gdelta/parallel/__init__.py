"""One sequence over many ranks: its time axis is cut into pieces, one for each rank.

A batch and heads need nothing of this: give each rank its own entries or heads and call the
functions of one rank. Cut the time axis where one sequence outgrows a device or a machine.

``api`` holds the functions and ``enter`` the way in and out; ``agree`` lets all ranks go on or
none; ``links`` says what an engine must do, ``mpi`` and ``groups`` are the engines; ``pieces`` says
who holds what; ``run`` is the order of the work: ``local`` what a rank does with its own tokens,
``reach`` how far the state before them matters, ``scan`` how it gets there; ``spaces`` computes in
the caller's library; ``back`` and ``autograd`` are the way back for torch; ``model`` counts
messages and time.
"""

from .api import gated_delta_rule, gated_linear_attention

__all__ = ["gated_delta_rule", "gated_linear_attention"]
