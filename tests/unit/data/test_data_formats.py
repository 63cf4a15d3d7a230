"""More shapes of data: compressed, Arrow, folders and patterns, columns, keys given twice, and files that are none."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from finetune.config.schema import DataSection
from finetune.data import files
from finetune.data.sources import load_records
from finetune.errors import ConfigError, DataError, InputError
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer

TWO = [{"text": "one"}, {"text": "two"}]
LINES = "".join(json.dumps(row) + "\n" for row in TWO).encode()
DATA = DataSection()
SKIP = DataSection(on_bad_row="skip")


def save(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("suffix", files.COMPRESSED)
def test_compressed_files_are_the_same_rows_and_a_cut_one_is_named(tmp_path: Path, suffix: str) -> None:
    packed = PACKERS[suffix](LINES)
    path = save(tmp_path, f"a.jsonl{suffix}", packed)
    records = load_records(path, DATA)
    assert list(records) == TWO
    assert records.where(1) == f"{path} line 2"
    assert list(load_records(save(tmp_path, f"a.csv{suffix}", PACKERS[suffix](b"text\none\ntwo\n")), DATA)) == TWO
    with pytest.raises(DataError, match=f"not a whole {suffix} file"):
        load_records(save(tmp_path, f"b.jsonl{suffix}", packed[: len(packed) // 2]), DATA)


def test_a_file_made_to_explode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 1000)
    path = save(tmp_path, "a.jsonl.xz", lzma.compress(b" " * 10_000_000))
    with pytest.raises(DataError, match="bytes that become more than"):
        load_records(path, DATA)


def test_arrow_and_feather(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "two"]})
    pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"))
    with (
        pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    for name in ("a.feather", "stream.arrow", "file.arrow"):
        assert list(load_records(str(tmp_path / name), DATA)) == TWO
    with pytest.raises(DataError, match="not a readable Arrow file"):
        load_records(save(tmp_path, "b.arrow", b"ARROW1 nothing"), DATA)
    twice = pyarrow.Table.from_arrays([table["text"], table["text"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, str(tmp_path / "twice.parquet"))
    with pytest.raises(DataError, match="names text twice"):
        load_records(str(tmp_path / "twice.parquet"), DATA)


def test_a_folder_of_texts_is_a_document_a_file(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    folder = tmp_path / "books"
    save(folder, "b.txt", "two\nlines")
    save(folder, "a/one.txt.gz", gzip.compress(b"\xef\xbb\xbfone"))
    save(folder, "empty.txt", "")
    (folder / "loop").symlink_to(folder)
    records = load_records(str(folder), DATA)
    assert [row["text"] for row in records] == ["one", "two\nlines", ""]
    assert records.where(1) == f"{folder}/b.txt row 1"
    with pytest.raises(DataError, match=r"empty\.txt row 1: column 'text' is empty"):
        prepared(str(folder), tiny_tokenizer(), template="text")
    report = prepared(str(folder), tiny_tokenizer(), template="text", on_bad_row="skip").train.report
    assert report.dropped == {"column 'text' is empty": 1}


def test_a_pattern_reads_files_in_order_and_names_their_lines(tmp_path: Path) -> None:
    save(tmp_path, "b.jsonl", LINES)
    save(tmp_path, "a.csv", "text\nzero\n")
    save(tmp_path, "deep/c.jsonl", '{"text": "three"}\n')
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    records = load_records(f"{tmp_path}/*.[cj]s*", DATA)
    assert [row["text"] for row in records] == ["zero", "one", "two"]
    assert [records.where(0), records.where(2)] == [f"{tmp_path}/a.csv line 2", f"{tmp_path}/b.jsonl line 2"]
    assert [row["text"] for row in load_records(f"{tmp_path}/**/*.jsonl", DATA)] == ["one", "two", "three"]
    assert [row["text"] for row in load_records(f"{tmp_path}/*.jsonl", DataSection(max_rows=1))] == ["one"]
    with pytest.raises(DataError, match="no file matches the pattern"):
        load_records(f"{tmp_path}/*.json", DATA)
    with pytest.raises(DataError, match=r"a folder; a file is wanted[\s\S]*by a pattern: .*/\*\.csv"):
        load_records(str(tmp_path), DATA)


def test_b52_an_object_of_columns_is_a_table_and_a_list_is_named_by_its_key(tmp_path: Path) -> None:
    assert list(load_records(save(tmp_path, "a.json", '{"text": ["one", "two"]}'), DATA)) == TWO
    path = save(tmp_path, "b.json", json.dumps({"version": 1, "data": TWO, "train": TWO[:1]}))
    with pytest.raises(DataError, match=r"stand under 'data': name it as .*b\.json:data or .*b\.json:train"):
        load_records(path, DATA)
    records = load_records(f"{path}:data", DATA)
    assert list(records) == TWO
    assert records.where(1) == f"{path}:data row 2"
    with pytest.raises(DataError, match=r"no list 'rows' .*\n.*lists in it: data, train"):
        load_records(f"{path}:rows", DATA)
    with pytest.raises(DataError, match="different lengths: a 1, b 2"):
        load_records(save(tmp_path, "c.json", '{"a": [1], "b": [1, 2]}'), DATA)
    with pytest.raises(DataError, match="orient="):
        load_records(save(tmp_path, "d.json", '{"text": {"0": "one"}}'), DATA)


def test_a_key_given_twice_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", '{"text": "one"}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(DataError, match="line 2: the key 'text' is given twice"):
        load_records(path, DATA)
    with pytest.raises(DataError, match="the key 'text' is given twice"):
        load_records(save(tmp_path, "b.json", '[{"text": "a", "text": "b"}]'), DATA)


def test_b52_broken_lines_are_skipped_by_policy_and_counted(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    lines = '{"text": "one"}\n{"text": "br\n[1]\n{"text": "two"}\n{"text": "x", "text": "y"}\n'
    path = save(tmp_path, "a.jsonl", lines)
    with pytest.raises(DataError, match="line 2: broken JSON"):
        prepared(path, tiny_tokenizer(), template="text")
    report = prepared(path, tiny_tokenizer(), template="text", on_bad_row="skip").train.report
    assert (report.rows_in, report.rows_kept) == (5, 2)
    assert report.dropped == {"broken JSON": 1, "no JSON object": 1, "the key 'text' is given twice": 1}
    assert report.places["broken JSON"] == ("line 2",)
    assert report.places["no JSON object"] == ("line 3",)
    table = save(tmp_path, "a.csv", "text,other\none,1\ntwo\n")
    report = prepared(table, tiny_tokenizer(), template="text", on_bad_row="skip").train.report
    assert report.dropped == {"another number of cells than the header": 1}
    with pytest.raises(DataError, match=r"line 1: 0 of 2 rows left \(2 broken JSON\)"):
        load_records(save(tmp_path, "b.jsonl", "{\n{\n"), SKIP)


@pytest.mark.timeout(20)
def test_pipes_devices_and_loops_of_links_are_refused_without_waiting(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.txt"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match="this is a pipe, not a file"):
            load_records(str(tmp_path / name), DATA)
    with pytest.raises(DataError, match="this is a device, not a file"):
        load_records("/dev/zero", DATA)
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="symbolic links"):
        load_records(str(tmp_path / "a.jsonl"), DATA)
    with pytest.raises(DataError, match="no file matches"):
        load_records(f"{tmp_path}/*.txt", DATA)


def test_a_row_of_ten_megabytes(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    long = "word " * 2_000_000
    path = save(tmp_path, "a.jsonl", json.dumps({"text": long}) + "\n" + '{"text": "two"}\n')
    assert len(load_records(path, DATA)[0]["text"]) == 10_000_000
    rows = [{"text": long[:100_000]}, {"text": "two"}]
    report = prepared(rows, tiny_tokenizer(), template="text", on_long="drop", max_tokens=64).train.report
    assert report.dropped == {"longer than data.max_tokens": 1}


TALK = [{"from": "caller", "value": "Hi"}, {"from": "agent", "value": "Hello"}]


def test_b38_roles_of_a_recipe_join_those_of_the_template(prepared: Callable[..., Any], learned: Any) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    with pytest.raises(DataError, match=r"unknown role 'caller'[\s\S]*data\.roles\.caller=user"):
        prepared([{"messages": TALK}])
    for talk in (TALK, json.dumps(TALK)):
        rows = prepared([{"messages": talk}], tokenizer, roles={"caller": "user", "agent": "assistant"}).train
        assert learned(rows[0], tokenizer) == ["Hello<|im_end|>"]
    with pytest.raises(ConfigError) as caught:
        prepared([{"input": "a", "target": "b"}], template="grammar", roles={"x": "wizard"})
    assert [fault.where for fault in caught.value.faults] == ["data.roles.x", "data.roles"]


def test_b36_a_system_text_of_the_recipe_is_a_default(prepared: Callable[..., Any]) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"messages": talk},
        {"messages": [{"role": "system", "content": "Own."}, *talk]},
        {"messages": [{"role": "system", "content": ""}, *talk]},
        {"messages": talk, "system": "Column."},
    ]
    tokenizer = tiny_tokenizer(CHATML)
    texts = [tokenizer.decode(row.input_ids) for row in prepared(rows, tokenizer, system="Default.").train.documents]
    starts = [text.split("<|im_end|>")[0].removeprefix("<|im_start|>system\n") for text in texts]
    assert starts == ["Default.", "Own.", "", "Column."]
    both = {"messages": rows[1]["messages"], "system": "Other."}
    with pytest.raises(DataError, match="a system column and another system message"):
        prepared([both])
    asked = [{"instruction": "Go.", "output": "Gone."}]
    plain = prepared(asked, tiny_tokenizer(), template="alpaca", system="Default.").train
    assert tokenizer.decode(plain[0].input_ids).startswith("Default.\n\nBelow is an instruction")
    chat = prepared(asked, tokenizer, template="alpaca", system="Default.").train
    assert tokenizer.decode(chat[0].input_ids).startswith(
        "<|im_start|>system\nDefault.<|im_end|>\n<|im_start|>user\nGo."
    )
    with pytest.raises(ConfigError, match=r"data\.template=text has no place for a system text"):
        prepared([{"text": "a"}], tiny_tokenizer(), template="text", system="Default.")


def test_sharegpt_calls_become_tool_calls(prepared: Callable[..., Any], learned: Any) -> None:
    from tests.unit.data.chat_forms import TOOLS

    tokenizer = tiny_tokenizer(TOOLS)
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    talk = [
        {"from": "human", "value": "2+2?"},
        call,
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    row = {"conversations": talk, "tools": [{"name": "add"}], "system": "Count."}
    rows = prepared([row], tokenizer, template="messages").train
    answers = learned(rows[0], tokenizer)
    assert answers[0].strip().startswith("<tool_call>")
    assert answers[1] == "4<|im_end|>"
    broken = {**row, "conversations": [talk[0], {**call, "value": "add(2)"}]}
    with pytest.raises(DataError, match="text that is not JSON"):
        prepared([broken], tokenizer, template="sharegpt")
