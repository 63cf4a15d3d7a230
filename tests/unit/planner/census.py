"""A census of one step on a CPU: every tensor's bytes by the side it would be on with a GPU, beside what the plan counts.

Host memory of levers is made of pages of its own (memory/host), so on a CPU too it can be told from the device's: pages are
counted as they are mapped, everything else that a job makes as it passes torch's dispatcher. A frozen embedding that is
looked up on the host is in ordinary memory, and is named. Two steps are run and the second is counted: state and slots stand.

The plain form of the gate's backward has temporaries that a GPU's kernel has not; it takes small slices here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.schema import Recipe
from finetune.contracts import Batch, Plan, Row
from finetune.data.prefetch import load
from finetune.kernels import swiglu
from finetune.kernels.precision import compute
from finetune.memory import host, weight_streaming
from finetune.memory.case import Case, case_of
from finetune.memory.host_rows import HostRows
from finetune.memory.storage import storage_of
from finetune.planner.estimate import Estimate, estimate_case
from finetune.planner.estimate_resident import BESIDE_TENSORS
from finetune.planner.space import optimizer_bytes, update_bytes
from finetune.train.job import Job
from finetune.train.step import given_ids, train_step
from tests.numerics.streamed_jobs import loaded_job, model_folder, recipe_of

ROWS, LENGTH, BLOCKS, VOCABULARY = 4, 128, 4, 768
STANDING = ("weights", "slots", "optimizer")
ON_HOST = (
    "streamed weights", "streamed gradients", "streamed optimizer", "embedding and head", "parked boundaries",
    "parked activations", "parked optimizer", "parked embedding",
)  # fmt: skip


class Census(TorchDispatchMode):
    """Bytes of the device's storages that are alive: `now`, and the most since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        self.peak = self.now

    def add(self, tensor: Tensor, counted: bool = True) -> None:
        """Takes a tensor in that was there before, or that is known to be the host's (`counted` false)."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes() if counted else 0
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _tensors((*args, *kwargs.values())):
            self.add(value, counted=False)
        out = function(*args, **kwargs)
        for value in _tensors((out,)):
            self.add(value)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Pages:
    """Bytes of the host's pages that are mapped: `now`, and at their `peak`."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def made(self, pages: Any) -> None:
        count = len(pages)
        self.now += count
        self.peak = max(self.peak, self.now)
        weakref.finalize(pages, self.gone, count)

    def gone(self, count: int) -> None:
        self.now -= count


@contextmanager
def counted_pages() -> Iterator[Pages]:
    """Inside, host pages are counted as they are mapped."""
    pages = Pages()

    class Counted(host._Pages):
        def __new__(cls, *args: Any) -> Any:
            made = super().__new__(cls, *args)
            pages.made(made)
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_Pages", Counted)
        patch.setattr(swiglu, "SLICE_ELEMENTS", 2**10)
        yield pages


@dataclass(frozen=True)
class Found:
    """Counted bytes: the device's between steps (`rest`), at a step's and an evaluation's widest, the host's; and the plan's."""

    rest: int
    step: int
    evaluation: int
    host: int
    planned: Estimate
    case: Case

    def planned_of(self, phase: str) -> int:
        """The plan's bytes of the device's tensors."""
        beside = (*BESIDE_TENSORS, *ON_HOST)
        return sum(count for cause, count in self.planned.phases[phase].causes.items() if cause not in beside)

    @property
    def planned_rest(self) -> int:
        """What stands between steps; the gradient of the first hidden states does until an embedding's update passes."""
        causes = self.planned.phases["save"].causes
        kept = 0
        if self.case.plan.weights == "streamed" and self.case.storage.trained and self._ends.embedding_passes:
            kept = weight_streaming.streaming_of(self.case).carry
        return kept + sum(causes.get(cause, 0) for cause in STANDING)

    @property
    def _ends(self) -> weight_streaming.StreamedEnds:
        return weight_streaming.ends_of(self.case)

    @property
    def planned_host(self) -> int:
        causes = self.planned.host.causes
        return sum(causes.get(cause, 0) for cause in ON_HOST)

    @property
    def ratios(self) -> dict[str, float]:
        """Planned by counted. Of a step and an evaluation: of what comes and goes in it."""
        found = {"rest": self.planned_rest / self.rest}
        found["step"] = (self.planned_of("step") - self.planned_rest) / (self.step - self.rest)
        planned = self.planned_of("evaluate")
        if self.case.plan.weights == "streamed":
            # A CPU evaluates with the host's own copies of what comes whole.
            planned = max(planned - self._ends.visiting, self.planned_of("save"))
        if self.evaluation:
            found["evaluate"] = (planned - self.planned_rest) / (self.evaluation - self.rest)
        if self.host or self.planned_host:
            found["host"] = self.planned_host / max(self.host, 1)
        return found


