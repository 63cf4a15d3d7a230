"""One optimizer step: count, forward and backward of every micro-batch, sum over ranks, clip, update.

The count of trained items is known from the labels and summed over the ranks before the first forward, so every
micro-batch's loss is divided by the same number. The update happens only after the loss and the gradient norm were
seen to be finite: a step that diverges changes nothing. (With plan.optimizer_in_backward only the loss is seen before.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from finetune.contracts import Batch, StepResult
from finetune.data.prefetch import Loaded, load
from finetune.errors import DataError
from finetune.kernels.determinism import deterministic
from finetune.kernels.norms import tensor_norms
from finetune.kernels.precision import compute, products
from finetune.optim.schedule import peak_rate, rate
from finetune.train.diverged import diverged, overflowed
from finetune.train.job import Job, StopAskedError

SKIPPED_LIMIT = 20
"""fp16 steps in a row that may overflow before the run stops: by then the loss scale is a millionth of its start."""


def train_step(job: Job, rows: Sequence[int], steps: int, loaded: Loaded | None = None) -> StepResult:
    """Trains on `rows` (of the global batch; this rank takes its share) and returns what happened.

    `steps` is the length of the schedule; `loaded` are the rows' batches where they were made
    ahead. Raises StopAskedError before anything is done when any rank was asked to stop, and DivergedError before the
    update when the loss or the gradient is not finite. Under fp16 such a step is skipped with a smaller loss scale, and
    only SKIPPED_LIMIT of them in a row raise.
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
    peak = peak_rate(job.recipe.optimizer, job.recipe.train)
    lr = rate(job.recipe.schedule, peak, job.progress.step, steps)
    for group in job.optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    scale = job.scale.scale if job.scale else None
    losses, norms_P = _gradients_of(job, batches, count)
    local = torch.stack(losses).sum() if losses else torch.zeros((), device=world.device)
    norm = torch.linalg.vector_norm(norms_P)
    # One read of the device a step: whatever is watched is read with it.
    local_loss, norm_value, zeros = torch.stack([local.float(), norm, job.health.count_zeros(norms_P)]).tolist()
    loss = world.sum([local_loss])[0] / count
    skipped = _judge(job, batches, losses, loss, norm_value)
    if skipped:
        job.optimizer.zero_grad(set_to_none=True)
        if job.update.stream is not None:
            job.update.stream.drop()
    elif job.update.in_backward is None:
        factor = clip(_gradients(job), norm_value, job.recipe.train.max_grad_norm)
        job.update.step(factor)
    job.update.done()
    warning = job.health.zero_gradients(zeros)
    if warning:
        job.log.warn(f"step {job.progress.step + 1}: {warning}")
    seconds = time.perf_counter() - started + loaded.waited
    step = job.progress.step + 1
    return StepResult(step, loss, int(tokens), int(count), lr, norm_value, seconds, data_wait, skipped, scale)


def _gradients_of(job: Job, batches: list[Batch], count: float) -> tuple[list[Tensor], Tensor]:
    """The summed losses of the micro-batches, and the norms of every parameter's gradient of the whole step, unscaled."""
    in_backward = job.update.in_backward
    if in_backward is not None:
        (batch,) = batches
        in_backward.mode = "update"
        loss = backward(job, batch, count, look=True)
        norms = in_backward.finish()
        if job.update.host is not None:
            job.update.host.end()
        return [loss], torch.stack(norms)
    if job.update.stream is not None:
        losses = stream_batches(job, batches, count)
    else:
        losses = [backward(job, batch, count) for batch in batches]
    gradients = _gradients(job)
    job.world.sum_gradients(gradients)
    if job.scale is not None:
        torch._foreach_mul_(gradients, 1.0 / job.scale.scale)
    return losses, _norms(job, gradients)


def _norms(job: Job, gradients: list[Tensor]) -> Tensor:
    """The norms of every trained parameter's gradient in model order; those of streamed ones are known already."""
    here = tensor_norms(gradients)
    if job.update.stream is None:
        return here
    own = iter(here)
    elsewhere = job.update.stream.norms()
    return torch.stack([elsewhere[p] if p in elsewhere else next(own) for p in job.model.trainable().values()])


def stream_batches(job: Job, batches: list[Batch], count: float) -> list[Tensor]:
    """Forward and backward of all micro-batches by the streamed step; as `backward` of each, one after the other."""
    stream, device = job.update.stream, job.world.device
    assert stream is not None
    scale = job.scale.scale if job.scale else 1.0

    @contextmanager
    def enter(batch: Batch) -> Iterator[None]:
        job.key.set(job.progress.step, batch.row_ids)
        with given_ids(job, batch):
            yield

    def loss_of(hidden_BSD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        with compute(device, job.precision, job.recipe.model.trained):
            loss = job.task.loss_of(hidden_BSD, job.model, batch, job.plan)
        return loss, loss / count * scale

    with (
        products("tf32") if job.precision == "tf32" else nullcontext(),
        deterministic(job.plan.attention == "deterministic"),
    ):
        return stream.step([batch.to(device) for batch in batches], enter, loss_of, scale / count)


def backward(job: Job, batch: Batch, count: float, look: bool = False) -> Tensor:
    """Adds the micro-batch's share of the gradient; returns its summed loss, detached, still on the device.

    With `look` the loss is read first, and DivergedError raised before the backward where it is not finite.
    """
    on_device = batch.to(job.world.device)
    job.key.set(job.progress.step, on_device.row_ids)
    again = deterministic(job.plan.attention == "deterministic")
    with products("tf32") if job.precision == "tf32" else nullcontext(), again:
        with compute(job.world.device, job.precision, job.recipe.model.trained), given_ids(job, batch):
            loss = job.task.loss_sum(job.model, on_device, job.plan)
        if look and not math.isfinite(float(loss.detach())):
            raise diverged(job, [batch], [loss.detach()], float(loss.detach()) / count, None)
        (loss / count * (job.scale.scale if job.scale else 1.0)).backward()
    return loss.detach()


def given_ids(job: Job, batch: Batch) -> AbstractContextManager[None]:
    """Tells an embedding on the host the ids that it will be asked for."""
    if job.given is None:
        return nullcontext()
    return job.given.given(batch.input_ids if batch.host_ids is None else batch.host_ids)


def _gradients(job: Job) -> list[Tensor]:
    """Every trained parameter's gradient in model order; one that no row of this rank reached counts as zeros.

    Without those of parameters whose gradients a streamed step has taken to the host.
    """
    elsewhere = job.update.stream.elsewhere if job.update.stream is not None else set()
    gradients = []
    for parameter in job.model.trainable().values():
        if parameter in elsewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def _judge(job: Job, batches: list[Batch], losses: list[Tensor], loss: float, norm: float) -> bool:
    """Whether the step is to be skipped, which only fp16 does; DivergedError where it ends the run."""
    finite = math.isfinite(loss) and math.isfinite(norm)
    if job.scale is None:
        if not finite:
            raise diverged(job, batches, losses, loss, norm)
        return False
    job.scale.note(not finite)
    if job.scale.skipped_in_a_row >= SKIPPED_LIMIT:
        raise overflowed(job, SKIPPED_LIMIT)
    return not finite


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float | None) -> float:
    """Scales the gradients in place so that their global norm is at most `max_norm`, as torch's clip_grad_norm_ does;
    returns the factor."""
    if max_norm is None or not norm > max_norm - 1e-6:
        return 1.0
    factor = min(1.0, max_norm / (norm + 1e-6))
    torch._foreach_mul_(list(gradients), factor)
    return factor
