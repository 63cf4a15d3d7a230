"""Evaluation: one true loss over held-out rows. Sums and counts are kept, never logits, so memory does not grow with the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune.contracts import Model, Plan, Task
from finetune.data.dataset import RowSet
from finetune.data.loader import micro_batches
from finetune.kernels.precision import compute
from finetune.machine.collectives import World


@dataclass
class Evaluator:
    """Measures a model on row sets; every rank takes its share of the rows and none is counted twice.

    `interrupted` is asked between batches and may raise. A batch is a micro-batch of the plan; where the device's memory is
    too small for it, `rows` (0: as the plan) is halved from then on, which `say` tells, and the set is begun again.
    """

    task: Task
    model: Model
    plan: Plan
    world: World
    precision: str
    interrupted: Callable[[], None]
    say: Callable[[str], None] = lambda text: None
    rows: int = 0

    def losses(self, sets: dict[str, RowSet]) -> dict[str, float]:
        """`eval_loss` of the set `valid`, `NAME/eval_loss` of the others: sum of token losses over trained tokens."""
        figures: dict[str, float] = {}
        for name, rows in sets.items():
            total, count = self._sums(rows)
            figures["eval_loss" if name == "valid" else f"{name}/eval_loss"] = total / count
        return figures

    def _sums(self, rows: RowSet) -> tuple[float, int]:
        module = self.model.module
        was_training = module.training
        module.eval()
        own = None
        try:
            with torch.no_grad():
                while own is None:
                    own = self._own_sums(rows)
        finally:
            module.train(was_training)
        summed, counted = self.world.sum(own)
        return summed, int(counted)

    def _own_sums(self, rows: RowSet) -> tuple[float, int] | None:
        """This rank's sums; None where memory ran out and smaller batches are left to be tried."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        count, size = 0, self.rows or self.plan.micro_batch
        try:
            for share in micro_batches(range(len(rows)), self.world.rank, self.world.size, size):
                self.interrupted()
                batch = self.task.collate([rows[int(i)] for i in share])
                count += self.task.count(batch)
                with compute(self.world.device, self.precision):
                    total += self.task.loss_sum(self.model, batch.to(self.world.device), self.plan)
            return float(total), count
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        self.rows = size // 2
        self.say(f"out of memory in an evaluation with batches of {size} rows: it goes on with {self.rows}")
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return None
