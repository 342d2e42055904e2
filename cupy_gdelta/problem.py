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
REQUIRED = ("q", "k", "v", "state")
WRITTEN = ("out", "state", "states_out")


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
    dy: View | None = None  # gradients of y and of the final state: this call asks for the others
    dstate: View | None = None

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
        return [x for x in (*some, self.dy, self.dstate) if x is not None]


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
    backward: bool = False,
    dy: Any = None,
    dstate: Any = None,
    whole: int | None = None,
) -> Problem:
    """Refuse what breaks the contract, before any work; else describe the call.

    ``backward`` asks for gradients, from dy and dstate of which one may be None. ``whole`` is how
    far cu_seqlens may reach where q is a piece of what it counts.
    """

    def fail(kind: type[Exception], text: str) -> NoReturn:
        raise kind(f"{name}: {text}")

    if backward and dy is None and dstate is None:
        fail(ValueError, "dy or dstate must be given; got neither")
    given = {
        "q": q,
        "k": k,
        "v": v,
        **one_gate(fail, gate, log_gate),
        "beta": beta,
        "initial_state": initial_state,
        "out": out,
        "dy": dy,
        "dstate": dstate,
    }
    views = take_all(fail, given, "(B, T, H)", _why(backward, out))
    first = views["q"]
    check_dtypes(fail, views)
    sizes = check_sizes(fail, views, ("B", "T"))
    offsets = None
    N = sizes["B"]
    if cu_seqlens is not None:
        offsets, N = _offsets(
            fail, cu_seqlens, first, sizes["B"], sizes["T"] if whole is None else whole
        )
    if "initial_state" in views:
        want = (N, sizes["H"], sizes["K"], sizes["V"])
        check_shape(fail, "initial_state", views["initial_state"], "(N, H, K, V)", want)
    if "dy" in views:
        check_shape(fail, "dy", views["dy"], "(B, T, H, V)", views["v"].shape)
    if "dstate" in views:
        want = (N, sizes["H"], sizes["K"], sizes["V"])
        check_shape(fail, "dstate", views["dstate"], "(N, H, K, V)", want)
    if "out" in views:
        check_shape(fail, "out", views["out"], "(B, T, H, V)", views["v"].shape)
        check_writable(fail, "out", views["out"])
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
        scale=check_scale(fail, scale),
        qk_l2norm=check_flag(fail, "qk_l2norm", qk_l2norm),
        return_state=check_flag(fail, "return_state", return_state),
        precision=precision,
        out=views.get("out"),
        dy=views.get("dy"),
        dstate=views.get("dstate"),
    )


def _why(backward: bool, out: Any) -> str:
    """What keeps a call from being differentiated."""
    if backward:
        return "here, for second derivatives are not computed"
    if out is not None:
        return "where out is given"
    return "where derivatives are taken forward"


Fail = Callable[[type[Exception], str], NoReturn]


def take_all(fail: Fail, given: dict[str, Any], per_token: str, why: str) -> dict[str, View]:
    """Views of the arrays given, all of one library and device.

    ``per_token`` is a gate's form, ``why`` what keeps the call from being differentiated.
    """
    views: dict[str, View] = {}
    for label, x in given.items():
        if x is None and label not in REQUIRED:
            continue
        try:
            views[label] = arrays.take(x)
        except TypeError as error:
            text = str(error)
            if label in PER_TOKEN and isinstance(x, (numbers.Number, np.generic)):
                text = (
                    f"must be an array of shape {per_token}, not a number; got {type(x).__name__}"
                )
            fail(TypeError, f"{label} {text}")
    first = views["q"]
    for label, x in views.items():
        if not x.beside(first):
            fail(TypeError, f"{label} must be {first.kind}, as q is; got {x.kind}")
        if x.needs_grad and label not in WRITTEN:
            fail(
                TypeError,
                f"{label} must not require grad {why} (pass {label}.detach() or call under "
                f"torch.no_grad()); got a tensor that does",
            )
    if first.family == "dlpack":
        try:
            arrays.importer(given["v"])
        except TypeError as error:
            fail(TypeError, f"v {error}")
    return views


def one_gate(fail: Fail, gate: Any, log_gate: Any) -> dict[str, Any]:
    """The gate under the name of the form it is given in."""
    if gate is not None and log_gate is not None:
        fail(ValueError, "gate must be given in one form, as gate or as log_gate; got both")
    return {"gate": gate} if log_gate is None else {"log_gate": log_gate}


def check_shape(fail: Fail, label: str, x: View, form: str, want: tuple[int, ...]) -> None:
    if x.shape != want:
        names = form.strip("()")
        sizes = ", ".join(str(n) for n in want)
        fail(ValueError, f"{label} must have shape {form} with {names} = {sizes}; got {x.shape}")


