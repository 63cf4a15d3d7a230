"""The space of plans of one recipe on one machine: micro-batch x the levers' choices, each with its bytes and its time.

It is walked whole, and the same input gives the same plans in the same order. Seconds are those of memory/step_time at the
machine's rates, with the levers' own slowdowns and padding.
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
from finetune.memory.case import Case, case_of
from finetune.memory.step_time import step_seconds, sums_of
from finetune.memory.storage import Storage, storage_of
from finetune.memory.table import LEVERS
from finetune.planner.budget import Budget, budget_of, device_of, precision_of
from finetune.planner.estimate import Estimate, Facts, StateBytes, UpdateBytes, estimate_case
from finetune.planner.hardware import Hardware
from finetune.planner.pins import Allowance, lever_choices, micro_batches, why_not_streamed

Place = Literal["device", "host"]
HeadPlace = Literal["device", "visit", "host"]
OF_STREAMING = (
    "activation_checkpointing",
    "activation_offload",
    "optimizer_placement",
    "optimizer_in_backward",
    "embedding_placement",
)
"""Levers whose time a streamed step's own seconds hold."""
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
    """One plan with its bytes, the seconds of its step, and these relative to the chosen plan's (below 1: faster)."""

    plan: Plan
    estimate: Estimate
    seconds: float
    relative_seconds: float = 1.0

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
        rates = self.hardware.rates if self.hardware.device == self.storage.device else None
        return replace(made, update_bytes=facts.update_bytes, rates=rates, sums=sums_of(made))

    @property
    def may_stream(self) -> bool:
        """Whether streamed plans are left to be tried where no resident one fits: on a GPU, and nothing speaks against it."""
        wanted = self.recipe.plan.weights
        return wanted == "auto" and self.storage.device == "cuda" and not why_not_streamed(self.recipe, self.ranks)[0]

    def candidates(self, streamed: bool = False, timed: bool = True) -> list[Candidate]:
        """Every plan, larger micro-batches and fewer levers first; not `timed`: only their bytes, 0 seconds. InputError for pins
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
                found.append(Candidate(plan, estimate_case(base, by_tokens), self._seconds(base) if timed else 0.0))
            for other in self._streamed(plan) if streamed or self.recipe.plan.weights == "streamed" else ():
                base = replace(base, plan=other)
                found.append(Candidate(other, estimate_case(base, by_tokens), self._seconds(base) if timed else 0.0))
        if not found:
            raise InputError(
                f"plan.optimizer_in_backward=true needs one micro-batch a step, and plan.micro_batch="
                f"{self.recipe.plan.micro_batch} makes several of {rows} rows",
                where="plan.optimizer_in_backward",
                remedy=f"plan.micro_batch={rows} or auto, or plan.optimizer_in_backward=false",
            )
        return found

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

    def _seconds(self, case: Case) -> float:
        """Seconds of one rank's step, with what levers, small micro-batches and padding add."""
        rows = min(case.plan.micro_batch, case.step_rows)
        timed = replace(case, filled=self._padded(rows) / self.longest_row)
        return self._steps * seconds_of(timed)

    @property
    def mean_row(self) -> float:
        """Tokens of a row without its padding, in the mean."""
        if self.recipe.data.pack:
            return float(self.longest_row)
        if self.lengths:
            return sum(self.lengths) / len(self.lengths)
        return MEAN_SHARE * self.longest_row

    @property
    def step_tokens(self) -> float:
        """Tokens of a step of all ranks, without padding."""
        train = self.recipe.train
        return float(train.batch_tokens or 0) if train.batch is None else train.batch * self.mean_row

    @property
    def _steps(self) -> float:
        """How much longer a step is than one of `rows` rows: one of so many tokens has more rows where they are short."""
        return max(1.0, self.step_tokens / (self.ranks * self.rows * self.mean_row))

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


def seconds_of(case: Case) -> float:
    """Seconds of one rank's step by this case's plan."""
    plan, streamed = case.plan, case.plan.weights == "streamed"
    levers = [lever for lever in LEVERS.values() if getattr(plan, lever.field) != lever.off]
    if not streamed:
        return step_seconds(case) * (1.0 + sum(lever.slowdown(case) for lever in levers))
    # A head that passes makes its logits in parts of its own.
    held = (*OF_STREAMING, "loss_chunk") if plan.head_placement == "host" else OF_STREAMING
    more = sum(lever.slowdown(case) for lever in levers if lever.field not in held)
    return weight_streaming.seconds(case) + step_seconds(case) * more
