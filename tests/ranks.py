"""Tests that many ranks run together, each in a process of its own: test_parallel starts them.

``ranks.py ENGINE ARRAY TEST``: the engine is mpi, gloo or nccl, the array numpy, torch, cupy or
torch-cuda. A rank that fails raises, and its engine ends the others.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys

import numpy as np
import pytest
from compare import REFERENCE, REFERENCE_GRAD, assert_close, host
from conftest import Family

from cupy_gdelta import accuracy, gated_delta_rule, gated_linear_attention, parallel
from cupy_gdelta.parallel import agree, links, model

PARALLEL = {
    "linear": parallel.gated_linear_attention,
    "delta": parallel.gated_delta_rule,
}
ALONE = {"linear": gated_linear_attention, "delta": gated_delta_rule}
RULES = tuple(PARALLEL)


class World:
    """The ranks of an engine, and arrays of a family."""

    def __init__(self, engine: str, array: str) -> None:
        self.family = Family(array)
        self.engine = engine
        if engine == "mpi":
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.rank, self.comm.size
            return
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.family.on_gpu:
            device = self.rank % torch.cuda.device_count()
            torch.cuda.set_device(device)
        if array == "cupy":
            import cupy

            cupy.cuda.Device(device).use()
        dist.init_process_group(
            engine,
            init_method=f"file://{os.environ['STORE']}",
            rank=self.rank,
            world_size=self.size,
        )
        self.comm = dist.group.WORLD

    def everyone(self, x):
        """``x`` of every rank."""
        if self.engine == "mpi":
            return self.comm.allgather(x)
        found = [None] * self.size
        sys.modules["torch"].distributed.all_gather_object(found, x)
        return found

    def same(self, x):
        """``x`` of rank 0."""
        return self.everyone(x)[0]

    def piece(self, arrays: dict, cuts) -> dict:
        a, b = cuts[self.rank], cuts[self.rank + 1]
        return {n: x if x is None else x[:, a:b] for n, x in arrays.items()}

    def even(self, T: int) -> list[int]:
        return [T * r // self.size for r in range(self.size + 1)]

    def check(
        self,
        rule: str,
        problem: dict,
        dtype: str,
        cuts,
        *,
        initial_state=None,
        everywhere=False,
        spread=True,
        what="",
        **options,
    ):
        """The call cut into pieces against the reference of the whole; this rank's results."""
        arrays = self.family.arrays(problem, dtype)
        if initial_state is not None:
            initial_state = self.family.array(initial_state, state_dtype(dtype))
        y, state = PARALLEL[rule](
            **self.piece(arrays, cuts),
            comm=self.comm,
            initial_state=initial_state if self.rank == 0 or not spread else None,
            return_state="all" if everywhere else True,
            **options,
        )
        expected_y, expected = REFERENCE[rule](
            **{n: host(x) for n, x in arrays.items()},
            initial_state=None if initial_state is None else host(initial_state),
            **options,
        )
        assert np.isfinite(expected_y).all()
        assert np.abs(expected_y).max(initial=0.0) < 1e4, "void reference"
        whole = np.concatenate(self.everyone(host(y)), axis=1)
        tolerance = accuracy.TOLERANCE[rule, dtype]
        what = f"{what} {rule} {dtype} cut at {list(cuts)} rank {self.rank}"
        assert_close(whole, expected_y, tolerance, f"{what} y")
        assert (state is None) == (not everywhere and self.rank + 1 < self.size)
        if state is not None:
            assert_close(state, expected, tolerance, f"{what} state")
        return y, state

    def refused(self, match: str, kind: type[Exception], rule="linear", **arguments) -> None:
        """Every rank raises one and the same error, which begins with the function's name."""
        with pytest.raises(kind) as raised:
            PARALLEL[rule](**arguments, comm=self.comm)
        text = str(raised.value)
        texts = self.everyone(text)
        assert len(set(texts)) == 1, texts
        assert match in text, (match, text)
        assert text.startswith(PARALLEL[rule].__name__ + ": "), text


