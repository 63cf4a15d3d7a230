"""Out of memory: what a run does in place of ending.

The step that failed is undone - its gradients dropped, generators and the loss scale put back - and repeated with the next
smaller plan. Draws are keyed by the step and the row, so the repeated step is the same one, up to the order of sums. A plan
that only cuts batches differently goes on in place; for any other one the model is built again in the same process, from a
checkpoint of the last complete state. Where the failed step has moved weights or optimizer state already, only what is on
the disk is whole, so the run goes back to its newest checkpoint.

Several processes cannot go on so, since the others wait in a sum: the state is saved, and all end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.lock import alone
from finetune.errors import CheckpointError, NothingFitsError
from finetune.planner.plan import Decision
from finetune.planner.shrink import difference, in_place, mechanics, pins_in_the_way, smaller
from finetune.planner.space import Space
from finetune.telemetry import memory
from finetune.train import state
from finetune.train.job import Job

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""How torch's own message begins when the host's memory is at an end: a plain RuntimeError."""
CLAIM = ".out-of-memory"


class MemoryFullError(NothingFitsError):
    """Memory ran out in `within`."""

    def __init__(self, what: str, within: str, said: str, remedy: str) -> None:
        super().__init__(f"{what} ran out of memory in {within}", said, remedy)
        self.within = within


class DeviceFullError(MemoryFullError):
    """The device ran out of memory."""

    def __init__(self, within: str, said: str) -> None:
        super().__init__(
            "the GPU",
            within,
            said,
            "plan.micro_batch=1, plan.activation_checkpointing=true, plan.activation_offload=true or a smaller "
            "data.max_tokens; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less where lengths vary; "
            "resume=auto goes on from the last checkpoint",
        )


class HostFullError(MemoryFullError):
    """The host ran out of memory, so the run ends: what it would take to go on is no less than what it took."""

    def __init__(self, within: str, said: str) -> None:
        super().__init__(
            "the host",
            within,
            said or "MemoryError",
            "a smaller plan.host_memory, plan.micro_batch=1 or a smaller data.max_tokens; resume=auto goes on from the last "
            "checkpoint",
        )


class AgainError(Exception):
    """The run is to be built again with another plan, from `checkpoint` (None: from its start)."""

    def __init__(self, checkpoint: Path | None, out_of_memory: list[dict[str, Any]]) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.out_of_memory = out_of_memory


