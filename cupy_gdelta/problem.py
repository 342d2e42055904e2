"""Arguments -> a frozen Problem. Every error message about an argument is written here."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from . import arrays
from .arrays import View

MAX_HEAD_DIM = 256
PRECISIONS = ("highest", "tf32")
PER_TOKEN = ("gate", "log_gate", "beta")


@dataclass(frozen=True)
class Problem:
    """One checked call: sizes, views of the inputs, and what is asked for."""

    name: str  # the public function, for messages
    rule: str  # "linear" or "delta"
    B: int
    T: int
    H: int
    Hq: int
    K: int
    V: int
    N: int  # sequences: B, or the number of packed ones
    q: View
    k: View
    v: View
    gate: View | None  # the logarithm of the gate when log_gate is set
    log_gate: bool
    beta: View | None
    initial_state: View | None
    cu_seqlens: np.ndarray | View | None  # int64 offsets on the host, or a view on the device
    scale: float
    qk_l2norm: bool
    return_state: bool
    precision: str
    out: View | None

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def state_dtype(self) -> str:
        """What the state is kept in between calls."""
        return arrays.state_dtype(self.dtype)

    @property
    def inputs(self) -> list[View]:
        some = (self.q, self.k, self.v, self.gate, self.beta, self.initial_state)
        return [x for x in some if x is not None]


def check(
    name: str,
    rule: str,
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    *,
    log_gate: Any = None,
    scale: Any = 1.0,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    qk_l2norm: bool = False,
    out: Any = None,
    precision: str = "highest",
) -> Problem:
    """Refuse what breaks the contract, before any work; else describe the call."""

    def fail(kind: type[Exception], text: str) -> NoReturn:
        raise kind(f"{name}: {text}")

    if gate is not None and log_gate is not None:
        fail(ValueError, "gate must be given in one form, as gate or as log_gate; got both")
    given = {
        "q": q,
        "k": k,
        "v": v,
        "gate" if log_gate is None else "log_gate": gate if log_gate is None else log_gate,
        "beta": beta,
        "initial_state": initial_state,
        "out": out,
    }
    views: dict[str, View] = {}
    for label, x in given.items():
        if x is None and label not in ("q", "k", "v"):
            continue
        try:
            views[label] = arrays.take(x)
        except TypeError as error:
            text = str(error)
            if label in PER_TOKEN and isinstance(x, (numbers.Number, np.generic)):
                text = f"must be an array of shape (B, T, H), not a number; got {type(x).__name__}"
            fail(TypeError, f"{label} {text}")
    first = views["q"]
    for label, x in views.items():
        if not x.beside(first):
            fail(TypeError, f"{label} must be {first.kind}, as q is; got {x.kind}")
        if x.needs_grad and label != "out":
            fail(
                TypeError,
                f"{label} must not require grad, for this version computes no gradients (pass "
                f"{label}.detach() or call under torch.no_grad()); got a tensor that does",
            )
    if first.family == "dlpack":
        try:
            arrays.importer(v)
        except TypeError as error:
            fail(TypeError, f"v {error}")
    _dtypes(fail, views)
    sizes = _sizes(fail, views)
    offsets = None
    N = sizes["B"]
    if cu_seqlens is not None:
        offsets, N = _offsets(fail, cu_seqlens, first, sizes["B"], sizes["T"])
    if "initial_state" in views:
        want = (N, sizes["H"], sizes["K"], sizes["V"])
        _shape(fail, "initial_state", views["initial_state"], "(N, H, K, V)", want)
    if "out" in views:
        _out(fail, views["out"], views["v"])
    rule_of_precision = f"precision must be one of {', '.join(PRECISIONS)}"
    if not isinstance(precision, str):
        fail(TypeError, f"{rule_of_precision}; got {type(precision).__name__}")
    if precision not in PRECISIONS:
        fail(ValueError, f"{rule_of_precision}; got {precision!r}")
    return Problem(
        name=name,
        rule=rule,
        **sizes,
        N=N,
        q=first,
        k=views["k"],
        v=views["v"],
        gate=views.get("gate", views.get("log_gate")),
        log_gate="log_gate" in views,
        beta=views.get("beta"),
        initial_state=views.get("initial_state"),
        cu_seqlens=offsets,
        scale=_scale(fail, scale),
        qk_l2norm=_flag(fail, "qk_l2norm", qk_l2norm),
        return_state=_flag(fail, "return_state", return_state),
        precision=precision,
        out=views.get("out"),
    )


Fail = Callable[[type[Exception], str], NoReturn]


def _shape(fail: Fail, label: str, x: View, form: str, want: tuple[int, ...]) -> None:
    if x.shape != want:
        names = form.strip("()")
        sizes = ", ".join(str(n) for n in want)
        fail(ValueError, f"{label} must have shape {form} with {names} = {sizes}; got {x.shape}")


def _sizes(fail: Fail, views: dict[str, View]) -> dict[str, int]:
    q, k, v = (views[label] for label in "qkv")
    if len(q.shape) != 4:
        fail(ValueError, f"q must have shape (B, T, Hq, K); got {q.shape}")
    B, T, Hq, K = q.shape
    if k.shape != q.shape:
        fail(ValueError, f"k must have the shape of q, (B, T, Hq, K) = {q.shape}; got {k.shape}")
    if len(v.shape) != 4 or v.shape[:2] != (B, T):
        fail(
            ValueError,
            f"v must have shape (B, T, H, V) with B, T = {B}, {T} from q; got {v.shape}",
        )
    H, V = v.shape[2:]
    if (Hq == 0 and H > 0) or (Hq > 0 and H % Hq):
        fail(
            ValueError,
            f"v must have a multiple of the {Hq} heads of q and k; got {H} heads in {v.shape}",
        )
    for label, axis, size in (("q", "K", K), ("v", "V", V)):
        if not 1 <= size <= MAX_HEAD_DIM:
            fail(
                ValueError,
                f"{label} must have a last axis {axis} of 1 to {MAX_HEAD_DIM}; got {size}",
            )
    for label in PER_TOKEN:
        if label in views:
            _shape(fail, label, views[label], "(B, T, H)", (B, T, H))
    return {"B": B, "T": T, "H": H, "Hq": Hq, "K": K, "V": V}


def _dtypes(fail: Fail, views: dict[str, View]) -> None:
    dtype = views["q"].dtype
    if dtype not in arrays.FLOATS:
        *others, last = arrays.FLOATS
        names = ", ".join(others)
        fail(TypeError, f"q must have dtype {names} or {last}; got {dtype}")
    allowed = {
        "k": (dtype,),
        "v": (dtype,),
        "gate": ("float32", dtype),
        "log_gate": ("float32", dtype),
        "beta": ("float32", dtype),
        "initial_state": (arrays.state_dtype(dtype),),
        "out": (dtype,),
    }
    for label, x in views.items():
        kinds = list(dict.fromkeys(allowed.get(label, (dtype,))))
        if x.dtype not in kinds:
            hint = _conversion(label, x, kinds[0])
            fail(
                TypeError,
                f"{label} must have dtype {' or '.join(kinds)} for q of {dtype}{hint}; "
                f"got {x.dtype}",
            )


def _conversion(label: str, x: View, dtype: str) -> str:
    """How to mend what random generators and sums in float64 make."""
    if label in ("q", "k", "v", "out"):
        return ""
    call = {"torch": f"to(torch.{dtype})", "dlpack": ""}.get(x.family, f'astype("{dtype}")')
    return f" (convert it: {label}.{call})" if call else ""


def _flag(fail: Fail, label: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        fail(TypeError, f"{label} must be True or False; got {type(value).__name__}")
    return bool(value)


def _out(fail: Fail, out: View, v: View) -> None:
    _shape(fail, "out", out, "(B, T, H, V)", v.shape)
    if out.readonly:
        fail(ValueError, "out must be writable; got a read-only array")
    if out.copied:
        fail(ValueError, "out must be aligned and in native byte order; got one that is not")
    reach = 0  # of the axes with smaller strides, in elements
    for step, size in sorted((abs(s), n) for n, s in zip(out.shape, out.strides, strict=True)):
        if size > 1 and step <= reach and 0 not in out.shape:
            fail(
                ValueError,
                f"out must have memory of its own for each element; "
                f"got strides {out.strides} for shape {out.shape}",
            )
        reach += step * (size - 1)
    if out.needs_grad:
        fail(ValueError, "out must not require grad; got a tensor that does")


def _scale(fail: Fail, scale: Any) -> float:
    kind = type(scale).__name__
    if getattr(scale, "requires_grad", False):
        fail(TypeError, "scale must be a number (multiply q instead); got one that requires grad")
    if getattr(scale, "shape", None) == () and hasattr(scale, "__float__"):
        dtype = getattr(scale.dtype, "name", str(scale.dtype).rpartition(".")[2])
        if not dtype.startswith(("float", "bfloat", "longdouble", "int", "uint")):
            own = isinstance(scale, np.generic)  # whose type is the dtype
            fail(
                TypeError,
                f"scale must be a real number; got {kind if own else f'{kind} of {dtype}'}",
            )
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        fail(TypeError, f"scale must be a real number; got {kind}")
    try:
        value = float(scale)
    except OverflowError:
        fail(ValueError, f"scale must be finite as a float; got {kind} beyond its range")
    if not math.isfinite(value):
        fail(ValueError, f"scale must be finite; got {value}")
    return value


def _offsets(fail: Fail, cu_seqlens: Any, q: View, B: int, T: int) -> tuple[np.ndarray | View, int]:
    """cu_seqlens as int64 on the host, checked; on q's device, as a view that only kernels read."""
    if B != 1:
        fail(ValueError, f"cu_seqlens must come with B = 1, sequences packed along T; got B = {B}")
    if isinstance(cu_seqlens, (list, tuple, range)):
        ends, dtype = _listed(fail, cu_seqlens), "int64"
    else:
        try:
            view = arrays.take(cu_seqlens)
        except TypeError as error:
            text = str(error).replace("an array", "a list or an array of integers")
            fail(TypeError, f"cu_seqlens {text}")
        if view.device >= 0:
            return _device_offsets(fail, view, q)
        ends, dtype = view.array, view.dtype
    if not dtype.startswith(("int", "uint")):
        fail(TypeError, f"cu_seqlens must hold integers; got dtype {dtype}")
    if ends.ndim != 1 or ends.size == 0:
        fail(ValueError, f"cu_seqlens must have shape (N + 1,) with N >= 0; got {ends.shape}")
    ends = ends.copy()  # which no caller can change under the work
    if ends[0] != 0:
        fail(ValueError, f"cu_seqlens must start with 0; got {ends[0]}")
    falls = np.flatnonzero(ends[1:] < ends[:-1])
    if falls.size:
        i = int(falls[0])
        fail(ValueError, f"cu_seqlens must not decrease; got {ends[i]}, {ends[i + 1]} at {i}")
    if ends[-1] > T:
        fail(ValueError, f"cu_seqlens must end at T = {T} or before; got {ends[-1]}")
    return ends.astype(np.int64), ends.size - 1


def _listed(fail: Fail, values: Any) -> np.ndarray:
    ends = []
    for x in values:
        try:
            ends.append(operator.index(x))
        except TypeError:
            fail(TypeError, f"cu_seqlens must hold integers; got {x!r}")
        if isinstance(x, bool):
            fail(TypeError, f"cu_seqlens must hold integers; got {x!r}")
    try:
        return np.array(ends, dtype=np.int64)
    except OverflowError:
        fail(ValueError, f"cu_seqlens must hold 64-bit integers; got {max(ends, key=abs)}")


def _device_offsets(fail: Fail, view: View, q: View) -> tuple[View, int]:
    if not view.beside(q):
        places = "on the CPU" if q.device < 0 else f"on the CPU or be {q.kind}, as q is"
        fail(TypeError, f"cu_seqlens must lie {places}; got {view.kind}")
    if view.dtype not in ("int32", "int64"):
        fail(TypeError, f"cu_seqlens must have dtype int32 or int64; got {view.dtype}")
    if len(view.shape) != 1 or view.shape[0] == 0:
        fail(ValueError, f"cu_seqlens must have shape (N + 1,) with N >= 0; got {view.shape}")
    return view, view.shape[0] - 1
