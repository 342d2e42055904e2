"""The harness that runs kernels on the CPU: right kernels run, and each planted fault is found."""

from __future__ import annotations

import mmap
import re

import numpy as np
import pytest
from host import simt

pytestmark = pytest.mark.skipif(simt.compiler() is None, reason="no g++ to build kernels with")

BROKEN = {  # what is wrong -> what the message must say
    "kReadPast": r"reads 4 bytes at faults\.cu:\d+ outside .* into the 256 bytes of x",
    "kWritePast": r"thread 63 .*writes 4 bytes at faults\.cu:\d+ outside .* the 256 bytes of y",
    "kWriteInput": r"writes 4 bytes at offset 0 of x, which is only to be read",
    "kSharedPast": r"writes .* (512 bytes into|512 of) the 512 bytes of dynamic shared",
    "kUninitialised": r"reads 4 bytes at offset 256 of dynamic shared memory .* nobody has written",
    "kVectorShared": r"address is 8 bytes off the alignment of 16 at faults\.cu:\d+",
    "kVectorGlobal": r"address is 4 bytes off the alignment of 8 at faults\.cu:\d+",
    "kMatrixRow": r"ldmatrix_x4 \(faults\.cu:\d+\): the row is not aligned to 16 bytes",
    "kLocalPast": r"array index 4 out of bounds at faults\.cu:\d+",
    "kOverflow": r"product overflows at faults\.cu:\d+",
    "kMask": r"calls __shfl_sync \(faults\.cu:\d+\) without being in its mask",
    "kDiverges": r"warp 0 diverges: .*__shfl_xor_sync \(faults\.cu:\d+\).*__syncthreads",
    "kTwoPlaces": r"warp 0 diverges: .*__shfl_xor_sync .*__shfl_xor_sync",
    "kLonely": r"deadlock: warp 0 lanes 0\.\.31 wait at bar_sync .* barrier 1; warp 1 .*__sync",
    "kCounts": r"meet at barrier 1 with different numbers of threads",
    "kBeyond": r"bar_sync .*: 128 threads are no multiple of 32 within the block",
    "kAbandoned": r"warp 0 diverges: .*__syncthreads .*__syncwarp",
    "kLivelock": r"livelock: threads only sleep",
    "kNowhere": r"no memory at address|outside of all arrays",
    "kZero": r"divides an integer by zero|division overflows or divides by zero",
    "kDeep": r"thread 0 .*its local variables overflow the stack",
    "kOtherLocal": r"thread 1 .*touches a local variable of thread 0 ",
}
ONLY_WITH_CHECK = {  # what a plain build cannot notice
    "kReadPast",
    "kWritePast",
    "kWriteInput",
    "kUninitialised",
    "kVectorShared",
    "kVectorGlobal",
    "kLocalPast",
    "kOverflow",
    "kOtherLocal",
}

FAULTS = simt.Kernels(
    simt.HERE / "faults.cu",
    [
        *(f"reverse<{s}>" for s in ("true", "false")),
        *(f"reverse_warp<{o}>" for o in ("kNone", "kShuffle", "kSyncWarp")),
        *(f"reverse_async<{o}>" for o in ("true, true", "true, false", "false, true")),
        *(f"broadcast<{s}>" for s in ("true", "false")),
        *(f"pipeline<{f}>" for f in ("true", "false")),
        *(f"sum_blocks<{a}>" for a in ("true", "false")),
        *(f"broken<{f}>" for f in ("kRight", *BROKEN)),
        "leave_early",
        *(f"meet<{f}>" for f in ("true", "false")),
    ],
)
TWINS = simt.Kernels(
    simt.HERE / "twins.cu",
    [
        *(f"shuffles<{t}>" for t in ("float", "double", "int")),
        *(f"product16<{h}, {t}>" for h in ("true", "false") for t in ("true", "false")),
        *("votes", "to_float", "from_float", "product_tf32", "product_f64", "copies", "spin"),
    ],
)
EVERY = [(order, check) for check in (False, True) for order in simt.ORDERS]


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(1, 193, dtype=np.float32)


def run(kernels, name, grid, block, smem, *args, order=0, check=True, **options):
    """Launch with arrays as arguments, those called in ``x`` being inputs; returns the last one."""
    arrays = [a for a in args if isinstance(a, np.ndarray) and a.ndim]
    reads, writes = {"x": arrays[0]}, {f"y{i}": a for i, a in enumerate(arrays[1:-1])}
    writes["y"] = arrays[-1]
    options = {"reads": reads, "writes": writes} | options
    kernels.launch(name, grid, block, smem, list(args), order=order, check=check, **options)
    return arrays[-1]


