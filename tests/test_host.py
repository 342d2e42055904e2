"""The harness that runs kernels on the CPU: right kernels run, and each planted fault is found."""

from __future__ import annotations

import numpy as np
import pytest
from host import simt

pytestmark = pytest.mark.skipif(simt.compiler() is None, reason="no g++ to build kernels with")

FAULTS = simt.HERE / "faults.cu"
REVERSE = simt.Kernels(FAULTS, ["reverse<true>", "reverse<false>"])


def reverse(sync: bool, **options) -> bool:
    """Whether two blocks of 96 threads reverse their parts."""
    x, y = np.arange(192, dtype=np.float32), np.zeros(192, np.float32)
    name = f"reverse<{str(sync).lower()}>"
    REVERSE.launch(name, 2, 96, 96 * 4, [x, y], **options)
    return np.array_equal(y.reshape(2, 96), x.reshape(2, 96)[:, ::-1])


@pytest.mark.parametrize("order", simt.ORDERS)
def test_missing_barrier_shows_in_every_order(order):
    assert reverse(True, order=order)
    assert not reverse(False, order=order)


def test_wrong_number_of_arguments_is_refused():
    with pytest.raises(TypeError, match=r"arguments of \[8, 8\] bytes; got \[8\]"):
        REVERSE.launch("reverse<true>", 1, 32, 128, [np.zeros(32)])
