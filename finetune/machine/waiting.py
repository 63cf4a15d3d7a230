"""Work for which the processes of a run wait for as long as it takes.

A collective that waits for an hour ends in its time-out. So a process that is ready says so in the group's store and
asks there now and then for the others; only when all are ready do they meet in a collective, which then takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from finetune.errors import FinetuneError, LostProcessError
from finetune.machine.collectives import World

BETWEEN_LOOKS = 0.1
"""Seconds between two looks at the store."""


def in_own_time(world: World, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives on this rank, once every rank has done its own, however long that takes.

    `name` is the work's own among the group's. An error of a rank is raised on every rank, the lowest rank's first;
    LostProcessError when a rank ends meanwhile.
    """
    if world.size == 1:
        return make()
    store = dist.distributed_c10d._get_default_store()
    key = f"ready {name}"
    outcome: Any = None
    failed: FinetuneError | None = None
    try:
        outcome = make()
    except FinetuneError as error:
        failed = error
    finally:
        store.set(f"{key} {world.rank}", "yes")
    for rank in range(world.size):
        _wait(store, f"{key} {rank}")
    errors = [error for error in world.gather(failed) if error is not None]
    store.delete_key(f"{key} {world.rank}")  # the same store may serve a later run of these processes
    if errors:
        errors[0].everywhere = True
        raise errors[0]
    return outcome


def first_alone(world: World, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives on rank 0, on every rank, however long it takes; an error raised there is raised on every rank."""
    return world.share(in_own_time(world, name, make if world.first else lambda: None))


def _wait(store: Any, key: str) -> None:
    while True:
        try:
            if store.check([key]):
                return
        except RuntimeError as error:
            raise LostProcessError(
                "another process of this run has ended, so this one stops too",
                remedy=f"its own message says why ({str(error).splitlines()[0]})",
            ) from error
        time.sleep(BETWEEN_LOOKS)
