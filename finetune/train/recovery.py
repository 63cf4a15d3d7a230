"""Out of memory: what a run does in place of ending.

The step that failed is undone - its gradients dropped, promised updates made, generators put back - and repeated with the
next smaller plan. Draws are keyed by the step and the row, so the repeated step is the same one, up to the order of sums.
A plan that only cuts batches differently goes on in place; another one starts again from a checkpoint of the last complete
state, in the same process. Where weights or optimizer state may have moved in the failed step, only a checkpoint holds the
last complete state, so the run goes back to the newest one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import store
from finetune.errors import NothingFitsError, StoppedError
from finetune.machine.collectives import World
from finetune.planner.plan import Decision
from finetune.planner.shrink import difference, in_place, mechanics, pins_in_the_way, smaller
from finetune.planner.space import Space
from finetune.telemetry import memory
from finetune.telemetry.log import Log
from finetune.train import state
from finetune.train.job import Job

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""How torch's own message begins when the host's memory is at an end: a plain RuntimeError."""
CLAIM = "out-of-memory.claim"


class DeviceFullError(NothingFitsError):
    """The device ran out of memory in `where`."""

    def __init__(self, where: str, said: str) -> None:
        super().__init__(
            f"the GPU ran out of memory in {where}",
            said,
            "plan.micro_batch=1, plan.activation_checkpointing=true, plan.activation_offload=true or a smaller "
            "data.max_tokens; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less where lengths vary; "
            "resume=auto goes on from the last checkpoint",
        )
        self.within = where


class AgainError(Exception):
    """The run is to be built again with another plan, from `checkpoint` (None: from its start)."""

    def __init__(self, checkpoint: Path | None, out_of_memory: list[dict[str, Any]]) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.out_of_memory = out_of_memory


@contextmanager
def memory_named(where: str) -> Iterator[None]:
    """Turns out-of-memory of the device into DeviceFullError, that of the host into NothingFitsError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceFullError(where, str(error).split(". ")[0]) from None
    except (MemoryError, RuntimeError) as error:
        if not host_is_full(error):
            raise
        raise host_full(where, error) from None


def host_is_full(error: BaseException) -> bool:
    """Whether an error says that the host has no memory left."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error))


def host_full(where: str, error: BaseException) -> NothingFitsError:
    """The error for a host without memory left."""
    lines = str(error).splitlines()
    return NothingFitsError(
        f"the host ran out of memory in {where}",
        lines[0] if lines else "MemoryError",
        "plan.host_memory=, plan.micro_batch=1 or a smaller data.max_tokens; complete checkpoints are untouched: "
        "resume=auto goes on from the last one",
    )


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The generators' states, for `undo`."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_states(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def undo(job: Job) -> bool:
    """Takes back what a failed step left. False where weights or state may have moved, so that it cannot be."""
    moved = job.update.moved
    job.update.done()
    _let_go(job)
    if job.update.stream is not None and not moved:
        try:
            job.update.stream.recover()
        except torch.OutOfMemoryError:
            # Not even a block with its update has room, so the promised updates cannot be made here.
            moved = True
        _let_go(job)
    return not moved


def _let_go(job: Job) -> None:
    job.optimizer.zero_grad(set_to_none=True)
    for parameter in job.model.trainable().values():
        parameter.grad = None
    gc.collect()
    memory.tidy(job.world.device)


@contextmanager
def smaller_where_full(
    world: World,
    decision: Decision,
    space: Space,
    begin: tuple[Path | None, int, list[dict[str, Any]]],
    log: Log,
) -> Iterator[None]:
    """Around the building of a run's model: AgainError with a smaller plan where the device is too small for it. `begin`: the
    checkpoint that the run starts from, its step, and what out-of-memory it met before."""
    checkpoint, step, met = begin
    try:
        with memory_named("loading the model"):
            yield
    except DeviceFullError as full:
        found = smaller(space, decision) if world.size == 1 else None
        if found is None:
            raise
        before, after = mechanics(decision.plan), mechanics(found.plan)
        log.notice(f"out of memory in {full.within}: starts again with {difference(before, after)}")
        entry = {"step": step + 1, "where": full.within, "before": before, "after": after}
        raise AgainError(checkpoint, [*met, entry]) from None


