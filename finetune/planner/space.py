"""The space of plans of one recipe on one machine: micro-batch x the levers' choices, each with its bytes and its time.

It is walked whole, and the same input gives the same plans in the same order. Time is relative: operations from the
shape, the levers' own slowdowns, what a small micro-batch wastes, and padding. Rates of the machine are not measured
yet, so seconds are not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from finetune.config.schema import Recipe
from finetune.contracts import Plan, Shape
from finetune.errors import InputError
from finetune.memory import mlp_tiles, weight_streaming
from finetune.memory.case import DECODE, Case, case_of
from finetune.memory.checkpointing import step_operations
from finetune.memory.storage import Storage, storage_of
from finetune.memory.table import LEVERS
from finetune.planner.budget import Budget, budget_of, device_of, precision_of
from finetune.planner.estimate import Estimate, Facts, StateBytes, UpdateBytes, estimate_case
from finetune.planner.hardware import Hardware
from finetune.planner.pins import Allowance, lever_choices, micro_batches, why_not_streamed

Place = Literal["device", "host"]
HeadPlace = Literal["device", "visit", "host"]
THIN = {"cpu": 8.0, "cuda": 64.0}
"""Tokens that a micro-batch costs beyond its own, because its matrix products are thin."""
OVERHEAD = {"cpu": 5e-3 * 5e10, "cuda": 1.5e-3 * 5e14}
"""Operations that a block could do while its forward and backward are only being launched: seconds a block (a tiny Llama
on a CPU; some 300 launches on a GPU) times the rate. Assumed until the machine's rates are measured."""
MEAN_SHARE = 0.5
"""The mean length of rows that are not packed, as a share of the longest, where the rows are not known. An assumption: it
says how much padding grows with the micro-batch."""


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
class Space:
    """All plans of one recipe on one machine. `lengths`: some rows' tokens, in an order like that of training."""

    recipe: Recipe
    shape: Shape
    hardware: Hardware
    ranks: int
    longest_row: int
    lengths: tuple[int, ...] | None = None

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
        states, update = optimizer_bytes(self.recipe), update_bytes(self.recipe)
        return Facts(self.longest_row, self.precision, states, self.rows, update)

    @property
    def allowance(self) -> Allowance:
        """What decides which values of the levers are exact here."""
        return Allowance(self.recipe, self.shape, self.storage, self.precision, self.ranks)

    def case(self, plan: Plan) -> Case:
        """A plan of this space as cost models see it."""
        facts = self.facts
        made = case_of(self.shape, self.storage, plan, facts.longest_row, facts.rows, facts.state_bytes)
        return replace(made, update_bytes=facts.update_bytes)

    @property
    def may_stream(self) -> bool:
        """Whether streamed plans are left to be tried where no resident one fits: on a GPU, and nothing speaks against it."""
        wanted = self.recipe.plan.weights
        return wanted == "auto" and self.storage.device == "cuda" and not why_not_streamed(self.recipe, self.ranks)[0]

    def candidates(self, streamed: bool = False) -> list[Candidate]:
        """Every plan, larger micro-batches and fewer levers first; times are relative to the fastest. InputError for pins
        that no plan keeps. Streamed plans are among them where the recipe asks for them, or with `streamed`."""
        storage, rows = self.storage, self.rows
        choices = [lever_choices(lever, self.allowance) for lever in LEVERS.values()]
        fields = [lever.field for lever in LEVERS.values()]
        found: list[Candidate] = []
        by_tokens = self.recipe.train.batch_tokens is not None
        base: Case | None = None
        for count, *values in itertools.product(micro_batches(self.recipe, rows, self.ranks), *choices):
            levers = dict(zip(fields, values, strict=True))
            if levers["optimizer_in_backward"] and count < rows:
                continue
            if levers["mlp_tile"] and not self._tiles(levers, count):
                continue
            plan = Plan(
                device=storage.device,
                micro_batch=count,
                ranks=self.ranks,
                fast_block=storage.fast,
                attention=self.recipe.plan.attention,
                **levers,
            )
            base = replace(base, plan=plan) if base else self.case(plan)
            if self.recipe.plan.weights != "streamed":
                found.append(Candidate(plan, estimate_case(base, by_tokens), self._cost(base)))
            for other in self._streamed(plan) if streamed or self.recipe.plan.weights == "streamed" else ():
                base = replace(base, plan=other)
                found.append(Candidate(other, estimate_case(base, by_tokens), self._cost(base)))
        if not found:
            raise InputError(
                f"plan.optimizer_in_backward=true needs one micro-batch a step, and plan.micro_batch="
                f"{self.recipe.plan.micro_batch} makes several of {rows} rows",
                where="plan.optimizer_in_backward",
                remedy=f"plan.micro_batch={rows} or auto, or plan.optimizer_in_backward=false",
            )
        fastest = min(candidate.relative_seconds for candidate in found)
        return [replace(each, relative_seconds=each.relative_seconds / fastest) for each in found]

    def _tiles(self, levers: dict[str, Any], count: int) -> bool:
        """Whether a micro-batch's MLP can go in these tiles; of those that nobody pinned, whether they are its own."""
        if levers["activation_checkpointing"] is not True:
            return False
        if self.recipe.plan.mlp_tile != "auto":
            return True
        tile: int = levers["mlp_tile"]
        return tile == mlp_tiles.worth_trying(count * self.longest_row)

    def _streamed(self, plan: Plan) -> Iterator[Plan]:
        """This plan with its weights streamed, if it has what streaming does by itself: by where embedding and head are, and
        by resident blocks where memory is what is looked for."""
        wanted, blocks = self.recipe.plan, self.shape.blocks
        if plan.activation_checkpointing is not True or plan.optimizer_in_backward:
            return
        if plan.optimizer_placement == "host":
            return
        slots = plan.slots if wanted.slots == "auto" else wanted.slots
        resident = [0]
        if wanted.resident_blocks != "auto":
            resident = [min(wanted.resident_blocks, blocks)]
        elif wanted.weights == "auto" or wanted.gpu_memory != "auto":
            resident = sorted({0, *(blocks * quarter // 4 for quarter in (1, 2, 3))})
        streamed = replace(plan, weights="streamed", slots=slots)
        for (embedding, head), count in itertools.product(self._ends(plan.embedding_placement), resident):
            if self.shape.tied and "host" in (embedding, head):
                # One matrix is in one place.
                embedding = head = "host"
            yield replace(streamed, resident_blocks=count, embedding_placement=embedding, head_placement=head)

    def _ends(self, embedding: Place) -> list[tuple[Place, HeadPlace]]:
        """Where embedding and head may be in a streamed plan: a pin, or the device and, where it is exact, the host; the fastest
        first."""
        wanted, storage = self.recipe.plan, self.storage
        heads: list[HeadPlace] = ["device"] if wanted.head_placement == "auto" else [wanted.head_placement]
        plain = storage.fast and not storage.own_head and self.recipe.plan.exact != "bitwise"
        if wanted.head_placement == "auto" and not (storage.own_head or self.shape.tied):
            heads.append("visit")
        if wanted.head_placement == "auto" and plain:
            heads.append("host")
        if wanted.embedding_placement != "auto" or not (storage.trained and plain):
            return [(embedding, head) for head in heads]
        # Trained, both go together: one of them alone on the device takes most of what the other frees.
        return [("device" if head == "device" else "host", head) for head in heads]

    def _cost(self, case: Case) -> float:
        """Operations of one rank's step, with what levers, thin micro-batches and padding add."""
        plan = case.plan
        slower = 1.0 + sum(lever.slowdown(case) for lever in LEVERS.values() if getattr(plan, lever.field) != lever.off)
        rows = max(case.rows, plan.micro_batch)
        if plan.weights == "streamed":
            slower += weight_streaming.slowdown(case)
        operations = step_operations(self.shape, case.storage, self.longest_row)
        passes = 2 if plan.activation_checkpointing is False else 3
        decoded = passes * self.shape.linear_parameters if case.storage.coded else 0
        if plan.weights == "streamed" and plan.fast_block:
            # Once a block's turn, whatever the number of micro-batches.
            decoded = decoded * plan.micro_batch // rows
        launches = OVERHEAD[plan.device] + decoded * DECODE[plan.device]
        overhead = THIN[plan.device] + self.shape.blocks * launches / operations
        tokens = rows * self._padded(min(plan.micro_batch, rows)) + -(-rows // plan.micro_batch) * overhead
        return operations * slower * tokens

    def _padded(self, rows: int) -> float:
        """Tokens a row with its padding: the mean longest of `rows` lengths as the rows are, else the expected one of
        lengths that are uniform up to twice their mean."""
        if self.recipe.data.pack:
            return float(self.longest_row)
        if self.lengths is not None:
            import numpy as np

            whole = len(self.lengths) // rows * rows
            if whole:
                return float(np.asarray(self.lengths[:whole]).reshape(-1, rows).max(1).mean())
            return float(max(self.lengths))
        return 2 * MEAN_SHARE * self.longest_row * rows / (rows + 1)
