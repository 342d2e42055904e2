"""Messages, bytes and time of a call over many ranks, on paper.

For one sequence of T tokens, B = 1, in pieces of T / ranks. The tests count the messages of runs
over 2, 3 and 4 ranks and find exactly these. For T = 16 M = 2^24, H = 16, K = V = 128, states in
float32, t = 2.5 ns (linear) and 4 ns (delta rule) for a token with all heads on one GPU, 20 us and
50 GB/s for a message, the slowest rank by :func:`seconds`, "decaying" where the gates leave nothing
of a state within 4,096 tokens and "lasting" where they do not:

    ranks   linear, decaying   linear, lasting    delta, decaying    delta, lasting
              MB     s    %      MB     s    %      MB     s    %      MB     s    %
        1      .0  .0419 100%      .0  .0419 100%      .0  .0671 100%      .0  .0671 100%
        2     1.0  .0211 100%     1.0  .0420  50%     1.0  .0337 100%     1.0  .0672  50%
        4     1.0  .0106  99%     2.1  .0211  50%     1.0  .0169  99%     3.2  .0505  33%
        8     1.0  .0055  96%     3.1  .0107  49%     1.0  .0086  97%     5.3  .0255  33%
       16     1.0  .0029  91%     4.2  .0056  47%     1.0  .0045  94%     7.4  .0130  32%
       64     1.0  .0010  62%     6.3  .0018  36%     1.0  .0014  72%    11.6  .0037  28%
      256     1.0  .0007  24%     8.4  .0010  17%     1.0  .0008  33%    15.8  .0016  16%
     1024     1.0  .0007   6%    10.5  .0009   4%     1.0  .0007   9%    20.1  .0012   5%

MB is what the rank that sends most sends, s the time, % the share of it that the tokens of a rank
would take alone. Decaying, the ranks share the work almost ideally until a piece is about as short
as the decay. Lasting, the rule runs twice, the delta rule on three ranks and more three times: two
ranks gain nothing then. The wait for messages grows with the logarithm of the ranks, and outgrows
the work where a piece takes less than a millisecond.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .agree import SIZE


class Traffic(NamedTuple):
    """What one rank sends to others, besides the records that all ranks gather."""

    messages: int
    bytes: int


def sent(
    rule: str, ranks: int, rank: int, H: int, K: int, V: int, itemsize: int, lasting: bool = True
) -> Traffic:
    """What ``rank`` sends of the states of one sequence that all ranks share, B = 1."""
    state = H * K * V * itemsize
    transition = H * 16 if rule == "linear" else H * K * (K * itemsize + 8)
    if not lasting:  # to the next one, as all do
        return Traffic(1, state) if rank + 1 < ranks else Traffic(0, 0)
    messages, total, far = 0, 0, 1
    while rank + far < ranks:
        messages += 1
        total += state + transition * (rank >= far)
        far *= 2
    return Traffic(messages, total)


def seconds(
    rule: str,
    ranks: int,
    tokens: int,
    H: int,
    K: int,
    V: int,
    itemsize: int = 4,
    lasting: bool = True,
    *,
    token: float,
    seen: int = 4096,
    latency: float = 20e-6,
    bandwidth: float = 50e9,
) -> float:
    """Time of a call in pieces of equal length, on a GPU.

    ``token`` is the time for one token with all heads on one rank, and ``seen`` how many tokens of
    a piece see the state before it where that does not last.
    """
    piece = tokens / ranks
    if ranks == 1:
        return piece * token
    runs = 1 if rule == "linear" or ranks == 2 else 2  # besides the first
    again = piece * runs if lasting else min(seen, piece)
    rounds = math.ceil(math.log2(ranks))
    most = max(sent(rule, ranks, r, H, K, V, itemsize, lasting).bytes for r in range(ranks))
    records = 2 * rounds * latency + ranks * SIZE / bandwidth
    return (piece + again) * token + rounds * latency + most / bandwidth + records


def table() -> str:
    """The table above, in megabytes sent by the rank that sends most, seconds and efficiency."""
    H, K, V, tokens = 16, 128, 128, 1 << 24
    lines = [
        "    ranks   linear, decaying   linear, lasting    delta, decaying    delta, lasting",
        "              MB     s    %      MB     s    %      MB     s    %      MB     s    %",
    ]
    for ranks in (1, 2, 4, 8, 16, 64, 256, 1024):
        cells = [f"    {ranks:5}"]
        for rule, token in (("linear", 2.5e-9), ("delta", 4e-9)):
            for lasting in (False, True):
                most = max(sent(rule, ranks, r, H, K, V, 4, lasting).bytes for r in range(ranks))
                time = seconds(rule, ranks, tokens, H, K, V, lasting=lasting, token=token)
                share = tokens * token / ranks / time
                cells.append(f"{most / 1e6:6.1f} {time:.4f} {share:4.0%}".replace(" 0.", "  ."))
        lines.append("  ".join(cells))
    return "\n".join(lines)