def check_sizes(fail: Fail, views: dict[str, View], lead: tuple[str, ...]) -> dict[str, int]:
    """Every size by its name; ``lead`` names the axes before those of heads."""
    q, k, v = (views[label] for label in "qkv")
    n, axes = len(lead), ", ".join(lead)
    if len(q.shape) != n + 2:
        fail(ValueError, f"q must have shape ({axes}, Hq, K); got {q.shape}")
    first, (Hq, K) = q.shape[:n], q.shape[n:]
    if k.shape != q.shape:
        fail(ValueError, f"k must have the shape of q, ({axes}, Hq, K) = {q.shape}; got {k.shape}")
    sizes = ", ".join(map(str, first))
    if len(v.shape) != n + 2 or v.shape[:n] != first:
        fail(
            ValueError,
            f"v must have shape ({axes}, H, V) with {axes} = {sizes} from q; got {v.shape}",
        )
    H, V = v.shape[n:]
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
            check_shape(fail, label, views[label], f"({axes}, H)", (*first, H))
    return {**dict(zip(lead, first, strict=True)), "H": H, "Hq": Hq, "K": K, "V": V}


def check_dtypes(fail: Fail, views: dict[str, View]) -> None:
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
        "dstate": (arrays.state_dtype(dtype),),
        "state": ("float64",) if dtype == "float64" else ("float32", "bfloat16", "float16"),
        "states_out": (views["state"].dtype,) if "state" in views else (),
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
    if label in ("q", "k", "v", "out", "dy"):
        return ""
    call = {"torch": f"to(torch.{dtype})", "dlpack": ""}.get(x.family, f'astype("{dtype}")')
    return f" (convert it: {label}.{call})" if call else ""


def check_flag(fail: Fail, label: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        fail(TypeError, f"{label} must be True or False; got {type(value).__name__}")
    return bool(value)


def check_writable(fail: Fail, label: str, x: View) -> None:
    """Refuse what cannot be written in place."""
    if x.readonly:
        fail(ValueError, f"{label} must be writable; got a read-only array")
    if x.copied:
        fail(ValueError, f"{label} must be aligned and in native byte order; got one that is not")
    reach = 0  # of the axes with smaller strides, in elements
    for step, size in sorted((abs(s), n) for n, s in zip(x.shape, x.strides, strict=True)):
        if size > 1 and step <= reach and 0 not in x.shape:
            fail(
                ValueError,
                f"{label} must have memory of its own for each element; "
                f"got strides {x.strides} for shape {x.shape}",
            )
        reach += step * (size - 1)
    if x.needs_grad:
        fail(ValueError, f"{label} must not require grad; got a tensor that does")


def check_scale(fail: Fail, scale: Any) -> float:
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
    ends = take_integers(fail, "cu_seqlens", cu_seqlens, q)
    if len(ends.shape) != 1 or ends.shape[0] == 0:
        fail(ValueError, f"cu_seqlens must have shape (N + 1,) with N >= 0; got {ends.shape}")
    if isinstance(ends, View):
        return ends, ends.shape[0] - 1
    if ends[0] != 0:
        fail(ValueError, f"cu_seqlens must start with 0; got {ends[0]}")
    falls = np.flatnonzero(ends[1:] < ends[:-1])
    if falls.size:
        i = int(falls[0])
        fail(ValueError, f"cu_seqlens must not decrease; got {ends[i]}, {ends[i + 1]} at {i}")
    if ends[-1] > T:
        fail(ValueError, f"cu_seqlens must end at T = {T} or before; got {ends[-1]}")
    return ends.astype(np.int64), ends.size - 1


def take_integers(fail: Fail, label: str, values: Any, q: View) -> np.ndarray | View:
    """Integers on the host as an array of their own; on q's device as a view for kernels to read.

    What lies on the host is copied: no caller can change it under the work.
    """
    if isinstance(values, (list, tuple, range)):
        return _listed(fail, label, values)
    try:
        view = arrays.take(values)
    except TypeError as error:
        text = str(error).replace("an array", "a list or an array of integers")
        fail(TypeError, f"{label} {text}")
    if view.device < 0:
        if not view.dtype.startswith(("int", "uint")):
            fail(TypeError, f"{label} must hold integers; got dtype {view.dtype}")
        return view.array.copy()
    if not view.beside(q):
        places = "on the CPU" if q.device < 0 else f"on the CPU or be {q.kind}, as q is"
        fail(TypeError, f"{label} must lie {places}; got {view.kind}")
    if view.dtype not in ("int32", "int64"):
        fail(TypeError, f"{label} must have dtype int32 or int64; got {view.dtype}")
    return view


def _listed(fail: Fail, label: str, values: Any) -> np.ndarray:
    found = []
    for x in values:
        try:
            found.append(operator.index(x))
        except TypeError:
            fail(TypeError, f"{label} must hold integers; got {x!r}")
        if isinstance(x, bool):
            fail(TypeError, f"{label} must hold integers; got {x!r}")
    try:
        return np.array(found, dtype=np.int64)
    except OverflowError:
        fail(ValueError, f"{label} must hold 64-bit integers; got {max(found, key=abs)}")
