"""Random calls cut over ranks, against the float64 reference: a program for mpiexec."""

from __future__ import annotations

import sys
import numpy as np
from mpi4py import MPI

from cupy_gdelta import accuracy, parallel, reference

FUNCTIONS = {
    "linear": (parallel.gated_linear_attention, reference.gated_linear_attention),
    "delta": (parallel.gated_delta_rule, reference.gated_delta_rule),
}

def case(seed, size):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(0, 400)); H = int(rng.choice([1,2,4])); Hq = int(rng.choice([h for h in (1,2,4) if H % h == 0]))
    K, V = (int(x) for x in rng.choice([1,3,8,16,24], 2))
    packed = rng.random() < .5
    B = 1 if packed else int(rng.integers(1, 4))
    gate = str(rng.choice(accuracy.GATES))
    x = accuracy.inputs(rng, B=B, T=T, H=H, Hq=Hq, K=K, V=V, gate=gate)
    cuts = np.sort(rng.integers(0, T + 1, size - 1))
    if rng.random() < .3 and size > 1: cuts[: rng.integers(0, size)] = 0 if rng.random() < .5 else T; cuts.sort()
    cuts = np.concatenate([[0], cuts, [T]])
    offsets, N = None, B
    if packed:
        N = int(rng.integers(0, 6))
        offsets = np.sort(rng.integers(0, T + 1, N + 1)); offsets[0] = 0
        if rng.random() < .5: offsets[-1] = T if N else 0
    init = rng.standard_normal((N, H, K, V)) if rng.random() < .6 else None
    return x, cuts, offsets, init, rng

def main(count):
    comm = MPI.COMM_WORLD
    worst = {}
    for seed in range(count):
        x, cuts, offsets, init, rng = case(seed, comm.size)
        rule = ("linear", "delta")[seed % 2]
        dtype = ("float32", "float64", "float32", "float16", "float32")[seed % 5]
        state = "float64" if dtype == "float64" else "float32"
        x = {n: a.astype(dtype if n in "qkv" else state) for n, a in x.items()}
        if init is not None: init = init.astype(state)
        f, ref = FUNCTIONS[rule]
        opts = dict(scale=float(rng.choice([1.0, .3])), cu_seqlens=offsets)
        ey, es = ref(**x, **opts, initial_state=init)
        a, b = cuts[comm.rank], cuts[comm.rank+1]
        everywhere = seed % 3 == 0
        given = init if (comm.rank == 0 or seed % 4 < 2) else None
        y, s = f(**{n: v[:, a:b] for n, v in x.items()}, **opts, initial_state=given, comm=comm, return_state="all" if everywhere else True)
        ys = comm.allgather(y)
        assert (s is None) == (not everywhere and comm.rank != comm.size-1)
        got = np.concatenate(ys, 1)
        err = accuracy.error(got, ey)
        if s is not None: err = max(err, accuracy.error(s, es))
        tol = accuracy.TOLERANCE[rule, dtype]
        worst[rule,dtype] = max(worst.get((rule,dtype),0), err/tol)
        if err > tol: print("rank", comm.rank, "seed", seed, rule, dtype, err, cuts, offsets, flush=True)
    print(comm.rank, worst, flush=True)

main(int(sys.argv[1]))
