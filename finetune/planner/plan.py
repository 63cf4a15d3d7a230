"""The planner: tries every plan, keeps those that fit, takes the fastest, and says why.

The space is small (micro-batch x the levers' choices), so it is walked whole, and the same input gives the same plan.
Time is relative: operations from the shape, the levers' own slowdowns, what a small micro-batch wastes, and padding.
Rates of the machine are not measured yet, so seconds are not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from finetune.config.schema import Recipe
from finetune.contracts import Plan, Shape
from finetune.memory.checkpointing import step_operations
from finetune.memory.storage import Storage, Work, storage_of
from finetune.memory.table import LEVERS
from finetune.planner.budget import Budget, budget_of, device_of, precision_of
from finetune.planner.estimate import Estimate, Facts, StateBytes, UpdateBytes, estimate
from finetune.planner.hardware import Hardware
from finetune.planner.pins import check_built, lever_choices, micro_batches, pinned_fields
from finetune.planner.words import size

THIN = {"cpu": 8.0, "cuda": 64.0}
"""Tokens that a micro-batch costs beyond its own, because its matrix products are thin."""
OVERHEAD = {"cpu": 5e-3 * 5e10, "cuda": 1.5e-3 * 5e14}
"""Operations that a block could do while its forward and backward are only being launched: seconds a block (a tiny Llama
on a CPU; some 300 launches on a GPU) times the rate. Assumed until the machine's rates are measured."""
DECODE = {"cpu": 1e-9 * 5e10, "cuda": 1.8e-12 * 5e14}
"""Operations that could be done while one 4-bit weight is decoded, which every micro-batch does anew: seconds a weight
(one H200, bitsandbytes, measured from the step; a CPU's is a guess) times the rate."""
MEAN_SHARE = 0.5
"""The mean length of rows that are not packed, as a share of the longest. An assumption: it says how much padding grows
with the micro-batch."""
EQUAL = 0.01
"""Plans within this share of the fastest count as equally fast; the one that needs least memory is taken."""

OptimizerBytes = Callable[[Recipe], StateBytes]
"""The state bytes of a recipe's optimizer."""


@dataclass(frozen=True)
class Candidate:
    """One plan with its bytes and its time relative to that of the chosen plan (below 1: faster)."""

    plan: Plan
    estimate: Estimate
    relative_seconds: float

    @property
    def bytes(self) -> int:
        """Peak bytes of the device, over all phases."""
        return self.estimate.peak


@dataclass(frozen=True)
class Decision:
    """The chosen plan and why. `alternatives` are the plans that no other beats in both bytes and time, smallest first;
    `next_faster` is the faster plan that lacks least, with `lacks` bytes (None: nothing is faster)."""

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


def optimizer_bytes(recipe: Recipe) -> StateBytes:
    """The state bytes of the recipe's row of the optimizer table."""
    from finetune.optim.table import tensor_bytes

    trained = recipe.model.trained if recipe.adapter.kind == "none" else "fp32"
    # Not a closure: a decision travels between processes.
    return partial(tensor_bytes, recipe.optimizer, trained)


def update_bytes(recipe: Recipe) -> UpdateBytes:
    """The temporaries of an update by the recipe's row of the optimizer table."""
    from finetune.optim.table import workspace_bytes

    return partial(
        workspace_bytes, recipe.optimizer.name, recipe.adapter.kind == "none" and recipe.model.trained != "fp32"
    )


def decide(
    recipe: Recipe,
    shape: Shape,
    hardware: Hardware,
    ranks: int = 1,
    longest_row: int | None = None,
    optimizers: OptimizerBytes = optimizer_bytes,
) -> Decision:
    """The fastest plan within the budget, for `ranks` processes and rows of at most `longest_row` tokens (default
    data.max_tokens).

    Raises NothingFitsError (as PlanRefusedError: the gap, the smallest plan, the recipe changes that would fit);
    InputError or NotBuiltError for pins that contradict the recipe or cannot be kept.
    """
    check_built(recipe, shape, ranks)
    space = Space(recipe, shape, hardware, ranks, longest_row or recipe.data.max_tokens, optimizers)
    candidates = space.candidates()
    fitting = [candidate for candidate in candidates if not space.budget.lack(candidate.estimate)]
    if not fitting:
        from finetune.planner.refusal import refusal

        raise refusal(space, min(candidates, key=lambda candidate: candidate.bytes))
    best = min(candidate.relative_seconds for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.relative_seconds <= best * (1 + EQUAL)]
    chosen = min(near, key=lambda candidate: (candidate.bytes, candidate.relative_seconds))
    return _decision(space, chosen, candidates)