@contextmanager
def memory_named(within: str) -> Iterator[None]:
    """Turns torch's and Python's out-of-memory into DeviceFullError or HostFullError, which say in what it was."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceFullError(within, str(error).split(". ")[0]) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and CPU_ALLOCATOR not in str(error):
            raise
        raise HostFullError(within, str(error).split("\n")[0]) from None


@contextmanager
def taken_back(job: Job) -> Iterator[None]:
    """A step in which memory runs out leaves generators and the loss scale as they were before it."""
    device, scale = job.world.device, job.scale
    here, facts = torch.get_rng_state(), scale.facts() if scale is not None else {}
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    except MemoryFullError:
        torch.set_rng_state(here)
        if there is not None:
            torch.cuda.set_rng_state(there, device)
        for name, value in facts.items():
            setattr(scale, name, value)
        raise


def undo(job: Job) -> bool:
    """Frees what a failed step left on the device. False where weights or state may have moved, so that it is not undone."""
    device = job.world.device
    if device.type == "cuda":
        # Copies beside the computation may still be writing to memory that is free already.
        torch.cuda.synchronize(device)
    whole = not job.update.moved
    if job.update.in_backward is not None:
        job.update.in_backward.forget()
    if job.update.stream is not None:
        job.update.stream.recover()
    for parameter in job.model.trainable().values():
        parameter.grad = None
    gc.collect()
    memory.tidy(device)
    return whole


def smaller_plan(job: Job, decision: Decision, space: Space, full: MemoryFullError) -> Decision:
    """After `full`: the decision to go on with in place. Raises AgainError where the model has to be built again for it, and
    NothingFitsError, with the last complete state saved, where the run cannot go on."""
    whole = undo(job)
    if isinstance(full, HostFullError):
        raise _ended(job, whole, full)
    step = job.progress.step
    back = None if step == 0 else job.progress.saved
    rebuilt = step == 0 or (job.recipe.run.keep and (whole or back is not None))
    before_it = sum(each["step"] == step + 1 for each in job.progress.out_of_memory)
    found = smaller(space, decision, not rebuilt, before_it) if whole or rebuilt else None
    if found is None:
        raise _no_plan(job, decision, space, full, whole)
    before, after = mechanics(decision.plan), mechanics(found.plan)
    change = difference(before, after)
    entry = {"step": step + 1, "where": full.within, "before": before, "after": after}
    job.progress.out_of_memory = [*job.progress.out_of_memory, entry]
    if job.world.size > 1:
        raise _ended(job, whole, full, change)
    told = f"out of memory in {full.within}; the run goes on with a smaller plan ({change})"
    if whole and in_place(decision.plan, found.plan):
        job.log.notice(told)
        return found
    since = (
        f"the state after step {step}"
        if whole
        else f"{back.name} (weights had moved in the failed step)"
        if back
        else "the start"
    )
    job.log.notice(f"{told}; the model is built again, from {since if step else 'the start'}")
    if whole and step:
        back = state.save(job)
    if job.stop.asked is not None:
        raise state.stopped(job, job.stop.asked, back)
    raise AgainError(back, job.progress.out_of_memory)


def _no_plan(job: Job, decision: Decision, space: Space, full: MemoryFullError, whole: bool) -> NothingFitsError:
    pins = pins_in_the_way(space, decision)
    other = smaller(space, decision)
    if other is not None:
        change = difference(mechanics(decision.plan), mechanics(other.plan))
        why = (
            "no checkpoint is there to do it from"
            if job.recipe.run.keep
            else "nothing of a trial is saved (run.keep=false)"
        )
        what, remedy = f"a smaller plan needs the model built again, but {why}", f"start with a smaller plan: {change}"
    elif pins:
        what, remedy = "only pinned choices would help", f"without {' or '.join(pins)} there is a smaller plan"
    else:
        what, remedy = "no plan is smaller", "a smaller data.max_tokens, or model.base=nf4"
    return _ended(job, whole, NothingFitsError(f"{full.fault.what}, and {what}", full.fault.where, remedy))


def _ended(job: Job, whole: bool, error: NothingFitsError, change: str = "") -> NothingFitsError:
    """The error to end with, once what can be saved is; it says what is there. `change`: of the plan that a resume takes."""
    fault = error.fault
    moved = "weights had moved in the failed step, so it cannot be undone"
    if job.progress.saved is not None:
        moved += "; the last checkpoint is untouched"
    kept, note = _save(job) if whole else (False, moved)
    remedy = fault.remedy
    if change:
        how = "goes on with" if kept else "goes on from the last checkpoint; give it the smaller plan:"
        remedy = f"resume=auto {how} {change} (several processes cannot change their plan by themselves)"
    return NothingFitsError(f"{fault.what}; {note}", fault.where, remedy)


def _save(job: Job) -> tuple[bool, str]:
    """Saves the last complete state, which every process holds whole; whether it is saved, and that in words. Of several
    processes the first that comes writes."""
    step = job.progress.step
    if not job.recipe.run.keep:
        return False, "nothing of a trial is kept"
    try:
        if job.world.size == 1:
            state.save(job)
        else:
            with alone(job.folder / CLAIM) as mine:
                if mine:
                    state.write(job)
    except (CheckpointError, MemoryError, RuntimeError, OSError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        return False, f"the state after step {step} could not be saved ({said}); the last checkpoint is untouched"
    return True, f"the state after step {step} is saved"
