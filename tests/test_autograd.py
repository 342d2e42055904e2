"""torch: gradients, the compiler, checkpoints, autocast, streams, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_close, host
from conftest import GPU_FAMILIES, Family, python

import cupy_gdelta
from cupy_gdelta import accuracy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its own ways at first uses

RULES = pytest.mark.parametrize("rule", ["linear", "delta"])
TORCH = pytest.mark.parametrize("name", ["torch", GPU_FAMILIES[1]])
FUNCTION = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
GRAD = {
    "linear": cupy_gdelta.gated_linear_attention_grad,
    "delta": cupy_gdelta.gated_delta_rule_grad,
}


def leaves(rng, name="torch", dtype="float32", **sizes) -> dict:
    """Inputs that require grad."""
    x = accuracy.inputs(rng, **sizes)
    shape = (x["v"].shape[0], x["v"].shape[2], x["q"].shape[3], x["v"].shape[3])
    x["initial_state"] = rng.standard_normal(shape)
    return {n: a.requires_grad_() for n, a in Family(name).arrays(x, dtype).items()}


def detached(x: dict) -> dict:
    return {name: a.detach() for name, a in x.items()}


def assert_grads(x: dict, expected, tolerance=0.0) -> None:
    for name, a in x.items():
        want = getattr(expected, "gate" if name == "log_gate" else name)
        assert a.grad.dtype == a.dtype
        assert_close(a.grad, host(want), tolerance, name)


# gradients


SMALL = {"T": 5, "H": 4, "Hq": 2, "K": 3, "V": 2, "gate": "negative"}


@TORCH
@RULES
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"qk_l2norm": True}, {"cu_seqlens": [0, 2, 2, 4]}], ids=str
)
def test_gradcheck(name, rule, options, rng):
    if rule == "linear" and "qk_l2norm" in options:
        pytest.skip("an option of the delta rule")
    x = leaves(rng, name, "float64", **SMALL)
    if "cu_seqlens" in options:
        x["initial_state"] = x["initial_state"].detach().repeat(3, 1, 1, 1).requires_grad_()

    def call(*values):
        given = dict(zip(x, values, strict=True))
        return FUNCTION[rule](**given, **options, return_state=True)

    assert torch.autograd.gradcheck(call, tuple(x.values()))


@RULES
def test_gradcheck_of_log_gates_and_defaults(rule, rng):
    x = leaves(rng, "torch", "float64", **SMALL | {"gate": "random"})
    log_gate = x["gate"].detach().log().requires_grad_()
    q, k, v = (x[n] for n in "qkv")
    function = FUNCTION[rule]
    assert torch.autograd.gradcheck(
        lambda q, k, v, log_gate: function(q, k, v, log_gate=log_gate), (q, k, v, log_gate)
    )
    assert torch.autograd.gradcheck(lambda *qkv: function(*qkv), (q, k, v))


@TORCH
@RULES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_same_gradients_as_the_function(name, rule, dtype, rng):
    x = leaves(rng, name, dtype, B=2, T=70, H=4, Hq=2)
    y, state = FUNCTION[rule](**x, return_state=True)
    dy, dstate = torch.randn_like(y), torch.randn_like(state)
    torch.autograd.backward((y, state), (dy, dstate))
    assert_grads(x, GRAD[rule](dy, **detached(x), dstate=dstate))


@TORCH
@RULES
@pytest.mark.parametrize("wanted", ["q", "k", "v", "gate", "beta", "initial_state"])
def test_one_input_alone(name, rule, wanted, rng):
    x = leaves(rng, name, T=40)
    given = detached(x) | {wanted: x[wanted]}
    y = FUNCTION[rule](**given)
    y.backward(torch.ones_like(y))
    expected = GRAD[rule](torch.ones_like(y), **detached(x))
    assert_close(x[wanted].grad, host(getattr(expected, wanted)), 0.0, wanted)
    assert all(a.grad is None for n, a in x.items() if n != wanted)


@TORCH
@RULES
def test_the_final_state_alone(name, rule, rng):
    x = leaves(rng, name, T=40)
    _, state = FUNCTION[rule](**x, return_state=True)
    state.sum().backward()
    assert not x["q"].grad.any()
    assert_grads(x, GRAD[rule](None, **detached(x), dstate=torch.ones_like(state)))


@TORCH
@RULES
def test_G02_gradients_that_are_not_contiguous(name, rule, rng):
    """Backward took dy for contiguous (flash-attention#355, pytorch#64529)."""
    x = leaves(rng, name, B=2, T=40, H=3)
    function, plain = FUNCTION[rule], detached(x)

    def check(loss, dy, dstate=None):
        for a in x.values():
            a.grad = None
        loss(*function(**x, return_state=True)).backward()
        assert_grads(x, GRAD[rule](dy.contiguous(), **plain, dstate=dstate), 1e-6)

    ones = torch.ones_like(plain["v"])
    check(lambda y, s: y.sum(), ones)
    weight = torch.randn_like(ones.repeat(1, 1, 1, 2))
    check(lambda y, s: (torch.cat([y, y], -1) * weight).sum(), weight[..., :24] + weight[..., 24:])
    turned = torch.randn_like(ones.transpose(1, 3).contiguous())
    check(lambda y, s: (y.transpose(1, 3) * turned).sum(), turned.transpose(1, 3))
    states = torch.randn_like(plain["initial_state"].transpose(2, 3).contiguous())
    check(
        lambda y, s: y.sum() + (s.transpose(2, 3) * states).sum(),
        ones,
        states.transpose(2, 3).contiguous(),
    )


@RULES
def test_saved_for_backward_are_inputs_alone(rule, rng):
    x = leaves(rng, T=40)
    own, saved = {a.data_ptr() for a in x.values()}, []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a) or a, lambda a: a)
    with hooks:
        FUNCTION[rule](**x, return_state=True)
    assert {a.data_ptr() for a in saved} == own


