"""Several processes of one run, forked: gloo on the CPU, a second instead of torchrun's ten."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(recipe: dict[str, Any], ranks: int, timeout: float = 120.0) -> list[Any]:
    """`finetune.run(recipe)` on every rank; each rank's summary in order. A rank that fails fails the call."""
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
            answers.put((rank, None, finetune.run(recipe).summary))
        except BaseException:
            answers.put((rank, traceback.format_exc(), None))

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        got = sorted((answers.get(timeout=timeout) for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    failures = [failure for _, failure, _ in got if failure]
    assert not failures, failures[0]
    summaries = [summary for _, _, summary in got]
    assert [summary["hardware"]["ranks"] for summary in summaries] == [ranks] * ranks
    return summaries
