"""The cache keeps so much: what was used the longest ago goes first, never what a process uses or makes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import Recipe
from finetune.data import cache
from finetune.data.cache_limit import in_use, make_room, size
from finetune.data.opening import open_data
from finetune.environment import cache_limit
from finetune.errors import InputError
from tests.conftest import alpaca_rows
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


def entry(folder: Path, name: str, used: float, count: int = 1000) -> Path:
    made = folder / (name * 32)
    made.mkdir(parents=True)
    (made / "0.ids.npy").write_bytes(b"x" * count)
    mark = in_use(made)
    assert mark is not None
    mark.close()
    os.utime(made.with_suffix(".used"), (used, used))
    return made


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    a, b, c = entry(tmp_path, "a", 30), entry(tmp_path, "b", 10), entry(tmp_path, "c", 20)
    (tmp_path / "README").mkdir()
    assert make_room(tmp_path, 3000) == (0, 0)
    assert make_room(tmp_path, 2999) == (1, 1000)
    assert (a.exists(), b.exists(), c.exists()) == (True, False, True)
    assert make_room(tmp_path, 0) == (2, 2000)
    assert size(tmp_path) == 0
    assert (tmp_path / "README").is_dir(), "what is no entry is left alone"
    assert make_room(tmp_path / "nowhere", 0) == (0, 0)


def test_an_entry_of_an_older_version_goes_by_its_date(tmp_path: Path) -> None:
    old, new = entry(tmp_path, "a", 30), entry(tmp_path, "b", 20)
    old.with_suffix(".used").unlink()
    os.utime(old, (5, 5))
    assert make_room(tmp_path, 1000) == (1, 1000)
    assert not old.exists()
    assert new.exists()


def test_what_is_used_or_made_stays(tmp_path: Path) -> None:
    used, made, free = entry(tmp_path, "a", 1), entry(tmp_path, "b", 2), entry(tmp_path, "c", 3)
    held = in_use(used)
    with cache.locked(made):
        assert make_room(tmp_path, 0) == (1, 1000)
        assert used.exists()
        assert made.exists()
        assert not free.exists()
    assert held is not None
    held.close()
    assert make_room(tmp_path, 0) == (2, 2000)


def hold(folder: str, ready: Any, leave: Any) -> None:
    mark = in_use(Path(folder))
    ready.set()
    leave.wait(30)
    os._exit(0 if mark else 1)  # as a process that is killed: nothing is given back by hand


def test_another_process_keeps_its_entry_and_a_dead_one_does_not(tmp_path: Path) -> None:
    used = entry(tmp_path, "a", 1)
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(used), ready, leave), daemon=True)
    process.start()
    assert ready.wait(30)
    assert make_room(tmp_path, 0) == (0, 0)
    leave.set()
    process.join(30)
    assert process.exitcode == 0
    assert make_room(tmp_path, 0) == (1, 1000)


def test_several_processes_may_make_room_at_once(tmp_path: Path) -> None:
    for name in "abcdef":
        entry(tmp_path, name, ord(name))
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        found = pool.starmap(make_room, [(tmp_path, 3000)] * 8)
    assert size(tmp_path) <= 3000
    assert sum(count for count, _ in found) == 6 - size(tmp_path) // 1000


def test_opened_data_stay_within_the_limit(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    place, path = tmp_path / "cache" / "data", write(alpaca_rows(30))
    lines: list[str] = []

    def opened(limit: int) -> Any:
        values = {"path": path, "template": "alpaca", "max_tokens": limit}
        recipe = Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values})
        return open_data(recipe, tiny_tokenizer(CHATML), tell=lines.append)

    def kept() -> int:
        return sum(folder.is_dir() for folder in place.iterdir())

    first, second = opened(512), opened(513)
    assert kept() == 2
    monkeypatch.setenv("FINETUNE_CACHE_GIB", "0")
    third = opened(514)
    assert kept() == 3, "all are in use, the new one too"
    assert third.train.fingerprint == first.train.fingerprint
    del first
    fourth = opened(515)
    assert kept() == 3, "the one that nobody holds went"
    assert "removed 1 prepared data set" in lines[-1]
    assert "FINETUNE_CACHE_GIB" in lines[-1]
    assert fourth.train[0].input_ids.tolist() == second.train[0].input_ids.tolist()


@pytest.mark.parametrize(("text", "limit"), [("", 50 * 2**30), ("0", 0), ("1.5", 3 * 2**29), ("inf", 2**63)])
def test_the_limit_is_a_number_of_gib(monkeypatch: pytest.MonkeyPatch, text: str, limit: int) -> None:
    monkeypatch.setenv("FINETUNE_CACHE_GIB", text)
    assert cache_limit() == limit


@pytest.mark.parametrize("text", ["50GB", "-1", "nan"])
def test_another_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FINETUNE_CACHE_GIB", text)
    with pytest.raises(InputError, match=r"FINETUNE_CACHE_GIB: .* is no number of GiB"):
        cache_limit()


def test_an_entry_that_another_process_takes_away_while_sizes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed, then gone when it is entered: it counts nothing and ends nothing."""
    for name in ("kept", "going"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 100)
    scandir = os.scandir

    def late(place: Any = ".") -> Any:
        if str(place).endswith("going"):
            shutil.rmtree(place, ignore_errors=True)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", late)
    assert size(tmp_path) == 100
