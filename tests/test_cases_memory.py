"""Reported faults (see test_cases.py): strides, offsets, head sizes and sizes beyond 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_close, bits, check, host
from conftest import python

import cupy_gdelta
from cupy_gdelta import accuracy

FUNCTIONS = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
RULES = pytest.mark.parametrize("rule", FUNCTIONS)
GUARD = 1e30  # of the other sign and size than anything that may be read


def equal(a, b):
    return all(np.array_equal(host(x), host(y)) for x, y in zip(a, b, strict=True))


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_S01_strides_are_followed(family, rule, dtype, rng):
    """A slice or transpose was read as its parent buffer (cupy/cupy#7267, #9233)."""
    B, T, H, K = 2, 65, 3, 24
    state = "float64" if dtype == "float64" else "float32"
    p = accuracy.inputs(rng, B=B, T=2 * T, H=H, K=K, V=K)
    parents = {
        "q": family.array(p["q"], dtype),
        "k": family.array(np.pad(p["k"][:, :T], ((0, 0), (0, 0), (0, 0), (0, 8))), dtype),
        "v": family.array(p["v"][:, :T].swapaxes(1, 2).copy(), dtype),
        "gate": family.array(np.stack([p["gate"][:, :T], np.full((B, T, H), GUARD)], -1), state),
        "beta": family.array(p["beta"][:, :T].transpose(2, 0, 1).copy(), state),
        "initial_state": family.array(rng.standard_normal((B, H, K, K)), state),
    }
    views = {
        "q": parents["q"][:, ::2],
        "k": parents["k"][..., :24],
        "v": parents["v"].swapaxes(1, 2),
        "gate": parents["gate"][..., 0],
        "beta": parents["beta"].swapaxes(0, 1).swapaxes(1, 2),
        "initial_state": parents["initial_state"].swapaxes(2, 3),
    }
    before = {n: bits(host(x)) for n, x in parents.items()}
    y = check(rule, FUNCTIONS[rule], views, dtype)
    copies = {n: family.array(host(x), dtype if n in "qkv" else state) for n, x in views.items()}
    assert equal(y, FUNCTIONS[rule](**copies, return_state=True))
    assert {n: bits(host(x)) for n, x in parents.items()} == before


def guarded(family, x, dtype, guard=GUARD):
    """``x`` inside a larger array of huge values, and that array."""
    parent = np.full([n + 2 for n in x.shape], guard if dtype != "float16" else 6e4)
    inside = (slice(1, -1),) * x.ndim
    parent[inside] = x
    parent = family.array(parent, dtype)
    return parent[inside], parent


@RULES
def test_S02_stride_zero_is_not_read_past_its_end(family, rule, rng):
    """A broadcast array was read as if it had all its elements (cupy/cupy#3095, #913)."""
    B, T, H, K = 2, 65, 3, 8
    p = accuracy.inputs(rng, B=B, T=T, H=H, K=K, V=K)
    p["beta"] = np.ones((1, 1, 1))
    p["gate"] = p["gate"][:1, :, :1]
    p["v"] = p["v"][:, :, :1]
    shapes = {"beta": (B, T, H), "gate": (B, T, H), "v": (B, T, H, K)}
    thin, full = {}, {}
    for name, x in p.items():
        small, _ = guarded(family, x, "float32")
        thin[name] = spread(family, small, shapes.get(name, x.shape))
        full[name] = family.array(np.broadcast_to(x, shapes.get(name, x.shape)), "float32")
    assert equal(
        check(rule, FUNCTIONS[rule], full, "float32"), FUNCTIONS[rule](**thin, return_state=True)
    )


def spread(family, x, shape):
    if family.name.startswith("torch"):
        return x.expand(*shape)
    if family.name == "cupy":
        import cupy

        return cupy.broadcast_to(x, shape)
    return np.broadcast_to(x, shape)


@RULES
def test_S02_axes_of_size_one_may_have_any_stride(rule, rng):
    p = {n: x.astype("float32") for n, x in accuracy.inputs(rng, T=5, H=1, K=4, V=1).items()}
    odd = {}
    for name, x in p.items():
        strides = [s if n > 1 else 4 * 10**6 for n, s in zip(x.shape, x.strides, strict=True)]
        odd[name] = np.lib.stride_tricks.as_strided(x, x.shape, strides)
    expected = check(rule, FUNCTIONS[rule], p, "float32")
    assert equal(FUNCTIONS[rule](**odd, return_state=True), expected)


S03 = """
    import sys
    import numpy as np
    sys.path.insert(0, {tests!r})
    from compare import check
    from conftest import Family
    import cupy_gdelta
    from cupy_gdelta import accuracy

    family = Family({family!r})
    rng = np.random.default_rng(0)
    for dtype, K, V, shift in [(d, *s) for d in ("float16", "bfloat16", "float32", "float64")
                               for s in ((24, 24, 1), (64, 64, 1), (9, 7, 3), (128, 128, 5))]:
        p = accuracy.inputs(rng, T=33, H=3, K=K, V=V)
        p["initial_state"] = rng.standard_normal((1, 3, K, V))
        views = {{}}
        for name, x in p.items():
            kind = dtype if name in "qkv" else "float64" if dtype == "float64" else "float32"
            flat = np.concatenate([np.full(shift, 6e4), x.ravel()])
            views[name] = family.array(flat, kind)[shift:].reshape(x.shape)
        out = family.array(np.full(p["v"].size + shift, np.nan), dtype)[shift:]
        for rule, function in (("linear", cupy_gdelta.gated_linear_attention),
                               ("delta", cupy_gdelta.gated_delta_rule)):
            check(rule, function, views, dtype, out=out.reshape(p["v"].shape))
    print("right")
"""


def test_S03_an_offset_that_breaks_alignment(family):
    """Loads of 16 bytes from such a view kill the process's CUDA context (qkan#26, fla#913)."""
    from pathlib import Path

    tests = str(Path(__file__).parent)
    assert python(S03.format(tests=tests, family=family.name)) == "right\n"


H01 = [(n, n) for n in (1, 3, 8, 9, 24, 40, 80, 96, 192)] + [(9, 24), (24, 9), (40, 3), (3, 200)]


@RULES
@pytest.mark.parametrize(("K", "V"), H01)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_H01_heads_that_fill_no_tile(backend, rule, K, V, dtype, rng):
    """The next head was read, or the next tensor written (mamba PR#1046, fla#552, fla#22)."""
    T, H = (255, 20) if max(K, V) <= 9 else (130, 3)
    p = accuracy.inputs(rng, T=T, H=H, K=K, V=V)
    p["initial_state"] = rng.standard_normal((1, H, K, V))
    views = {n: guarded(backend, x, dtype if n in "qkv" else "float32")[0] for n, x in p.items()}
    out, parent = guarded(backend, np.zeros((1, T, H, V)), dtype)
    y, state = check(rule, FUNCTIONS[rule], views, dtype, out=out)
    assert y is out
    around = host(parent).copy()
    around[1:-1, 1:-1, 1:-1, 1:-1] = around[0, 0, 0, 0]
    assert (around == around[0, 0, 0, 0]).all(), "written beside out"
    kinds = {n: dtype if n in "qkv" else "float32" for n in views}
    other = {n: guarded(backend, host(x), kinds[n], np.nan)[0] for n, x in views.items()}
    out, _ = guarded(backend, np.zeros((1, T, H, V)), dtype)
    assert equal(FUNCTIONS[rule](**other, return_state=True, out=out), (y, state))
    plain = {n: backend.array(host(x), kinds[n]) for n, x in views.items()}
    check(rule, FUNCTIONS[rule], plain, dtype)


@RULES
@pytest.mark.parametrize(("K", "V"), [(256, 256), (256, 1), (1, 256), (256, 255), (129, 256)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_H02_the_widest_heads(backend, rule, K, V, dtype, rng):
    """Only the first 128 columns were computed, or shared memory ran out (fla#241, cupy#2118)."""
    p = accuracy.inputs(rng, T=70, H=1, K=K, V=V)
    y, state = check(rule, FUNCTIONS[rule], backend.arrays(p, dtype), dtype)
    assert np.abs(host(y)[..., -1]).max() > 1e-3
    assert np.abs(host(state)[..., -1, -1]).max() > 1e-6
    for name, axis, wide in (("q", "K", (1, 2, 1, 300)), ("v", "V", (1, 2, 1, 512))):
        x = {n: backend.array(np.ones((1, 2, 1, 4)), dtype) for n in "qkv"}
        x |= {n: backend.array(np.ones(wide), dtype) for n in ("qk" if name == "q" else "v")}
        text = f"{name} must have a last axis {axis} of 1 to 256; got {wide[-1]}"
        with pytest.raises(ValueError, match=text):
            FUNCTIONS[rule](**x)


def test_A01_every_kind_of_scalar(backend, rng):
    """A Python float was read as a C float, a float64 array as float32 (cupy/cupy#8485, #6940)."""
    p = backend.arrays(accuracy.inputs(rng, T=9), "float32")
    half = [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5)]
    two = [2, 2.0, np.int32(2), np.int64(2), np.uint8(2), np.float64(2)]
    if backend.on_gpu:
        import cupy

        half += [cupy.array(0.5), cupy.array(0.5, "float32")]
        two += [cupy.array(2)]
    for rule, function in FUNCTIONS.items():
        for scales in (half, two):
            expected = check(rule, function, p, "float32", scale=float(scales[0]))
            for scale in scales:
                assert equal(function(**p, scale=scale, return_state=True), expected), repr(scale)
        for name in p:
            odd = p | {name: p[name].astype("float64")}
            if name == "q":
                name = "k"  # the first that is not of the dtype of q
            with pytest.raises(TypeError, match=rf"{name} must have dtype float(32|64) "):
                function(**odd)


@RULES
@pytest.mark.parametrize(("B", "H"), [(65537, 1), (2050, 32)])
def test_L01_more_heads_than_65535(backend, rule, B, H, rng):
    """Batch times heads went on an axis of the grid that ends at 65535 (fla#172, fla#64)."""
    p = backend.arrays(accuracy.inputs(rng, B=B, T=1, H=H, K=8, V=8), "float32")
    y, state = check(rule, FUNCTIONS[rule], p, "float32")
    last = FUNCTIONS[rule](**{n: x[-1:] for n, x in p.items()}, return_state=True)
    assert_close(y[-1:], host(last[0]), 1e-6, "the last y")
    assert_close(state[-1:], host(last[1]), 1e-6, "the last state")


@RULES
def test_L01_more_sequences_than_65535(backend, rule, rng):
    N = 65600
    p = accuracy.inputs(rng, B=N, T=1, H=1, K=8, V=8)
    batch = backend.arrays(p, "float32")
    packed = {n: x.reshape(1, N, *x.shape[2:]) for n, x in batch.items()}
    y, state = check(rule, FUNCTIONS[rule], batch, "float32")
    some, states = FUNCTIONS[rule](**packed, cu_seqlens=range(N + 1), return_state=True)
    assert_close(some[0], host(y)[:, 0], 1e-6, "y")
    assert_close(states, host(state), 1e-6, "state")


def far_apart(backend, x, gap):
    """``x`` with its two batch entries ``gap`` elements apart, as float16."""
    if backend.on_gpu:
        import cupy as library
        from cupy.lib.stride_tricks import as_strided
    else:
        library, as_strided = np, np.lib.stride_tricks.as_strided
    buffer = library.zeros(gap + x[0].size, "float16")
    strides = [2 * gap, *(2 * s // x.itemsize for s in x.strides[1:])]
    view = as_strided(buffer, x.shape, strides)
    view[...] = library.asarray(x.astype("float16"))
    return view


@RULES
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_L02_strides_beyond_32_bits(backend, rule, name, rng):
    """Offsets of more than 2^31 elements wrapped (fla#1080, mamba#1015, cupy#7539)."""
    p = accuracy.inputs(rng, B=2, T=70, K=16, V=16)
    plain = backend.arrays(p, "float16")
    expected = check(rule, FUNCTIONS[rule], plain, "float16")
    far = far_apart(backend, p["v" if name == "out" else name], 2**31 + 5)
    assert equal(FUNCTIONS[rule](**plain | {name: far}, return_state=True), expected)


@pytest.mark.gpu
@pytest.mark.slow
@RULES
def test_L02_arrays_beyond_32_bits(rule, rng):
    """Contiguous float16 arrays of 2^31 elements and more: the last entry as if alone."""
    import cupy

    shape = (1048577, 16, 1, 128)
    random = cupy.random.default_rng(0)

    def draw(*shape):
        x = cupy.empty(shape, "float16")
        for part in cupy.array_split(x, 64):
            part[...] = random.standard_normal(part.shape, dtype="float32")
        return x

    q, v = draw(*shape), draw(*shape)
    for part in cupy.array_split(q, 64):
        part /= cupy.linalg.norm(part.astype("float32"), axis=-1, keepdims=True).astype("float16")
    gate = random.random(shape[:3], dtype="float32")
    y = FUNCTIONS[rule](q, q, v, gate)
    for i in (0, 524288, shape[0] - 1):
        one = slice(i, i + 1)
        alone, _ = check(
            rule,
            FUNCTIONS[rule],
            {"q": q[one], "k": q[one], "v": v[one], "gate": gate[one]},
            "float16",
        )  # one entry alone may run on another tile: equal to rounding
        tolerance = accuracy.TOLERANCE[rule, "float16"]
        assert_close(y[one], host(alone), tolerance, f"entry {i}")
