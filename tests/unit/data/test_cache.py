"""Kept rows: reused when nothing changed, made anew when anything did, whole or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config.schema import Recipe
from finetune.data import cache
from finetune.data.dataset import Splits
from finetune.data.opening import open_data
from finetune.errors import DataError
from tests.conftest import alpaca_rows
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def opened(write: Callable[..., str]) -> Callable[..., tuple[Splits, str]]:
    """Data opened with these keys, and what was told."""
    path = write(alpaca_rows(30))

    def run(tokenizer: Any = None, **data: Any) -> tuple[Splits, str]:
        values = {"path": path, "template": "alpaca", "max_tokens": 64, **data}
        recipe = Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values})
        lines: list[str] = []
        splits = open_data(recipe, tokenizer or tiny_tokenizer(CHATML), tell=lines.append)
        return splits, "\n".join(lines)

    return run


def test_b57_unchanged_inputs_are_reused_and_told(opened: Callable[..., Any], place: Path) -> None:
    first, told = opened(pack=True, valid_share=0.2)
    assert "prepared in" in told
    assert str(place) in told
    second, told = opened(pack=True, valid_share=0.2)
    assert "reused" in told
    assert "KiB" in told
    assert second.train.report == first.train.report
    assert second.evaluate["valid"].fingerprint == first.evaluate["valid"].fingerprint
    assert second.train.fingerprint == first.train.fingerprint
    assert isinstance(second.train.arrays["ids"], np.memmap)
    for ours, theirs in zip(first.train, second.train, strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids)
        assert (ours.document_lengths, ours.sources) == (theirs.document_lengths, theirs.sources)


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 48}, {"train_on": "all"}, {"pack": True}, {"template": "grammar.yaml"}, {"valid_share": 0.2}],
    ids=lambda change: next(iter(change)),
)
def test_b57_a_changed_setting_is_prepared_anew(opened: Callable[..., Any], change: dict[str, Any]) -> None:
    shipped = Path(__file__).parents[3] / "data_templates" / "alpaca.yaml"
    own = Path("grammar.yaml")
    own.write_text(shipped.read_text().replace("Response:", "Answer:"))
    if "template" in change:
        change = {"template": str(own.resolve())}
    opened()
    assert "prepared in" in opened(**change)[1]
    assert "reused" in opened(**change)[1]


def test_b57_another_tokenizer_and_a_changed_row_are_prepared_anew(
    opened: Callable[..., Any], write: Callable[..., str]
) -> None:
    """Case B57: the row keeps the file's size and time."""
    opened()
    other = tiny_tokenizer(CHATML)
    other.chat_template = other.chat_template.replace("+ m['content']", "+ '\n' + m['content']")
    assert "prepared in" in opened(other)[1]
    rows = alpaca_rows(30)
    file = Path(write(rows))
    before = file.stat()
    text = file.read_text()
    file.write_text(text.replace(rows[7]["output"], rows[7]["output"][::-1], 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    splits, told = opened()
    assert "prepared in" in told
    assert "reused" in opened()[1]
    assert splits.train.fingerprint == opened()[0].train.fingerprint


def test_what_changes_no_row_reuses_and_false_keeps_nothing(opened: Callable[..., Any], place: Path) -> None:
    opened(cache=False)
    assert not place.exists()
    opened()
    assert "reused" in opened(workers=0)[1]


@pytest.mark.parametrize("how", ["cut", "flipped", "facts", "gone"])
def test_a_broken_entry_is_told_and_made_anew(opened: Callable[..., Any], place: Path, how: str) -> None:
    first = opened()[0]
    fingerprint = first.train.fingerprint
    entry = next(folder for folder in place.iterdir() if folder.is_dir())
    file = entry / "0.ids.npy"
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[:-4])
    elif how == "flipped":
        content[-2] ^= 1
        file.write_bytes(content)
    elif how == "facts":
        facts = json.loads((entry / cache.FACTS).read_text())
        facts["sets"][0]["report"]["tokens"] += 1
        (entry / cache.FACTS).write_text(json.dumps(facts))
    else:
        file.unlink()
    splits, told = opened()
    assert "are broken" in told
    assert "prepared in" in told
    assert splits.train.fingerprint == fingerprint
    assert "reused" in opened()[1]


def test_a_killed_writer_leaves_nothing_that_is_read(opened: Callable[..., Any], place: Path) -> None:
    fingerprint = opened()[0].train.fingerprint
    entry = next(folder for folder in place.iterdir() if folder.is_dir())
    dead = multiprocessing.get_context("fork").Process(target=lambda: None)
    dead.start()
    dead.join()
    half = entry.rename(entry.with_name(f"{entry.name}.writing-{dead.pid}"))
    (half / cache.FACTS).unlink()
    splits, told = opened()
    assert "prepared in" in told
    assert not half.exists()
    assert splits.train.fingerprint == fingerprint


def test_two_processes_at_once_leave_one_whole_entry(opened: Callable[..., Any], place: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=lambda: answers.put(opened()[0].train.fingerprint)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(10)
    assert len(set(found)) == 1
    assert [folder for folder in place.iterdir() if folder.is_dir()] != []
    assert "reused" in opened()[1]


def test_a_cache_that_cannot_be_written_is_told(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    splits, told = opened()
    assert "prepared, not kept" in told
    assert len(splits.train) == 30


def test_a_bad_row_stops_as_it_does_without_a_cache(opened: Callable[..., Any], write: Callable[..., str]) -> None:
    bad = write([*alpaca_rows(3), {"instruction": "x", "output": ""}], "bad.jsonl")
    with pytest.raises(DataError, match="line 4"):
        opened(path=bad)


def _opened_twice(recipe_of: Callable[[], Recipe], change: Callable[[], object]) -> tuple[Splits, Splits, str]:
    """What is opened before and after a change, and what was told the second time."""
    told: list[str] = []
    before = open_data(recipe_of(), tiny_tokenizer(CHATML))
    change()
    return before, open_data(recipe_of(), tiny_tokenizer(CHATML), tell=told.append), "\n".join(told)


def _recipe(path: str, **data: Any) -> Recipe:
    values = {"path": path, "template": "alpaca", "max_tokens": 64, **data}
    return Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values})


@pytest.mark.parametrize("change", ["lines", "keys", "kinds", "name"])
def test_b57_a_pattern_is_known_by_its_files_names_and_bytes(tmp_path: Path, change: str) -> None:
    """Blank lines, the order of keys, 1 or 1.0 and a file's name all change what is trained or what is told."""
    folder = tmp_path / "some"
    folder.mkdir()
    file = folder / "a.jsonl"
    row = '{"instruction": "a", "output": 1}\n'
    file.write_text(row + '{"instruction": \n' + row)

    def changed() -> None:
        if change == "lines":
            file.write_text("\n\n\n\n" + file.read_text())
        elif change == "keys":
            file.write_text(file.read_text().replace(row, '{"output": 1, "instruction": "a"}\n'))
        elif change == "kinds":
            file.write_text(file.read_text().replace(": 1}", ": 1.0}"))
        else:
            file.rename(folder / "b.jsonl")

    _, after, told = _opened_twice(lambda: _recipe(f"{folder}/*.jsonl", on_bad_row="skip"), changed)
    assert "prepared in" in told
    line = 6 if change == "lines" else 2
    (places,) = [some for reason, some in after.train.report.places.items() if reason.startswith("broken JSON")]
    assert places[0].endswith(f"{'b' if change == 'name' else 'a'}.jsonl line {line}")


def test_b57_a_list_inside_a_json_file_is_known_by_the_files_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"rows": [{"instruction": "a", "output": 1}]}')
    _, after, told = _opened_twice(
        lambda: _recipe(f"{file}:rows"), lambda: file.write_text(file.read_text().replace(": 1}", ": 1.0}"))
    )
    assert "prepared in" in told
    assert "1.0" in "".join(text for text, _ in after.train.report.sample)


