"""Files with a fault in one place: it is named with its row, costs that row alone where it may, and loses no other."""

from __future__ import annotations

import bz2
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataSection
from finetune.data import files
from finetune.data.cells import BROKEN
from finetune.data.sources import load_records
from finetune.errors import DataError

SKIP = DataSection(on_bad_row="skip")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".bz2": bz2.compress}


def rows(first: int, count: int) -> bytes:
    return "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(first, first + count)).encode()


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
@pytest.mark.parametrize("piece", [7, 2**20])
def test_b53_compressed_streams_behind_one_another_are_read_whole(
    tmp_path: Path, suffix: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    file = tmp_path / f"a.jsonl{suffix}"
    padding = bytes(8) if suffix == ".xz" else b""
    compress = COMPRESS[suffix]
    file.write_bytes(compress(rows(0, 40)) + padding + compress(b"") + compress(rows(40, 2)) + padding)
    assert [row["text"] for row in load_records(str(file), DataSection())] == [f"row {n}" for n in range(42)]


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
@pytest.mark.parametrize("how", ["second corrupted", "garbage behind", "second cut", "first cut", "odd zeros"])
def test_b53_a_compressed_file_that_is_not_whole_is_refused(tmp_path: Path, suffix: str, how: str) -> None:
    first, second = COMPRESS[suffix](rows(0, 3)), COMPRESS[suffix](rows(3, 3))
    content = {
        "second corrupted": first + b"\xff" + second[1:],
        "garbage behind": first + b"garbage",
        "second cut": first + second[:-9],
        "first cut": first[:-9],
        "odd zeros": first + bytes(3),
    }[how]
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"not a whole {suffix} file"):
        load_records(str(file), SKIP)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson"])
def test_a_line_that_begins_with_a_bracket_is_a_fault_of_that_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    for line, reason in (('["x"]', "no JSON object"), ('["x", ', "broken JSON")):
        file.write_text(line + '\n{"text": "one"}\n')
        found = load_records(str(file), SKIP)
        assert found[1] == {"text": "one"}
        assert found[0][BROKEN][1] == reason
        assert found.where(0) == f"{file} line 1"
        with pytest.raises(DataError, match="line 1: "):
            load_records(str(file), DataSection())
    file.write_text('[{"text": "one"},\n {"text": "two"}]\n')
    assert len(load_records(str(file), SKIP)) == 2, "an array in a file of that name is read as before"


@pytest.mark.parametrize(
    "content",
    ['[{"a": 1}, {"a": 1, "a": 2}, {"a": 3}]', '[{"a": 1}, {"a": {"b": 1, "b": 1}}, {"a": 3}]',
     '{"a": [1, {"b": 1, "b": 1}, 3]}', '{"rows": [{"a": 1}, {"a": 1, "a": 2}, {"a": 3}]}'],
)  # fmt: skip
def test_a_key_given_twice_in_a_json_file_has_its_row_number(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    path = f"{file}:rows" if "rows" in content else str(file)
    with pytest.raises(DataError, match=r"row 2: the key '[ab]' is given twice"):
        load_records(path, DataSection())
    found = load_records(path, SKIP)
    assert [found[0], found[2]] == [{"a": 1}, {"a": 3}]
    assert found[1][BROKEN][1].endswith("is given twice")


def test_a_key_given_twice_at_the_top_of_a_json_file_is_a_fault_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1], "a": [2]}')
    with pytest.raises(DataError, match="the key 'a' is given twice"):
        load_records(str(file), SKIP)


def test_when_every_row_is_skipped_the_reasons_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": \n{"a": \n[]\n')
    (tmp_path / "b.jsonl").write_text("x\n")
    with pytest.raises(DataError) as caught:
        load_records(str(tmp_path / "a.jsonl"), SKIP)
    assert "a.jsonl line 1: 0 of 3 rows left (2 broken JSON, 1 no JSON object); the first: broken" in str(caught.value)
    assert "on_bad_row" not in str(caught.value)
    with pytest.raises(DataError, match=r"0 of 4 rows left \(3 broken JSON, 1 no JSON object\)"):
        load_records(str(tmp_path / "*.jsonl"), SKIP)


def test_the_report_of_rows_that_are_all_dropped_asks_to_mend_them(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="0 of 2 rows left") as caught:
        prepared([{"instruction": "a", "output": ""}] * 2, template="alpaca", on_bad_row="skip")
    assert "on_bad_row" not in str(caught.value)
    assert "mend them" in str(caught.value)
