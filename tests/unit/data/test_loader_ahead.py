"""Batches made ahead: in order, with their counts, their errors at their step; threads and workers that end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.config.schema import Recipe
from finetune.contracts import IGNORED, Row
from finetune.data import workers
from finetune.data.ahead import Ahead
from finetune.data.dataset import prepare
from finetune.data.loader import Order, draws, micro_batches
from finetune.data.prefetch import Prefetch, load
from finetune.data.rendering import Renderer
from finetune.data.templates import load_template
from finetune.errors import DataError
from finetune.tasks.text import TextTask
from tests.conftest import alpaca_rows
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


def rows(count: int) -> list[Row]:
    made = []
    for number in range(count):
        ids = np.arange(3 + number % 4, dtype=np.int32) + number
        labels = ids.copy()
        labels[:1] = IGNORED
        made.append(Row(number, ids, labels, (len(ids),), (number,)))
    return made


def steps(order: Order, epochs: int) -> Iterator[tuple[int, int, np.ndarray]]:
    for epoch in range(epochs):
        for some, end in order.steps(epoch):
            yield epoch, end, some


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_steps_come_in_order_with_their_batches_and_counts() -> None:
    held, order, task = rows(7), Order([1] * 7, 3, None, seed=1), TextTask(0)
    with Prefetch(steps(order, 2), lambda s: load(s, held, task, (0, 1, 2)), torch.device("cpu")) as ahead:
        got = list(ahead)
    assert [(each.epoch, each.end, each.rows.tolist()) for each in got] == [
        (epoch, end, some.tolist()) for epoch, end, some in steps(order, 2)
    ]
    for each in got:
        expected = [task.collate([held[int(i)] for i in part]) for part in micro_batches(each.rows, 0, 1, 2)]
        assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(each.batches, expected, strict=True))
        assert each.tokens == sum(len(held[int(i)].input_ids) for i in each.rows)
        assert each.trained == each.tokens - len(each.rows)
        assert each.waited >= 0
    assert "batches ahead" not in threads()


def test_waiting_is_counted_and_work_beside_it_is_not() -> None:
    def slow(step: Any) -> Any:
        time.sleep(0.1)
        return load(step, rows(7), TextTask(0), (0, 1, 4))

    with Prefetch(steps(Order([1] * 7, 3, None, 0), 1), slow, torch.device("cpu")) as ahead:
        found = iter(ahead)
        assert next(found).waited >= 0.09
        time.sleep(0.5)
        assert next(found).waited < 0.05


def test_an_error_is_raised_at_its_own_step_and_leaving_early_ends_the_thread() -> None:
    def broken(step: Any) -> Any:
        if step[1] == 6:
            raise DataError("a bad row", "file line 5")
        return load(step, rows(9), TextTask(0), (0, 1, 4))

    with Prefetch(steps(Order([1] * 9, 3, None, 0), 1), broken, torch.device("cpu")) as ahead:
        first, second = list(ahead)
    first.raise_error()
    with pytest.raises(DataError, match="file line 5"):
        second.raise_error()
    with Prefetch(steps(Order([1] * 9, 1, None, 0), 99), lambda s: load(s, rows(9), TextTask(0), (0, 1, 4)),
                  torch.device("cpu")) as ahead:  # fmt: skip
        next(iter(ahead))
    assert "batches ahead" not in threads()

    def failing() -> Iterator[int]:
        yield 1
        raise DataError("no more", "line 2")

    with Ahead(failing(), 1, "x") as items, pytest.raises(DataError, match="line 2"):
        list(items)


def test_b122_b84_shares_of_ranks_cover_an_epoch_once_whatever_the_ranks() -> None:
    held, order = rows(11), Order([1] * 11, 4, None, seed=2)
    for ranks in (1, 2, 3):
        seen = [
            int(row)
            for rank in range(ranks)
            for step in steps(order, 1)
            for batch in load(step, held, TextTask(0), (rank, ranks, 2)).batches
            for row in batch.row_ids
        ]
        assert sorted(seen) == list(range(11))


def test_b137_draws_differ_by_worker_rank_and_epoch_and_repeat_with_the_seed() -> None:
    """Case B137: each row's draws belong to (seed, epoch, row); which rank or worker holds the row is no matter."""

    def all_draws(ranks: int) -> dict[tuple[int, int], float]:
        order = Order([1] * 8, 4, None, seed=7)
        return {
            (epoch, int(row)): float(draws(7, epoch, int(row)).random())
            for epoch in range(2)
            for some in order.batches(epoch)
            for rank in range(ranks)
            for part in micro_batches(some, rank, ranks, 1)
            for row in part
        }

    one, two = all_draws(1), all_draws(2)
    assert one == two
    assert len(set(one.values())) == 16