def smaller_plan(job: Job, decision: Decision, space: Space, full: DeviceFullError) -> Decision:
    """After `full`: the decision to go on with in place. AgainError where the run has to be built again for it;
    NothingFitsError, with the last complete state saved, where no plan is left."""
    whole = undo(job)
    step, keep = job.progress.step, job.recipe.run.keep
    again_possible = (keep and whole) or step == 0 or not whole
    found = smaller(space, decision, only_in_place=whole and not again_possible)
    if found is None:
        raise _no_plan(job, decision, space, full, whole)
    before, after = mechanics(decision.plan), mechanics(found.plan)
    entry = {"step": step + 1, "where": full.within, "before": before, "after": after}
    job.progress.out_of_memory = [*job.progress.out_of_memory, entry]
    told = f"out of memory in {full.within}: goes on with {difference(before, after)}"
    if job.world.size > 1:
        raise _ended(job, full, whole, difference(before, after))
    if whole and in_place(decision.plan, found.plan):
        job.log.notice(f"{told}; step {step + 1} is repeated" if step or "trial" not in full.within else told)
        return found
    saved = _save_here(job) if whole and keep else None
    whole = whole and (saved is not None or step == 0)
    checkpoint = saved or (None if whole else job.progress.saved)
    since = f"from {checkpoint.name}" if checkpoint else "from the start"
    if job.stop.asked is not None:
        goes = f"go on with run.dir={job.folder} resume=auto" if keep else "run.keep=true"
        raise StoppedError(f"stopped by {job.stop.asked}; {told}, {since}", str(job.folder), goes)
    why = "" if whole else " (weights had moved in the failed step)"
    job.log.notice(f"{told}; the model is built again and goes on {since}{why}")
    raise AgainError(checkpoint, job.progress.out_of_memory)


def _no_plan(job: Job, decision: Decision, space: Space, full: DeviceFullError, whole: bool) -> NothingFitsError:
    pins = pins_in_the_way(space, decision)
    remedy = (
        f"without {' or '.join(pins)} there is a smaller plan" if pins else "a smaller data.max_tokens or model.base="
    )
    saved = _save_here(job) if whole else None
    rest = f"; the state after step {job.progress.step} is saved: resume=auto goes on from it" if saved else ""
    what = "only pinned choices would help" if pins else "no smaller plan exists"
    return NothingFitsError(f"out of memory in {full.within}, and {what}", full.fault.where, remedy + rest)


def _ended(job: Job, full: DeviceFullError, whole: bool, change: str) -> NothingFitsError:
    """One of several processes: the others wait in a sum, so all end; the last complete state is saved with the plan to go
    on with. Every process holds the whole state, so the one that failed can write it."""
    saved = _save_here(job) if whole else None
    rest = f"resume=auto goes on with {change}"
    if saved is None:
        rest = "resume=auto goes on from the last checkpoint; give it a smaller plan: " + change
    held = f"; the state after step {job.progress.step} is saved" if saved else ""
    return NothingFitsError(f"the GPU ran out of memory in {full.within}{held}", full.fault.where, rest)


def _save_here(job: Job) -> Path | None:
    """Writes the checkpoint from this process alone, unless another one does or did; None for a trial, and where not even
    that has room."""
    if not job.recipe.run.keep:
        return None
    if job.world.size == 1:
        try:
            return state.save(job)
        except torch.OutOfMemoryError:
            return None
    target, claim = store.path_of(job.checkpoints, job.progress.step), job.folder / CLAIM
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return target
    try:
        return state.write(job)
    finally:
        claim.unlink()
