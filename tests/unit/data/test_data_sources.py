"""Data files in every shape people bring them: each loads with the right rows, or says in one line what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config.schema import DataSection
from finetune.data.sources import load_records
from finetune.errors import DataError

TWO = [{"text": "one"}, {"text": "two"}]
DATA = DataSection()


def save(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def fault(path: str) -> str:
    with pytest.raises(DataError) as caught:
        load_records(path, DATA)
    message = str(caught.value)
    assert path in message
    assert caught.value.exit_code == 2
    assert len(message.splitlines()) == 2, "one line, and one for the remedy"
    return message


def test_json_lines_know_their_line_numbers(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", '{"text": "one"}\n\n  \n{"text": "two"}\n')
    records = load_records(path, DATA)
    assert list(records) == TWO
    assert [records.where(0), records.where(1)] == [f"{path} line 1", f"{path} line 4"]
    assert records.columns() == ["text"]
    assert records[0:1] == TWO[:1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_b49_byte_order_mark_crlf_and_blank_lines_change_nothing(tmp_path: Path, name: str) -> None:
    plain = "\n".join(map(json.dumps, TWO)) + "\n"
    assert list(load_records(save(tmp_path, name, plain), DATA)) == TWO
    assert list(load_records(save(tmp_path, "b" + name, b"\xef\xbb\xbf" + plain.encode()), DATA)) == TWO
    messy = b"\xef\xbb\xbf" + plain.replace("\n", "\r\n\r\n").encode()
    assert list(load_records(save(tmp_path, "c" + name, messy), DATA)) == TWO


def test_b51_unicode_line_separators_stay_inside_their_string(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\u2029d\x0be"
    lines = json.dumps({"text": odd}, ensure_ascii=False).replace("\\u000b", "\\u000b") + '\n{"text": "two"}\n'
    assert "\u2028" in lines
    assert [row["text"] for row in load_records(save(tmp_path, "a.jsonl", lines), DATA)] == [odd, "two"]
    table = f'text,other\n"{odd[:7]}",1\ntwo,2\n'
    assert [row["text"] for row in load_records(save(tmp_path, "a.csv", table), DATA)] == [odd[:7], "two"]


def test_b52_a_list_at_the_top_is_accepted_whatever_the_suffix(tmp_path: Path) -> None:
    for name in ("a.json", "a.jsonl"):
        path = save(tmp_path, name, json.dumps(TWO, indent=2))
        records = load_records(path, DATA)
        assert list(records) == TWO
        assert records.where(1) == f"{path} row 2"


def test_b52_one_object_at_the_top_is_refused_with_a_hint(tmp_path: Path) -> None:
    message = fault(save(tmp_path, "a.json", json.dumps({"version": 1, "data": TWO})))
    assert "one JSON object at the top" in message
    assert "the rows seem to stand under 'data'" in message
    assert "put the rows into a list" in fault(save(tmp_path, "b.json", '{"text": "one"}'))


def test_b52_a_broken_line_is_named(tmp_path: Path) -> None:
    message = fault(save(tmp_path, "a.jsonl", '{"text": "one"}\n\n{"text": "two'))
    assert "a.jsonl line 3: broken JSON" in message
    assert "cut off" in message
    assert "b.json line 4: broken JSON" in fault(save(tmp_path, "b.json", '[\n{"text": 1},\n{"text": 2}\n{"text": 3}]'))
    assert "c.jsonl line 2: a JSON object is wanted; this is a list" in fault(save(tmp_path, "c.jsonl", "{}\n[1]"))
    assert "d.json row 2: a JSON object is wanted; this is a str" in fault(save(tmp_path, "d.json", '[{"a": 1}, "b"]'))
    assert "nested too deeply" in fault(save(tmp_path, "e.jsonl", '{"a": ' + "[" * 100_000))


def test_b54_empty_inputs_each_have_one_clear_line(tmp_path: Path) -> None:
    assert "empty (0 bytes)" in fault(save(tmp_path, "zero.jsonl", ""))
    assert "only blank lines" in fault(save(tmp_path, "blank.jsonl", "\n \r\n\t\n"))
    assert "only blank lines" in fault(save(tmp_path, "blank.csv", "\n\n"))
    assert "no rows" in fault(save(tmp_path, "head.csv", "text\n"))
    assert "no rows" in fault(save(tmp_path, "list.json", "[]"))
    assert "did you mean" in fault(str(tmp_path / "zero.jsnl"))
    assert "zero.jsonl" in fault(str(tmp_path / "zero.jsnl"))
    assert "nor its folder" in fault(str(tmp_path / "nowhere" / "rows.jsonl"))
    message = fault(str(tmp_path))
    assert "this is a folder" in message
    assert "blank.csv" in message
    (tmp_path / "bare").mkdir()
    assert "a folder without a data file" in fault(str(tmp_path / "bare"))
    assert "unknown kind '.docx'" in fault(save(tmp_path, "a.docx", "x"))
    with pytest.raises(DataError, match=r"data\.path"):
        load_records(None, DATA)


def test_a_typo_in_a_local_path_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    save(tmp_path / "data", "train.jsonl", "{}")
    assert "did you mean data/train.jsonl?" in fault("data/trian.jsonl")
    assert "no such file" in fault("data/train")
    assert "nor its folder" in fault("other/train.jsonl")


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    program = (
        "from finetune.config.schema import DataSection\n"
        "from finetune.data.sources import load_records\n"
        "from finetune.errors import DataError\n"
        "try:\n    load_records('no-such-owner/no-such-set:test', DataSection())\n"
        "except DataError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("no-such-owner/no-such-set split test: the hub data set cannot be loaded"), done.stderr
    assert "local file" in lines[1]
    assert len(lines) == 2


def test_bytes_that_are_no_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    message = fault(save(tmp_path, "a.jsonl", b'{"text": "one"}\n{"text": "\xe9t\xe9"}\n'))
    assert "a.jsonl line 2: not UTF-8 (byte 0xe9)" in message
    assert "UTF-16" in fault(save(tmp_path, "b.jsonl", '{"text": "one"}'.encode("utf-16")))


def test_csv_cells_are_text_and_rows_know_where_they_begin(tmp_path: Path) -> None:
    path = save(tmp_path, "a.csv", '\ufeffinput,target\n"two\nlines, and a comma",x\n\n007,"say ""hi"""\n')
    records = load_records(path, DATA)
    assert list(records) == [
        {"input": "two\nlines, and a comma", "target": "x"},
        {"input": "007", "target": 'say "hi"'},
    ]
    assert [records.where(0), records.where(1)] == [f"{path} line 2", f"{path} line 5"]
    assert list(load_records(save(tmp_path, "a.tsv", "a\tb\n1\t2,3\n"), DATA)) == [{"a": "1", "b": "2,3"}]
    large = save(tmp_path, "large.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(load_records(large, DATA)[0]["text"]) == 300_000


def test_broken_csv_is_named_with_its_line(tmp_path: Path) -> None:
    assert "a.csv line 3: 1 cells, but the header names 2" in fault(save(tmp_path, "a.csv", "a,b\n1,2\n3\n"))
    assert "a twice" in fault(save(tmp_path, "b.csv", "a,a\n1,2\n"))
    assert "c.csv line 2: broken CSV" in fault(save(tmp_path, "c.csv", 'a,b\n1,"2\n'))


def test_parquet_rows_and_broken_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    chat = [[{"role": "user", "content": "hi"}], []]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None], "number": [42, 7], "messages": chat}), path)
    records = load_records(path, DATA)
    assert records[0] == {"text": "one", "number": 42, "messages": chat[0]}
    assert records[1]["text"] is None
    assert records.where(1) == f"{path} row 2"
    assert "not a readable Parquet file" in fault(save(tmp_path, "b.parquet", b"PAR1 nothing"))


def test_max_rows_takes_the_first(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", "".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    assert [row["n"] for row in load_records(path, DataSection(max_rows=3))] == [0, 1, 2]
    assert len(load_records(path, DataSection(max_rows=9))) == 5


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '"hello"', "a JSON object is wanted; this is a str"),
        ("a.json", "42", "a JSON object is wanted; this is a int"),
        ("a.json", "null", "a JSON object is wanted; this is a NoneType"),
        ("a.json", DEEP, "line 1: JSON nested too deeply"),
        ("a.jsonl", DEEP, "line 1: JSON nested too deeply"),
        ("a.jsonl", '{"text": "a"}\n{"text": ' + "9" * 5000 + "}\n", "line 2: a number with too many digits"),
        ("a.json", '[{"text": ' + "9" * 5000 + "}]", "a number with too many digits"),
        ("a.json", '{"text": ' + "9" * 5000 + "}", "line 1: a number with too many digits"),
    ],
)
def test_json_that_is_no_table_of_rows_is_one_message(tmp_path: Path, name: str, content: str, message: str) -> None:
    assert message in fault(save(tmp_path, name, content))