def folder_of(place: Path) -> Path:
    wide = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": BLOCKS, "vocab_size": VOCABULARY}
    return model_folder(place, **wide)


def recipe_for(folder: Path, kind: str, fast: bool, **sections: Any) -> Recipe:
    adapter = {"adapter": {"rank": 8, "alpha": 8}} if kind == "lora" else {}
    return recipe_of(folder, kind, **{**adapter, "plan": {"fast_block": fast}, **sections})


def full_rows() -> list[Row]:
    """Rows of one document, none padded."""
    ids = np.random.default_rng(0).integers(8, VOCABULARY, (ROWS, LENGTH))
    return [Row(number, row, row.copy(), (LENGTH,), (number,)) for number, row in enumerate(ids)]


def census(recipe: Recipe, plan: Plan, evaluated: bool = True) -> Found:
    """Runs two steps of ROWS rows under the plan and, if `evaluated`, an evaluation of one micro-batch, and counts."""
    with counted_pages() as pages:
        job = loaded_job(recipe, plan, full_rows())
        live = Census()
        hosted = _on_host(job, live)
        with live:
            for _ in range(2):
                live.begin()
                rest = live.now
                one_step(job, live)
            step = live.peak
            live.begin()
            if evaluated:
                evaluate(job, live)
            evaluation = live.peak if evaluated else 0
        storage = storage_of(job.model.shape, recipe, "fp32")
        case = case_of(job.model.shape, storage, plan, LENGTH, ROWS, optimizer_bytes(recipe))
        case = replace(case, update_bytes=update_bytes(recipe))
        return Found(rest, step, evaluation, hosted + pages.peak, estimate_case(case, False), case)


def _on_host(job: Job, live: Census) -> int:
    """Takes in what a job's model holds; returns the bytes of a table that is looked up on the host."""
    spans: list[int] = []
    stream = job.update.stream
    if stream is not None:
        pages = [*(tall.weight_VD for tall in stream.ends.all), *(flat.host for flat in stream.host.flats)]
        spans = [tensor.untyped_storage().data_ptr() for tensor in pages]
        # Loading has used them.
        for slot in (*stream.slots._slots, *stream.slots._own.values()):
            live.add(slot.octets)
    for tensor in [*job.model.module.parameters(), *job.model.module.buffers()]:
        live.add(tensor.data, counted=tensor.untyped_storage().data_ptr() not in spans)
    tables = [part for part in job.model.module.modules() if isinstance(part, HostRows)]
    for table in tables:
        live.add(table.weight, counted=False)
    return sum(table.weight.untyped_storage().nbytes() for table in tables)


def one_step(job: Job, live: Census) -> None:
    loaded = load((0, 0, np.arange(ROWS)), job.splits.train, job.task, (0, 1, job.plan.micro_batch))
    for batch in loaded.batches:
        _take(batch, live)
    del batch
    train_step(job, range(ROWS), 10, loaded)
    job.progress.step += 1


def _take(batch: Batch, live: Census) -> None:
    live.add(batch.input_ids)
    live.add(batch.labels)


def evaluate(job: Job, live: Census) -> None:
    """The loss of one micro-batch, as train/after does it."""
    count = job.plan.micro_batch
    (batch,) = load((0, 0, np.arange(count)), job.splits.train, job.task, (0, 1, count)).batches
    _take(batch, live)
    job.model.module.eval()
    with torch.no_grad(), job.update.visiting(), compute(job.world.device, job.precision), given_ids(job, batch):
        job.task.loss_sum(job.model, batch, job.plan)
    job.model.module.train()
