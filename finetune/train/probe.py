"""A trial of the longest rows before the first step, so that too little memory shows at once and not after hours (case B135).

Forward and backward of one micro-batch, and nothing else: gradients are dropped, no generator moves, no state is made. So
a run with it and one without it are the same bit for bit. The update is not tried; its memory does not depend on rows.
"""

from __future__ import annotations

import numpy as np
import torch

from finetune.data.streaming import StreamRows
from finetune.train.job import Job
from finetune.train.step import backward, stream_batches


def wanted(job: Job) -> bool:
    """What plan.probe says; auto: on a GPU, since on a CPU it costs a step's time and memory is rarely short. The longest
    rows of a stream are not known."""
    asked = job.recipe.plan.probe and not isinstance(job.splits.train, StreamRows)
    return job.world.device.type == "cuda" if asked and job.recipe.plan.probe == "auto" else asked


def longest_rows(job: Job) -> list[int]:
    """Positions of the longest training rows, as many as a micro-batch has; the first ones among equals."""
    order = np.argsort(-np.asarray(job.splits.train.lengths), kind="stable")
    return [int(row) for row in order[: job.plan.micro_batch]]


def probe(job: Job, rows: list[int]) -> None:
    """Runs forward and backward of `rows`. Raises what torch raises when memory is short."""
    device = job.world.device
    batch = job.task.collate([job.splits.train[row] for row in rows])
    if job.update.stream is not None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            stream_batches(job, [batch], max(1, job.task.count(batch)))
        job.update.stream.drop()
        for parameter in job.model.trainable().values():
            parameter.grad = None
        return
    in_backward = job.update.in_backward
    if in_backward is not None:
        in_backward.mode = "drop"
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            backward(job, batch, max(1, job.task.count(batch)))
    finally:
        if in_backward is not None:
            in_backward.mode = "gather"
        for parameter in job.model.trainable().values():
            parameter.grad = None
