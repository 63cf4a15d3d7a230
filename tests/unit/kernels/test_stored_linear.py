"""Linears stored in 8 bits: decoding against its reference, gradients, what autograd keeps, and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finetune.kernels.stored_linear import StoredLinear, decoded, decoded_reference, encoded
from tests.unit.planner.live_bytes import saved_bytes

KINDS = ("int8", "fp8")


def linear(inputs: int = 48, outputs: int = 1100, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 1, outputs)[:, None])  # rows of very different size
        layer.weight[5] = 0
    return layer.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_the_reference_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    weight = linear(dtype=dtype).weight
    codes, scale = encoded(weight, kind)
    assert (codes.element_size(), scale.dtype, tuple(scale.shape)) == (1, torch.float32, (1100, 1))
    assert torch.equal(decoded(codes, scale, kind, dtype), decoded_reference(codes, scale, kind, dtype))


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_errors_are_those_of_the_format(kind: str, worst: float) -> None:
    """int8: half a step of a row's largest magnitude; e4m3: half a unit of three mantissa bits of the element itself."""
    weight = linear().weight
    again = decoded(*encoded(weight, kind), kind, torch.float32)
    size = weight.abs().amax(dim=1, keepdim=True) if kind == "int8" else weight.abs()
    # e4m3's smallest step, where elements are far below their row's largest.
    floor = 0 if kind == "int8" else weight.abs().amax(dim=1, keepdim=True) / 448 * 2**-10
    assert ((again - weight).abs() <= worst * size * 1.0001 + floor).all()
    assert (again[5] == 0).all()
    torch.testing.assert_close(again.abs().amax(dim=1), weight.abs().amax(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_those_of_the_decoded_weight(kind: str) -> None:
    plain = linear(bias=True)
    stored = StoredLinear(plain, kind)
    reference = nn.Linear(48, 1100)
    reference.load_state_dict({"weight": stored.weight, "bias": plain.bias})
    x = torch.randn(3, 7, 48)
    results = []
    for layer in (stored, reference):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.square().sum().backward()
        results.append((out, given.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-6)
    assert stored.bias is not None
    assert stored.bias.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_keeps_no_decoded_weight(kind: str) -> None:
    layers = nn.Sequential(*(StoredLinear(linear(64, 64), kind) for _ in range(3)))
    x = torch.randn(2, 64, requires_grad=True)
    with saved_bytes(layers) as kept:
        out = layers(x)
    assert sum(kept.values()) == 0
    out.sum().backward()
    plain = nn.Sequential(*(linear(64, 64) for _ in range(3)))
    assert sum(b.numel() * b.element_size() for b in layers.buffers()) == 3 * (64 * 64 + 64 * 4)
    assert sum(p.numel() for p in plain.parameters()) == 3 * 64 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_nothing_to_train_and_follows_autocast(kind: str) -> None:
    stored = StoredLinear(linear(dtype=torch.bfloat16), kind)
    assert not list(stored.parameters())
    assert stored.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stored(torch.randn(2, 48)).dtype == torch.bfloat16
    # A cast of the whole module leaves the codes alone.
    before = stored.codes.clone()
    assert torch.equal(stored.to(torch.float32).codes, before)
