"""Several processes of one run, forked: gloo on the CPU, a second instead of torchrun's ten."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from finetune.errors import FinetuneError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(recipe: dict[str, Any], ranks: int, timeout: float = 120.0) -> list[Any]:
    """`finetune.run(recipe)` on every rank; each rank's summary in order. A rank that fails fails the call."""
    got = endings(recipe, ranks, timeout=timeout)
    failures = [ending for ending in got if isinstance(ending, BaseException)]
    assert not failures, "".join(traceback.format_exception(failures[0]))
    assert [summary["hardware"]["ranks"] for summary in got] == [ranks] * ranks
    return got


def endings(
    recipe: dict[str, Any], ranks: int, before: Callable[[int], None] = lambda rank: None, timeout: float = 120.0
) -> list[Any]:
    """How `finetune.run(recipe)` ends on each rank, in order: its summary, or the error raised. `before(rank)` runs first."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = free_port()

    def work(rank: int) -> None:
        import torch

        import finetune

        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        try:
            before(rank)
            answers.put((rank, finetune.run(recipe).summary))
        except FinetuneError as error:
            answers.put((rank, error))
        except BaseException:
            answers.put((rank, AssertionError(traceback.format_exc())))

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return [
            ending for _, ending in sorted((answers.get(timeout=timeout) for _ in processes), key=lambda pair: pair[0])
        ]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
