"""Reported faults (see test_cases.py), in decode steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compare import REFERENCE, assert_close, bits, host
from conftest import Family, python

import cupy_gdelta
from cupy_gdelta import accuracy

STEPS = {
    "linear": cupy_gdelta.gated_linear_attention_step,
    "delta": cupy_gdelta.gated_delta_rule_step,
}
RULES = pytest.mark.parametrize("rule", STEPS)
GUARD = 1e30


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 2, "T": 20, "H": 2, "K": 24, "V": 24} | sizes)


def states(rng, p):
    (B, _, H, V), K = p["v"].shape, p["q"].shape[-1]
    return rng.standard_normal((B, H, K, V))


def walk(rule, x, state, **options):
    """y of every token, one step a token."""
    T = x["q"].shape[1]
    ys = []
    for t in range(T):
        token = {n: None if a is None else a[:, t] for n, a in x.items()}
        ys.append(host(STEPS[rule](**token, state=state, **options)))
    return np.stack(ys, 1)


def check(rule, x, state, dtype="float32", **options):
    """Every token by steps against the reference; y and the state that is left."""
    p = {n: None if a is None else host(a) for n, a in x.items()}
    expected = REFERENCE[rule](**p, initial_state=host(state), **options)
    assert np.abs(expected[0]).max() < 1e4, "void reference"
    y = walk(rule, x, state, **options)
    tolerance = accuracy.TOLERANCE[rule, dtype]
    assert_close(y, expected[0], tolerance, "y")
    assert_close(state, expected[1], tolerance, "state")
    return y, host(state)


@RULES
def test_N01_a_gate_of_zero_forgets_whatever_was_there(backend, rule, rng):
    """A gate of exactly 0 gave NaN (fla#20)."""
    p = problem(rng)
    p["gate"][:, 7] = 0
    x = backend.arrays(p, "float32")
    huge = backend.array(np.full((2, 2, 24, 24), 1e30), "float32")
    walk(rule, {n: a[:, :7] for n, a in x.items()}, huge)
    rest = {n: a[:, 7:] for n, a in x.items()}
    y = walk(rule, rest, huge)
    fresh = backend.array(np.zeros((2, 2, 24, 24)), "float32")
    assert np.array_equal(walk(rule, rest, fresh), y)
    assert np.array_equal(host(fresh), host(huge))


@RULES
@pytest.mark.parametrize("gate", [1e-37, 1e-12, 0.2])
def test_N02_small_gates(backend, rule, gate, rng):
    """Products of small gates became 0 or NaN (fla#77)."""
    p = problem(rng)
    p["gate"][...] = gate
    check(rule, backend.arrays(p, "float32"), backend.array(states(rng, p), "float32"))


def test_O01_decay_comes_before_the_error(family):
    """Decaying after the error gives [.5, .5] (fla#885)."""
    one = np.ones((1, 2, 1, 1))
    half = np.full((1, 2, 1), 0.5)
    x = family.arrays({"q": one, "k": one, "v": one, "gate": half, "beta": half}, "float32")
    state = family.array(np.zeros((1, 1, 1, 1)), "float32")
    assert walk("delta", x, state).ravel().tolist() == [0.5, 0.625]


def test_P02_a_state_beyond_float16(backend):
    """The state of float16 inputs must not overflow when y does (vllm#54308)."""
    x = np.ones((1, 64, 1, 24))
    p = {n: backend.array(a, "float16") for n, a in (("q", x), ("k", x), ("v", 100 * x))}
    p |= {"gate": None, "beta": None}
    state = backend.array(np.zeros((1, 1, 24, 24)), "float32")
    y = walk("linear", p, state)
    assert (host(state) == 6400).all()
    exact = 2400.0 * np.arange(1, 65)
    assert np.isposinf(y[0, exact > 65520, 0]).all()
    assert_close(y[0, exact <= 65504, 0, 0], exact[exact <= 65504], 6e-4, "y")


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_S01_strides_are_followed(family, rule, dtype, rng):
    """A slice or transpose was read as its parent buffer (cupy/cupy#7267, #9233)."""
    B, H, K = 2, 3, 24
    wide = "float64" if dtype == "float64" else "float32"
    p = {n: a[:, 0] for n, a in problem(rng, T=1, H=H, K=K, V=K).items()}
    parents = {
        "q": family.array(np.stack([p["q"], np.full_like(p["q"], GUARD)], -1), dtype),
        "k": family.array(np.pad(p["k"], ((0, 0), (0, 0), (0, 8))), dtype),
        "v": family.array(p["v"].swapaxes(1, 2).copy(), dtype),
        "gate": family.array(np.stack([p["gate"], np.full((B, H), GUARD)], -1), wide),
        "beta": family.array(p["beta"].T.copy(), wide),
        "state": family.array(rng.standard_normal((H, B, K, K)), wide),
        "out": family.array(np.full((K, B, H), GUARD), dtype),
    }
    x = {
        "q": parents["q"][..., 0],
        "k": parents["k"][..., :24],
        "v": parents["v"].swapaxes(1, 2),
        "gate": parents["gate"][..., 0],
        "beta": parents["beta"].T,
        "state": parents["state"].swapaxes(0, 1),
        "out": parents["out"].swapaxes(0, 1).swapaxes(1, 2),
    }
    before = {n: bits(host(a)) for n, a in parents.items()}
    copies = {
        n: family.array(host(a), dtype if n in ("q", "k", "v") else wide) for n, a in x.items()
    }
    copies.pop("out")
    y = STEPS[rule](**x)
    assert y is x["out"]
    plain = STEPS[rule](**copies)
    assert np.array_equal(host(y), host(plain))
    assert np.array_equal(host(x["state"]), host(copies["state"]))
    for name in ("q", "k", "v", "gate", "beta"):
        assert bits(host(parents[name])) == before[name], name


@RULES
def test_S02_broadcast_inputs(family, rule, rng):
    """A broadcast array was read as if it had all its elements (cupy/cupy#3095, #913)."""
    p = {n: a[:, 0] for n, a in problem(rng, T=1).items()}
    p["beta"], p["v"] = np.full((1, 1), 0.5), p["v"][:, :1]
    thin, full = {}, {}
    for name, shape in (
        ("q", None),
        ("k", None),
        ("v", (2, 2, 24)),
        ("gate", None),
        ("beta", (2, 2)),
    ):
        small = family.array(p[name], "float32")
        if shape is None:
            thin[name] = full[name] = small
        else:
            expand = getattr(small, "expand", None)
            if expand is None:
                xp = __import__(type(small).__module__.partition(".")[0])
                thin[name] = xp.broadcast_to(small, shape)
            else:
                thin[name] = expand(*shape)
            full[name] = family.array(np.broadcast_to(p[name], shape), "float32")
    one, two = (family.array(np.zeros((2, 2, 24, 24)), "float32") for _ in range(2))
    assert np.array_equal(
        host(STEPS[rule](**thin, state=one)), host(STEPS[rule](**full, state=two))
    )
    assert np.array_equal(host(one), host(two))


S03 = """
    import sys
    import numpy as np
    sys.path.insert(0, {tests!r})
    from compare import host
    from conftest import Family
    import test_cases_decode as cases
    from cupy_gdelta import accuracy

    family = Family({family!r})
    rng = np.random.default_rng(0)
    rounded = {{"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}}
    for dtype, kept, K, V, shift in [(*d, *s)
                                     for d in (("float16", "float16"), ("bfloat16", "float32"),
                                               ("float32", "bfloat16"), ("float64", "float64"))
                                     for s in ((24, 24, 1), (64, 64, 1), (9, 7, 3), (128, 128, 5))]:
        p = cases.problem(rng, T=2, K=K, V=V)
        views = {{}}
        for name, x in (p | {{"state": cases.states(rng, p)}}).items():
            wide = "float64" if dtype == "float64" else "float32"
            kind = dtype if name in "qkv" else kept if name == "state" else wide
            flat = np.concatenate([np.full(shift, 6e4), x.ravel()])
            views[name] = family.array(flat, kind)[shift:].reshape(x.shape)
        state = views.pop("state")
        for rule in cases.STEPS:
            plain = family.array(host(state), kept)
            y = cases.walk(rule, views, state)
            other = max(rounded[dtype], rounded[kept])  # loads of another width, other sums
            assert accuracy.error(cases.walk(rule, views, plain), y) <= other
            assert accuracy.error(host(plain), host(state)) <= other
            assert np.isfinite(y).all()
    print("right")
"""


def test_S03_an_offset_that_breaks_alignment(family):
    """Loads of 16 bytes from such a view kill the process's CUDA context (qkan#26, fla#913)."""
    tests = str(Path(__file__).parent)
    assert python(S03.format(tests=tests, family=family.name)) == "right\n"


H01 = [(n, n) for n in (1, 3, 8, 9, 24, 40, 80, 96, 192)] + [(9, 24), (24, 9), (40, 3), (3, 200)]


@RULES
@pytest.mark.parametrize(("K", "V"), H01)
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_H01_guards_around_everything_stay_after_twenty_steps(backend, rule, K, V, kept, rng):
    """The next head was read, or the next tensor written (mamba PR#1046, fla#552, fla#22)."""
    p = problem(rng, H=3, K=K, V=V)
    parents, x = {}, {}
    for name, a in (p | {"state": states(rng, p), "out": np.zeros((2, 3, V))}).items():
        parent = np.full([n + 2 for n in a.shape], GUARD)
        inside = (slice(1, -1),) * a.ndim
        parent[inside] = a
        parents[name] = backend.array(parent, kept if name == "state" else "float32")
        x[name] = parents[name][inside]
    state, out = x.pop("state"), x.pop("out")
    first = host(state)
    expected = REFERENCE[rule](**p, initial_state=first)
    ys = []
    for t in range(20):
        y = STEPS[rule](**{n: a[:, t] for n, a in x.items()}, state=state, out=out)
        assert y is out
        ys.append(host(y))
    loose = 1.5e-2 if kept == "bfloat16" else accuracy.TOLERANCE[rule, "float32"]
    assert_close(np.stack(ys, 1), expected[0], loose, "y")
    assert_close(state, expected[1], loose, "state")
    for name, a in parents.items():
        around = host(a)
        around[(slice(1, -1),) * around.ndim] = around.flat[0]
        assert (around == around.flat[0]).all(), f"written beside {name}"


@RULES
@pytest.mark.parametrize(("K", "V"), [(256, 256), (256, 1), (1, 256), (256, 255), (129, 256)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_H02_the_widest_heads(backend, rule, K, V, dtype, rng):
    """Only the first 128 columns were computed, or shared memory ran out (fla#241, cupy#2118)."""
    p = problem(rng, B=1, T=16, H=1, K=K, V=V)
    wide = "float64" if dtype == "float64" else "float32"
    x, before = backend.arrays(p, dtype), states(rng, p)
    state = backend.array(before, wide)
    y, end = check(rule, x, state, dtype)
    at_once = backend.array(before, wide)
    assert_close(STEPS[rule](**x, state=at_once), y, accuracy.TOLERANCE[rule, dtype], "16 at once")
    assert_close(at_once, end, accuracy.TOLERANCE[rule, dtype], "16 at once, state")
    assert np.abs(y[..., -1]).max() > 1e-3


@RULES
@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 7, 33])
def test_U03_every_entry_of_a_batch(backend, rule, B, rng):
    """One entry was corrupt from batch 3 on (omlx#2119, ik_llama.cpp PR#1933)."""
    p = problem(rng, B=B, T=3, K=8, V=8)
    x, before = backend.arrays(p, "float32"), states(rng, p)
    state = backend.array(before, "float32")
    y, end = check(rule, x, state)
    for b in range(B):
        one = backend.array(before[b : b + 1], "float32")
        alone = walk(rule, {n: a[b : b + 1] for n, a in x.items()}, one)
        assert np.array_equal(alone, y[b : b + 1])
        assert np.array_equal(host(one), end[b : b + 1])


@RULES
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_U03_the_same_bits_among_few_and_among_many(backend, rule, kept, rng):
    """Blocks are other ones where entries fill the chip; results must not be."""
    p = problem(rng, B=40, T=1, H=16 if backend.on_gpu else 2, K=128, V=128)
    x, before = backend.arrays({n: a[:, 0] for n, a in p.items()}, "bfloat16"), states(rng, p)
    state = backend.array(before, kept)
    y = STEPS[rule](**x, state=state)
    for some in (slice(3, 4), slice(20, 25), slice(39, 40)):
        few = backend.array(before[some], kept)
        alone = STEPS[rule](**{n: a[some] for n, a in x.items()}, state=few)
        assert np.array_equal(host(alone), host(y[some]))
        assert np.array_equal(host(few), host(state[some]))


@RULES
@pytest.mark.parametrize(("B", "H"), [(65537, 1), (2050, 32)])
def test_L01_more_heads_than_65535(backend, rule, B, H, rng):
    """Batch times heads went on an axis of the grid that ends at 65535 (fla#172, fla#64)."""
    p = problem(rng, B=B, T=1, H=H, K=8, V=8)
    x, before = backend.arrays(p, "float32"), states(rng, p)
    state = backend.array(before, "float32")
    y, end = check(rule, x, state)
    last = backend.array(before[-1:], "float32")
    alone = walk(rule, {n: a[-1:] for n, a in x.items()}, last)
    assert np.array_equal(alone, y[-1:])
    assert np.array_equal(host(last), end[-1:])


def far(backend, x, axis, gap):
    """``x`` with the entries of an axis ``gap`` elements apart, as float16."""
    if backend.on_gpu:
        import cupy as library
        from cupy.lib.stride_tricks import as_strided
    else:
        library, as_strided = np, np.lib.stride_tricks.as_strided
    buffer = library.zeros(gap * (x.shape[axis] - 1) + x.size, "float16")
    strides = [2 * s // x.itemsize for s in x.strides]
    strides[axis] = 2 * gap
    view = as_strided(buffer, x.shape, strides)
    view[...] = library.asarray(x.astype("float16"))
    return view


@RULES
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_L02_states_beyond_32_bits(backend, rule, axis, rng):
    """Offsets of more than 2^31 elements wrapped (fla#1080, mamba#1015, cupy#7539)."""
    sizes = {"B": 2, "T": 2, "H": 2, "K": 2, "V": 16}
    p = problem(rng, **sizes)
    x, before = backend.arrays(p, "float16"), states(rng, p)
    plain = backend.array(before, "float16")
    state = far(backend, before, axis, 2**31 + 5)
    expected = STEPS[rule](**x, state=plain)
    assert np.array_equal(host(STEPS[rule](**x, state=state)), host(expected))
    assert np.array_equal(host(state), host(plain))


def needs_memory(gigabytes):
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if cupy.cuda.Device().mem_info[0] < gigabytes * 10**9:
        pytest.skip(f"needs {gigabytes} GB of GPU memory")


@pytest.mark.gpu
@RULES
@pytest.mark.parametrize(("kept", "T"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 3)])
def test_L02_only_rows_past_2_31_elements_of_a_pool(rule, kept, T, rng):
    """Rows on both sides of 2^31 and 2^32 elements; nothing else of the pool is touched."""
    import cupy

    family, H, K, V = Family("cupy"), 2, 128, 128
    row = H * K * V
    needs_memory((2**32 + 64 * row) * {"float32": 4, "bfloat16": 2}[kept] // 10**9 + 2)
    P = 2**32 // row + 9
    rows = [2**31 // row, 2**31 // row + 7, 2**32 // row - 1, 2**32 // row, P - 1]
    pool = family.array(np.zeros((1, H, K, V)), kept)
    pool = cupy.zeros((P, H, K, V), pool.dtype)
    p = problem(rng, B=len(rows), T=T, H=H, K=K, V=V)
    x = family.arrays(p, "bfloat16")
    for r, a in zip(rows, states(rng, p), strict=True):
        pool[r] = family.array(a, kept)
    before = np.stack([host(pool[r]) for r in rows])
    y = STEPS[rule](**x, state=pool, state_indices=cupy.array(rows))
    expected = REFERENCE[rule](**{n: host(a) for n, a in x.items()}, initial_state=before)
    loose = accuracy.TOLERANCE[rule, "bfloat16"]
    assert_close(y, expected[0], loose, "y")
    assert_close(np.stack([host(pool[r]) for r in rows]), expected[1], loose, "the pool")
    for r in rows:
        pool[r] = 0
    for part in cupy.array_split(pool.view(f"uint{8 * pool.itemsize}"), 16):
        assert not part.any(), "a row that nobody owns was written"
    del pool, part
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@RULES
def test_L02_a_pool_of_more_than_2_31_elements(rule, rng):
    """Decode of N = 131073 with K = V = 128 has 2,147,500,032 state elements (fla#1080)."""
    import cupy

    N = 131073
    needs_memory(11)
    pool = cupy.empty((N, 1, 128, 128), "float32")
    random = cupy.random.default_rng(0)
    for part in cupy.array_split(pool, 64):
        part[...] = random.standard_normal(part.shape, dtype="float32")
    p = accuracy.inputs(rng, B=N, T=1, H=1, K=128, V=128)
    x = {n: a[:, 0] for n, a in Family("cupy").arrays(p, "float32").items()}
    some = [0, 1, 65536, N - 2, N - 1]
    first = pool[some].get()
    y = STEPS[rule](**x, state=pool)
    one = {n: host(a)[some][:, None] for n, a in x.items()}
    expected = REFERENCE[rule](**one, initial_state=first)
    assert_close(host(y)[some], expected[0][:, 0], accuracy.TOLERANCE[rule, "float32"], "y")
    assert_close(pool[some], expected[1], accuracy.TOLERANCE[rule, "float32"], "state")
    few = {n: a[: len(some)] for n, a in x.items()}
    before = pool[some].get()
    y = STEPS[rule](**few, state=pool, state_indices=cupy.array(some[::-1]))
    one = {n: host(a)[:, None] for n, a in few.items()}
    expected = REFERENCE[rule](**one, initial_state=before[::-1])
    assert_close(y, expected[0][:, 0], accuracy.TOLERANCE[rule, "float32"], "y of the pool")
    assert_close(pool[some[::-1]], expected[1], accuracy.TOLERANCE[rule, "float32"], "the pool")
    del pool
    cupy.get_default_memory_pool().free_all_blocks()


def test_A01_every_kind_of_scalar(backend, rng):
    """A Python float was read as a C float, a float64 array as float32 (cupy/cupy#8485, #6940)."""
    p = problem(rng, T=1)
    x = {n: a[:, 0] for n, a in backend.arrays(p, "float32").items()}
    scales = [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5)]
    if backend.on_gpu:
        import cupy

        scales += [cupy.array(0.5), cupy.array(0.5, "float32")]
    for rule, function in STEPS.items():
        ys = []
        for scale in (*scales, *scales):  # a second time as calls of a known form
            state = backend.array(np.ones((2, 2, 24, 24)), "float32")
            ys.append(host(function(**x, state=state, scale=scale)))
        state = backend.array(np.ones((2, 2, 24, 24)), "float32")
        twice = host(function(**x, state=state, scale=1))
        for y in ys:
            assert np.array_equal(y, ys[0]), rule
        assert np.allclose(2 * ys[0], twice, rtol=1e-6)
        for name in x:
            odd = x | {name: x[name].astype("float64")}
            with pytest.raises(TypeError, match=r"must have dtype float(32|64) "):
                function(**odd, state=state)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
@RULES
def test_X03_data_made_on_the_callers_stream(name, rule, rng):
    """The kernel ran on stream 0, before the data was there (cudnn-frontend PR#483)."""
    import cupy

    family = Family(name)
    p = problem(rng, T=1)
    x = {n: a[:, 0] for n, a in family.arrays(p, "float32").items()}
    fresh, before = x["q"] + 0, states(rng, p)
    state = family.array(before, "float32")
    expected = host(STEPS[rule](**x, state=state))
    code = 'extern "C" __global__ void spin(long long n) {\n'
    code += "long long start = clock64(); while (clock64() - start < n) {} }"
    spin = cupy.RawKernel(code, "spin")
    if name == "cupy":
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    else:
        torch = pytest.importorskip("torch")
        streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(20):
        x["q"][...] = float("nan")
        state = family.array(before, "float32")
        cupy.cuda.Device().synchronize()
        stream = streams[i % 2]
        if name == "cupy":
            with stream:
                spin((1,), (1,), (np.int64(20_000_000),))
                x["q"][...] = fresh
                y = STEPS[rule](**x, state=state).get(stream=stream)
        else:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                x["q"].copy_(fresh)
                y = STEPS[rule](**x, state=state).cpu()
        assert np.array_equal(host(y), expected), f"call {i}"


@pytest.mark.gpu
@RULES
def test_M01_arrays_on_a_device_that_is_not_the_current_one(rule, rng):
    """Wrong numbers, or the caller's current device was changed (cupy/cupy#3193, #5795)."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    p, before = problem(rng), np.zeros((2, 2, 24, 24))
    for device in (1, 0, 1):
        with cupy.cuda.Device(device):
            x = Family("cupy").arrays(p, "float32")
            state = Family("cupy").array(before, "float32")
        for current in (0, 1):
            with cupy.cuda.Device(current):
                y = STEPS[rule](**{n: a[:, 0] for n, a in x.items()}, state=state)
                assert (y.device.id, cupy.cuda.Device().id) == (device, current)
    with cupy.cuda.Device(0):
        state = Family("cupy").array(before, "float32")
    with pytest.raises(TypeError, match="state must be a CuPy array on CUDA device 1, as q is"):
        STEPS[rule](**{n: a[:, 0] for n, a in x.items()}, state=state)


@pytest.mark.gpu
@RULES
def test_R01_the_same_bits_a_hundred_times(rule, rng):
    """A missing barrier changed results from run to run (fla#889, fla#945, flash-attention#359)."""
    family = Family("cupy")
    for K in (24, 64, 128):
        p = problem(rng, T=4, K=K, V=K, H=4, gate="one")
        x, before = family.arrays(p, "bfloat16"), states(rng, p)
        first = None
        for _ in range(100):
            state = family.array(before, "float32")
            y = STEPS[rule](**x, state=state)
            found = bits(y, state)
            assert first in (None, found)
            first = found


@pytest.mark.gpu
@RULES
@pytest.mark.parametrize("pool", [False, True])
def test_E01_a_cupy_graph_follows_new_inputs(rule, pool, rng):
    """Capture failed on a copy to the host, an allocation or stream 0 (Megatron-LM PR#6796)."""
    import cupy

    family = Family("cupy")
    p = problem(rng, T=1)
    x = {n: a[:, 0].copy() for n, a in family.arrays(p, "bfloat16").items()}
    state = family.array(states(rng, p), "float32")
    out = cupy.zeros_like(x["v"])
    rows = cupy.array([0, 1])
    options = {"state_indices": rows} if pool else {}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        STEPS[rule](**x, state=state, out=out, **options)
        stream.begin_capture()
        STEPS[rule](**x, state=state, out=out, **options)
        lost = STEPS[rule](**x, state=state, **options)  # y is kept for the graph
        graph = stream.end_capture()
    del lost
    for i in range(3):
        new = problem(rng, T=1)
        fresh = {n: a[:, 0] for n, a in family.arrays(new, "bfloat16").items()}
        cupy.cuda.Device().synchronize()
        before = host(state)
        order = [1, 0] if pool and i % 2 else [0, 1]
        with stream:
            for name, a in fresh.items():
                x[name][...] = a
            rows[...] = cupy.array(order)
            graph.launch(stream)
        stream.synchronize()
        token = {n: host(a)[:, None] for n, a in x.items()}
        first, middle = REFERENCE[rule](**token, initial_state=before[order])
        _, end = REFERENCE[rule](**token, initial_state=middle)
        assert_close(out, first[:, 0], accuracy.TOLERANCE[rule, "bfloat16"], f"replay {i}")
        assert_close(host(state)[order], end, 1e-5, f"state of replay {i}")


@pytest.mark.gpu
@RULES
def test_E01_a_torch_graph_follows_new_inputs(rule, rng):
    torch = pytest.importorskip("torch")
    family = Family("torch-cuda")
    x = family.arrays(problem(rng, T=3), "bfloat16")
    p = problem(rng, T=3)
    state = family.array(states(rng, p), "bfloat16")
    STEPS[rule](**x, state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = STEPS[rule](**x, state=state)
    for i in range(3):
        for name, a in family.arrays(problem(rng, T=3), "bfloat16").items():
            x[name].copy_(a)
        before = host(state)
        graph.replay()
        expected = REFERENCE[rule](**{n: host(a) for n, a in x.items()}, initial_state=before)
        assert_close(y, expected[0], accuracy.TOLERANCE[rule, "bfloat16"], f"replay {i}")
        assert_close(state, expected[1], accuracy.TOLERANCE[rule, "bfloat16"], f"state {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, [0, 1]], ids=["cold", "rows on the host"])
def test_E01_what_cannot_be_captured_says_so_and_leaves_the_capture_whole(rows):
    code = f"""
        import cupy
        import cupy_gdelta

        x = cupy.full((2, 2, 24), 1 / 8, "float32")
        state, out, rows = cupy.zeros((2, 2, 24, 24), "float32"), cupy.zeros_like(x), {rows}
        step = cupy_gdelta.gated_delta_rule_step
        if rows:
            step(x, x, x, None, None, state, out=out)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                step(x, x, x, None, None, state, state_indices=rows, out=out)
            except RuntimeError as error:
                print("call once" in str(error))
            stream.end_capture()
            step(x, x, x, None, None, state, state_indices=rows, out=out)
        stream.synchronize()
        print(bool(cupy.isfinite(out).all()))
    """
    assert python(code) == "True\nTrue\n"
