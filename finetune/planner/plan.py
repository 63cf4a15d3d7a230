"""The planner: tries every plan, keeps those that fit, takes the fastest, and says why.

The space (planner/space) is walked whole, and the same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.schema import Recipe
from finetune.contracts import Plan, Shape
from finetune.machine.rates import Rates
from finetune.memory import weight_streaming
from finetune.memory.case import Case
from finetune.memory.table import LEVERS
from finetune.planner.budget import Budget
from finetune.planner.estimate import Estimate, Facts
from finetune.planner.hardware import Hardware
from finetune.planner.pins import check_built, pinned_fields, why_off
from finetune.planner.refusal import refusal
from finetune.planner.space import Candidate, Space
from finetune.planner.words import size

LENGTHS = 4096
"""Rows whose lengths are looked at for the padding that a micro-batch costs."""
EQUAL = 0.03
"""Plans within this share of the fastest count as equally fast, since times are no better known than that: of these the one
that asks least of the host, then the one that needs least memory is taken."""
HEADS = {"device": 0, "visit": 1, "host": 2}


@dataclass(frozen=True)
class Decision:
    """The chosen plan and why. `alternatives` are the plans that no other beats in both bytes and time, smallest first;
    `next_faster` is the faster plan that lacks least, with `lacks` bytes (None: nothing is faster). `seconds`: of a step, as
    predicted from `rates`; `step_tokens`: of all ranks, without padding."""

    plan: Plan
    estimate: Estimate
    alternatives: tuple[Candidate, ...]
    smallest: Candidate
    next_faster: Candidate | None
    lacks: int
    reasons: tuple[str, ...]
    budget: Budget
    precision: str
    facts: Facts
    seconds: float
    step_tokens: float
    rates: Rates

    @property
    def tokens_per_s(self) -> float:
        """Predicted, of all ranks, without padding."""
        return self.step_tokens / self.seconds


def space_of(
    recipe: Recipe,
    shape: Shape,
    hardware: Hardware,
    ranks: int = 1,
    longest_row: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Space:
    """The plans that `decide` chooses from."""
    known = None if lengths is None else tuple(int(length) for length in lengths[:LENGTHS])
    return Space(recipe, shape, hardware, ranks, longest_row or recipe.data.max_tokens, known)


def decide(
    recipe: Recipe,
    shape: Shape,
    hardware: Hardware,
    ranks: int = 1,
    longest_row: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Decision:
    """The fastest plan within the budget, for `ranks` processes and rows of at most `longest_row` tokens (default
    data.max_tokens). `lengths` are rows' tokens in an order like that of training; they say what padding costs.

    Raises NothingFitsError (as PlanRefusedError: the gap, the smallest plan, the recipe changes that would fit);
    InputError or NotBuiltError for pins that contradict the recipe or cannot be kept.
    """
    space = space_of(recipe, shape, hardware, ranks, longest_row, lengths)
    check_built(recipe, shape, ranks, space.storage)
    candidates, budget = space.candidates(), space.budget
    fitting = [candidate for candidate in candidates if not budget.lack(candidate.estimate)]
    if not fitting and space.may_stream:
        candidates = space.candidates(streamed=True)
        fitting = [candidate for candidate in candidates if not budget.lack(candidate.estimate)]
    if not fitting:
        raise refusal(space, min(candidates, key=lambda each: (budget.lack(each.estimate), each.bytes)))
    best = min(candidate.seconds for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.seconds <= best * (1 + EQUAL)]
    chosen = min(near, key=lambda each: (_on_the_host(each.plan), each.bytes, each.relative_seconds))
    return _decision(space, chosen, candidates)


def _on_the_host(plan: Plan) -> int:
    """What of a plan uses the host's memory and the link: among equally fast plans the one with least is taken. A head that
    passes in parts counts twice, since it reorders sums besides."""
    levers = sum(lever.to_host and getattr(plan, lever.field) != lever.off for lever in LEVERS.values())
    return levers + HEADS[plan.head_placement]


def _decision(space: Space, chosen: Candidate, candidates: list[Candidate]) -> Decision:
    base, budget = chosen.seconds, space.budget
    # A plan that the host cannot hold is no alternative.
    held = [each for each in candidates if budget.host_lack(each.estimate) <= 0 or budget.device == "cpu"]
    scaled = [replace(each, relative_seconds=each.seconds / base) for each in held]
    smallest = min(scaled, key=lambda each: (each.bytes, each.relative_seconds))
    faster = [each for each in scaled if each.relative_seconds < 1 - EQUAL and budget.lack(each.estimate)]
    next_faster = min(faster, key=lambda each: (budget.lack(each.estimate), each.relative_seconds), default=None)
    lacks = budget.lack(next_faster.estimate) if next_faster else 0
    reasons = _reasons(space, chosen, scaled)
    plan = replace(chosen.plan, reasons=reasons)
    return Decision(
        plan=plan,
        estimate=chosen.estimate,
        alternatives=_frontier(scaled),
        smallest=smallest,
        next_faster=next_faster,
        lacks=lacks,
        reasons=reasons,
        budget=space.budget,
        precision=space.precision,
        facts=space.facts,
        seconds=chosen.seconds,
        step_tokens=space.step_tokens,
        rates=space.case(plan).speed,
    )


def _frontier(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Plans that no other beats in both bytes and time, smallest first."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.bytes, each.relative_seconds)):
        if not kept or each.relative_seconds < kept[-1].relative_seconds * (1 - EQUAL):
            kept.append(each)
    return tuple(kept)


def _reasons(space: Space, chosen: Candidate, candidates: list[Candidate]) -> tuple[str, ...]:
    plan, recipe, case = chosen.plan, space.recipe, space.case(chosen.plan)
    given = recipe.plan.host_memory if plan.device == "cpu" else recipe.plan.gpu_memory
    source = "free memory less a margin" if given == "auto" else "as the recipe says"
    reasons = [
        *space.budget.notes,
        f"the budget is {size(space.budget.device_bytes)} a process ({source}); the plan needs {size(chosen.bytes)}",
        f"micro-batch {plan.micro_batch} of {space.rows} rows: {_why(recipe, 'micro_batch', 'the fastest that fits')}",
    ]
    if plan.weights == "streamed":
        reasons += _of_streaming(plan, case, recipe)
    if plan.fast_block:
        kernel = {"auto": "torch's choice of kernel", "deterministic": "a deterministic kernel"}.get(
            plan.attention, f"the {plan.attention} kernel"
        )
        reasons.append(f"fast blocks: fused operations (other roundings), attention by {kernel}")
    elif plan.attention not in ("auto", "deterministic"):
        reasons.append(f"plan.attention={plan.attention} does nothing here: it is for fast blocks, which run on a GPU")
    if space.precision == "tf32" and plan.device == "cpu":
        reasons.append("tf32 changes nothing on a CPU: products are made in fp32")
    for lever in LEVERS.values():
        value = getattr(plan, lever.field)
        if value == lever.off:
            reason = why_off(lever, space.allowance)
            why = f"off: {reason}" if reason else "off: not needed"
        else:
            shown = "on" if value is True else value if isinstance(value, str) else f"of {value}"
            saved, cost = size(lever.saves(case)), lever.slowdown(case)
            why = f"{shown}: saves {saved}, costs {cost:.0%} ({lever.exact})"
        reasons.append(f"{lever.name} {_why(recipe, lever.field, why)}")
    if plan.optimizer_in_backward:
        reasons.append("step in backward: a step whose gradient is not finite is noticed, and not undone")
    if recipe.plan.exact == "bitwise":
        reasons.append("plan.exact=bitwise: only levers that change no bit are used")
    pins = pinned_fields(recipe)
    if pins:
        reasons.append(f"pinned: {', '.join(pins)}")
    return tuple(reasons)


def _of_streaming(plan: Plan, case: Case, recipe: Recipe) -> list[str]:
    """What the reader of a streamed plan should know of it."""
    blocks, each = case.shape.blocks, weight_streaming.streaming_of(case).block
    asked = "as the recipe says" if recipe.plan.weights == "streamed" else "no plan with resident weights fits"
    return [
        f"weights streamed ({asked}): {blocks - plan.resident_blocks} of {blocks} blocks live on the host, {size(each)} each, "
        f"and take turns in {plan.slots} buffers of the GPU; estimated to cost {max(0.0, weight_streaming.slowdown(case)):.0%} of "
        "a recomputing step",
        f"embedding on the {plan.embedding_placement}, {_head(plan)}",
    ]


def _head(plan: Plan) -> str:
    if plan.head_placement == "visit":
        return "head on the host, and whole on the device while losses are made"
    return f"head on the {plan.head_placement}" + (
        " (on the host they pass in parts: reordered sums)" if plan.head_placement == "host" else ""
    )


def _why(recipe: Recipe, field: str, otherwise: str) -> str:
    value: Any = getattr(recipe.plan, field)
    return otherwise if value == "auto" else f"{otherwise} (pinned)" if field != "micro_batch" else "pinned"
