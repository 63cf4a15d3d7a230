"""Activation offload: what is parked, how many bytes that is, and that a steady state takes nothing new of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from finetune.config.schema import Recipe
from finetune.memory import checkpointing, offload
from finetune.memory.offload import Offload
from finetune.memory.storage import Work, storage_of
from finetune.models.shapes import shape_of
from tests.unit.memory.tiny_models import VOCABULARY, base_of, tiny, with_lora

CPU = torch.device("cpu")
ROWS, LENGTH, BLOCKS = 4, 40, 4
RECIPES = {"full": {"kind": "none"}, "lora": {"kind": "lora", "rank": 8}}


def built(kind: str) -> nn.Module:
    return tiny(blocks=BLOCKS) if kind == "full" else with_lora(tiny(blocks=BLOCKS), r=8)


def loss_of(model: nn.Module, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))
    return base_of(model)(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("mode", [False, True, 2, "selective"], ids=str)
@pytest.mark.parametrize("kind", RECIPES)
def test_parked_bytes_are_as_planned_and_return(kind: str, mode: Any) -> None:
    model = built(kind).train()
    lever = Offload(model, CPU)
    checkpointing.apply(model, mode, lever)
    shape = shape_of(base_of(model).config)
    storage = storage_of(shape, Recipe.model_validate({"model": {"path": "x"}, "adapter": RECIPES[kind]}), "fp32")
    planned = offload.host_bytes(shape, storage, Work(ROWS, LENGTH), mode)
    loss = loss_of(model)
    assert lever.parked == planned
    assert lever.pool.bytes == planned
    loss.backward()
    del loss
    assert lever.parked == 0


def test_the_host_is_asked_once_for_the_longest_rows_and_never_again() -> None:
    model = built("lora").train()
    lever = Offload(model, CPU)
    checkpointing.apply(model, True, lever)
    loss_of(model, length=40).backward()
    taken = lever.pool.bytes
    for length in (10, 33, 40, 7):
        loss_of(model, length=length).backward()
        assert lever.pool.bytes == taken
    loss_of(model, length=50).backward()
    assert lever.pool.bytes == taken * 50 // 40


def test_two_forwards_before_their_backwards_do_not_share_a_buffer() -> None:
    model = built("full").train()
    checkpointing.apply(model, True, Offload(model, CPU))
    first, second = loss_of(model), loss_of(model, length=20)
    first.backward()
    second.backward()
    found = [p.grad.clone() for p in model.parameters()]
    plain = built("full").train()
    loss_of(plain).backward()
    loss_of(plain, length=20).backward()
    assert all(torch.equal(ours, p.grad) for ours, p in zip(found, plain.parameters(), strict=True))


def test_a_layout_that_is_not_dense_comes_back_with_its_values() -> None:
    lever = Offload(nn.Linear(1, 1), CPU)
    wide = torch.arange(48.0).reshape(4, 12)
    for view in (wide.t(), wide[:, ::2], wide[:, :1].expand(4, 9), wide[1:, 3:]):
        stay = offload._Stay(0)
        parked = lever._pack(stay, set(), 0, view)
        assert isinstance(parked, offload._View)
        assert torch.equal(lever._unpack(stay, parked), view)
