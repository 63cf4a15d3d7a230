"""One optimizer step: count, forward and backward of every micro-batch, sum over ranks, clip, update.

The count of trained items is known from the labels and summed over the ranks before the first forward, so every
micro-batch's loss is divided by the same number. The update happens only after the loss and the gradient norm were
seen to be finite: a step that diverges changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from finetune.contracts import Batch, StepResult
from finetune.data.prefetch import Loaded, load
from finetune.errors import DataError, DivergedError
from finetune.kernels.precision import compute
from finetune.optim.schedule import peak_rate, rate
from finetune.train.job import Job, StopAskedError


def train_step(job: Job, rows: Sequence[int], steps: int, loaded: Loaded | None = None) -> StepResult:
    """Trains on `rows` (of the global batch; this rank takes its share) and returns what happened.

    `steps` is the length of the schedule; `loaded` are the rows' batches where they were made
    ahead. Raises StopAskedError before anything is done when any rank was asked to stop, and DivergedError before the
    update when the loss or the gradient is not finite.
    """
    started = time.perf_counter()
    world, plan = job.world, job.plan
    if loaded is None:
        loaded = load((0, 0, np.asarray(rows)), job.splits.train, job.task, (world.rank, world.size, plan.micro_batch))
    loaded.raise_error()
    batches = loaded.batches
    data_wait = time.perf_counter() - started + loaded.waited
    counts = [loaded.trained, loaded.tokens, job.stop.asked is not None]
    count, tokens, stop = world.sum(counts)
    if stop:
        raise StopAskedError(job.stop.asked or "a signal on another rank")
    if count == 0:
        raise DataError("no token of this step is trained", f"rows {list(map(int, rows))[:8]}")
    losses = [_backward(job, batch, count) for batch in batches]
    gradients = _gradients(job)
    world.sum_gradients(gradients)
    norm = gradient_norm(gradients)
    local = torch.stack(losses).sum() if losses else torch.zeros((), device=world.device)
    local_loss, norm_value = torch.stack([local.float(), norm]).tolist()
    loss = world.sum([local_loss])[0] / count
    if not (math.isfinite(loss) and math.isfinite(norm_value)):
        raise _diverged(job, batches, losses, loss, norm_value)
    clip(gradients, norm_value, job.recipe.train.max_grad_norm)
    peak = peak_rate(job.recipe.optimizer, job.recipe.train)
    lr = rate(job.recipe.schedule, peak, job.progress.step, steps)
    for group in job.optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started + loaded.waited
    return StepResult(job.progress.step + 1, loss, int(tokens), int(count), lr, norm_value, seconds, data_wait)


def _backward(job: Job, batch: Batch, count: float) -> Tensor:
    """Adds the micro-batch's share of the gradient; returns its summed loss, detached, still on the device."""
    on_device = batch.to(job.world.device)
    job.key.set(job.progress.step, on_device.row_ids)
    with compute(job.world.device, job.precision, job.recipe.model.trained):
        loss = job.task.loss_sum(job.model, on_device, job.plan)
    (loss / count).backward()
    return loss.detach()


def _gradients(job: Job) -> list[Tensor]:
    """Every trained parameter's gradient in model order; one that no row of this rank reached counts as zeros."""
    gradients = []
    for parameter in job.model.trainable().values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of the per-tensor fp32 norms, in the order given: fp32 scalar on the gradients' device.

    16-bit gradients are widened inside the sum, tensor by tensor: no fp32 copy of any is made.
    """
    gradients = list(gradients)
    if not gradients:
        return torch.zeros(())
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float | None) -> None:
    """Scales the gradients in place so that their global norm is at most `max_norm`, as torch's clip_grad_norm_ does."""
    if max_norm is not None and norm > max_norm - 1e-6:
        torch._foreach_mul_(list(gradients), min(1.0, max_norm / (norm + 1e-6)))


def _diverged(job: Job, batches: list[Batch], losses: list[Tensor], loss: float, norm: float) -> DivergedError:
    """Names the rows whose own loss is not finite, of all ranks. When each alone is finite, all of a micro-batch whose
    loss is not are named, and when all losses are, the gradient is to blame: then all rows."""
    rows = [(int(row), float(value)) for batch, value in zip(batches, losses, strict=True) for row in batch.row_ids]
    bad = [row for row, value in rows if not math.isfinite(value)]
    own = {
        "named": [_describe(job, row) for row in bad if not _row_is_finite(job, row)],
        "suspects": bad,
        "all": [row for row, _ in rows],
    }
    ranks = job.world.gather(own)
    named, suspects, others = ([each for rank in ranks for each in rank[key]] for key in own)
    if not named:
        listed = suspects or others
        named = [f"one of rows {sorted(listed)[:16]}" + (" ..." if len(listed) > 16 else "")]
    return DivergedError(
        f"step {job.progress.step + 1}: the loss is {loss} and the gradient norm {norm}; nothing was updated",
        "; ".join(named[:8]),
        "look at those rows, or lower optimizer.lr or raise schedule.warmup; resume=auto goes on from the last checkpoint",
    )


def _row_is_finite(job: Job, row: int) -> bool:
    batch = job.task.collate([job.splits.train[row]]).to(job.world.device)
    job.key.set(job.progress.step, batch.row_ids)
    with torch.no_grad(), compute(job.world.device, job.precision, job.recipe.model.trained):
        return math.isfinite(float(job.task.loss_sum(job.model, batch, job.plan)))


def _describe(job: Job, row: int) -> str:
    sources = ", ".join(str(source + 1) for source in job.splits.train[row].sources[:8])
    return f"training row {row} (data row {sources})"