def test_a_file_changed_while_it_is_read_is_not_kept_under_its_former_hash(
    opened: Callable[..., Any], write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.data import opening

    make = opening.make_splits

    def after_a_change(*given: Any) -> Splits:
        write(alpaca_rows(20))
        return make(*given)

    monkeypatch.setattr(opening, "make_splits", after_a_change)
    splits, told = opened()
    assert len(splits.train) == 20
    assert "not kept: a data file was changed while it was read" in told


def test_an_error_of_a_data_file_is_not_told_as_one_of_the_cache(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.data import opening

    told: list[str] = []

    def fails(*given: Any) -> Splits:
        raise OSError(5, "Input/output error", "rows.jsonl")

    monkeypatch.setattr(opening, "make_splits", fails)
    with pytest.raises(OSError, match="Input/output"):
        open_data(_recipe(write(alpaca_rows(3))), tiny_tokenizer(CHATML), tell=told.append)
    assert told == []


def test_a_full_disk_is_told_in_the_systems_words(opened: Callable[..., Any], write: Callable[..., str]) -> None:
    """A limit on the size of files stands for the full disk: the write fails half way in the same manner."""
    import resource

    path = write([{"instruction": "abc " * 15, "output": "def " * 15 + str(n)} for n in range(800)], "big.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        splits, told = opened(path=path, max_tokens=256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "not kept: File too large" in told
    assert len(splits.train) == 800