@dataclass(frozen=True)
class Space:
    """All plans of one recipe on one machine."""

    recipe: Recipe
    shape: Shape
    hardware: Hardware
    ranks: int
    longest_row: int
    optimizers: OptimizerBytes

    @property
    def budget(self) -> Budget:
        return budget_of(self.recipe, self.hardware, self.ranks)

    @property
    def precision(self) -> str:
        return precision_of(self.recipe, self.hardware)

    @property
    def storage(self) -> Storage:
        return storage_of(self.shape, self.recipe, self.precision, device_of(self.recipe, self.hardware))

    @property
    def rows(self) -> int:
        """The most rows that one rank's share of a step has, all of them taken to be of the longest length."""
        train = self.recipe.train
        if train.batch is not None:
            return -(-train.batch // self.ranks)
        return max(1, (train.batch_tokens or 0) // self.longest_row // self.ranks)

    @property
    def facts(self) -> Facts:
        states, update = self.optimizers(self.recipe), update_bytes(self.recipe)
        return Facts(self.longest_row, self.precision, states, self.rows, update)

    def candidates(self) -> list[Candidate]:
        """Every plan, larger micro-batches and fewer levers first; times are relative to the fastest."""
        storage, facts = self.storage, self.facts
        choices = [lever_choices(lever, self.recipe, storage) for lever in LEVERS.values()]
        found = []
        for rows, *values in itertools.product(micro_batches(self.recipe, self.rows, self.ranks), *choices):
            levers = dict(zip((lever.field for lever in LEVERS.values()), values, strict=True))
            plan = Plan(
                device=storage.device,
                micro_batch=rows,
                ranks=self.ranks,
                fast_block=storage.fast,
                attention=self.recipe.plan.attention,
                **levers,
            )
            found.append(Candidate(plan, estimate(self.shape, self.recipe, plan, facts), self._cost(plan, storage)))
        fastest = min(candidate.relative_seconds for candidate in found)
        return [replace(each, relative_seconds=each.relative_seconds / fastest) for each in found]

    def _cost(self, plan: Plan, storage: Storage) -> float:
        """Operations of one rank's step, with what levers, thin micro-batches and padding add."""
        work = Work(plan.micro_batch, self.longest_row)
        slower = 1.0 + sum(
            lever.slowdown(self.shape, storage, work, getattr(plan, lever.field)) for lever in LEVERS.values()
        )
        rows = max(self.rows, plan.micro_batch)
        operations = step_operations(self.shape, storage, self.longest_row)
        decoded = (3 if plan.activation_checkpointing else 2) * self.shape.linear_parameters if storage.coded else 0
        launches = OVERHEAD[plan.device] + decoded * DECODE[plan.device]
        overhead = THIN[plan.device] + self.shape.blocks * launches / operations
        tokens = rows * self._padded(min(plan.micro_batch, rows)) + -(-rows // plan.micro_batch) * overhead
        return operations * slower * tokens

    def _padded(self, rows: int) -> float:
        """Tokens a row with its padding: the expected longest of `rows` lengths, uniform up to twice their mean."""
        if self.recipe.data.pack:
            return float(self.longest_row)
        return 2 * MEAN_SHARE * self.longest_row * rows / (rows + 1)


def _decision(space: Space, chosen: Candidate, candidates: list[Candidate]) -> Decision:
    base = chosen.relative_seconds
    scaled = [replace(each, relative_seconds=each.relative_seconds / base) for each in candidates]
    smallest = min(scaled, key=lambda each: (each.bytes, each.relative_seconds))
    faster = [each for each in scaled if each.relative_seconds < 1 - EQUAL and space.budget.lack(each.estimate)]
    next_faster = min(faster, key=lambda each: (space.budget.lack(each.estimate), each.relative_seconds), default=None)
    lacks = space.budget.lack(next_faster.estimate) if next_faster else 0
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
    )


def _frontier(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Plans that no other beats in both bytes and time, smallest first."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.bytes, each.relative_seconds)):
        if not kept or each.relative_seconds < kept[-1].relative_seconds * (1 - EQUAL):
            kept.append(each)
    return tuple(kept)


def _reasons(space: Space, chosen: Candidate, candidates: list[Candidate]) -> tuple[str, ...]:
    plan, recipe, storage = chosen.plan, space.recipe, space.storage
    work = Work(plan.micro_batch, space.longest_row)
    given = recipe.plan.host_memory if plan.device == "cpu" else recipe.plan.gpu_memory
    source = "free memory less a margin" if given == "auto" else "as the recipe says"
    reasons = [
        *space.budget.notes,
        f"the budget is {size(space.budget.device_bytes)} a process ({source}); the plan needs {size(chosen.bytes)}",
        f"micro-batch {plan.micro_batch} of {space.rows} rows: {_why(recipe, 'micro_batch', 'the fastest that fits')}",
    ]
    if storage.fast:
        kernel = "torch's order of kernels" if plan.attention == "auto" else f"the {plan.attention} kernel"
        reasons.append(f"fast blocks: fused operations (other roundings), attention by {kernel}")
    for lever in LEVERS.values():
        value = getattr(plan, lever.field)
        saved = size(lever.saves(space.shape, storage, work, value))
        cost = lever.slowdown(space.shape, storage, work, value)
        if value == lever.off:
            why = "off: not needed" if lever.exact == "bitwise" or recipe.plan.exact != "bitwise" else "off: bitwise"
        else:
            shown = "on" if value is True else f"of {value}"
            why = f"{shown}: saves {saved}, costs {cost:.0%} ({lever.exact})"
        reasons.append(f"{lever.name} {_why(recipe, lever.field, why)}")
    if recipe.plan.exact == "bitwise":
        reasons.append("plan.exact=bitwise: only levers that change no bit are used")
    pins = pinned_fields(recipe)
    if pins:
        reasons.append(f"pinned: {', '.join(pins)}")
    return tuple(reasons)


def _why(recipe: Recipe, field: str, otherwise: str) -> str:
    value: Any = getattr(recipe.plan, field)
    return otherwise if value == "auto" else f"{otherwise} (pinned)" if field != "micro_batch" else "pinned"