def state_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def random(world: World, count: int = 200) -> None:
    """Uneven and empty pieces, packed sequences, every gate regime, initial states, both rules."""
    dtypes = ["float32", "float64", "float32", "float16"]
    if world.family.name.startswith("torch") or world.family.on_gpu:
        dtypes[2] = "bfloat16"
    for seed in range(count):
        rng = np.random.default_rng(seed)
        rule, dtype = RULES[seed % 2], dtypes[seed // 2 % 4]
        T, H = int(rng.integers(0, 400)), int(rng.choice([1, 2, 4]))
        K, V = (int(x) for x in rng.choice([1, 3, 8, 16, 24], 2))
        packed = rng.random() < 0.5
        B = 1 if packed else int(rng.integers(0, 4))
        problem = accuracy.inputs(
            rng,
            B=B,
            T=T,
            H=H,
            Hq=int(rng.choice([h for h in (1, 2, 4) if H % h == 0])),
            K=K,
            V=V,
            gate=str(rng.choice(accuracy.GATES)),
            correlated=dtype == "float64" and rng.random() < 0.3,
        )
        offsets, N = None, B
        if packed:
            N = int(rng.integers(0, 6))
            offsets = np.sort(rng.integers(0, T + 1, N + 1))
            offsets[0] = 0
        for label in ("gate", "beta"):
            if rng.random() < 0.1:
                del problem[label]
        if "gate" in problem and rng.random() < 0.2:
            with np.errstate(divide="ignore"):
                problem["log_gate"] = np.log(np.abs(problem.pop("gate")))
        world.check(
            rule,
            problem,
            dtype,
            cuts(rng, T, world.size),
            cu_seqlens=offsets,
            scale=float(rng.choice([1.0, 0.3])),
            initial_state=rng.standard_normal((N, H, K, V)) if rng.random() < 0.6 else None,
            spread=rng.random() < 0.5,
            everywhere=rng.random() < 0.3,
            what=f"seed {seed}",
        )


def cuts(rng: np.random.Generator, T: int, size: int) -> np.ndarray:
    """Where pieces start and end; some are empty, at times those at one end."""
    inner = rng.integers(0, T + 1, size - 1)
    if rng.random() < 0.3:
        inner[: rng.integers(0, size)] = rng.choice([0, T])
    return np.concatenate([[0], np.sort(inner), [T]])


def lasting(world: World) -> None:
    """Pieces longer than a reach is looked for at a time, that decay and that do not."""
    rng = np.random.default_rng(1)
    T = 2500 * world.size
    for rule, gate, slow in itertools.product(RULES, ("one", "0.9995", "random"), (False, True)):
        problem = accuracy.inputs(rng, T=T, H=2, K=8, V=5, gate=gate)
        if slow:  # in one head a state outlasts the pieces
            problem["gate"][..., 1] = 0.99999
        initial = rng.standard_normal((1, 2, 8, 5))
        for dtype in ("float32", "float64", "bfloat16")[: 2 if world.engine == "mpi" else 3]:
            world.check(rule, problem, dtype, world.even(T), initial_state=initial, what=gate)


def growing(world: World) -> None:
    """What a piece does to a state is beyond the range of its dtype; no state is.

    Gates above 1 where nothing is written; small gates, then large ones; keys that undo gates.
    """
    rng = np.random.default_rng(13)
    for dtype, logs in itertools.product(("float32", "float64"), (False, True)):
        grow(world, accuracy.inputs(rng, T=300 * world.size, H=2, K=4, V=3), dtype, logs)


def grow(world: World, problem: dict, dtype: str, logs: bool) -> None:
    T, bits = 300 * world.size, 128 if dtype == "float32" else 1024
    large = np.full((1, 2, 4, 3), 2.0 ** (0.45 * bits))
    up = 2.0 ** (bits / 100)

    def check(gate, initial=None, rule="delta", **changes):
        gate = np.broadcast_to(np.float32(gate), (1, T, 2))
        with np.errstate(divide="ignore"):
            gates = {"log_gate": np.log(gate)} if logs else {"gate": gate}
        changes = {n: np.broadcast_to(x, problem[n].shape) for n, x in changes.items()}
        kept = {n: x for n, x in problem.items() if n != "gate"}
        options = {} if initial is None else {"initial_state": initial, "scale": 8 / initial.max()}
        world.check(rule, kept | gates | changes, dtype, world.even(T), **options)

    where = np.arange(T)[None, :, None]
    check(np.where(where < T // 2, up, 0.9), v=problem["v"] * (where >= T // 2)[..., None])
    wave = 2.0 ** (np.where(where // 300 % 2, bits, -bits) / 260)
    for rule in RULES:
        check(up, rule=rule, v=0)
        check(np.where(where % 300 == 290, 0, 2.0**60), rule=rule, v=0)
        check(wave, large, rule, v=0, **({"beta": 0} if rule == "delta" else {}))
    check(0.25, k=np.eye(4)[0], beta=5)
    if dtype == "float64":
        check(8, k=np.eye(4)[0], beta=0.875)


def zeros(world: World) -> None:
    """N01: a gate of 0 forgets at the ends of pieces and within them, as cu_seqlens does."""
    T = 40 * world.size
    one = {n: np.ones((1, T, 1, 1)) for n in "qkv"} | {"beta": np.ones((1, T, 1))}
    for rule in RULES:
        for at in (0, 1, 20, 39, 40, 41, T - 1):
            gate = np.full((1, T, 1), 0.9)
            gate[0, at % T] = 0
            y, _ = world.check(rule, one | {"gate": gate}, "float32", world.even(T))
            where = at % T - 40 * world.rank
            if 0 <= where < 40:
                assert float(y[0, where, 0, 0]) == 1
        world.check(rule, one | {"gate": np.zeros((1, T, 1))}, "float32", world.even(T))


def states(world: World) -> None:
    """T01, C03, Z01: the state where pieces are short or empty; None and zeros are the same."""
    rng = np.random.default_rng(2)
    for rule, T, H in itertools.product(RULES, (0, 1, 2, 33, 65), (0, 2)):
        problem = accuracy.inputs(rng, T=T, H=H, Hq=H // 2, K=4, V=3, gate="0.2")
        first = [0] + [T] * world.size  # all on the first rank, then on the last one
        initial = rng.standard_normal((1, H, 4, 3))
        for where in (first, [0] * world.size + [T], world.even(T)):
            world.check(rule, problem, "float32", where, initial_state=initial, everywhere=True)
            y, state = world.check(rule, problem, "float32", where)
            same_y, same = world.check(rule, problem, "float32", where, initial_state=initial * 0)
            assert np.array_equal(host(y), host(same_y))
            assert state is None or np.array_equal(host(state), host(same))


def packed(world: World) -> None:
    """V01, C01: empty sequences, starts at and off the ends of pieces, kinds of offsets."""
    rng = np.random.default_rng(3)
    T = 128 * world.size
    every = list(range(0, T + 1, 64))
    for offsets in (
        [0, 0, 128, 128, T, T],
        [0],
        [0, 0],
        [0, 5, 70, 71, T - 3],
        every,
        np.array([0, 100, T], np.int32),
        (0, 3, T),
    ):
        for rule in RULES:
            problem = accuracy.inputs(rng, T=T, H=2, K=8, V=8)
            initial = rng.standard_normal((len(offsets) - 1, 2, 8, 8))
            for state, spread in ((None, True), (initial, True), (initial, False)):
                world.check(
                    rule,
                    problem,
                    "float32",
                    world.even(T),
                    cu_seqlens=offsets,
                    initial_state=state,
                    spread=spread,
                )


def alone(world: World) -> None:
    """The y of one rank's function: the same bits where no state enters, else to rounding."""
    rng = np.random.default_rng(4)
    T = 100 * world.size
    for rule in RULES:
        arrays = world.family.arrays(accuracy.inputs(rng, T=T, gate="0.9995"), "float32")
        y = PARALLEL[rule](**world.piece(arrays, world.even(T)), comm=world.comm)
        whole = ALONE[rule](**arrays)
        at = 100 * world.rank
        tolerance = accuracy.TOLERANCE[rule, "float32"]
        assert_close(y, host(whole)[:, at : at + 100], tolerance, rule)
        if world.rank == 0:
            first = ALONE[rule](**{n: x[:, :100] for n, x in arrays.items()})
            assert np.array_equal(host(y), host(first))


def repeatable(world: World) -> None:
    """R01, U01: the same bits each time, whatever was computed between."""
    rng = np.random.default_rng(5)
    T = 130 * world.size
    for rule in RULES:
        arrays = world.family.arrays(accuracy.inputs(rng, T=T, gate="0.9995"), "float32")
        piece = world.piece(arrays, world.even(T))
        large = world.family.array(np.full((1, 2, 24, 24), 1e6), "float32")
        found = []
        for _ in range(5):
            y, state = PARALLEL[rule](**piece, comm=world.comm, return_state="all")
            found.append((host(y), host(state)))
            PARALLEL[rule](**piece, comm=world.comm, initial_state=large)
        for y, state in found[1:]:
            assert np.array_equal(y, found[0][0])
            assert np.array_equal(state, found[0][1])


def neighbours(world: World) -> None:
    """The bits of an entry and head do not depend on the gates of others."""
    T = 500 * world.size
    for rule in RULES:
        problem = accuracy.inputs(np.random.default_rng(14), B=2, T=T, H=2, gate="0.9995")
        found = []
        for gate in (0.9995, 0.5):
            problem["gate"][1], problem["gate"][0, :, 1] = gate, gate
            piece = world.piece(world.family.arrays(problem, "float32"), world.even(T))
            found.append(host(PARALLEL[rule](**piece, comm=world.comm))[0, :, 0])
        assert np.array_equal(*found), rule


def layouts(world: World) -> None:
    """S01, X09: strided inputs and outputs, nothing written but out; out over an input."""
    rng = np.random.default_rng(6)
    T = 50 * world.size
    problem = accuracy.inputs(rng, B=2, T=T, H=4, Hq=2, K=9, V=24, gate="0.9995")
    for rule in RULES:
        arrays = world.family.arrays(problem, "float32")
        expected, _ = REFERENCE[rule](**{n: host(x) for n, x in arrays.items()})
        strided = {n: turned(world.family, x) for n, x in arrays.items()}
        before = {n: host(x) for n, x in strided.items()}
        a = 50 * world.rank
        for label in ("new", "v"):
            piece = world.piece(strided, world.even(T))
            out = piece["v"] if label == "v" else turned(world.family, piece["v"])
            assert PARALLEL[rule](**piece, comm=world.comm, out=out) is out
            tolerance = accuracy.TOLERANCE[rule, "float32"]
            assert_close(out, expected[:, a : a + 50], tolerance, f"{rule} {label}")
            for n, x in strided.items():
                assert (n == label) or np.array_equal(host(x), before[n]), n


def turned(family: Family, x):
    """A copy of ``x`` whose tokens lie apart, heads first."""
    order = (0, 2, 1, 3)[: x.ndim]
    swapped = x.permute(order) if hasattr(x, "permute") else x.transpose(order)
    back = family.array(host(swapped), "float32")
    return back.permute(order) if hasattr(back, "permute") else back.transpose(order)


def not_a_number(world: World) -> None:
    """A NaN goes to all later ranks of its sequence, and to no other sequence, head or entry."""
    T = 30 * world.size
    faults = (("v", (0, 3, 1, 2), "nan"), ("gate", (0, 3, 1), "nan"), ("gate", (0, 3, 1), "inf"))
    cases = itertools.product(RULES, ("one", "0.9995"), faults)
    for rule, gate, (label, where, fault) in cases:
        rng = np.random.default_rng(7)
        problem = accuracy.inputs(rng, T=T, gate=gate, H=2)
        for offsets in (None, [0, T // 2 + 1, T]):
            clean = world.family.arrays(problem, "float32")
            dirty = world.family.arrays(problem, "float32")
            dirty[label][where] = float(fault)
            if fault == "inf":
                dirty["gate"][0, T // 3, 1] = 0
            options = {"comm": world.comm, "cu_seqlens": offsets, "return_state": "all"}
            wanted, state = PARALLEL[rule](**world.piece(clean, world.even(T)), **options)
            y, spoilt = PARALLEL[rule](**world.piece(dirty, world.even(T)), **options)
            bad = ~np.isfinite(np.concatenate(world.everyone(host(y)), axis=1))
            whole = np.concatenate(world.everyone(host(wanted)), axis=1)
            y = np.concatenate(world.everyone(host(y)), axis=1)
            end = T if offsets is None else offsets[1]
            assert bad[0, 4 : T // 3 if fault == "inf" else end, 1, 2].all()
            assert not bad[:, :, 0].any()
            assert not bad[:, end:].any()
            assert np.array_equal(y[:, :, 0], whole[:, :, 0])
            assert np.array_equal(y[:, end:], whole[:, end:])
            assert np.array_equal(host(spoilt)[1:], host(state)[1:])


def refusals(world: World) -> None:
    """Whatever is wrong on one rank alone, all raise the same error, and go on afterwards."""
    size, rank = world.size, world.rank
    rng = np.random.default_rng(8)
    good = world.family.arrays(accuracy.inputs(rng, T=8, H=2, K=4, V=4), "float32")
    for bad in {0, size - 1}:
        mine = rank == bad

        def alter(mine=mine, **changes):
            return good | changes if mine else good

        wrong = f"(on rank {bad} of {size})"
        shape = "v must have shape (B, T, H, V) with B, T = 1, 8 from q; got (1, 7, 2, 4)"
        world.refused(f"{shape} {wrong}", ValueError, **alter(v=good["v"][:, :7]))
        world.refused(f"float64 {wrong}", TypeError, **alter(k=world.family.array(host(good["k"]))))
        world.refused(f"got list {wrong}", TypeError, **alter(q=[1.0]))
        world.refused(wrong, ValueError, **alter(gate=good["gate"][..., 0]))
        world.refused(f"ümläut' {wrong}".encode("ascii", "backslashreplace").decode(), ValueError,
                      **alter(precision="ümläut"))  # fmt: skip
        world.refused(wrong, ValueError, "delta", **good, cu_seqlens=[0, 5, 3] if mine else [0, 3])
        world.refused(wrong, TypeError, **good, return_state=1 if mine else True)
        world.refused(wrong, ValueError, **good, return_state="first" if mine else "all")
        state = world.family.array(np.zeros((1, 2, 4, 5)), "float32")
        world.refused(wrong, ValueError, **good, initial_state=state if mine else None)
    wide = {n: world.family.array(host(x)) for n, x in good.items()}
    last = rank == size - 1
    few = {n: x[:, :, :1] for n, x in good.items()}
    at = f"on rank 0 and {{}} on rank {size - 1}"
    if size > 1:
        disagreements = [
            (wide if last else good, "the dtype of q", "float32", "float64", {}),
            (few if last else good, "the heads Hq of q", 2, 1, {}),
            (good, "scale", 1.0, 0.5, {"scale": 0.5 if last else 1}),
            (good, "cu_seqlens", "None", "[0, 3]", {"cu_seqlens": [0, 3] if last else None}),
            (good, "precision", "highest", "tf32", {"precision": "tf32" if last else "highest"}),
            (good, "return_state", False, True, {"return_state": last}),
        ]
        for arrays, label, first, other, options in disagreements:
            text = f"{label} must be the same on all ranks; got {first} {at.format(other)}"
            world.refused(text, ValueError, **arrays, **options)
        state = world.family.array(np.zeros((1, 2, 4, 4)), "float32")
        text = f"on rank 0, on all ranks or on none; got it on rank {size - 1} of {size}"
        world.refused(text, ValueError, **good, initial_state=state if last else None)
    text = f"must end at T = {8 * size}, the tokens of all ranks, or before; got {8 * size + 1}"
    world.refused(text, ValueError, **good, cu_seqlens=[0, 8 * size + 1])
    if size > 1:
        text = "the function called must be the same on all ranks"
        with pytest.raises(ValueError, match=text):
            PARALLEL[RULES[last]](**good, comm=world.comm)
    world.check("linear", accuracy.inputs(rng, T=20), "float32", world.even(20))


def gradients(world: World, count: int = 60) -> None:
    """Of random cuts of both rules, as random; dy and the gradient of the state strided."""
    import torch

    for seed in range(count):
        rng = np.random.default_rng(1000 + seed)
        rule = RULES[seed % 2]
        dtype = ("float32", "float64", "float32", "bfloat16")[seed // 2 % 4]
        T, H = int(rng.integers(0, 200)), int(rng.choice([1, 2, 4]))
        packed = rng.random() < 0.5
        B = 1 if packed else int(rng.integers(1, 4))
        offsets, N = None, B
        if packed:
            N = int(rng.integers(0, 6))
            offsets = np.sort(rng.integers(0, T + 1, N + 1))
            offsets[0] = 0
        Hq = int(rng.choice([h for h in (1, 2, 4) if H % h == 0]))
        K, V = (int(x) for x in rng.choice([1, 3, 8, 16], 2))
        gate = str(rng.choice(accuracy.GATES))
        problem = accuracy.inputs(rng, B=B, T=T, H=H, Hq=Hq, K=K, V=V, gate=gate)
        if rng.random() < 0.2:
            problem["log_gate"] = np.log(np.abs(problem.pop("gate")) + 1e-30)
        arrays = world.family.arrays(problem, dtype)
        state_kind = state_dtype(dtype)
        initial = rng.standard_normal((N, H, K, V)) if rng.random() < 0.6 else None
        if initial is not None:
            initial = world.family.array(initial, state_kind)
        dy = world.family.array(rng.standard_normal((B, H, T, V)), dtype).transpose(1, 2)
        dstate = world.family.array(rng.standard_normal((N, H, K, V)), state_kind)
        with_state, everywhere = rng.random() < 0.7, rng.random() < 0.3
        options = {"cu_seqlens": offsets, "scale": float(rng.choice([1.0, 0.3]))}
        expected = REFERENCE_GRAD[rule](
            host(dy),
            **{n: host(x) for n, x in arrays.items()},
            initial_state=None if initial is None else host(initial),
            dstate=host(dstate) * (world.size if everywhere else 1) if with_state else None,
            **options,
        )
        at = cuts(rng, T, world.size)
        piece = {n: x.detach().clone().requires_grad_() for n, x in world.piece(arrays, at).items()}
        spread = rng.random() < 0.5
        mine = None
        if initial is not None and (world.rank == 0 or not spread):
            mine = initial.clone().requires_grad_()
        given = "all" if everywhere else with_state
        results = PARALLEL[rule](
            **piece, **options, initial_state=mine, comm=world.comm, return_state=given
        )
        y, state = results if given else (results, None)
        part = world.piece({"dy": dy}, at)["dy"]
        if everywhere or (with_state and world.rank + 1 == world.size):
            outputs = [y, state], [part, dstate if with_state else torch.zeros_like(dstate)]
        else:
            outputs = [y], [part]
        torch.autograd.backward(*outputs)
        what = f"seed {seed} {rule} {dtype} {gate} cut at {list(at)} d"
        tolerance = accuracy.GRADIENT_TOLERANCE[dtype]
        for n, x in piece.items():
            whole = np.concatenate(world.everyone(host(x.grad)), axis=1)
            want = expected._asdict()["gate" if n == "log_gate" else n]
            assert x.grad.dtype == x.dtype
            assert_close(whole, want, tolerance, f"{what} {n}")
        found = world.everyone(None if mine is None else host(mine.grad))
        if initial is not None:
            total = sum(x for x in found if x is not None)
            assert_close(total, expected.initial_state, tolerance, f"{what} initial_state")


def differentiable(world: World) -> None:
    """What autograd refuses, and what it computes without a gradient."""
    import torch

    rng = np.random.default_rng(11)
    T = 20 * world.size
    last = world.rank + 1 == world.size
    for rule in RULES:
        arrays = world.family.arrays(accuracy.inputs(rng, T=T), "float64")
        piece = world.piece(arrays, world.even(T))
        with_grad = {n: x.clone().requires_grad_() for n, x in piece.items()}
        if world.size > 1:
            text = "whether an input requires grad must be the same on all ranks; got False on"
            world.refused(text, ValueError, rule, **(with_grad if last else piece))
        text = "out must be None where an input requires grad"
        world.refused(text, ValueError, rule, **with_grad, out=torch.empty_like(piece["v"]))
        y = PARALLEL[rule](**piece, comm=world.comm)
        with torch.no_grad():
            same = PARALLEL[rule](**with_grad, comm=world.comm)
        assert not same.requires_grad
        assert torch.equal(y, same)
        y, state = PARALLEL[rule](**with_grad, comm=world.comm, return_state="all")
        assert y.requires_grad
        assert torch.equal(y, same)
        q = with_grad["q"]
        loss = y.sum() + state.sum()
        (first,) = torch.autograd.grad(loss, q, create_graph=True)
        (again,) = torch.autograd.grad(loss, q, retain_graph=True)
        assert torch.equal(first, again)
        with pytest.raises(TypeError, match="_grad: second derivatives are not computed"):
            (first * q).sum().backward()
        with torch.no_grad():
            q += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def subgroup(world: World) -> None:
    """Some of the ranks, in another order for MPI; the others are no part of it."""
    if world.engine == "mpi":
        inside = world.rank > 0 or world.size == 1
        comm = world.comm.Split(int(inside), -world.rank)
        rank, size = comm.rank, comm.size
    else:
        dist = sys.modules["torch"].distributed
        comm = dist.new_group(list(range(1, world.size)))
        rank, size = world.rank - 1, world.size - 1
        inside = rank >= 0
    problem = accuracy.inputs(np.random.default_rng(12), T=90, gate="0.9995")
    for rule in RULES:
        arrays = world.family.arrays(problem, "float32")
        expected, state = REFERENCE[rule](**{n: host(x) for n, x in arrays.items()})
        if not inside and world.engine != "mpi":
            with pytest.raises(ValueError, match="comm must be a group that this rank is in"):
                PARALLEL[rule](**arrays, comm=comm)
            continue
        a, b = (90 * r // size for r in (rank, rank + 1))
        piece = {n: x[:, a:b] for n, x in arrays.items()}
        y, found = PARALLEL[rule](**piece, comm=comm, return_state="all")
        tolerance = accuracy.TOLERANCE[rule, "float32"]
        assert_close(y, expected[:, a:b], tolerance, f"{rule} y")
        assert_close(found, state, tolerance, f"{rule} state")
    if world.engine == "mpi" and world.size > 1:
        between = comm.Create_intercomm(0, world.comm, 0 if inside else world.size - 1)
        with pytest.raises(TypeError, match="must be an intracommunicator"):
            PARALLEL["linear"](**arrays, comm=between)
    if not inside and world.engine != "mpi":
        return
    if world.engine == "mpi":
        null = sys.modules["mpi4py.MPI"].COMM_NULL
        with pytest.raises(ValueError, match="must be a communicator in use; got a null or freed"):
            PARALLEL["linear"](**arrays, comm=null)
        comm.Free()
    else:
        dist.destroy_process_group(comm)
    with pytest.raises(ValueError, match=r"gated_linear_attention: comm must be a .* in use; got"):
        PARALLEL["linear"](**arrays, comm=comm)


class OnDevice:
    """Stands for a CuPy array of bytes, which an engine without CUDA cannot read."""

    def __init__(self, x) -> None:
        self._x, self.shape = np.array(x, np.uint8), (len(x),)

    def get(self):
        return self._x.copy()

    def set(self, x) -> None:
        self._x[...] = x


def staging(world: World) -> None:
    """Arrays on a device go through the host, both ways."""
    ends = links.link("test", world.comm)
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent, found = OnDevice([world.rank, 7]), OnDevice([99, 99])
    ends.exchange([(sent, following)], [(found, before)])()
    assert found.get().tolist() == [before, 7]
    ends.broadcast(sent, world.size - 1)
    assert sent.get().tolist() == [world.size - 1, 7]
    ends.total(sent)
    assert sent.get().tolist() == [world.size * (world.size - 1), 7 * world.size]


class Counting:
    """An MPI communicator that counts what goes through it."""

    def __init__(self, comm) -> None:
        self._comm, self.sent, self.gathered = comm, [], []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, x, dest, tag):
        self.sent.append(x.nbytes)
        return self._comm.Isend(x, dest=dest, tag=tag)

    def Allgather(self, x, found):
        self.gathered.append(x.nbytes)
        self._comm.Allgather(x, found)

    def Get_attr(self, key):
        return self

    def Bcast(self, x, root):
        raise AssertionError("nobody has asked for this")


def traffic(world: World) -> None:
    """Messages and bytes are those of the model, whatever T is."""
    rng = np.random.default_rng(9)
    H, K, V = 2, 8, 5
    kinds = itertools.product(RULES, ("one", "zero"), ("float32", "float64"), (1, 7))
    for rule, gate, dtype, length in kinds:
        T = 300 * length * world.size
        problem = accuracy.inputs(rng, T=T, H=H, K=K, V=V, gate=gate)
        piece = world.piece(world.family.arrays(problem, dtype), world.even(T))
        comm = Counting(world.comm)
        PARALLEL[rule](**piece, comm=comm)
        item = np.dtype(dtype).itemsize
        lasting = gate == "one"
        expected = model.sent(rule, world.size, world.rank, H, K, V, item, lasting)
        assert (len(comm.sent), sum(comm.sent)) == expected, (rule, gate, comm.sent, expected)
        rounds = max(0, world.size - 1).bit_length()
        assert len(comm.sent) <= rounds
        assert comm.gathered == [agree.SIZE] + [1] * (world.size > 2)


def wildcards(world: World) -> None:
    """A receive of the caller from any rank with any tag takes no message of ours."""
    MPI = sys.modules["mpi4py.MPI"]
    one = np.ones((1, 30, 1, 4), np.float32)
    for comm in (world.comm, world.comm.Dup(), world.comm.Dup().Dup()):
        found = np.zeros(1)
        request = comm.Irecv(found, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
        for _ in range(2):
            y = parallel.gated_linear_attention(one, one, one, comm=comm)
            assert y[0, 0, 0, 0] == 4 * (30 * world.rank + 1)
        comm.Send(np.full(1, 5.0), dest=(world.rank + 1) % world.size)
        request.Wait()
        assert found[0] == 5
    for _ in range(3000):  # more than there can be at a time
        comm = world.comm.Dup()
        links.link("test", comm)
        comm.Free()


def death(world: World) -> None:
    """A rank that dies ends the others; this never returns."""
    problem = accuracy.inputs(np.random.default_rng(10), T=10)
    arrays = world.family.arrays(problem, "float32")
    PARALLEL["linear"](**arrays, comm=world.comm)
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    PARALLEL["linear"](**arrays, comm=world.comm)


TESTS = {
    "random": random,
    "some": lambda world: random(world, 60),
    "lasting": lasting,
    "growing": growing,
    "zeros": zeros,
    "states": states,
    "packed": packed,
    "alone": alone,
    "repeatable": repeatable,
    "neighbours": neighbours,
    "layouts": layouts,
    "not_a_number": not_a_number,
    "refusals": refusals,
    "gradients": gradients,
    "differentiable": differentiable,
    "subgroup": subgroup,
    "staging": staging,
    "traffic": traffic,
    "wildcards": wildcards,
    "death": death,
}


def main(engine: str, array: str, *names: str) -> None:
    world = World(engine, array)
    for name in names:
        TESTS[name](world)
        if world.rank == 0:
            print(name, "passed", flush=True)
    if engine != "mpi":
        world.comm = None
        gc.collect()  # errors hold frames that hold the group, whose threads must end first
        sys.modules["torch"].distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
