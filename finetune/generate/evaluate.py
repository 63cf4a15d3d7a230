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


@dataclass(frozen=True)
class Evaluator:
    """Measures a model on row sets; every rank takes its share of the rows and none is counted twice.

    `interrupted` is asked between batches and may raise.
    """

    task: Task
    model: Model
    plan: Plan
    world: World
    precision: str
    interrupted: Callable[[], None]

    def losses(self, sets: dict[str, RowSet]) -> dict[str, float]:
        """`eval_loss` of the first set; `NAME/eval_loss` of the others. Sum of token losses over count of trained tokens."""
        figures: dict[str, float] = {}
        for index, (name, rows) in enumerate(sets.items()):
            total, count = self._sums(rows)
            figures["eval_loss" if index == 0 else f"{name}/eval_loss"] = total / count
        return figures

    def _sums(self, rows: RowSet) -> tuple[float, int]:
        module = self.model.module
        was_training = module.training
        module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        count = 0
        try:
            with torch.no_grad():
                for share in micro_batches(range(len(rows)), self.world.rank, self.world.size, self.plan.micro_batch):
                    self.interrupted()
                    batch = self.task.collate([rows[int(i)] for i in share])
                    count += self.task.count(batch)
                    with compute(self.world.device, self.precision):
                        total += self.task.loss_sum(self.model, batch.to(self.world.device), self.plan)
        finally:
            module.train(was_training)
        summed, counted = self.world.sum([float(total), count])
        return summed, int(counted)
