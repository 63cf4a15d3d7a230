"""Bytes by cause for each phase of a run, from the counts of a model, a recipe and a plan: resident or streamed."""

from __future__ import annotations

from dataclasses import replace

from finetune.config.schema import Recipe
from finetune.contracts import Plan, Shape
from finetune.memory.case import Case, case_of
from finetune.memory.storage import storage_of
from finetune.planner.estimate_resident import Estimate, Facts, StateBytes, UpdateBytes, estimate_resident
from finetune.planner.estimate_streamed import estimate_streamed

__all__ = ["Estimate", "Facts", "StateBytes", "UpdateBytes", "estimate", "estimate_case"]


def estimate(shape: Shape, recipe: Recipe, plan: Plan, facts: Facts) -> Estimate:
    """The bytes of one process that runs the recipe with this plan, at its widest in each phase.

    Tensor bytes are as autograd and the optimizer keep them (tested against counts); `context`, `allocator` and host
    process bytes are constants measured or assumed, named in planner/estimate_resident.
    """
    storage = storage_of(shape, recipe, facts.precision, plan.device)
    case = case_of(shape, storage, plan, facts.longest_row, facts.rows, facts.state_bytes)
    case = replace(case, update_bytes=facts.update_bytes)
    return estimate_case(case, recipe.train.batch_tokens is not None)


def estimate_case(case: Case, by_tokens: bool) -> Estimate:
    """As `estimate`, of a case that is there already. `by_tokens`: a step is so many tokens, of any number of rows."""
    if case.plan.weights == "streamed":
        return estimate_streamed(case)
    return estimate_resident(case, by_tokens)
