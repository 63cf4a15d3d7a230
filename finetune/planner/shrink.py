"""The next smaller plan, after memory ran out under the one in force.

What was planned for the failed plan was too little, so only plans with clearly fewer planned bytes are tried, the fastest
of them first; the budget itself is not believed any more. Pins hold: a plan that the user excluded is never taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from finetune.contracts import Plan
from finetune.errors import InputError
from finetune.planner.pins import pinned_fields
from finetune.planner.plan import Decision
from finetune.planner.space import Candidate, Space
from finetune.planner.words import size

IN_PLACE = ("micro_batch", "loss_chunk")
"""What a run can change between two steps; anything else is built into the model when it is assembled."""
CLEARLY = 0.05
"""The share of the failed plan's bytes that the next one has to save, where any plan does: a smaller gain is within what
estimates are off by."""
ALIKE = 0.01
"""The share by which a plan with half the micro-batch may be above the failed one, where no plan is below it: more ids wait."""
OTHER_PINS = ("exact", "weights", "resident_blocks", "slots", "head_placement")
"""Keys of plan.* that take plans away, beside the micro-batch and the levers."""


def mechanics(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, without its reasons."""
    values = asdict(plan)
    del values["reasons"]
    return values


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What changed between two plans' mechanics, as `micro_batch 4 -> 2, loss_chunk 0 -> 1024`."""
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in after if before.get(name) != after[name])


def in_place(before: Plan, after: Plan) -> bool:
    """Whether a run can go over from one plan to the other without building its model again."""
    one, two = mechanics(before), mechanics(after)
    return all(one[name] == two[name] for name in one if name not in IN_PLACE)


def smaller(space: Space, decision: Decision, only_in_place: bool = False, again: int = 0) -> Decision | None:
    """The fastest plan whose step has clearly fewer planned bytes than the decision's; else the smallest with fewer; else one
    with half the micro-batch and hardly more: what is planned widest may not be what was too wide. None where there is none. No
    other phase may need more than before. `again`: how often this step failed before; each time the share doubles, so that a
    few attempts suffice."""
    planned, peak = decision.estimate.step_tensors, decision.estimate.peak
    possible = [
        each
        for each in _candidates(space)
        if each.estimate.step_tensors <= planned * (1 + ALIKE)
        and each.bytes <= peak * (1 + ALIKE)
        and (space.budget.device == "cpu" or space.budget.host_lack(each.estimate) <= 0)
        and (not only_in_place or in_place(decision.plan, each.plan))
    ]
    found = [each for each in possible if each.estimate.step_tensors < planned and each.bytes <= peak]
    found = found or [each for each in possible if each.plan.micro_batch <= decision.plan.micro_batch // 2]
    if not found:
        return None
    clear = [each for each in found if each.estimate.step_tensors <= planned * (1 - CLEARLY * 2**again)]
    if clear:
        chosen = min(clear, key=lambda each: (each.seconds, each.estimate.step_tensors))
    else:
        chosen = min(found, key=lambda each: (each.estimate.step_tensors, each.seconds))
    needs = size(chosen.estimate.step_tensors)
    return _taken(decision, chosen, f"memory ran out in a plan of {size(planned)}; this one's step needs {needs}")


def found_again(space: Space, decision: Decision, wanted: Mapping[str, Any]) -> Decision | None:
    """The decision for a plan that an earlier part of the run went over to; None where it is no plan of this space (other
    pins, another machine)."""
    for each in _candidates(space):
        values = mechanics(each.plan)
        # An earlier version does not say all of them.
        if all(values.get(name) == value for name, value in wanted.items()):
            return _taken(
                decision,
                each,
                f"memory ran out earlier in this run; its plan's step needs {size(each.estimate.step_tensors)}",
            )
    return None


def pins_in_the_way(space: Space, decision: Decision) -> list[str]:
    """The pins without any one of which a smaller plan would exist, as `plan.micro_batch=4`; all of them where it takes
    several; none where no smaller plan exists anyhow."""
    other = {field: getattr(space.recipe.plan, field) for field in OTHER_PINS}
    pins = [
        *pinned_fields(space.recipe),
        *(f"plan.{field}={value}" for field, value in other.items() if value != "auto"),
    ]
    alone = [pin for pin in pins if _helps(space, [pin], decision)]
    return alone or (pins if pins and _helps(space, pins, decision) else [])


def _helps(space: Space, pins: list[str], decision: Decision) -> bool:
    try:
        return smaller(_without(space, pins), decision) is not None
    except InputError:  # the other pins contradict it
        return False


def _without(space: Space, pins: list[str]) -> Space:
    fields = {pin.removeprefix("plan.").split("=")[0]: "auto" for pin in pins}
    plan = space.recipe.plan.model_copy(update=fields)
    return replace(space, recipe=space.recipe.model_copy(update={"plan": plan}))


def _candidates(space: Space) -> list[Candidate]:
    return space.candidates(streamed=space.may_stream)


def _taken(decision: Decision, chosen: Candidate, reason: str) -> Decision:
    kept = tuple(text for text in decision.reasons if not text.startswith("memory ran out"))
    reasons = (*kept, reason)
    return replace(
        decision,
        plan=replace(chosen.plan, reasons=reasons),
        estimate=chosen.estimate,
        seconds=chosen.seconds,
        reasons=reasons,
    )
