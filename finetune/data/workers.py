"""Records rendered and tokenised side by side: in this process, or in several.

In one process, a thread renders the next batch while the tokenizer, whose threads need no interpreter, is at the present
one. Several processes render in parallel too, which is what limits chat templates. They are started afresh, never
forked (a fork copies the locks of the tokenizer's threads, and hangs), and never import the user's script. They draw
nothing random, get whole batches in order and give them back in order, so they change no row.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from finetune.data.ahead import Ahead
from finetune.data.cells import RowError
from finetune.data.rendering import Rendered, Renderer
from finetune.data.sources import Record
from finetune.data.tokens import tokenise_all
from finetune.environment import for_child
from finetune.errors import DataError, FinetuneError

Item = tuple[Record | RowError, str]
"""A record, or why it is none, and its place for messages."""
Made = tuple[Rendered, np.ndarray, np.ndarray] | RowError
"""A record as text, token ids and labels, or why it is none."""

WORTH_IT = 200_000
"""Rows from which the start of other processes (some seconds each) pays."""
MOST = 16
CHILD = "import sys; sys.path[:0] = sys.argv[2:]; from finetune.data.workers import serve; serve(int(sys.argv[1]))"


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count(workers: int | str, rows: int) -> int:
    """How many processes `data.workers` means for so many rows; 0: this one alone."""
    if workers != "auto":
        return int(workers)
    return 0 if rows < WORTH_IT else min(len(usable_cores()), MOST)


def crowded(workers: int) -> str:
    """What to tell of more workers than cores; '' when they have room."""
    cores = usable_cores()
    if workers <= len(cores):
        return ""
    shown = ", ".join(map(str, cores[:16])) + (", ..." if len(cores) > 16 else "")
    return (
        f"data.workers={workers}, but this process may run on {len(cores)} of {os.cpu_count()} cores ({shown}): "
        f"they take turns. Lower data.workers, or widen the mask (taskset, the scheduler's cores a task)"
    )


def made(renderer: Renderer, batches: Iterable[Sequence[Item]], workers: int = 0) -> Iterator[list[Made]]:
    """Each batch rendered and tokenised, in order. DataError for what is wrong beyond a row, or a worker that ended."""
    if workers == 0:
        return _here(renderer, batches)
    return _there(renderer, batches, workers)


def _here(renderer: Renderer, batches: Iterable[Sequence[Item]]) -> Iterator[list[Made]]:
    with Ahead((_rendered(renderer, batch) for batch in batches), 1, "rendering ahead") as ahead:
        for rendered in ahead:
            yield _tokenised(renderer, rendered)


def _rendered(renderer: Renderer, batch: Sequence[Item]) -> list[Rendered | RowError]:
    found: list[Rendered | RowError] = []
    for record, where in batch:
        try:
            found.append(record if isinstance(record, RowError) else renderer.render(record, where))
        except RowError as fault:
            found.append(fault)
    return found


def _tokenised(renderer: Renderer, rendered: Sequence[Rendered | RowError]) -> list[Made]:
    tokens = tokenise_all(
        [each for each in rendered if isinstance(each, Rendered)], renderer.tokenizer, renderer.lengths
    )
    return [each if isinstance(each, RowError) else (each, *next(tokens)) for each in rendered]


class Worker:
    """One other process, and the pipe to it."""

    def __init__(self, renderer: Renderer) -> None:
        self.pipe, theirs = Pipe()
        with closing(theirs):
            command = [sys.executable, "-c", CHILD, str(theirs.fileno()), *filter(None, sys.path)]
            variables = for_child(TOKENIZERS_PARALLELISM="false")  # they are the parallelism
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
        self.places: deque[str] = deque()
        self.give((renderer.template, renderer.tokenizer, renderer.train_on))

    def give(self, value: Any, place: str = "its start") -> None:
        self.places.append(place)
        try:
            self.pipe.send(value)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended(place) from None

    def take(self) -> Any:
        """The answer to the oldest thing given. Raises what went wrong there."""
        place = self.places.popleft()
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended(place) from None
        if isinstance(answer, FinetuneError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"a data worker failed at {place}:\n{answer}")
        return answer

    def _ended(self, place: str) -> DataError:
        code = self.process.wait(10)
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = "the machine may be out of memory: " if code == -signal.SIGKILL else ""
        return DataError(f"a data worker ended ({why})", where=place, remedy=f"{hint}lower data.workers; 0 uses none")

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self.pipe.close()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _there(renderer: Renderer, batches: Iterable[Sequence[Item]], workers: int) -> Iterator[list[Made]]:
    """Batch k goes to process k mod workers, one at a time, and comes back in that order."""
    with ExitStack() as stack:
        team = []
        for _ in range(workers):
            worker = Worker(renderer)
            stack.callback(worker.end)
            team.append(worker)
        for worker in team:
            worker.take()
        asked: deque[Worker] = deque()
        for number, batch in enumerate(batches):
            worker = team[number % workers]
            # Its answer first: a process that writes one while it is written to would wait for ever, both pipes full.
            done = asked.popleft().take() if len(asked) == workers else None
            worker.give(list(batch), f"{batch[0][1]} and {len(batch) - 1:,} more rows")
            asked.append(worker)
            if done is not None:
                yield done
        while asked:
            yield asked.popleft().take()


def serve(descriptor: int) -> None:
    """The other process: answers batches until the pipe closes, which it does when the asking process ends, however."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the asking process, which ends this one
    pipe = Connection(descriptor)
    renderer: Renderer | None = None
    while True:
        try:
            value = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = True
            if renderer is None:
                renderer = Renderer(*value)
            else:
                answer = _tokenised(renderer, _rendered(renderer, value))
        except FinetuneError as error:
            answer = error
        except BaseException:
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
