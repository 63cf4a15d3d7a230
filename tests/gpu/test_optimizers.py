"""Optimizers on a GPU: the kernel gives the plain form's bits at real sizes, and rows take the bytes they state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from finetune.checkpoint.resume import optimizer_tensors, restore_optimizer
from finetune.config.schema import OptimizerSection
from finetune.kernels.adam_values import Scalars, States
from finetune.kernels.adamw import RULES, SLICE_ELEMENTS, new_states, state_views, update_, update_slice_
from finetune.kernels.state_codes import FORMATS
from finetune.kernels.stochastic_rounding import Draws
from finetune.optim.table import OPTIMIZERS, build, state_bytes
from tests.unit.optim.conftest import SHAPES, parameters

pytestmark = pytest.mark.gpu
ADAMW = RULES["adamw"]
SIZES = [(4096, 14336), (128256, 4096), (61, 101)]


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    made = torch.randn(shape, generator=generator, device="cuda")
    made.mul_(torch.randn(shape[0], 1, generator=generator, device="cuda").exp_())
    return made.to(dtype)


def plain_(weight: torch.Tensor, slope: torch.Tensor, states: States, scalars: Scalars, draws: Draws | None) -> None:
    """The plain form, slice by slice."""
    flat, slope = weight.view(-1), slope.view(-1)
    for start in range(0, flat.numel(), SLICE_ELEMENTS["cuda"]):
        part = slice(start, min(start + SLICE_ELEMENTS["cuda"], flat.numel()))
        here = draws.after(start) if draws else None
        update_slice_(ADAMW, flat[part], slope[part], state_views(states, part), scalars, here)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("trained", ["fp32", "bf16", "stochastic", "split"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_kernel_gives_the_plain_forms_bits_for_10_steps(form: str, trained: str, size: tuple[int, int]) -> None:
    dtype = torch.float32 if trained == "fp32" else torch.bfloat16
    weight = (gradient(size, 99, torch.float32) * 0.02).to(dtype)
    other = weight.clone()
    states, plain = (new_states(ADAMW, weight, form, trained == "split") for _ in range(2))
    for step in range(1, 11):
        slope = gradient(size, step, dtype)
        scalars = Scalars(1e-3, weight_decay=0.1, step=step)
        draws = Draws(3, step, 5) if trained == "stochastic" else None
        with torch.no_grad():
            update_(ADAMW, weight, slope, states, scalars, draws)
            plain_(other, slope, plain, scalars, draws)
    assert torch.equal(weight, other)
    for name, tensor in states.tensors.items():
        assert torch.equal(tensor, plain.tensors[name]), name


@pytest.mark.parametrize("form", FORMATS)
def test_the_gpus_bits_are_the_cpus(form: str) -> None:
    """What a resume on another device, and the exactness of roots on both, rest on."""
    shape = (300, 1000)
    here = (gradient(shape, 99, torch.float32) * 0.02).bfloat16()
    there = here.cpu()
    states, others = new_states(ADAMW, here, form), new_states(ADAMW, there, form)
    for step in range(1, 6):
        slope = gradient(shape, step, torch.bfloat16)
        scalars = Scalars(1e-3, weight_decay=0.1, step=step)
        update_(ADAMW, here, slope, states, scalars, Draws(3, step, 5))
        update_(ADAMW, there, slope.cpu(), others, scalars, Draws(3, step, 5))
    assert torch.equal(here.cpu(), there)
    assert all(torch.equal(states.tensors[name].cpu(), others.tensors[name]) for name in others.tensors)


def test_elements_past_2_to_the_31_are_updated() -> None:
    """A tensor of 2**31 + 4096 elements: its last ones move as those of a small tensor with the same draws."""
    count = 2**31 + 4096
    weight = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    slope = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    tail = torch.randn(4096, device="cuda").bfloat16()
    weight[-4096:], slope[-4096:] = tail, tail
    states = new_states(ADAMW, weight, "4bit")
    update_(ADAMW, weight, slope, states, Scalars(1e-2), Draws(0, 1, 0))
    small, fresh = tail.clone(), new_states(ADAMW, tail, "4bit")
    update_(ADAMW, small, tail, fresh, Scalars(1e-2), Draws(0, 1, 0, first=2**31))
    assert torch.equal(weight[-4096:], small)
    assert not torch.equal(small, tail)
    assert torch.equal(states.tensors["mean"][-2048:], fresh.tensors["mean"])


@pytest.mark.parametrize("trained", ["fp32", "stochastic", "split", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes_are_the_measured_ones(name: str, trained: str) -> None:
    if OPTIMIZERS[name].fp32_only and trained != "fp32":
        return
    dtype = torch.float32 if trained == "fp32" else torch.bfloat16
    named = {key: nn.Parameter(value.detach().cuda()) for key, value in parameters(dtype=dtype).items()}
    section = OptimizerSection(name=name)
    optimizer: Any = build(section, named, trained=trained)
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    assert sum(storages.values()) == state_bytes(section, SHAPES, trained=trained)


def test_paged_states_are_paged_again_after_a_resume_and_give_the_same_bits() -> None:
    section, shapes = OptimizerSection(name="paged_adamw8bit"), {"up_proj.weight": (512, 512)}

    def steps(optimizer: Any, parameter: nn.Parameter, numbers: range) -> None:
        for step in numbers:
            parameter.grad = gradient((512, 512), step, torch.float32)
            optimizer.step()

    (whole,) = (nn.Parameter(p.detach().cuda()) for p in parameters(shapes).values())
    straight = build(section, {"up_proj.weight": whole})
    steps(straight, whole, range(6))
    (half,) = (nn.Parameter(p.detach().cuda()) for p in parameters(shapes).values())
    first = build(section, {"up_proj.weight": half})
    steps(first, half, range(3))
    tensors, facts = optimizer_tensors(first, {"up_proj.weight": half})
    again = nn.Parameter(half.detach().clone())
    resumed = build(section, {"up_proj.weight": again})
    restore_optimizer(resumed, {"up_proj.weight": again}, {key: value.clone() for key, value in tensors.items()}, facts)
    steps(resumed, again, range(3, 6))
    assert torch.equal(again, whole)
    assert straight.state[whole]["state1"].is_paged
    assert resumed.state[again]["state1"].is_paged


def test_an_update_by_the_kernel_has_no_temporaries() -> None:
    parameter = nn.Parameter(torch.randn(4096, 4096, device="cuda").bfloat16())
    parameter.grad = torch.randn_like(parameter)
    optimizer = build(OptimizerSection(name="adamw8bit"), {"up_proj.weight": parameter}, trained="stochastic")
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() == before
