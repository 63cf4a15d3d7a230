"""The next steps' batches, made while the present step computes: collated in a thread, on a GPU copied by a stream of its own.

What a step needs to know of its labels is counted here on the host, so that nothing asks the device for it. The thread
ends with its owner, hands on whatever goes wrong in it, and draws nothing random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from finetune.contracts import Batch, Row, Task
from finetune.data.ahead import Ahead
from finetune.data.loader import micro_batches

DEPTH = 2
"""Steps that are ready before they are asked for."""


@dataclass(frozen=True)
class Loaded:
    """A step's share of one rank. `trained` and `tokens` are counted over its batches; `waited` are seconds that the loop
    waited for it."""

    epoch: int
    end: int
    rows: np.ndarray
    batches: list[Batch]
    trained: int
    tokens: int
    waited: float = 0.0
    copied: Any = None
    error: BaseException | None = None

    def raise_error(self) -> None:
        """Raises what went wrong when the batches were made, in the step that they were made for."""
        if self.error is not None:
            raise self.error


def load(step: tuple[int, int, np.ndarray], source: Sequence[Row], task: Task, share: tuple[int, int, int]) -> Loaded:
    """A step's rows (epoch, position after it, row ids) as this rank's batches on the host; `share`: rank, ranks, micro-batch."""
    epoch, end, rows = step
    batches = [task.collate([source[int(row)] for row in part]) for part in micro_batches(rows, *share)]
    return Loaded(epoch, end, rows, batches, sum(map(task.count, batches)), sum(map(task.tokens, batches)))


class Prefetch:
    """Steps with their batches on `device`, in order: `for loaded in prefetch`. Use it in a `with`.

    `steps` gives (epoch, position after the step, row ids); it is read ahead, so it must not look at the run's progress.
    """

    def __init__(
        self,
        steps: Iterable[tuple[int, int, np.ndarray]],
        load_step: Callable[[tuple[int, int, np.ndarray]], Loaded],
        device: torch.device,
        depth: int = DEPTH,
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = Ahead(self._made(steps, load_step), depth, "batches ahead")

    def __enter__(self) -> Self:
        self._ahead.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ahead.__exit__(*exception)

    def __iter__(self) -> Iterator[Loaded]:
        ready = iter(self._ahead)
        while True:
            started = time.perf_counter()
            loaded = next(ready, None)
            if loaded is None:
                return
            yield self._taken(loaded, time.perf_counter() - started)

    def _made(
        self,
        steps: Iterable[tuple[int, int, np.ndarray]],
        load_step: Callable[[tuple[int, int, np.ndarray]], Loaded],
    ) -> Iterator[Loaded]:
        for step in steps:
            try:
                loaded = self._placed(load_step(step))
            except BaseException as error:
                yield Loaded(*step, [], 0, 0, error=error)
                return
            yield loaded

    def _placed(self, loaded: Loaded) -> Loaded:
        """Copied by the side stream out of pinned memory; nothing here waits for the copy."""
        if self._stream is None:
            return loaded
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batches = [_pinned(batch).to(self._device) for batch in loaded.batches]
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return replace(loaded, batches=batches, copied=copied)

    def _taken(self, loaded: Loaded, waited: float) -> Loaded:
        """The compute stream waits for the copy, and the memory is not given to others before compute has read it."""
        if loaded.copied is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(loaded.copied)
            for batch in loaded.batches:
                for tensor in _tensors(batch).values():
                    tensor.record_stream(compute)
        return replace(loaded, waited=waited)


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    names = ("input_ids", "labels", "row_ids", "document_ids", "positions")
    return {name: tensor for name in names if (tensor := getattr(batch, name)) is not None}


def _pinned(batch: Batch) -> Batch:
    pinned: dict[str, Any] = {name: tensor.pin_memory() for name, tensor in _tensors(batch).items()}
    return replace(batch, **pinned)
