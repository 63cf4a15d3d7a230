"""When nothing fits: the gap, the smallest plan, and the recipe changes that would fit, each with its bytes.

Changes of a recipe change the result, so they are only named, never made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from finetune.config.schema import Recipe
from finetune.contracts import Plan
from finetune.errors import InputError, NothingFitsError
from finetune.memory.table import LEVERS
from finetune.planner.estimate import Estimate
from finetune.planner.space import Candidate, Space
from finetune.planner.words import size

SHORTEST = 128
"""Tokens below which a shorter row is not proposed."""
MECHANICS = ("micro_batch", *(lever.field for lever in LEVERS.values()))


@dataclass(frozen=True)
class Change:
    """A change of the recipe: `keys` as on the command line, the bytes of its smallest plan, and whether that fits."""

    keys: tuple[str, ...]
    bytes: int
    fits: bool
    note: str

    def __str__(self) -> str:
        return f"{' '.join(self.keys)} needs {size(self.bytes)}{'' if self.fits else ', still too much'} ({self.note})"


class PlanRefusedError(NothingFitsError):
    """No exact plan fits. `smallest` is the smallest plan, `gap` what it lacks in bytes, `changes` the ways out."""

    def __init__(self, smallest: Plan, estimate: Estimate, gap: int, changes: tuple[Change, ...], what: str) -> None:
        self.smallest = smallest
        self.estimate = estimate
        self.gap = gap
        self.changes = changes
        fitting = [change for change in changes if change.fits] or list(changes)
        label = "would fit: " if any(change.fits for change in changes) else "closest: "
        remedy = label + "; ".join(str(change) for change in fitting) if fitting else "use a machine with more memory"
        super().__init__(what, where="plan", remedy=remedy)


def refusal(space: Space, smallest: Candidate) -> PlanRefusedError:
    """The error for a space of plans none of which fits."""
    estimate, budget = smallest.estimate, space.budget
    gap = budget.lack(estimate)
    plan = smallest.plan
    on_host = budget.device != "cpu" and budget.host_lack(estimate) >= budget.device_lack(estimate)
    kind = "host memory" if budget.device == "cpu" or on_host else "GPU memory"
    need = estimate.host.total * budget.processes if on_host else estimate.peak
    limit = budget.host_bytes if on_host else budget.device_bytes
    phase = max(estimate.phases, key=lambda name: estimate.phases[name].total)
    causes = estimate.host.causes if on_host else estimate.phases[phase].causes
    widest = sorted(causes.items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{name} {size(count)}" for name, count in widest)
    what = (
        f"nothing fits: {space.shape.name} needs {size(need)} of {kind} at least, the budget is {size(limit)}, "
        f"{size(gap)} too little. The smallest plan ({_described(plan)}) is widest in "
        f"{'the host process' if on_host else phase}: {parts}"
    )
    if budget.notes:
        what += f". {'; '.join(budget.notes)}"
    return PlanRefusedError(plan, estimate, gap, tuple(_changes(space)), what)


def _described(plan: Plan) -> str:
    """A plan in words: its micro-batch, and the levers that are on."""
    on = {
        lever.name: getattr(plan, lever.field) for lever in LEVERS.values() if getattr(plan, lever.field) != lever.off
    }
    shown = [name if value is True or value == "host" else f"{name} {value}" for name, value in on.items()]
    if plan.weights == "streamed":
        shown = ["streamed weights", *shown]
    return ", ".join([f"micro-batch {plan.micro_batch}", *shown])


def _changes(space: Space) -> Iterator[Change]:
    proposals = list(_proposals(space.recipe))
    tried = [_tried(space, keys, recipe, space.longest_row, note) for keys, recipe, note in proposals]
    tried += _shorter(space, (), space.recipe, "longer rows are cut")
    yield from tried
    if proposals and not any(change.fits for change in tried):
        keys, recipe, note = proposals[-1]
        yield from _shorter(space, keys, recipe, f"{note}; longer rows are cut")


def _proposals(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Recipe, str]]:
    """Changes that save memory, by how much they change: (keys, changed recipe, note)."""
    pins = [field for field in MECHANICS if getattr(recipe.plan, field) != "auto"]
    if pins:
        free = recipe.plan.model_copy(update=dict.fromkeys(pins, "auto"))
        unpinned = tuple(f"plan.{field}=auto" for field in pins)
        yield unpinned, recipe.model_copy(update={"plan": free}), "the result stays the same"
    if recipe.optimizer.name == "adamw":
        eight = recipe.optimizer.model_copy(update={"name": "adamw8bit"})
        yield ("optimizer.name=adamw8bit",), recipe.model_copy(update={"optimizer": eight}), "moments in 8 bits"
    keys: tuple[str, ...] = ()
    if recipe.adapter.kind == "none":
        # What chooses among the model's own parameters does not go with an adapter.
        chosen = [name for name in ("last_blocks", "modules", "freeze") if getattr(recipe.train, name)]
        keys = ("adapter.kind=lora", *(f"train.{name}=null" for name in chosen))
        lora = recipe.adapter.model_copy(update={"kind": "lora"})
        whole = recipe.train.model_copy(update={"last_blocks": None, "modules": (), "freeze": ()})
        recipe = recipe.model_copy(update={"adapter": lora, "train": whole})
        yield keys, recipe, f"trains adapters of rank {lora.rank} only"
    if recipe.model.base == "same" and recipe.adapter.init not in ("pissa", "olora"):
        stored = recipe.model.model_copy(update={"base": "nf4"})
        recipe = recipe.model_copy(update={"model": stored})
        yield (*keys, "model.base=nf4"), recipe, "frozen weights in 4 bits"


def _tried(space: Space, keys: tuple[str, ...], recipe: Recipe, longest: int, note: str) -> Change:
    changed = replace(space, recipe=recipe, longest_row=longest)
    try:
        candidates = changed.candidates(streamed=changed.may_stream, timed=False)
    except InputError as error:
        return Change(keys, 0, False, str(error))
    budget = changed.budget
    fitting = [each for each in candidates if not budget.lack(each.estimate)]
    smallest = min(fitting or candidates, key=lambda each: (budget.lack(each.estimate), each.bytes))
    return Change(keys, smallest.bytes, bool(fitting), note)


def _shorter(space: Space, keys: tuple[str, ...], recipe: Recipe, note: str) -> Iterator[Change]:
    """The longest rows, by halves, that fit; nothing if none does."""
    length = space.longest_row // 2
    while length >= SHORTEST:
        data = recipe.data.model_copy(update={"max_tokens": length})
        change = _tried(
            space, (*keys, f"data.max_tokens={length}"), recipe.model_copy(update={"data": data}), length, note
        )
        if change.fits:
            yield change
            return
        length //= 2
