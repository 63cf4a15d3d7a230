"""What moves when, of the parts of streaming: fetches in their order, bytes of quantised blocks, promises of uneven blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn

from finetune.kernels import norms
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.flat import ALIGNED, Flat
from finetune.memory.streaming.lanes import Lane
from finetune.memory.streaming.slots import Slots
from finetune.memory.streaming.tall import Tall
from finetune.optim.coded import Coded
from finetune.optim.groups import parameter_groups
from finetune.optim.slices import Slicing
from tests.unit.memory.test_streaming_parts import CPU, adamw8bit, blocks

THERE_AND_BACK = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


class Noting(Lane):
    """A lane that notes which block's bytes it was asked for."""

    def __init__(self, flats: list[Flat]) -> None:
        super().__init__(CPU)
        self.places = [flat.host.data_ptr() for flat in flats]
        self.seen: list[int] = []

    def copy(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> Any:
        self.seen.append(self.places.index(source.data_ptr()))
        return super().copy(target, source, after)


def noted(count: int, resident: frozenset[int] = frozenset(), total: int = 5) -> tuple[Slots, Noting]:
    flats = [Flat(block, CPU, True) for block in blocks(total)]
    slots = Slots(flats, count, CPU, resident)
    slots.up = Noting(flats)
    return slots, slots.up


@pytest.mark.parametrize(
    ("count", "resident", "fetched"),
    [
        (1, [], [0, 1, 2, 3, 4, 3, 2, 1, 0]),
        (2, [], [0, 1, 2, 3, 4, 2, 1, 0]),
        (3, [], [0, 1, 2, 3, 4, 1, 0]),
        (5, [], [0, 1, 2, 3, 4]),
        (2, [1, 3], [1, 0, 2, 3, 4, 0]),  # resident ones come once, and may come before one that takes turns
        (2, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_fetches_go_ahead_in_the_order_of_use(count: int, resident: list[int], fetched: list[int]) -> None:
    """At the turn what is there stays; whatever is used next is asked for once, and no sooner than it has room."""
    slots, lane = noted(count, frozenset(resident))
    slots.begin(THERE_AND_BACK)
    for number in THERE_AND_BACK:
        with slots.using(number):
            pass
    assert lane.seen == fetched
    assert slots.fetched == sum(slots.flats[number].bytes for number in fetched)


@pytest.mark.parametrize("count", [2, 3])
def test_while_a_block_is_used_the_next_ones_are_there_and_its_own_bytes_stay(count: int) -> None:
    slots, lane = noted(count)
    values = [flat.host.clone() for flat in slots.flats]
    slots.begin(THERE_AND_BACK)
    for place, number in enumerate(THERE_AND_BACK):
        with slots.using(number) as octets:
            nearest = list(dict.fromkeys(THERE_AND_BACK[place:]))[:count]
            assert {slot.holds for slot in slots._slots} >= set(nearest)
            for near in nearest:
                slot = slots._slot_of(near)
                assert slot is not None
                assert torch.equal(slot.octets[: slots.flats[near].bytes], values[near])
            assert torch.equal(octets[: slots.flats[number].bytes], values[number])
    # The second step finds the last blocks used there.
    before = len(lane.seen)
    slots.begin(THERE_AND_BACK)
    assert len(lane.seen) == before


def test_changed_bytes_are_on_the_host_before_their_slot_has_another_block() -> None:
    slots, _ = noted(1)
    slots.begin(THERE_AND_BACK)
    for number in THERE_AND_BACK:
        with slots.using(number) as octets:
            octets[: slots.flats[number].bytes].fill_(number + 1)
            slots.lower(number)
    slots.settle()
    assert [flat.host.unique().tolist() for flat in slots.flats] == [[number + 1] for number in range(5)]


def test_a_use_that_nobody_announced_and_bytes_that_were_set_from_outside() -> None:
    slots, lane = noted(2)
    for number in (0, 1, 2):
        with slots.using(number) as octets:
            assert torch.equal(octets[: slots.flats[number].bytes], slots.flats[number].host)
    assert lane.seen == [0, 1, 2, 3]
    slots.flats[2].host.fill_(7)
    slots.forget()
    with slots.using(2) as octets:
        assert octets[: slots.flats[2].bytes].unique().tolist() == [7]


@pytest.mark.parametrize("half", [False, True])
def test_a_use_that_broke_off_is_fetched_anew(half: bool) -> None:
    """Also a resident block's: its bytes may be changed half-way, and the host has those from before."""
    slots, lane = noted(2, frozenset({1}) if half else frozenset())
    values = slots.flats[1].host.clone()

    def broken() -> None:
        with slots.using(1) as octets:
            octets.zero_()
            raise MemoryError

    with pytest.raises(MemoryError):
        broken()
    with slots.using(1) as octets:
        assert torch.equal(octets[: slots.flats[1].bytes], values)
    assert lane.seen.count(1) == 2
    bound = {parameter.data_ptr() for spot in slots.flats[1].spots if (parameter := spot.parameter) is not None}
    start = slots.flats[1].host.data_ptr()
    assert all(start <= place < start + slots.flats[1].bytes for place in bound)


@pytest.mark.parametrize("double", [False, True])
def test_scales_of_four_bit_weights_move_with_their_codes(double: bool) -> None:
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False, compress_statistics=double, quant_type="nf4")
    layer = layer.requires_grad_(False).to("cpu")
    x = torch.randn(3, 64)
    wanted = layer(x)
    flat = Flat(layer, CPU, False)
    # Codes, absmax, the table; with scales quantised twice also the offset, and the second absmax and table.
    assert len(flat.spots) == (6 if double else 3)
    assert [spot.start % ALIGNED for spot in flat.spots] == [0] * len(flat.spots)
    assert all(one.stop <= other.start for one, other in zip(flat.spots, flat.spots[1:], strict=False))
    assert flat.spots[0].shape.numel() == 64 * 96 // 2
    slot = flat.host.clone()
    flat.host.zero_()
    flat.bind(slot)
    assert torch.equal(layer(x), wanted)
    flat.release()
    assert layer.weight.data_ptr() == flat.host.data_ptr()
    assert bool((layer.weight.quant_state.absmax == 0).all())
    flat.host.copy_(slot)
    assert torch.equal(layer(x), wanted)


def test_promises_of_uneven_blocks_at_the_rates_of_their_time() -> None:
    """Blocks of other sizes share the two turns; a rate that changes after the promise changes nothing."""
    torch.manual_seed(4)
    sizes = [(64, 70), (5,), (128, 64), (64, 64)]
    units = [[nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(3))] for size in sizes]
    plain = [[nn.Parameter(p.detach().clone()) for p in some] for some in units]

    def named(several: list[list[nn.Parameter]]) -> dict[str, nn.Parameter]:
        return {f"{unit}.{at}": p for unit, some in enumerate(several) for at, p in enumerate(some)}

    optimizer, own = adamw8bit(named(units)), adamw8bit(named(plain))
    deferred = Deferred(Slicing(optimizer), units, CPU)
    deferred.settle()
    for step in range(3):
        for number, (some, others) in enumerate(zip(units, plain, strict=True)):
            for parameter, other in zip(some, others, strict=True):
                gradient = torch.randn_like(parameter)
                parameter.grad, other.grad = gradient, gradient * 0.25
            deferred.lower(number)
            assert all(parameter.grad is None for parameter in some)
        own.step()
        deferred.promise(0.25)
        for group in (*optimizer.param_groups, *own.param_groups):
            group["lr"] = 0.1 / (step + 2)
        for number in range(len(units)):
            deferred.ask(number)
            deferred.ask(min(number + 1, len(units) - 1))
            assert len(deferred._coming) <= 2
            assert deferred.apply(number)
        deferred.end()
        deferred.wait()
    for some, others in zip(units, plain, strict=True):
        for parameter, other in zip(some, others, strict=True):
            assert torch.equal(parameter, other)
            assert int(optimizer.state[parameter]["step"]) == 3


def test_gradients_that_were_dropped_change_nothing() -> None:
    unit = [nn.Parameter(torch.ones(5))]
    optimizer = adamw8bit({"a": unit[0]})
    deferred = Deferred(Slicing(optimizer), [unit], CPU)
    deferred.settle()
    unit[0].grad = torch.full((5,), float("inf"))
    deferred.lower(0)
    assert deferred.norms[unit[0]].item() == float("inf")
    deferred.drop()
    assert deferred.norms == {}
    assert deferred.pending == []
    assert not deferred.apply(0)
    assert torch.equal(unit[0], torch.ones(5))
    assert optimizer.state[unit[0]]["step"] == 0


def test_stochastic_rounding_of_a_matrix_in_parts_draws_as_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's draws are those of its place in the matrix."""
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 8)
    torch.manual_seed(6)
    parameter = nn.Parameter(torch.randn(700, 8).bfloat16())
    plain = nn.Parameter(parameter.detach().clone())

    def optimizer(own: nn.Parameter) -> Coded:
        groups = [
            {**group, "form": "fp32", "lr": 1e-3} for group in parameter_groups({"embed_tokens.weight": own}, 0.1)
        ]
        return Coded(groups, "adamw", {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}, "stochastic", 0)

    whole = optimizer(plain)
    made = Tall(parameter, CPU, Slicing(optimizer(parameter)))
    for _ in range(2):
        gradient = torch.randn(700, 8).bfloat16()
        for number, rows in enumerate(made.parts):
            made.lower(number, gradient[rows])
        made.promise(1.0)
        made.flush()
        plain.grad = gradient
        whole.step()
    assert len(made.parts) == 3
    assert torch.equal(parameter, plain)