# operators


@TORCH
@RULES
@pytest.mark.parametrize("state", [False, True])
def test_opcheck(name, rule, state, rng):
    x = leaves(rng, name, **SMALL)
    q, k, v, gate, beta, first = x.values()
    offsets = torch.tensor([0, 2, 5], device=q.device)
    two = first.detach().repeat(2, 1, 1, 1).requires_grad_()
    options = (rule, 0.3, rule == "delta", "highest")
    for inputs in (
        (q, k, v, gate, None, beta, first, None, None),
        (q, k, v, None, gate, None, None, None, None),
        (q, k, v, gate, None, beta, two, None, [0, 2, 5]),
        (q, k, v, gate, None, beta, two, offsets, None),
    ):
        torch.library.opcheck(torch.ops.cupy_gdelta.forward.default, (*inputs, *options, state))
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in inputs]
        dy = torch.randn_like(v)
        torch.library.opcheck(torch.ops.cupy_gdelta.backward.default, (dy, None, *plain, *options))


@TORCH
@RULES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(name, rule, backend, rng):
    if name == "torch-cuda" and backend == "inductor":
        pytest.importorskip("triton")
    x = leaves(rng, name, B=2, T=40)
    options = {"scale": 0.5, "return_state": True}
    if rule == "delta":
        options["qk_l2norm"] = True

    def block(q, k, v, gate, beta, initial_state):
        y, state = FUNCTION[rule](
            q * 2, k, v, gate.sigmoid(), beta, initial_state=initial_state, **options
        )
        return y.tanh(), state + 1

    expected = block(**x)
    sum(a.sum() for a in expected).backward()
    grads = {n: a.grad.clone() for n, a in x.items()}
    for a in x.values():
        a.grad = None
    torch._dynamo.reset()
    got = torch.compile(block, fullgraph=True, backend=backend)(**x)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, host(b), 1e-6, "compiled")
    sum(a.sum() for a in got).backward()
    for n, a in x.items():
        assert_close(a.grad, host(grads[n]), 1e-6, f"d {n}")
    with torch.no_grad():
        assert_close(torch.compile(block, backend="eager")(**x)[0], host(expected[0]), 1e-6, "y")


@RULES
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_compile_of_packed_sequences(rule, kind, rng):
    x = leaves(rng, T=40)
    del x["initial_state"]
    ends = kind([0, 7, 7, 40])
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTION[rule], fullgraph=True, backend="aot_eager")
    y, state = compiled(**x, cu_seqlens=ends, return_state=True)
    assert torch.equal(y, FUNCTION[rule](**x, cu_seqlens=ends))
    y.sum().backward()
    assert x["q"].grad.any()
    assert state.shape[0] == 3


def test_the_first_call_may_be_inside_a_compiled_function():
    code = """
        import warnings
        import torch
        import cupy_gdelta
        import sys

        warnings.simplefilter("ignore")
        assert "cupy_gdelta.autograd" not in sys.modules
        f = torch.compile(cupy_gdelta.gated_delta_rule, fullgraph=True, backend="aot_eager")
        x = torch.ones(1, 5, 2, 3, requires_grad=True)
        f(x, x / 3, x).sum().backward()
        print(bool(x.grad.isfinite().all()))
    """
    assert python(code) == "True\n"


