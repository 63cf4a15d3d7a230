"""One tensor's update: AdamW as torch's, coded states near it, slices and views as the whole, and weights in 16 bits."""

from __future__ import annotations

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.kernels import adamw
from finetune.kernels.adam_values import CORRECTION, Scalars, States
from finetune.kernels.adamw import RULES, new_states, update_
from finetune.kernels.state_codes import FORMATS
from finetune.kernels.stochastic_rounding import Draws, join

ADAMW = RULES["adamw"]


def gradients(count: int, steps: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(count, generator=generator)
    return [base + 0.5 * torch.randn(count, generator=generator) for _ in range(steps)]


def start(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(9)) * 0.1


def stepped(weight: torch.Tensor, form: str, slopes: list[torch.Tensor], trained: str = "fp32", **options: float):
    states = new_states(ADAMW, weight, form, trained == "split")
    for step, slope in enumerate(slopes, 1):
        draws = Draws(0, step, 1) if trained == "stochastic" else None
        update_(ADAMW, weight, slope.to(weight.dtype), states, Scalars(step=step, **options), draws)
    return weight, states


OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.85, "beta2": 0.97, "epsilon": 1e-7}


def torch_adamw(weight: torch.Tensor, slopes: list[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    plain = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, betas=(0.85, 0.97), eps=1e-7)
    for slope in slopes:
        parameter.grad = slope.clone()
        plain.step()
    return parameter.detach()


def test_fp32_states_follow_torch_for_10_steps() -> None:
    slopes = gradients(5000, 10)
    ours, _ = stepped(start(5000), "fp32", slopes, **OPTIONS)
    assert torch.allclose(ours, torch_adamw(start(5000), slopes), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("form", "near"), [("8bit", 0.03), ("fp8", 0.06), ("4bit", 0.35)])
def test_coded_states_move_nearly_as_fp32_for_10_steps(form: str, near: float) -> None:
    slopes = gradients(8192, 10)
    coded, _ = stepped(start(8192), form, slopes, **OPTIONS)
    exact, _ = stepped(start(8192), "fp32", slopes, **OPTIONS)
    assert ((coded - exact).norm() / (exact - start(8192)).norm()).item() < near


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("trained", ["fp32", "stochastic", "split", "bf16"])
def test_slices_give_the_whole_tensors_bits(form: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = gradients(5000, 3)
    weight = start(5000) if trained == "fp32" else start(5000).bfloat16()
    whole, states = stepped(weight.clone(), form, slopes, trained, **OPTIONS)
    monkeypatch.setitem(adamw.SLICE_ELEMENTS, "cpu", 1024)
    cut, cut_states = stepped(weight.clone(), form, slopes, trained, **OPTIONS)
    assert torch.equal(whole, cut)
    assert all(torch.equal(states.tensors[name], cut_states.tensors[name]) for name in states.tensors)


@pytest.mark.parametrize("form", FORMATS)
def test_views_of_flat_buffers_are_updated_in_place(form: str) -> None:
    count, kind = 1024, FORMATS[form]
    slopes = gradients(count, 3)
    expected, _ = stepped(start(count).bfloat16(), form, slopes, "stochastic", **OPTIONS)
    flat, slope_flat = torch.zeros(3 * count, dtype=torch.bfloat16), torch.zeros(3 * count)
    flat[count : 2 * count] = start(count)
    fresh = new_states(ADAMW, torch.zeros(3 * count), form)
    views = {}
    for name, tensor in fresh.tensors.items():
        each = kind.scale_count(count) if name.endswith("_scales") else tensor.numel() // 3
        views[name] = tensor[each : 2 * each]
    for step, slope in enumerate(slopes, 1):
        slope_flat[count : 2 * count] = slope.bfloat16()
        here = States(form, views)
        update_(
            ADAMW, flat[count : 2 * count], slope_flat[count : 2 * count].bfloat16(), here,
            Scalars(step=step, **OPTIONS), Draws(0, step, 1),
        )  # fmt: skip
    assert torch.equal(flat[count : 2 * count], expected)
    assert flat[:count].abs().max() == flat[2 * count :].abs().max() == 0


def test_split_weights_are_bit_for_bit_an_fp32_masters() -> None:
    slopes = [slope.bfloat16().float() for slope in gradients(5000, 10)]
    first = start(5000).bfloat16()
    master, _ = stepped(first.float(), "8bit", slopes, **OPTIONS)
    weight, states = stepped(first.clone(), "8bit", slopes, "split", **OPTIONS)
    assert torch.equal(join(weight, states.tensors[CORRECTION]), master)
    assert states.tensors[CORRECTION].dtype == torch.int16


@pytest.mark.parametrize("lr", [1e-3, 1e-4, 1e-5])
def test_b127_small_updates_of_bf16_weights_are_learned(lr: float) -> None:
    slopes, options = [torch.ones(1000)] * 100, {"lr": lr}
    plain, _ = stepped(torch.ones(1000).bfloat16(), "fp32", slopes, "bf16", **options)
    assert (plain == 1).all(), "what makes the case: plain bf16 loses every update"
    expected = 1 - 100 * lr
    master, _ = stepped(torch.ones(1000), "fp32", slopes, **options)
    assert master.mean().item() == pytest.approx(expected, abs=1e-5)
    drawn, _ = stepped(torch.ones(1000).bfloat16(), "fp32", slopes, "stochastic", **options)
    # Each step moves a weight by one bf16 step (1/256) with probability p; four standard deviations of 1000 weights' mean.
    share = lr * 256
    spread = (100 * share * (1 - share) / 1000) ** 0.5 / 256
    assert drawn.float().mean().item() == pytest.approx(expected, abs=4 * spread)
    assert (drawn != 1).any()
    weight, states = stepped(torch.ones(1000).bfloat16(), "fp32", slopes, "split", **options)
    assert torch.equal(join(weight, states.tensors[CORRECTION]), master)


def test_lion_and_sgd_are_their_formulas() -> None:
    slopes = gradients(500, 10)
    for name in ("lion", "sgd"):
        weight, states = start(500), new_states(RULES[name], start(500), "fp32")
        plain, mean = start(500).double(), torch.zeros(500, dtype=torch.float64)
        for step, slope in enumerate(slopes, 1):
            update_(RULES[name], weight, slope, states, Scalars(1e-2, 0.9, 0.99, weight_decay=0.1, step=step))
            if name == "lion":
                plain = plain * (1 - 1e-3) - 1e-2 * (0.9 * mean + 0.1 * slope).sign()
                mean = 0.99 * mean + 0.01 * slope
            else:
                mean = 0.9 * mean + slope
                plain = plain * (1 - 1e-3) - 1e-2 * mean
        assert torch.allclose(weight.double(), plain, rtol=1e-5, atol=1e-6)


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    weight = torch.zeros(4, 8).t()
    with pytest.raises(FinetuneError, match=r"shape \[8, 4\] is not contiguous"):
        update_(ADAMW, weight, torch.zeros(8, 4), new_states(ADAMW, weight, "fp32"), Scalars(1e-3))
