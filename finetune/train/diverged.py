"""What is said when a step's loss or gradient is not a finite number: the step, the rows, and the last good checkpoint."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from finetune.checkpoint import store
from finetune.contracts import Batch
from finetune.errors import DivergedError
from finetune.kernels.precision import compute
from finetune.train.job import Job


def diverged(job: Job, batches: list[Batch], losses: list[Tensor], loss: float, norm: float | None) -> DivergedError:
    """Names the rows whose own loss is not finite, of all ranks. When each alone is finite, all of a micro-batch whose
    loss is not are named, and when all losses are, the gradient is to blame: then all rows. `norm` is None before backward."""
    rows = [(int(row), float(value)) for batch, value in zip(batches, losses, strict=True) for row in batch.row_ids]
    bad = [row for row, value in rows if not math.isfinite(value)]
    # Rows are run again through the whole model, which a streamed one is only while it is visited.
    with job.update.visiting() if bad else nullcontext():
        named = [_describe(job, row) for row in bad if not _row_is_finite(job, row)]
    own = {
        "named": named,
        "suspects": bad,
        "all": [row for row, _ in rows],
    }
    ranks = job.world.gather(own)
    named, suspects, others = ([each for rank in ranks for each in rank[key]] for key in own)
    if not named:
        listed = suspects or others
        named = [f"one of rows {sorted(listed)[:16]}" + (" ..." if len(listed) > 16 else "")]
    updated = job.update.in_backward is not None and norm is not None
    return DivergedError(
        f"step {job.progress.step + 1}: the loss is {loss}"
        + ("" if norm is None else f" and the gradient norm {norm}")
        + ("; the update was made in backward and is lost" if updated else "; nothing was updated"),
        "; ".join(named[:8]),
        f"look at those rows, or lower optimizer.lr or raise schedule.warmup; {last_good(job)}",
    )


def overflowed(job: Job, steps: int) -> DivergedError:
    """The end of an fp16 run whose loss scale finds no rest (case B131)."""
    return DivergedError(
        f"step {job.progress.step + 1}: {steps} steps in a row overflowed in fp16 and were skipped; the loss scale fell to "
        f"{job.scale.scale if job.scale else 0:g}",
        "model.precision=fp16",
        "model.precision=bf16 (where the GPU has it) or fp32: models trained in bf16 often exceed fp16's 65,504; or lower "
        f"optimizer.lr; {last_good(job)}",
    )


def last_good(job: Job) -> str:
    """Where the run can go on from, in words; the same on every rank."""
    path = job.world.agree(lambda: store.newest(job.checkpoints)[0])
    if path is None:
        return "there is no checkpoint yet: the run starts anew"
    return f"the last good checkpoint is {path}, and resume=auto goes on from it"


def _row_is_finite(job: Job, row: int) -> bool:
    batch = job.task.collate([job.splits.train[row]]).to(job.world.device)
    job.key.set(job.progress.step, batch.row_ids)
    with torch.no_grad(), compute(job.world.device, job.precision, job.recipe.model.trained):
        return math.isfinite(float(job.task.loss_sum(job.model, batch, job.plan)))


def _describe(job: Job, row: int) -> str:
    sources = ", ".join(str(source + 1) for source in job.splits.train[row].sources[:8])
    return f"training row {row} (data row {sources})"