def fault(*args, **options) -> str:
    with pytest.raises(simt.Fault) as caught:
        run(FAULTS, *args, **options)
    return str(caught.value)


@pytest.mark.parametrize(("order", "check"), EVERY)
def test_right_kernels_run_in_every_order(order, check, x):
    how = {"order": order, "check": check}
    y = run(FAULTS, "reverse<true>", 2, 96, 384, x, np.zeros(192, np.float32), **how)
    np.testing.assert_array_equal(y.reshape(2, 96), x.reshape(2, 96)[:, ::-1])
    y = run(FAULTS, "reverse_warp<kSyncWarp>", 1, 32, 0, x, np.zeros(32, np.float32), **how)
    np.testing.assert_array_equal(y, x[31::-1])
    assert (run(FAULTS, "broadcast<true>", 1, 96, 192, x, np.zeros(96, "f4"), **how) == x[5]).all()
    args = x, np.zeros(192, np.float32), np.int32(0)
    run(FAULTS, "reverse_async<true, true>", 1, 48, 768, *args, **how)
    np.testing.assert_array_equal(args[1], x[::-1])
    args = x, np.zeros(192, np.float32), np.int32(6)
    run(FAULTS, "pipeline<true>", 1, 64, 256, *args, **how)
    np.testing.assert_array_equal(args[1].reshape(6, 32), x.reshape(6, 32)[:, ::-1])
    args = x, np.zeros(6, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    assert run(FAULTS, "sum_blocks<true>", 6, 32, 0, *args, **how) == 21
    y = run(FAULTS, "broken<kRight>", 1, 64, 512, x, np.zeros(64, np.float32), np.int32(64), **how)
    np.testing.assert_array_equal(y, x[:64] + np.arange(64))
    args = x, np.zeros(96, np.float32), np.int32(64)
    y = run(FAULTS, "leave_early", 1, 96, 384, *args, **how)
    assert (y[0], y[32]) == (x[32:64].sum(), x[:32].sum())


@pytest.mark.parametrize("order", simt.ORDERS)
def test_missing_barrier(order, x):
    y = np.zeros(192, np.float32)
    run(FAULTS, "reverse<false>", 2, 96, 384, x, y, order=order, check=False)
    assert np.isnan(y).any() or not np.array_equal(y.reshape(2, 96), x.reshape(2, 96)[:, ::-1])
    text = fault("reverse<false>", 2, 96, 384, x, y, order=order, uninitialised=False)
    assert re.search(
        r"race: (reads|writes) 4 bytes .*dynamic shared memory at faults\.cu:\d+", text
    )
    assert re.search(r"which thread \d+ \(warp \d lane \d+\) (read|wrote) at faults\.cu:\d+", text)


@pytest.mark.parametrize("order", simt.ORDERS)
@pytest.mark.parametrize("between", ["kNone", "kShuffle"])
def test_missing_syncwarp(between, order, x):
    name = f"reverse_warp<{between}>"
    text = fault(name, 1, 32, 0, x, np.zeros(32, np.float32), order=order, uninitialised=False)
    assert "race: " in text
    assert "static shared memory" in text


@pytest.mark.parametrize("order", simt.ORDERS)
def test_write_before_other_warps_have_read(order, x):
    text = fault("broadcast<false>", 1, 96, 192, x, np.zeros(96, np.float32), order=order)
    assert re.search(r"race: .* 2 bytes at offset 10 of dynamic shared memory", text)


def test_missing_wait_for_an_asynchronous_copy(x):
    args = "reverse_async<false, true>", 1, 48, 768, x, np.zeros(192, np.float32), np.int32(0)
    run(FAULTS, *args, check=False)
    assert np.isnan(args[-2]).all()
    assert re.search(r"a cp.async of thread \d+ .*has yet to fill: no cp_async_wait", fault(*args))


@pytest.mark.parametrize("order", simt.ORDERS)
def test_missing_barrier_after_an_asynchronous_copy(order, x):
    args = "reverse_async<true, false>", 1, 48, 768, x, np.zeros(192, np.float32), np.int32(0)
    text = fault(*args, order=order, uninitialised=False)
    assert re.search(r"race: .* dynamic shared memory|has yet to fill", text)


def test_misaligned_asynchronous_copy(x):
    args = "reverse_async<true, true>", 1, 40, 768, x, np.zeros(192, np.float32), np.int32(1)
    for check in (False, True):
        assert re.search(
            r"cp_async \(faults\.cu:\d+\): not aligned to its 16 bytes", fault(*args, check=check)
        )


@pytest.mark.parametrize("order", simt.ORDERS)
def test_buffer_filled_again_before_it_is_drained(order, x):
    args = "pipeline<false>", 1, 64, 256, x, np.zeros(192, np.float32), np.int32(6)
    assert re.search(r"race: |a second time before", fault(*args, order=order))


def test_blocks_that_share_memory_without_atomics(x):
    args = x, np.zeros(6, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    assert re.search(
        r"race: .* of y1 .*which block 0 wrote", fault("sum_blocks<false>", 6, 32, 0, *args)
    )


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernel_is_reported(what, x):
    args = x[:64].copy(), np.zeros(64, np.float32), np.int32(128 - 64)
    for check in (True, False):
        if check or what not in ONLY_WITH_CHECK:
            text = fault(f"broken<{what}>", 1, 64, 512, *args, check=check)
            assert re.search(BROKEN[what], text)


def test_impossible_launches_are_refused(x):
    for grid, block, smem in (
        (0, 32, 0),
        (1, 0, 0),
        (1, 1025, 0),
        (1, (32, 33), 0),
        (1, 32, 2**18),
    ):
        with pytest.raises(ValueError, match="cannot launch"):
            FAULTS.launch("reverse<true>", grid, block, smem, [x, x])


def test_arguments_must_fit_the_parameters(x):
    with pytest.raises(TypeError, match=r"takes arguments of \[8, 8\] bytes; got \[8\]"):
        FAULTS.launch("reverse<true>", 1, 32, 128, [x])
    with pytest.raises(TypeError, match=r"takes arguments of \[8, 8, 4\] bytes; got \[8, 8, 8\]"):
        FAULTS.launch("leave_early", 1, 32, 128, [x, x, np.int64(3)])
    with pytest.raises(TypeError, match="must be NumPy scalars or arrays; got int"):
        FAULTS.launch("leave_early", 1, 32, 128, [x, x, 3])


@pytest.mark.parametrize("order", simt.ORDERS)
def test_blocks_that_wait_for_each_other(order):
    words = np.ndarray(3, np.int32, mmap.mmap(-1, 12))
    FAULTS.launch("meet<false>", 3, 32, 0, [words], order=order, together=True)
    assert words.tolist() == [1, 2, 3]
    with pytest.raises(simt.Fault, match=r"block \(1, 0, 0\).*barriers are numbered 0 to 15"):
        FAULTS.launch("meet<true>", 3, 32, 0, [words], order=order, together=True)
    with pytest.raises(simt.Fault, match="livelock"):
        FAULTS.launch("meet<false>", 3, 32, 0, [np.zeros(3, np.int32)], order=order)


@pytest.mark.parametrize(("kind", "dtype"), [("float", "f4"), ("double", "f8"), ("int", "i4")])
def test_shuffles(kind, dtype):
    x = np.arange(100, 132).astype(dtype)
    out = run(TWINS, f"shuffles<{kind}>", 1, 32, 0, x, np.zeros((7, 32), dtype))
    i = np.arange(32)
    sources = [
        np.full(32, 5),
        i // 8 * 8 + (i + 3) % 8,
        i ^ 6,
        np.where(i + 3 < 32, i + 3, i),
        np.where(i % 16 + 3 < 16, i + 3, i),
        np.where(i >= 5, i - 5, i),
        np.where(i % 8 >= 5, i - 5, i),
    ]
    np.testing.assert_array_equal(out, x[np.array(sources)])


def test_votes_and_reductions(rng):
    x = rng.integers(-3, 100, 32).astype(np.int32)
    out = run(TWINS, "votes", 1, 32, 0, x, np.zeros((9, 32), np.uint32)).view(np.int32)
    for i in range(32):
        mine = x[i % 2 :: 2]
        ballot = sum(1 << j for j in range(i % 2, 32, 2) if x[j] > 0)
        assert out[0, i].view(np.uint32) == ballot
        assert tuple(out[1:3, i]) == ((mine > 0).any(), (mine > 0).all())
        assert tuple(out[3:6, i]) == (mine.sum(), mine.min(), mine.max())
        assert out[6, i] == np.bitwise_xor.reduce(mine)
        bits = f"{x[i].view(np.uint32):032b}"
        assert out[7, i] == bits.count("1") + 100 * (f"{bits}1".index("1"))
        rest = x.view(np.uint32) % 3
        same = sum(1 << j for j in range(i % 2, 32, 2) if rest[j] == rest[i])
        assert out[8, i].view(np.uint32) == same


def test_16_bit_floats_are_read():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(1 << 16).astype(np.uint16)
    half, bfloat16 = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
    run(TWINS, "to_float", 1, 64, 0, x, half, bfloat16, np.int32(x.size), check=False)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(half, x.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(bfloat16, x.view(ml_dtypes.bfloat16).astype(np.float32))


def test_floats_are_rounded_to_16_bits(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(1 << 16).astype(np.uint16)
    ties = (every.astype(np.uint32) << 16) | rng.choice([0, 1, 0x7FFF, 0x8000, 0x8001], every.size)
    with np.errstate(invalid="ignore", over="ignore"):
        halves = every.view(np.float16).astype(np.float32)
        middle = (halves + np.nextafter(every.view(np.float16), np.float16(np.inf))) / 2
    near = middle * rng.choice(np.float32([1, 1 - 2**-23, 1 + 2**-22]), every.size)
    x = np.concatenate([ties.astype(np.uint32).view(np.float32), halves, middle, near])
    x = np.append(x, np.float32([65519.99, 65520, 7e4, -7e4, 2**-25, 2**-26, np.nan, -np.inf]))
    half, bfloat16 = np.zeros(x.shape, np.uint16), np.zeros(x.shape, np.uint16)
    run(TWINS, "from_float", 1, 64, 0, x, half, bfloat16, np.int32(x.size), check=False)
    with np.errstate(invalid="ignore", over="ignore"):
        for got, dtype in ((half, np.float16), (bfloat16, ml_dtypes.bfloat16)):
            expected, got = x.astype(dtype), got.view(dtype)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
            real = ~np.isnan(x)
            np.testing.assert_array_equal(got.view("u2")[real], expected.view("u2")[real])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_products_of_16_bit_matrices(half, transposed, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a, b, d = (rng.standard_normal(s) for s in ((16, 16), (16, 8), (16, 8)))
    a, b = (x.astype(np.float16 if half else ml_dtypes.bfloat16) for x in (a, b))
    got, given = d.astype(np.float32), np.ascontiguousarray(b.T if transposed else b)
    name = f"product16<{str(half).lower()}, {str(transposed).lower()}>"
    arrays = {"a": a.view("u2"), "b": given.view("u2")}
    writes = {"d": got}
    run(TWINS, name, 1, 32, 768, *arrays.values(), got, reads=arrays, writes=writes)
    expected = d + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6)


def test_product_of_tf32_matrices(rng):
    a, b, d = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    got = d.copy()
    run(TWINS, "product_tf32", 1, 32, 0, a, b, got)
    tf32 = [((x.view("u4") + 0x1000) & 0xFFFFE000).astype("u4").view("f4") for x in (a, b)]
    np.testing.assert_allclose(got, d + tf32[0] @ tf32[1], rtol=0, atol=4e-6)
    assert abs(got - (d + a @ b)).max() > 1e-5


def test_product_of_float64_matrices(rng):
    a, b, d = (rng.standard_normal(s) for s in ((8, 4), (4, 8), (8, 8)))
    got = d.copy()
    run(TWINS, "product_f64", 1, 32, 0, a, b, got)
    np.testing.assert_allclose(got, d + a @ b, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("order", "check"), EVERY)
def test_asynchronous_copies_of_every_size(order, check):
    x = np.arange(1, 13, dtype=np.float32)
    y = run(TWINS, "copies", 1, 1, 48, x, np.zeros(12, np.float32), order=order, check=check)
    np.testing.assert_array_equal(y, [1, 2, 3, 4, 5, 0, 7, 0, 9, 10, 11, 0])


@pytest.mark.parametrize(("order", "check"), EVERY)
def test_threads_that_wait_for_a_flag(order, check):
    flag, y = np.zeros(1, np.int32), np.zeros(2, np.int32)
    TWINS.launch(
        "spin", 1, 64, 0, [flag, y], order=order, check=check, writes={"flag": flag, "y": y}
    )
    assert list(y) == [7, 6]
