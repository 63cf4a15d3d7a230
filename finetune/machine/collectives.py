"""The processes of a run: which one this is, and the few sums they exchange.

Plain data parallel needs no wrapper around the model: every rank runs its share of a step's rows, gradients are summed
over the ranks once a step, and all losses were already divided by the global count. So ranks with unequal numbers of
micro-batches never wait for one another inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.environment import Launch
from finetune.errors import FinetuneError, InputError, LostProcessError

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class World:
    """This process (`rank` of `size`) and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64; the same on every rank."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _together():
            dist.all_reduce(tensor)
            return tensor.tolist()

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with _together():
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def agree(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0, on every rank, which all wait for it; an error raised there is raised on every rank."""
        value: Any = None
        if self.first:
            try:
                value = make()
            except FinetuneError as error:
                if self.size == 1:
                    raise
                error.everywhere = True
                value = error
        value = self.share(value)
        if isinstance(value, FinetuneError):
            raise value
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(box, value)
        return box

    def wait(self) -> None:
        if self.size > 1:
            with _together():
                dist.barrier()

    def sum_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Sums each gradient over the ranks in place, in flat buckets of one dtype."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        size = 0
        for gradient in gradients:
            if bucket and (gradient.dtype != bucket[0].dtype or size > BUCKET_BYTES):
                _reduce(bucket)
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
        if bucket:
            _reduce(bucket)


@contextmanager
def _together() -> Iterator[None]:
    """Turns a broken connection (gloo raises a plain RuntimeError, NCCL its own kind) into LostProcessError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this run has ended, so this one stops too",
            remedy=f"its own message says why ({str(error).splitlines()[0]})",
        ) from error


def _reduce(bucket: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    with _together():
        dist.all_reduce(flat)
    offset = 0
    for gradient in bucket:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def join(device: str, launch: Launch) -> World:
    """Joins the process group that the launcher describes: gloo on a CPU, NCCL on GPUs; alone when it describes none.

    torch's own group and not accelerate's process state: that is one per process for good, so a second run in the same
    process (another device, another world) would silently be given the first one's.
    """
    if device == "cuda":
        here = torch.cuda.device_count()
        if launch.local_rank >= here:
            raise InputError(
                f"process {launch.local_rank + 1} of this machine has no GPU of its own: there are {here}",
                "the launcher",
                f"start at most {here} processes a machine: --num_processes or --nproc-per-node {here}",
            )
        torch.cuda.set_device(launch.local_rank)
    place = torch.device(device, launch.local_rank) if device == "cuda" else torch.device(device)
    if launch.world > 1:
        kind = "nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(kind, rank=launch.rank, world_size=launch.world)
        except (ValueError, dist.DistError) as error:
            raise InputError(
                f"the {launch.world} processes that the launcher names cannot be joined: {str(error).splitlines()[0]}",
                "environment variables of the launcher",
                "start with accelerate launch or torchrun, or unset WORLD_SIZE and RANK to run one process",
            ) from error
    return World(launch.rank, launch.world, place)


def leave(world: World) -> None:
    """Leaves the process group, if there is one."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
