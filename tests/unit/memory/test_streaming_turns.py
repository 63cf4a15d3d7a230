"""A block's turn: called through its own hooks inside of a step, with what is copied standing until it is down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.errors import ModelError
from finetune.memory.streaming.boundaries import Boundaries
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.flat import Flat
from finetune.memory.streaming.host_blocks import HostBlocks, spread_evenly
from finetune.memory.streaming.lanes import Lane
from finetune.memory.streaming.slots import Slots
from finetune.optim.slices import Slicing
from tests.unit.memory.test_streaming_parts import CPU, adamw8bit, blocks


def hosted(count: int, slots: int = 2) -> tuple[nn.Module, list[nn.Module], HostBlocks]:
    several = blocks(count)
    model = nn.Sequential(*several)
    host = HostBlocks(CPU, True, slots, 0)
    host.rest(model, several)
    return model, several, host


def held(slots: Slots) -> set[int | None]:
    return {slot.holds for slot in slots._slots}


def test_a_block_that_is_called_in_its_turn_does_not_begin_another() -> None:
    """Two micro-batches through each block, there and back: the next block is there before it is used, each way."""
    _, several, host = hosted(5)
    assert host.slots is not None
    order = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    host.slots.begin(order)
    x = torch.ones(1, 8)
    for place, number in enumerate(order):
        with host.slots.using(number):
            for _ in range(2):
                several[number](x)
                assert host.flats[number].away, "the call bound the block to the host in the midst of its turn"
            following = next((other for other in order[place + 1 :] if other != number), number)
            assert held(host.slots) >= {number, following}
        assert not host.flats[number].away
    assert host.slots.fetched == (2 * 5 - 2) * host.flats[0].bytes
    assert host.slots._order == order


def test_a_block_that_is_called_outside_of_a_turn_fetches_itself() -> None:
    model, several, host = hosted(3)
    plain = nn.Sequential(*blocks(3))
    x = torch.randn(2, 8)
    assert torch.equal(model(x), plain(x))
    assert host.slots is not None
    assert host.slots.fetched == 3 * host.flats[0].bytes
    assert not any(flat.away for flat in host.flats)
    with pytest.raises(RuntimeError):
        several[1](torch.ones(1, 7))
    assert not host.flats[1].away
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("trained", [True, False])
def test_blocks_that_train_one_tensor_together_are_refused_by_number(trained: bool) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).requires_grad_(trained).eval()
    layers: Any = model.model.layers
    layers[2].self_attn.q_proj = layers[0].self_attn.q_proj
    wanted = model(input_ids=torch.arange(9)[None]).logits
    host = HostBlocks(CPU, trained, 2, 0)
    if trained:
        with pytest.raises(ModelError, match="block 2 trains a tensor that an earlier block has too"):
            host.rest(model, list(layers))
    else:
        host.rest(model, list(layers))
        assert torch.equal(model(input_ids=torch.arange(9)[None]).logits, wanted)


class Keeping(Lane):
    """A lane that keeps the place of what it was asked to copy, as one on a GPU reads it later."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.places: list[int] = []

    def copies(self, pairs: Any, after: Any = ()) -> Any:
        pairs = list(pairs)
        self.places += [source.data_ptr() for _, source in pairs]
        return super().copies(pairs, after)


def test_a_gradient_that_is_no_plain_rows_stands_until_it_is_down() -> None:
    """Its contiguous copy is what goes down, so that is what has to be held."""
    unit = [nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3))]
    deferred = Deferred(Slicing(adamw8bit({"a": unit[0], "b": unit[1]})), [unit], CPU)
    deferred.settle()
    deferred._down = lane = Keeping()
    gradient = torch.arange(24.0).view(4, 6).t()
    unit[0].grad, unit[1].grad = gradient, torch.ones(3)
    deferred.lower(0)
    ((_, standing),) = deferred._leaving
    assert [tensor.data_ptr() for tensor in standing] == lane.places
    there = deferred._units[0].pages[deferred._units[0].tensors[0].gradient].view(torch.float32)
    assert torch.equal(there.view(6, 4), gradient)
    deferred.promise(1.0)
    assert deferred._leaving == []
    assert deferred.apply(0)


def test_an_input_that_is_no_plain_rows_is_not_copied_behind_the_callers_back() -> None:
    boundaries = Boundaries(CPU, True)
    x_BSD = torch.randn(1, 3, 4)
    boundaries.begin([x_BSD], [0])
    with pytest.raises(AssertionError):
        boundaries.keep(0, 0, x_BSD.transpose(1, 2))


@pytest.mark.parametrize("total", [1, 2, 5, 32, 80])
def test_resident_blocks_are_distinct_in_order_and_apart(total: int) -> None:
    for count in range(total + 2):
        chosen = spread_evenly(count, total)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(count, total)
        assert all(0 <= number < total for number in chosen)
        gaps = [after - before for before, after in pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_tensors_of_several_types_and_odd_sizes_do_not_overlap(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    block = nn.Module()
    values: list[Tensor] = []
    for number, size in enumerate([(1,), (3, 5), (257,), (64, 4), ()]):
        values.append(torch.randn(size).to(dtypes[number % 2]))
        block.register_parameter(f"p{number}", nn.Parameter(values[-1].clone()))
    flat = Flat(block, CPU, True)
    assert all(one.stop <= other.start for one, other in zip(flat.spots, flat.spots[1:], strict=False))
    assert all(spot.start % 256 == 0 for spot in flat.spots)
    for value, parameter in zip(values, block.parameters(), strict=True):
        assert parameter.dtype == value.dtype
        assert torch.equal(parameter, value)
