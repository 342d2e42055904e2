"""The one comparison of the test suite: a result against the float64 reference."""

from __future__ import annotations

import hashlib

import numpy as np

from cupy_gdelta import accuracy, reference

REFERENCE = {
    "linear": reference.gated_linear_attention,
    "delta": reference.gated_delta_rule,
}

REFERENCE_GRAD = {
    "linear": reference.gated_linear_attention_grad,
    "delta": reference.gated_delta_rule_grad,
}


def assert_close(x, expected, tolerance: float, what: str) -> None:
    """Raise unless ||x - expected|| <= tolerance * ||expected||; names the worst position."""
    x, expected = host(x), host(expected)
    assert x.shape == expected.shape, f"{what}: shape {x.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), f"{what}: the reference itself is not finite"
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        first = tuple(int(i) for i in bad[0])
        raise AssertionError(f"{what}: {len(bad)} not finite, the first {x[first]} at {first}")
    error = accuracy.error(x, expected)
    if not error <= tolerance:
        worst = np.unravel_index(np.abs(x - expected).argmax(), x.shape)
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{what}: relative error {error:.3e} > {tolerance:.1e}; "
            f"worst at {at}: {x[at]!r}, expected {expected[at]!r}"
        )


def host(x) -> np.ndarray:
    """Any array as float64 on the CPU."""
    if type(x).__module__.partition(".")[0] == "torch":
        return x.detach().double().cpu().numpy()
    if hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).astype(np.float64)


def bits(*arrays) -> str:
    """A digest of their bytes, None left out. Of bytes themselves pytest would print every one."""
    digest = hashlib.sha256()
    for x in arrays:
        if x is not None:
            digest.update((x.get() if hasattr(x, "get") else x).tobytes())
    return digest.hexdigest()


def check(rule: str, function, arrays: dict, dtype: str, *, tolerance=None, what="", **options):
    """Run ``function(**arrays, **options)`` and compare y and the final state with the reference.

    ``arrays`` are the caller's arrays as rounded to ``dtype``; the reference is computed from them.
    Returns y and the state as the function gave them.
    """
    expected_y, expected_state = REFERENCE[rule](
        **{name: x if x is None else host(x) for name, x in arrays.items()},
        **{name: x for name, x in options.items() if name not in ("out", "precision")},
    )
    peak = np.abs(expected_y).max(initial=0.0)
    assert np.isfinite(expected_y).all(), f"{what}: void reference, not finite"
    assert peak < 1e4, f"{what}: void reference, peak {peak}"
    y, state = function(**arrays, return_state=True, **options)
    if tolerance is None:
        tolerance = accuracy.TOLERANCE[rule, dtype]
    assert_close(y, expected_y, tolerance, f"{what} y")
    assert_close(state, expected_state, tolerance, f"{what} state")
    return y, state


def check_grad(
    rule: str, function, dy, dstate, arrays: dict, dtype: str, *, tolerance=None, what="", **options
):
    """Run ``function(dy, **arrays, dstate=dstate, **options)``, compare with the reference.

    The gradients have the shape and dtype of their arguments. Returns them as the function did.
    """
    expected = REFERENCE_GRAD[rule](
        dy if dy is None else host(dy),
        **{name: x if x is None else host(x) for name, x in arrays.items()},
        dstate=dstate if dstate is None else host(dstate),
        **{name: x for name, x in options.items() if name != "precision"},
    )
    got = function(dy, **arrays, dstate=dstate, **options)
    if tolerance is None:
        tolerance = accuracy.GRADIENT_TOLERANCE[dtype]
    for name, x, want in zip(got._fields, got, expected, strict=True):
        given = arrays.get("log_gate" if name == "gate" and "log_gate" in arrays else name)
        assert (x is None) == (given is None), f"{what} d {name} is {x}"
        if x is not None:
            assert x.dtype == given.dtype, f"{what} d {name}: {x.dtype} for {given.dtype}"
            peak = np.abs(want).max(initial=0.0)
            assert peak < 1e4, f"{what} d {name}: void reference, peak {peak}"
            assert_close(x, want, tolerance, f"{what} d {name}")
    return got
