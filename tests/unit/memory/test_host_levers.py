"""Optimizer state and embeddings on the host, and updates in backward: where the bytes are, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config.schema import OptimizerSection
from finetune.contracts import Plan
from finetune.errors import ModelError
from finetune.memory import host_optimizer, step_in_backward
from finetune.memory.case import case_of
from finetune.memory.host_embedding import place_on_host
from finetune.memory.host_optimizer import HostStates, step_only
from finetune.memory.host_rows import HostRows
from finetune.memory.step_in_backward import StepInBackward
from finetune.memory.storage import storage_of
from finetune.models.shapes import shape_of
from finetune.optim.groups import roles_of
from finetune.optim.table import OPTIMIZERS, build
from tests.numerics.tiny_jobs import adapted, base
from tests.unit.memory.tiny_models import base_of, tiny, with_lora

CPU = torch.device("cpu")


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return build(OptimizerSection(name=kind, lr=1e-2, weight_decay=0.1), named, roles_of(module), "fp32", 0)


def gradients(module: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("chunk", [1, 100_000, 2**28])
@pytest.mark.parametrize("kind", [name for name in OPTIMIZERS if not name.startswith("paged")])
def test_state_on_the_host_gives_the_same_bits_with_any_optimizer(kind: str, chunk: int) -> None:
    plain = base()
    moved = copy.deepcopy(plain)
    one, other = optimizer_of(plain, kind), optimizer_of(moved, kind)
    states = HostStates(other, CPU, chunk_bytes=chunk)
    for step in range(4):
        gradients(plain, step)
        gradients(moved, step)
        one.step()
        states.step()
    for (name, left), right in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(left, right), name
        for key, value in one.state[left].items():
            same = torch.equal(other.state[right][key], value) if isinstance(value, torch.Tensor) else None
            assert same if same is not None else other.state[right][key] == value, (name, key)
    # Adafactor's sums over rows and columns are too small to be worth the way.
    assert (states.bytes > 0) == (kind != "adafactor")


def test_bytes_on_the_host_are_as_planned_and_state_stands_in_the_optimizer() -> None:
    module = adapted()
    optimizer = optimizer_of(module, "adamw")
    states = HostStates(optimizer, CPU)
    gradients(module, 0)
    states.step()
    config = base_of(module).config
    recipe = recipe_of({"kind": "lora", "rank": 64})
    shape = shape_of(config)
    plan = Plan("cpu", 1, False, 0, optimizer_placement="host")
    case = case_of(shape, storage_of(shape, recipe, "fp32"), plan, 8, 1, lambda elements, role: 8 * elements + 4)
    tensors = sum(each.count for each in case.tensors if each.elements >= host_optimizer.SMALL_PARAMETER)
    assert states.bytes == host_optimizer.hosted_bytes(case) - 4 * tensors  # the step counts stay where they are
    held = {id(tensor) for place in states._places.values() for tensor in place.hosted.values()}
    assert held == {id(value) for p in states._places for key, value in optimizer.state[p].items() if key != "step"}


def recipe_of(adapter: dict[str, Any]) -> Any:
    from finetune.config.schema import Recipe

    return Recipe.model_validate({"model": {"path": "x"}, "adapter": adapter})


def test_a_step_of_some_parameters_leaves_the_others_and_their_gradients() -> None:
    module = base()
    optimizer = optimizer_of(module, "adamw")
    gradients(module, 0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    given = {name: p.grad for name, p in module.named_parameters()}
    chosen = module.lm_head.weight
    step_only(optimizer, [chosen])
    assert all(p.grad is given[name] for name, p in module.named_parameters())
    moved = [name for name, p in module.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["lm_head.weight"]
    assert list(optimizer.state) == [chosen]


def test_one_gradient_stands_at_a_time_and_norms_come_in_model_order() -> None:
    module = base().train()
    named = dict(module.named_parameters())
    optimizer = optimizer_of(module, "sgd")
    standing: list[int] = []

    def update(parameters: Any) -> None:
        standing.append(sum(p.grad is not None for p in named.values()))
        step_only(optimizer, parameters)

    lever = StepInBackward(named, update)
    lever.mode = "update"
    ids = torch.arange(12).reshape(1, 12)
    module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    norms = lever.finish()
    assert max(standing) == 1
    assert len(standing) == len(named) == len(norms)
    plain = base().train()
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert [float(n) for n in norms] == [float(p.grad.norm()) for p in plain.parameters()]


@pytest.mark.parametrize(
    ("sections", "precision", "ranks", "why"),
    [
        ({}, "fp32", 1, "train.max_grad_norm=1 clips it"),
        ({"max_grad_norm": None}, "fp16", 1, "model.precision=fp16 skips such steps"),
        ({"max_grad_norm": None}, "bf16", 2, "before the gradients of 2 processes are summed"),
        ({"max_grad_norm": None, "batch": None, "batch_tokens": 4096}, "bf16", 1, "needs one micro-batch a step"),
        ({"max_grad_norm": None}, "bf16", 1, ""),
    ],
)
def test_updates_in_backward_are_refused_where_they_are_not_exact(
    sections: dict[str, Any], precision: str, ranks: int, why: str
) -> None:
    from finetune.config.schema import Recipe

    recipe = Recipe.model_validate({"model": {"path": "x"}, "train": {"batch": 4, **sections}})
    found = step_in_backward.refusal(recipe, precision, ranks)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("given", [False, True])
def test_an_embedding_on_the_host_gives_the_same_rows_and_is_no_parameter(given: bool) -> None:
    model = with_lora(tiny())
    plain = base_of(copy.deepcopy(model))
    ids = torch.tensor([[1, 2, 3], [7, 7, 95]])
    holder = place_on_host(base_of(model), CPU)
    embedding = base_of(model).get_input_embeddings()
    assert isinstance(embedding, HostRows)
    assert not list(embedding.parameters())
    expected = plain.get_input_embeddings()(ids)
    if given:
        with holder.given(ids):
            assert torch.equal(embedding(torch.zeros_like(ids)), expected)
    assert torch.equal(embedding(ids), expected)
    first, second = embedding(ids), embedding(ids.flip(0))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected.flip(0))
    assert embedding.pool.bytes == 2 * ids.numel() * 32 * 4
    assert embedding.weight.shape == (96, 32)


def test_an_embedding_that_cannot_be_on_the_host_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="it is trained"):
        place_on_host(tiny(), CPU)
    tied = tiny(tied=True).requires_grad_(False)
    with pytest.raises(ModelError, match="the head shares its matrix"):
        place_on_host(tied, CPU)
    scaled = tiny().requires_grad_(False)

    class Scaled(nn.Embedding):
        pass

    scaled.set_input_embeddings(Scaled(96, 32))
    with pytest.raises(ModelError, match="Scaled does more than look rows up"):
        place_on_host(scaled, CPU)