@pytest.fixture
def recipe(write: Callable[..., str]) -> Callable[..., Recipe]:
    path = write(alpaca_rows(40))

    def make(**data: Any) -> Recipe:
        values = {"path": path, "template": "alpaca", "max_tokens": 64, **data}
        return Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values})

    return make


def test_b137_b139_workers_after_tokenising_here_give_the_same_rows_and_draw_nothing(
    recipe: Callable[..., Recipe],
) -> None:
    """Case B139: the tokenizer's threads ran in this process before; nothing hangs, no row differs, no state moves."""
    tokenizer = tiny_tokenizer(CHATML)
    before = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    alone = prepare(recipe(workers=0), tokenizer)
    beside = prepare(recipe(workers=2), tokenizer)
    assert beside.train.fingerprint == alone.train.fingerprint
    assert beside.train.report == alone.train.report
    assert before == (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_b139_a_workers_exception_and_its_death_are_told_with_the_place_within_seconds() -> None:
    renderer = Renderer(load_template("alpaca"), tiny_tokenizer(CHATML))
    good = [(row, f"f.jsonl line {n}") for n, row in enumerate(alpaca_rows(3), 1)]
    made = list(workers.made(renderer, [good, good], 1))
    assert [len(batch) for batch in made] == [3, 3]
    worker = workers.Worker(renderer)
    try:
        assert worker.take() is True
        worker.give(5, "f.jsonl line 9")
        with pytest.raises(RuntimeError, match=r"(?s)f.jsonl line 9.*TypeError: 'int' object is not iterable"):
            worker.take()
        worker.give(good, "f.jsonl line 1 and 2 more rows")
        worker.process.send_signal(signal.SIGSTOP)
        worker.give(good, "f.jsonl line 1 and 2 more rows")
        started = time.monotonic()
        worker.process.kill()
        with pytest.raises(DataError, match="SIGKILL") as told:
            list(iter(worker.take, None))
        assert "lower data.workers" in str(told.value)
        assert time.monotonic() - started < 10
    finally:
        worker.end()


def test_b139_workers_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from finetune.data import workers\n"
        "from finetune.data.rendering import Renderer\n"
        "from finetune.data.templates import load_template\n"
        "from tests.unit.data.chat_forms import CHATML, tiny_tokenizer\n"
        "worker = workers.Worker(Renderer(load_template('alpaca'), tiny_tokenizer(CHATML)))\n"
        "worker.take()\n"
        "print(worker.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    worker = int(asking.stdout.readline())
    asking.kill()
    asking.wait()
    for _ in range(100):
        state = Path(f"/proc/{worker}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived the process that asked for it")


def test_b140_more_workers_than_usable_cores_are_told_with_the_mask() -> None:
    """Case B140: the mask is narrowed to one core before."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        assert workers.usable_cores() == [core]
        assert f"data.workers=4, but this process may run on 1 of {os.cpu_count()} cores ({core})" in workers.crowded(4)
        assert workers.crowded(1) == ""
        assert workers.count("auto", 10**6) == 1
        assert workers.count("auto", 100) == 0
        assert workers.count(3, 100) == 3
    finally:
        os.sched_setaffinity(0, before)
    assert os.sched_getaffinity(0) == before