@TORCH
@RULES
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, rule, reentrant, rng):
    from torch.utils.checkpoint import checkpoint

    x = leaves(rng, name, T=40)

    def block(*values):
        return FUNCTION[rule](**dict(zip(x, values, strict=True)))

    y = checkpoint(block, *x.values(), use_reentrant=reentrant)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_grads(x, GRAD[rule](dy, **detached(x)))


@TORCH
@RULES
def test_autocast(name, rule, rng):
    """q, k and v are narrowed, as in torch's own attention; gates, betas and states never are."""
    x = leaves(rng, name, T=40)
    kind = x["q"].device.type
    with torch.autocast(kind, torch.bfloat16):
        y, state = FUNCTION[rule](**x, return_state=True)
        with torch.no_grad():
            assert torch.equal(FUNCTION[rule](**x), y)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    (y.float().sum() + state.sum()).backward()
    narrow = detached(x) | {n: x[n].detach().bfloat16() for n in "qkv"}
    assert torch.equal(FUNCTION[rule](**narrow), y)
    expected = GRAD[rule](torch.ones_like(y), **narrow, dstate=torch.ones_like(state))
    assert_grads(x, expected)
    mixed = detached(x) | {"q": x["q"].detach().bfloat16(), "gate": x["gate"].detach().half()}
    with torch.autocast(kind, torch.bfloat16):
        assert FUNCTION[rule](**mixed).dtype == torch.bfloat16


# refusals


@RULES
def test_X07_second_derivatives_are_refused(rule, rng):
    """The gradient of a gradient was silently wrong (pytorch#76185, #58509)."""
    x = leaves(rng, T=10)
    (grad,) = torch.autograd.grad(FUNCTION[rule](**x).sum(), x["q"], create_graph=True)
    name = GRAD[rule].__name__
    with pytest.raises(TypeError, match=f"{name}: second derivatives are not computed"):
        grad.sum().backward()
    with pytest.raises(TypeError, match=f"{name}: q must not require grad here, for second"):
        GRAD[rule](x["v"].detach(), **x)


@RULES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": np.ones((1, 5, 4), np.float32)}, "gate must be a torch tensor on the CPU, as q"),
        ({"v": torch.ones(1, 5, 4, 2).double()}, "v must have dtype float32 for q of float32"),
        ({"v": torch.ones(1, 6, 4, 2)}, "v must have shape"),
        ({"log_gate": torch.ones(1, 5, 4)}, "gate must be given in one form"),
        ({"cu_seqlens": [0, 9]}, "cu_seqlens must end at T = 5 or before"),
        ({"cu_seqlens": [0, 1.5]}, "cu_seqlens must hold integers"),
        ({"scale": "1"}, "scale must be a real number"),
        ({"return_state": 1}, "return_state must be True or False"),
        ({"precision": "low"}, "precision must be one of"),
        ({"beta": 1.0}, r"beta must be an array of shape \(B, T, H\), not a number"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_are_those_of_every_call(rule, change, message, rng):
    x = leaves(rng, **SMALL)
    del x["initial_state"]
    name = FUNCTION[rule].__name__
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
        FUNCTION[rule](**x | change)


# streams


@pytest.mark.gpu
@RULES
def test_X08_backward_on_another_stream(rule, rng):
    """Saved arrays were freed early, or read before they were written (pytorch#7601)."""
    x = leaves(rng, "torch-cuda", B=2, T=500, H=4)
    expected = GRAD[rule](torch.ones_like(x["v"]), **detached(x))
    side = torch.cuda.Stream()
    for _ in range(20):
        for a in x.values():
            a.grad = None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            y = FUNCTION[rule](**x)
        torch.cuda.current_stream().wait_stream(side)
        y.sum().backward()
        assert_grads(x, expected)


@pytest.mark.gpu
@RULES
def test_X03_data_made_on_a_side_stream(rule, rng):
    x = leaves(rng, "torch-cuda", B=2, T=200, H=4)
    plain = detached(x)
    expected = GRAD[rule](torch.ones_like(x["v"]), **plain)
    for _ in range(20):
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            filled = {n: torch.zeros_like(a) for n, a in plain.items()}
            torch.cuda._sleep(2_000_000)
            for n, a in plain.items():
                filled[n].copy_(a)
            filled = {n: a.requires_grad_() for n, a in filled.items()}
            y = FUNCTION[rule](**filled)
            y.sum().backward()
            torch.cuda.current_stream().synchronize()
        assert_grads(filled, expected)
