"""Streams: every row once an epoch, in an order of (seed, epoch, block), resumed at the exact row, with bad rows told."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config.schema import Recipe
from finetune.data.opening import open_data, order_of
from finetune.data.preflight import render
from finetune.data.record_streams import stream_records
from finetune.data.streaming import STRIDE, StreamRows
from finetune.errors import DataError
from tests.conftest import alpaca_rows
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def streamed(write: Callable[..., str]) -> Callable[..., tuple[StreamRows, Any, list[str]]]:
    """A stream's rows and steps, and what is told."""

    def run(rows: list[Any] | str | None = None, batch: int = 3, seed: int = 0, **data: Any) -> Any:
        path = rows if isinstance(rows, str) else write(alpaca_rows(50) if rows is None else rows)
        values = {"path": path, "template": "alpaca", "max_tokens": 96, "streaming": True, "shuffle_buffer": 16, **data}
        train = {"batch": batch, "max_steps": 5, "seed": seed}
        recipe = Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values, "train": train})
        told: list[str] = []
        splits = open_data(recipe, tiny_tokenizer(CHATML), tell=told.append)
        return splits.train, order_of(recipe, splits.train), told

    return run


def walk(stream: Any, epoch: int = 0, start: int = 0) -> list[tuple[int, tuple[int, ...], bytes, int]]:
    """Each row of an epoch from a position on: its number, sources, tokens, and the position after its step."""
    rows, order, _ = stream
    found = []
    for ids, after in order.steps(epoch, start):
        for number in ids.tolist():
            row = rows[number]
            found.append((number, row.sources, row.input_ids.tobytes() + row.labels.tobytes(), after))
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_gives_every_row_once_block_by_block(streamed: Callable[..., Any], pack: bool) -> None:
    got = walk(streamed(pack=pack))
    sources = [source for _, some, _, _ in got for source in some]
    assert sorted(sources) == list(range(50))
    blocks = [source // 16 for source in sources]
    assert blocks == sorted(blocks), "file order, shuffled inside a block only"
    assert sources[:16] != sorted(sources[:16]) or pack
    assert len({number for number, *_ in got}) == len(got)
    assert walk(streamed(pack=pack)) == got
    assert walk(streamed(pack=pack, seed=1)) != got
    assert walk(streamed(pack=pack), epoch=1) != got
    assert [s for _, some, _, _ in walk(streamed(shuffle_buffer=1)) for s in some] == list(range(50))


@pytest.mark.parametrize("pack", [False, True])
def test_b69_a_stream_resumes_at_the_exact_row_also_twice(streamed: Callable[..., Any], pack: bool) -> None:
    whole = walk(streamed(pack=pack), epoch=2)
    ends = list(dict.fromkeys(after for *_, after in whole))
    first = [each for each in whole if each[3] <= ends[1]]
    second = walk(streamed(pack=pack), 2, ends[1])
    assert first + second == whole
    again = walk(streamed(pack=pack), 2, ends[3])
    assert [each for each in whole if each[3] <= ends[3]] + again == whole
    assert walk(streamed(pack=pack), 2, ends[-1]) == []
    assert ends[-1] // STRIDE == 3


def test_steps_by_tokens_take_rows_while_they_fit(streamed: Callable[..., Any], write: Callable[..., str]) -> None:
    rows, _, _ = streamed()
    recipe = rows.recipe.model_copy(
        update={"train": rows.recipe.train.model_copy(update={"batch": None, "batch_tokens": 200})}
    )
    sizes = [[len(rows[i].input_ids) for i in ids.tolist()] for ids, _ in order_of(recipe, rows).steps(0)]
    assert sum(map(len, sizes)) == 50
    assert all(sum(step) <= 200 for step in sizes)
    assert all(sum(step) + after[0] > 200 for step, after in pairwise(sizes))


def test_bad_rows_stop_with_their_line_or_are_left_out_and_told(streamed: Callable[..., Any]) -> None:
    """Line 30 is broken and line 33 has no answer, both behind the rows that are looked at before the start."""
    many: list[Any] = alpaca_rows(1100)
    many[1030] = '{"instruction": "x", '
    many[1033] = {"instruction": "x", "output": ""}
    stream = streamed(many, shuffle_buffer=100)
    with pytest.raises(DataError, match=r"2 of 100 rows cannot be used.*line 1031: broken JSON.*line 1034") as caught:
        walk(stream)
    assert caught.value.everywhere
    stream = streamed(many, shuffle_buffer=100, on_bad_row="skip")
    assert sorted(s for _, some, _, _ in walk(stream) for s in some) == [
        n for n in range(1100) if n not in (1030, 1033)
    ]
    (told,) = [line for line in stream[2] if "rows 1,001 to 1,100:" in line]
    assert "dropped 1 rows that cannot be read (line 1031)" in told
    assert "line 1034" in told


@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_what_is_cut_or_changed_behind_the_first_rows_is_told_once_and_summed(
    streamed: Callable[..., Any], on_long: str
) -> None:
    """Rows 1,031 (a number), 1,034 (too long) and 1,061 (empty) stand behind those of the report; both epochs have them."""
    many: list[Any] = [{"instruction": "x", "output": "y"}] * 1100
    many[1030] = {"instruction": "x", "output": 7}
    many[1033] = (
        {"instruction": "x " * 200, "output": "y"} if on_long == "drop" else {"instruction": "x", "output": "y" * 200}
    )
    many[1060] = {"instruction": "x", "output": ""}
    stream = streamed(many, shuffle_buffer=50, on_bad_row="skip", on_long=on_long)
    walk(stream)
    walk(stream, epoch=1)
    first, second, total = (line.removeprefix("data  ") for line in stream[2])
    cut = "dropped 1 longer than data.max_tokens" if on_long == "drop" else "truncated 1"
    changed = "1 rows with a number converted to text"
    assert first == f"rows 1,001 to 1,050: {cut} (line 1034); {changed} (line 1031)"
    assert second == "rows 1,051 to 1,100: dropped 1 column 'output' is empty (line 1061)"
    assert total.startswith("the 1,100 rows of the stream that were read: ")
    assert all(each in total for each in (cut, changed, "dropped 1 column 'output' is empty"))


def test_a_stream_that_ends_before_its_file_does_tells_what_it_lost(streamed: Callable[..., Any]) -> None:
    many: list[Any] = [{"instruction": "x", "output": "y"}, {"instruction": "x", "output": ""}] * 40
    stream = streamed(many, on_bad_row="skip")
    steps = stream[1].steps(0)
    next(steps)
    steps.close()
    assert "rows of the stream that were read: dropped" in stream[2][-1]


@pytest.mark.parametrize(
    ("content", "what"),
    [(b'{"instruction": "a", "output": "b", "output": "c"}', "line 1: the key 'output' is given twice"),
     (b'{"instruction": "a", "output": {"c": 1, "c": 2}}', "line 1: the key 'c' is given twice"),
     (b'{"instruction": "a", "output": "\xff"}', "line 1: not UTF-8"),
     ('{"instruction": "a"}'.encode("utf-16"), "the file is UTF-16")],
)  # fmt: skip
def test_a_stream_refuses_what_is_refused_without_streaming(
    streamed: Callable[..., Any], tmp_path: Path, content: bytes, what: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content + b"\n" + b'{"instruction": "a", "output": "b"}\n')
    for streaming in (True, False):
        with pytest.raises(DataError, match=what):
            streamed(str(file), streaming=streaming)
    if "twice" in what:
        dropped = streamed(str(file), on_bad_row="skip")[0].report.dropped
        assert sum(dropped.values()) == 1
    else:
        with pytest.raises(DataError, match=what):
            streamed(str(file), on_bad_row="skip")


def test_a_stream_refuses_a_column_given_twice(streamed: Callable[..., Any], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text("instruction,output,output\na,b,c\n")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["output", "output"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(DataError, match="names output twice"):
            streamed(str(tmp_path / name))


def test_a_stream_of_what_is_no_one_file_says_what_it_is(streamed: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.json").write_text('{"rows": []}')
    for path, what in (
        (tmp_path, "a folder cannot be streamed"),
        (f"{tmp_path}/*.jsonl", "a pattern cannot be streamed"),
        (f"{tmp_path}/a.json:rows", "a list inside a JSON file cannot be streamed"),
        (tmp_path / "aa.jsonl", "did you mean"),
    ):
        with pytest.raises(DataError, match=what):
            streamed(str(path))


def test_a_stream_of_broken_lines_counts_them(streamed: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"0 of 3 rows left.*3 rows that cannot be read; the first is line 1"):
        streamed(["{"] * 3, on_bad_row="skip")


def test_what_is_not_known_before_is_said(streamed: Callable[..., Any]) -> None:
    rows, _, _ = streamed(alpaca_rows(1100))
    assert rows.report.rows_in == 1000
    assert "these figures are of the first 1,000 rows" in rows.report.warnings[-1]
    assert rows.longest_row == rows.longest_document == 96
    assert render(rows.report) is not None
    with pytest.raises(IndexError, match="not in hand"):
        rows[5]


def test_a_stream_with_nothing_to_train_stops_at_once(streamed: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'output'.*is missing"):
        streamed([{"instruction": "a"}])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        streamed(str(tmp_path / "empty.jsonl"))
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match=r"\.json file cannot be streamed"):
        streamed(str(tmp_path / "a.json"))
    with pytest.raises(DataError, match="no such file"):
        streamed(str(tmp_path / "none.jsonl"))


def test_max_rows_ends_the_stream_and_changed_content_is_another_stream(streamed: Callable[..., Any]) -> None:
    assert len(walk(streamed(max_rows=20))) == 20
    same = streamed()[0].fingerprint
    assert streamed()[0].fingerprint == same
    assert streamed(max_tokens=95)[0].fingerprint != same
    assert streamed(alpaca_rows(51))[0].fingerprint != same


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("skip", [0, 1, 17, 40, 41])
def test_every_kind_of_file_is_read_from_any_row_on(tmp_path: Path, kind: str, skip: int) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"a": f"{n}\u2028,\t", "b": "x\ny" if kind != "jsonl" else str(n)} for n in range(40)]
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=7)
    else:
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, ["a", "b"], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    data = Recipe.model_validate({"model": {"path": "m"}, "data": {"path": str(file)}}).data
    found = list(stream_records(data, skip))
    assert [record for record, _ in found] == rows[skip:]
    if skip < 40:
        line = {"jsonl": 2 * skip + 1, "parquet": skip + 1}.get(kind, 2 * skip + 2)
        assert found[0][1] == f"{file} {'row' if kind == 'parquet' else 'line'} {line}"


def test_a_stream_reads_no_further_than_it_must(streamed: Callable[..., Any], write: Callable[..., str]) -> None:
    """One block is in use, one is ready, one is being made: nothing of the file behind them was read."""
    path = write([*alpaca_rows(1100), "broken " * 3])
    rows, order, _ = streamed(path, shuffle_buffer=10)
    steps = list(islice(order.steps(0), 3))
    assert [len(ids) for ids, _ in steps] == [3, 3, 3]
    assert all(np.all(ids < STRIDE) for ids, _ in steps)
    assert rows[int(steps[0][0][0])].sources[0] < 10
