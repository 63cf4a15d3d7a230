"""The chunked loss kernel against plain cross-entropy: values, gradients, dtypes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from finetune.kernels.linear_cross_entropy import linear_cross_entropy_reference, linear_cross_entropy_sum


def small(dtype: torch.dtype = torch.float32, count: int = 8, hidden: int = 10, vocabulary: int = 15) -> dict:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, vocabulary, (count,), generator=generator)
    labels[::3] = -100
    return {
        "hidden": torch.randn(count, hidden, generator=generator, dtype=dtype).requires_grad_(),
        "weight": torch.randn(vocabulary, hidden, generator=generator, dtype=dtype).requires_grad_(),
        "bias": torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_(),
        "labels": labels,
        "weights": torch.rand(count, generator=generator, dtype=dtype),
    }


def gradients(
    loss: torch.Tensor, case: dict, names: tuple[str, ...] = ("hidden", "weight", "bias")
) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [case[name] for name in names]))


@pytest.mark.parametrize("chunk", [1, 3, 8, 1024])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_b09_loss_and_gradients_equal_plain_cross_entropy(chunk: int, reduction: str, weighted: bool) -> None:
    case = small()
    logits = functional.linear(case["hidden"], case["weight"], case["bias"])
    losses = functional.cross_entropy(logits, case["labels"], ignore_index=-100, reduction="none")
    plain = (losses * case["weights"]).sum() if weighted else losses.sum()
    ours = linear_cross_entropy_sum(
        case["hidden"],
        case["weight"],
        case["labels"],
        case["bias"],
        case["weights"] if weighted else None,
        chunk,
    )
    if reduction == "mean":
        trained = (case["labels"] != -100).sum()
        plain, ours = plain / trained, ours / trained
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(gradients(ours, case), gradients(plain, case), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_b09_scale_of_zero_and_repeated_backward() -> None:
    case = small()
    loss = linear_cross_entropy_sum(case["hidden"], case["weight"], case["labels"], case["bias"], chunk=3)
    once = torch.autograd.grad(loss, case["hidden"], retain_graph=True)[0]
    third = torch.autograd.grad(loss / 3, case["hidden"], retain_graph=True)[0]
    none = torch.autograd.grad(loss * 0, case["hidden"])[0]
    torch.testing.assert_close(third, once / 3)
    assert none.abs().max() == 0
    assert once[0].abs().max() == 0  # its label is ignored
    assert once[1].abs().max() > 0


def test_b09_what_is_not_offered_is_refused() -> None:
    case = small()
    arguments = (case["hidden"], case["weight"], case["labels"])
    with pytest.raises(ValueError, match="require a gradient"):
        linear_cross_entropy_sum(*arguments, weights_N=case["weights"].clone().requires_grad_())
    with pytest.raises(TypeError):
        linear_cross_entropy_sum(*arguments, reduction="none")
    with pytest.raises(ValueError, match="label 15 is outside the vocabulary of 15"):
        linear_cross_entropy_sum(case["hidden"], case["weight"], torch.full((8,), 15))
    with pytest.raises(ValueError, match="int64 labels"):
        linear_cross_entropy_sum(case["hidden"], case["weight"], torch.rand(8))
    with pytest.raises(ValueError, match="8 weights wanted"):
        linear_cross_entropy_sum(*arguments, weights_N=torch.ones(7))
    with pytest.raises(ValueError, match="chunk"):
        linear_cross_entropy_sum(*arguments, chunk=0)
    with pytest.raises(ValueError, match=r"\[N, D\]"):
        linear_cross_entropy_sum(case["hidden"][None], case["weight"], case["labels"])
    with pytest.raises(TypeError, match="autocast"):
        linear_cross_entropy_sum(case["hidden"].bfloat16(), case["weight"], case["labels"])


def test_gradcheck_in_float64_and_second_derivatives_refused() -> None:
    case = small(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy_sum(h, w, case["labels"], b, case["weights"], chunk=3),
        (case["hidden"], case["weight"], case["bias"]),
    )
    loss = linear_cross_entropy_sum(case["hidden"], case["weight"], case["labels"])
    assert loss.dtype == torch.float64
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, case["hidden"], create_graph=True)


@pytest.mark.parametrize("count", [0, 4])
def test_nothing_trained_gives_zero_that_can_be_differentiated(count: int) -> None:
    hidden, weight = torch.randn(count, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, weight, torch.full((count,), -100))
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (count, 6)
    assert weight.grad is not None
    assert not weight.grad.any()
    assert not hidden.grad.any()


def test_frozen_weight_gets_no_gradient_and_no_grad_makes_none() -> None:
    case = small()
    frozen = case["weight"].detach()
    loss = linear_cross_entropy_sum(case["hidden"], frozen, case["labels"], chunk=3)
    loss.backward()
    assert case["hidden"].grad is not None
    with torch.no_grad():
        quiet = linear_cross_entropy_sum(case["hidden"], case["weight"], case["labels"], chunk=3)
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, loss.detach())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_autocast_runs_in_bf16_and_keeps_the_dtypes_of_gradients(stored: torch.dtype) -> None:
    case = small()
    hidden = case["hidden"].detach().to(stored).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy_sum(hidden, case["weight"], case["labels"], chunk=3)
        plain = linear_cross_entropy_reference(hidden, case["weight"], case["labels"])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(loss / 7, [hidden, case["weight"]])
    theirs = torch.autograd.grad(plain / 7, [hidden, case["weight"]])
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-3)


def test_b10_head_gradient_in_bf16_does_not_depend_on_the_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 16, generator=generator).bfloat16()
    weight = (torch.randn(8192, 16, generator=generator) * 0.3).bfloat16()
    labels = torch.randint(0, 8192, (4096,), generator=generator)
    exact = weight.float().requires_grad_()
    linear_cross_entropy_reference(hidden.float(), exact, labels).backward()
    assert exact.grad is not None
    for chunk in (128, 4096):
        head = weight.clone().requires_grad_()
        linear_cross_entropy_sum(hidden, head, labels, chunk=chunk).backward()
        assert head.grad is not None
        error = (head.grad.float() - exact.grad).norm() / exact.grad.norm()
        assert error < 0.01, (chunk, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b10_common_offset_of_the_logits_changes_nothing(dtype: torch.dtype) -> None:
    case = small(dtype)
    for offset in (1e4, -1e4):
        bias = torch.zeros(15, dtype=dtype)
        arguments = (case["hidden"], case["weight"], case["labels"])
        plain = linear_cross_entropy_sum(*arguments, bias, chunk=3)
        moved = linear_cross_entropy_sum(*arguments, bias + offset, chunk=3)
        assert torch.isfinite(moved)
        assert moved.item() == plain.item()
    # Also where the offset comes from the products themselves, which the shift by the maximum takes away.
    hidden = torch.cat([case["hidden"].float(), torch.full((8, 1), 1e4)], dim=1)
    weight = torch.cat([case["weight"].float(), torch.ones(15, 1)], dim=1)
    loss = linear_cross_entropy_sum(hidden, weight, case["labels"], chunk=3)
    plain = linear_cross_entropy_sum(case["hidden"].float(), case["weight"].float(), case["labels"], chunk=3)
    torch.testing.assert_close(loss, plain, rtol=1e-3, atol=1e-2)


def test_hidden_gradient_keeps_bf16_without_the_bias_of_a_rounded_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(256, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(64, 16, generator=generator).bfloat16()
    labels = torch.randint(0, 64, (256,), generator=generator)
    exact = hidden.detach().float().requires_grad_()
    scale = 1 / 1234
    (linear_cross_entropy_sum(hidden, weight, labels, chunk=64) * scale).backward()
    (linear_cross_entropy_reference(exact, weight.float(), labels) * scale).backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    # 1/1234 in bf16 is 0.14% off; the mean ratio of gradients must not be.
    ratio = (hidden.grad.float() * exact.grad).sum() / (exact.grad * exact.grad).sum()
    assert abs(ratio.item() - 1) < 5e-4
