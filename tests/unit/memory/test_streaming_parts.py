"""Parts of streaming, one by one, on the CPU: buffers, turns, boundaries, updates that are promised, matrices in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.kernels import norms
from finetune.kernels.vocabulary_loss import Sums, absorb, slope_
from finetune.memory.streaming.boundaries import Boundaries
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.flat import ALIGNED, Flat
from finetune.memory.streaming.host_blocks import spread_evenly
from finetune.memory.streaming.slots import Slots
from finetune.memory.streaming.tall import Tall
from finetune.optim.coded import Coded
from finetune.optim.groups import parameter_groups
from finetune.optim.slices import Slicing

CPU = torch.device("cpu")


def blocks(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 8)) for _ in range(count)]


def adamw8bit(named: dict[str, nn.Parameter]) -> Coded:
    groups = [{**group, "form": "8bit", "lr": 0.1} for group in parameter_groups(named, 0.1)]
    return Coded(groups, "adamw", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, "fp32", 0)


def test_a_flat_buffer_holds_a_block_and_binds_it() -> None:
    (block,) = blocks(1)
    before = {name: tensor.detach().clone() for name, tensor in block.named_parameters()}
    flat = Flat(block, CPU, True)
    assert [spot.start % ALIGNED for spot in flat.spots] == [0, 0, 0, 0]
    assert flat.bytes == 4 * ALIGNED
    elsewhere = flat.host.clone()
    flat.bind(elsewhere)
    elsewhere.zero_()
    assert all(bool((tensor == 0).all()) for tensor in block.parameters())
    flat.release()
    for name, tensor in block.named_parameters():
        assert torch.equal(tensor, before[name])


def test_adapters_stay_and_quantised_codes_move() -> None:
    from finetune.kernels.stored_linear import StoredLinear

    stored = StoredLinear(nn.Linear(8, 8, bias=False).requires_grad_(False), "int8")
    stored.register_parameter("lora", nn.Parameter(torch.ones(2)))
    flat = Flat(stored, CPU, False)
    assert {(spot.dtype, tuple(spot.shape)) for spot in flat.spots} == {(torch.int8, (8, 8)), (torch.float32, (8, 1))}
    other = torch.zeros_like(flat.host)
    flat.bind(other)
    assert bool((stored.codes == 0).all())
    assert bool((stored.lora == 1).all())


@pytest.mark.parametrize("count", [2, 3])
def test_slots_fetch_each_block_once_a_half_and_not_what_is_there(count: int) -> None:
    several = blocks()
    flats = [Flat(block, CPU, True) for block in several]
    slots = Slots(flats, count, CPU)
    values = [flat.host.clone() for flat in flats]
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    slots.begin(order)
    for number in order:
        with slots.using(number) as octets:
            assert torch.equal(octets[: flats[number].bytes], values[number])
    # At the turn as many blocks as there are slots are still there.
    assert slots.fetched == (8 - count) * flats[0].bytes


def test_resident_blocks_are_fetched_once() -> None:
    flats = [Flat(block, CPU, True) for block in blocks()]
    slots = Slots(flats, 2, CPU, frozenset({1, 3}))
    for _ in range(2):
        order = [0, 1, 2, 3, 3, 2, 1, 0]
        slots.begin(order)
        for number in order:
            with slots.using(number):
                pass
    assert slots.fetched == 4 * flats[0].bytes
    assert slots.bytes == 4 * flats[0].bytes


@pytest.mark.parametrize(
    ("count", "total", "wanted"), [(0, 4, []), (2, 4, [1, 3]), (4, 4, [0, 1, 2, 3]), (9, 2, [0, 1])]
)
def test_resident_blocks_are_spread(count: int, total: int, wanted: list[int]) -> None:
    assert spread_evenly(count, total) == wanted


@pytest.mark.parametrize("on_host", [False, True])
def test_boundaries_come_back_in_any_size(on_host: bool) -> None:
    boundaries = Boundaries(CPU, on_host)
    for length in (3, 5):
        inputs = [torch.randn(1, length, 2), torch.randn(1, length + 1, 2), torch.randn(1, 1, 2)]
        boundaries.begin(inputs, range(2))
        for block in range(2):
            for part, tensor in enumerate(inputs):
                boundaries.keep(block, part, tensor + block)
        places = [(block, part) for block in (1, 0) for part in range(3)]
        asked = 0
        for done, (block, part) in enumerate(places):
            while asked <= min(done + 2, len(places) - 1):
                boundaries.fetch(*places[asked])
                asked += 1
            assert torch.equal(boundaries.take(block, part), inputs[part] + block)
            boundaries.give()
        boundaries.end()


def stepped(parameters: list[list[nn.Parameter]], gradients: list[list[Tensor]]) -> tuple[Deferred, Coded]:
    named = {f"{unit}.{at}": p for unit, some in enumerate(parameters) for at, p in enumerate(some)}
    optimizer = adamw8bit(named)
    deferred = Deferred(Slicing(optimizer), parameters, CPU)
    deferred.settle()
    for number, some in enumerate(gradients):
        for parameter, gradient in zip(parameters[number], some, strict=True):
            parameter.grad = gradient.clone()
        deferred.lower(number)
    return deferred, optimizer


def test_promised_updates_are_those_of_the_optimizer_and_survive_a_break() -> None:
    torch.manual_seed(1)
    units = [[nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(7))] for _ in range(3)]
    plain = [[nn.Parameter(p.detach().clone()) for p in some] for some in units]
    gradients = [[torch.randn_like(p) for p in some] for some in units]
    own = adamw8bit({f"{unit}.{at}": p for unit, some in enumerate(plain) for at, p in enumerate(some)})
    for some, slopes in zip(plain, gradients, strict=True):
        for parameter, gradient in zip(some, slopes, strict=True):
            parameter.grad = gradient * 0.5
    own.step()
    deferred, optimizer = stepped(units, gradients)
    assert deferred.pending == []
    assert deferred.norms[units[0][1]].item() == pytest.approx(gradients[0][1].norm().item(), rel=1e-6)
    deferred.promise(0.5)
    deferred.apply(0)
    # Here something failed; what is pending says where to go on.
    assert deferred.pending == [1, 2]
    for number in deferred.pending:
        assert deferred.apply(number)
    assert not deferred.apply(1)
    for some, others in zip(units, plain, strict=True):
        for parameter, other in zip(some, others, strict=True):
            assert torch.equal(parameter, other)
            for name, value in own.state[other].items():
                assert torch.equal(torch.as_tensor(optimizer.state[parameter][name]), torch.as_tensor(value)), name


def test_an_unreached_parameter_has_a_gradient_of_zero() -> None:
    unit = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]
    optimizer = adamw8bit({"a": unit[0], "b": unit[1]})
    deferred = Deferred(Slicing(optimizer), [unit], CPU)
    deferred.settle()
    unit[0].grad = torch.ones(5)
    deferred.lower(0)
    assert deferred.norms[unit[1]].item() == 0
    deferred.promise(1.0)
    deferred.apply(0)
    assert optimizer.state[unit[1]]["step"] == 1


def tall(monkeypatch: pytest.MonkeyPatch, rows: int = 700) -> tuple[Tall, Coded, nn.Parameter]:
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 8)
    torch.manual_seed(2)
    parameter = nn.Parameter(torch.randn(rows, 8))
    optimizer = adamw8bit({"embed_tokens.weight": parameter})
    made = Tall(parameter, CPU, Slicing(optimizer))
    return made, optimizer, parameter


def test_a_tall_matrix_is_updated_in_parts_also_after_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, parameter = tall(monkeypatch)
    assert [rows.stop - rows.start for rows in made.parts] == [256, 256, 188]
    plain = nn.Parameter(parameter.detach().clone())
    own = adamw8bit({"embed_tokens.weight": plain})
    gradient = torch.randn(700, 8)
    for number, rows in enumerate(made.parts):
        made.lower(number, gradient[rows])
    assert torch.equal(made.norm(), norms.tensor_norm(gradient))
    made.promise(1.0)
    plain.grad = gradient
    own.step()
    passing = made.passing()
    rows, weight = next(passing)
    assert torch.equal(weight, plain[rows])
    passing.close()
    assert made.pending
    made.flush()
    assert not made.pending
    assert torch.equal(parameter, plain)


def test_a_gradient_that_is_made_when_it_is_asked_for_is_added_to_the_one_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, parameter = tall(monkeypatch)
    before = parameter.detach().clone()
    first, second = torch.randn(700, 8), torch.randn(700, 8)
    for number, rows in enumerate(made.parts):
        made.lower(number, first[rows])
    made.added = lambda rows: second[rows].clone()
    made.measure()
    assert torch.equal(made.norm(), norms.tensor_norm(second + first))
    plain = nn.Parameter(before)
    own = adamw8bit({"embed_tokens.weight": plain})
    plain.grad = second + first
    own.step()
    made.promise(1.0)
    made.flush()
    assert torch.equal(parameter, plain)
    assert made.added is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_over_parts_of_the_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    logits = (5 * torch.randn(9, 37)).to(dtype)
    labels = torch.randint(0, 37, (9,))
    wide = logits.float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    wanted.sum().backward()
    sums = Sums.empty(9, CPU)
    for start in range(0, 37, 10):
        absorb(logits[:, start : start + 10], labels, start, sums)
    torch.testing.assert_close(sums.losses(), wanted.detach(), rtol=1e-5, atol=1e-6)
    slopes = torch.cat(
        [slope_(logits[:, start : start + 10].clone(), labels, start, sums) for start in range(0, 37, 10)], 1
    )
    assert wide.grad is not None
    torch.testing.assert_close(slopes.float(), wide.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_norms_of_tall_and_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 1024)
    several: list[Any] = [torch.randn(600, 4), torch.randn(5), torch.randn(3, 3, dtype=torch.bfloat16)]
    found = norms.tensor_norms(several)
    for value, tensor in zip(found, several, strict=True):
        assert value.item() == pytest.approx(tensor.float().norm().item(), rel=1e-5)
    assert len(norms.parts_of(several[0])) == 3
    assert norms.tensor_norms([]).numel() == 0
