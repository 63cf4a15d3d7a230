"""A matrix that is whole on the device for a phase: what it finds there, what comes when, and slots that make room for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.kernels import norms
from finetune.memory.streaming.lanes import Lane
from finetune.memory.streaming.tall import Tall
from finetune.memory.streaming.visit import Visit
from tests.unit.memory.test_streaming_order import THERE_AND_BACK, noted
from tests.unit.memory.test_streaming_parts import CPU, adamw8bit, tall


class Counting(Lane):
    """A lane that counts its copies."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.count = 0

    def copy(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> Any:
        self.count += 1
        return super().copy(target, source, after)


def test_a_frozen_matrix_comes_once_when_it_is_asked_for_and_leaves() -> None:
    parameter = nn.Parameter(torch.randn(10, 4), requires_grad=False)
    before = parameter.detach().clone()
    made, lane = Tall(parameter, CPU), Counting()
    visit = Visit(made, lane)
    for visits in (1, 2):
        visit.ask()
        visit.ask()
        assert lane.count == visits
        assert parameter.data_ptr() == made.weight_VD.data_ptr()
        with visit.there():
            assert parameter.data_ptr() != made.weight_VD.data_ptr()
            assert torch.equal(parameter, before)
        assert parameter.data_ptr() == made.weight_VD.data_ptr()
    with visit.there():  # not asked for before
        assert torch.equal(parameter, before)
    assert lane.count == 3


def test_a_step_that_breaks_off_leaves_nothing_behind() -> None:
    parameter = nn.Parameter(torch.randn(10, 4), requires_grad=False)
    made, lane = Tall(parameter, CPU), Counting()
    visit = Visit(made, lane)
    visit.ask()
    visit.end()
    with pytest.raises(MemoryError), visit.there():
        raise MemoryError
    visit.end()
    assert parameter.data_ptr() == made.weight_VD.data_ptr()
    assert lane.count == 2


def test_a_trained_matrix_is_updated_before_it_is_used_and_its_gradient_goes_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three parts of 700 rows; weights, norms and updates are those of a matrix on the device."""
    made, _, parameter = tall(monkeypatch)
    plain = nn.Parameter(parameter.detach().clone())
    own = adamw8bit({"embed_tokens.weight": plain})
    visit = Visit(made, Lane(CPU))
    for _ in range(3):
        visit.ask()
        gradient = torch.randn(700, 8)
        with visit.there():
            assert not made.pending
            assert torch.equal(parameter, plain)
            parameter.grad = gradient.clone()
        visit.let_go()
        assert parameter.grad is None
        assert torch.equal(made.norm(), norms.tensor_norm(gradient))
        made.promise(0.5)
        plain.grad = gradient * 0.5
        own.step()
    made.flush()
    assert torch.equal(parameter, plain)


def test_a_gradient_that_nothing_reached_is_zero_and_one_that_is_dropped_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, parameter = tall(monkeypatch)
    before = parameter.detach().clone()
    visit = Visit(made, Lane(CPU))
    with visit.there():
        pass
    assert made.norm().item() == 0
    with visit.there():
        parameter.grad = torch.ones(700, 8)
    visit.end()
    assert made.norm().item() == pytest.approx(5600**0.5)
    made.drop()
    made.flush()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("count", "resident", "fetched"),
    [
        (1, [], [0, 1, 2, 3, 4, 3, 2, 1, 0]),
        (2, [], [0, 1, 2, 3, 4, 3, 2, 1, 0]),
        (3, [], [0, 1, 2, 3, 4, 3, 2, 1, 0]),
        (2, [2], [2, 0, 1, 3, 4, 3, 1, 0]),
        (2, [4], [4, 0, 1, 2, 3, 3, 2, 1, 0]),
        (2, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_slots_but_the_last_blocks_are_lent_at_the_turn(
    count: int, resident: list[int], fetched: list[int], broken: bool
) -> None:
    """The last block stays; the others come again afterwards. A step that breaks off meanwhile leaves the next one whole."""
    slots, lane = noted(count, frozenset(resident))
    values = [flat.host.clone() for flat in slots.flats]
    for again in (True, False) if broken else (False,):
        lane.seen.clear()
        slots.begin(THERE_AND_BACK)
        for place, number in enumerate(THERE_AND_BACK):
            with slots.using(number) as octets:
                assert torch.equal(octets[: slots.flats[number].bytes], values[number])
                if place == 4:
                    slots.lend(number)
            if place == 4:
                slots.lend(4)
                assert [slot.holds for slot in slots._slots] == ([] if 4 in resident else [4])
                if again:
                    break
                slots.take_back()
    if not broken:
        assert sorted(lane.seen) == sorted(fetched)
        assert lane.seen[-1] == fetched[-1]
    assert len(slots._slots) == min(count, 5 - len(resident))


def test_memory_of_lent_slots_is_free_and_does_not_pile_up_over_steps() -> None:
    """Seen on a GPU: each block kept its views of every buffer it had ever been bound to, a slot more a step."""
    slots, _ = noted(2, frozenset())
    buffers: list[Any] = []
    for _ in range(3):
        slots.begin(THERE_AND_BACK)
        for place, number in enumerate(THERE_AND_BACK):
            with slots.using(number):
                known = {id(buffer()) for buffer in buffers}
                buffers += [weakref.ref(slot.octets) for slot in slots._slots if id(slot.octets) not in known]
                if place == 4:
                    slots.lend(number)
                    views = [view for flat in slots.flats for held in flat._views.values() for view in held]
                    own = {flat.host.untyped_storage().data_ptr() for flat in slots.flats}
                    own |= {slot.octets.untyped_storage().data_ptr() for slot in slots._slots}
                    assert {view.untyped_storage().data_ptr() for view in views} <= own
            if place == 4:
                slots.take_back()
    assert len(buffers) == 5
    assert sum(buffer() is not None for buffer in buffers) == 2
