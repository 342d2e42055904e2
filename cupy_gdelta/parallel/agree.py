"""All ranks go on with the same call, or all raise the same error."""

from __future__ import annotations

import json
from typing import Any

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


def agree(link: Link, name: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of all ranks, once none is a refusal and they agree in what must be the same."""
    raw = json.dumps(record).encode("ascii")
    records = [json.loads(x) for x in link.gather(raw.ljust(SIZE))]
    for rank, found in enumerate(records):
        if "refusal" in found:
            kind, text = found["refusal"]
            raise KINDS.get(kind, RuntimeError)(f"{text} (on rank {rank} of {link.size})")
    for key, label in SAME.items():
        first = records[0][key]
        for rank, found in enumerate(records):
            if found[key] != first:
                raise ValueError(
                    f"{name}: {label} must be the same on all ranks; got {first} on rank 0 and "
                    f"{found[key]} on rank {rank}"
                )
    return records


def refusal(error: Exception) -> dict[str, Any]:
    """The record of a rank that cannot go on."""
    text = str(error).encode("ascii", "backslashreplace").decode("ascii")
    return {"refusal": [type(error).__name__, text[: SIZE // 2 - 100]]}
