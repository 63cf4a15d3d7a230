"""The next smaller plan: fewer bytes in the step, the fastest of them, and never against a pin."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from finetune.models.shapes import SHAPES
from finetune.planner.hardware import parse
from finetune.planner.plan import Decision, decide, space_of
from finetune.planner.shrink import CLEARLY, difference, found_again, in_place, mechanics, pins_in_the_way, smaller
from finetune.planner.space import Space
from tests.unit.planner.test_decide import recipe


def planned(machine: str = "1x80GB,128GB", ranks: int = 1, **changes: Any) -> tuple[Space, Decision]:
    given = recipe(**changes), SHAPES["llama3-8b"], parse(machine), ranks, 2048
    return space_of(*given), decide(*given)


def chain(space: Space, decision: Decision) -> list[Decision]:
    found = [decision]
    while (after := smaller(space, found[-1])) is not None:
        found.append(after)
    return found


@pytest.mark.parametrize("changes", [{}, {"adapter__kind": "none", "model__trained": "stochastic"}])
def test_each_next_plan_is_smaller_and_the_last_is_the_smallest(changes: dict[str, Any]) -> None:
    """Down to a plan with which nothing is left: by 5% a time while that can be, and never more of another phase."""
    space, decision = planned(**({"machine": "1x141GB,256GB"} if changes else {}), train__batch=2, **changes)
    plans = chain(space, decision)
    sizes = [each.estimate.step_tensors for each in plans]
    assert len(plans) > 3
    assert all(after < before for before, after in itertools.pairwise(sizes))
    assert all(after <= (1 - CLEARLY) * before for before, after in itertools.pairwise(sizes[:-1]))
    assert all(each.estimate.peak <= decision.estimate.peak for each in plans)
    assert plans[-1].seconds > decision.seconds
    least = min(each.estimate.step_tensors for each in space.candidates(streamed=True))
    assert sizes[-1] <= least / (1 - CLEARLY)
    assert plans[-1].plan.reasons[-1].startswith("memory ran out")
    assert sum(reason.startswith("memory ran out") for reason in plans[-1].reasons) == 1


def test_the_fastest_of_the_clearly_smaller_plans_is_taken() -> None:
    space, decision = planned()
    after = smaller(space, decision)
    assert after is not None
    limit = (1 - CLEARLY) * decision.estimate.step_tensors
    rest = [each for each in space.candidates(streamed=True) if each.estimate.step_tensors <= limit]
    assert after.seconds == min(each.seconds for each in rest if each.bytes <= decision.estimate.peak)


def test_in_place_only_the_micro_batch_and_the_loss_chunk_change() -> None:
    space, decision = planned(plan__micro_batch="auto")
    after = smaller(space, decision, only_in_place=True)
    assert after is not None
    assert in_place(decision.plan, after.plan)
    changed = {name for name, value in mechanics(after.plan).items() if mechanics(decision.plan)[name] != value}
    assert changed <= {"micro_batch", "loss_chunk"}
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b 2 -> 3"


def test_pins_are_kept_and_those_in_the_way_are_named() -> None:
    pins = {
        "plan__micro_batch": 4, "plan__activation_checkpointing": True, "plan__loss_chunk": 256,
        "plan__activation_offload": False, "plan__weights": "resident", "plan__embedding_placement": "device",
        "plan__optimizer_placement": "device", "plan__mlp_tile": 0,
    }  # fmt: skip
    space, decision = planned(**pins)
    assert smaller(space, decision) is None
    found = pins_in_the_way(space, decision)
    assert "plan.micro_batch=4" in found
    assert "plan.weights=resident" in found
    assert "plan.loss_chunk=256" not in found
    free, _ = planned()
    assert pins_in_the_way(free, decision) == []
    for each in chain(*planned(plan__micro_batch=4, plan__weights="resident")):
        assert each.plan.micro_batch == 4
        assert each.plan.weights == "resident"


def test_a_resume_finds_the_plan_again() -> None:
    space, decision = planned()
    after = smaller(space, decision)
    assert after is not None
    wanted = mechanics(after.plan)
    found = found_again(space, decision, wanted)
    assert found is not None
    assert mechanics(found.plan) == wanted
    assert found.estimate == after.estimate
    assert found_again(space, decision, {**wanted, "micro_batch": 1000}) is None
    del wanted["slots"]  # an earlier version's checkpoint
    assert found_again(space, decision, wanted) is not None


def test_a_step_that_fails_again_takes_a_larger_stride() -> None:
    space, decision = planned(train__batch=2)
    sizes = []
    for again in range(4):
        after = smaller(space, decision, again=again)
        assert after is not None
        sizes.append(after.estimate.step_tensors / decision.estimate.step_tensors)
        assert sizes[-1] <= 1 - CLEARLY * 2**again or sizes[-1] == min(sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.7
