"""Batched matrix products that leave the threads to us.

OpenBLAS starts threads for one product above a size, and several callers at once wait for each
other there: at K = V = 256 that costs a factor of ten. Slices of columns stay below that size.
"""

from __future__ import annotations

import numpy as np

ONE_THREAD = 1 << 18  # multiplications that OpenBLAS leaves to the calling thread


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = a b, [..., m, k] [..., k, n] -> [..., m, n], as ``numpy.matmul`` but in slices of n."""
    n = b.shape[-1]
    width = ONE_THREAD // (a.shape[-2] * a.shape[-1])
    if width >= n:
        return np.matmul(a, b, out=out)
    width = max(16, width // 16 * 16)
    count, rest = divmod(n, width)
    if count:
        b_slices, slices = (
            x[..., : count * width].reshape(*x.shape[:-1], count, width).swapaxes(-2, -3)
            for x in (b, out)
        )
        np.matmul(a[..., None, :, :], b_slices, out=slices)
    if rest:
        np.matmul(a, b[..., n - rest :], out=out[..., n - rest :])
    return out


def takes(x: np.ndarray) -> bool:
    """Whether the tokens of x [S, t, heads, D] are rows that the BLAS reads or writes in place."""
    return x.strides[3] == x.itemsize and x.strides[1] >= x.shape[3] * x.itemsize
