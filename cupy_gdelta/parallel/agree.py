"""All ranks go on with the same call, or all raise the same error."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from .links import Link

SIZE = 2048  # bytes of a record
KINDS = {"TypeError": TypeError, "ValueError": ValueError}
SAME = {  # entries of a record, and what to call them in a message
    "function": "the function called",
    "dtype": "the dtype of q",
    "B": "the batch B of q",
    "Hq": "the heads Hq of q",
    "K": "the last axis K of q",
    "H": "the heads H of v",
    "V": "the last axis V of v",
    "cu_seqlens": "cu_seqlens",
    "scale": "scale",
    "qk_l2norm": "qk_l2norm",
    "precision": "precision",
    "return_state": "return_state",
    "differentiable": "whether an input requires grad",
}


def agree(link: Link, name: str, same: dict[str, Any], own: tuple[int, ...]) -> np.ndarray:
    """The numbers ``own`` of all ranks, once none refuses and all have ``same`` in common.

    A record is the digest of what must be the same, the numbers, and the text of it all, which is
    read only where something is wrong: there may be a thousand of them.
    """
    text = json.dumps(same).encode("ascii")
    head = hashlib.sha256(text).digest() + np.array(own, np.int64).tobytes()
    records = link.gather((head + text).ljust(SIZE))
    found = np.frombuffer(b"".join(records), np.uint8).reshape(link.size, SIZE)
    wrong = "refusal" in same or (found[:, :32] != found[0, :32]).any()
    numbers = found[:, 32 : len(head)].copy().view(np.int64)
    if wrong:
        _raise(name, [json.loads(x[len(head) :]) for x in records])
    return numbers


def _raise(name: str, records: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(records):
        if "refusal" in found:
            kind, text = found["refusal"]
            raise KINDS.get(kind, RuntimeError)(f"{text} (on rank {rank} of {len(records)})")
    for key, label in SAME.items():
        first = records[0][key]
        for rank, found in enumerate(records):
            if found[key] != first:
                raise ValueError(
                    f"{name}: {label} must be the same on all ranks; got {first} on rank 0 and "
                    f"{found[key]} on rank {rank}"
                )


def refusal(error: Exception) -> dict[str, Any]:
    """What a rank that cannot go on says instead."""
    text = str(error).encode("ascii", "backslashreplace").decode("ascii")
    return {"refusal": [type(error).__name__, text[: SIZE // 2 - 100]]}
