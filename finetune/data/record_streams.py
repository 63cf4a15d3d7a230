"""Records of a file or a hub data set one after another, never all in memory, from any of them on.

A record that cannot be read is given as its error, so that data.on_bad_row decides; whatever makes the rest of the file
unreadable is raised. JSON lines, CSV, TSV and Parquet files, and hub data sets; a JSON array is no stream.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.config.schema import DataSection
from finetune.data.cells import RowError
from finetune.data.sources import LARGEST_CELL, SUFFIXES, Record
from finetune.environment import user_path
from finetune.errors import DataError

Placed = tuple[Record | RowError, str]
"""A record, or why it is none, and its place: `file.jsonl line 12`."""

UNREADABLE = "rows that cannot be read"


def stream_records(data: DataSection, skip: int) -> Iterator[Placed]:
    """The records of data.path from number `skip` on (blank lines do not count). DataError for what cannot be opened."""
    path = data.path or ""
    file = user_path(path, path)
    if file.is_file():
        kind = file.suffix.lower()
        reader = READERS.get(kind)
        if reader is None or file.stat().st_size == 0:
            what = "the file is empty (0 bytes)" if reader else f"a {kind or 'nameless'} file cannot be streamed"
            remedy = f"give {', '.join(READERS)} or a hub data set" + (
                "" if reader else ", or leave data.streaming out"
            )
            raise DataError(what, where=path, remedy=remedy)
        return reader(path, file, skip)
    if file.exists() or file.suffix.lower() in SUFFIXES or path.count("/") != 1:
        raise DataError("no such file", where=path, remedy="check the path, or give a hub id as org/name")
    return _hub(path, data.split, skip)


def _bad(what: str, where: str) -> RowError:
    return RowError(what, where, reason=UNREADABLE, remedy="mend the line, or set data.on_bad_row=skip")


def _json_lines(path: str, file: Path, skip: int) -> Iterator[Placed]:
    """Only a newline ends a line; a skipped one is not parsed."""
    passed = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            passed += 1
            if passed > skip:
                where = f"{path} line {number}"
                yield _parsed(line, where), where


def _parsed(line: bytes, where: str) -> Record | RowError:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _bad(f"not UTF-8 (byte 0x{line[error.start]:02x})", where)
    except json.JSONDecodeError as error:
        return _bad(f"broken JSON: {error.msg} at column {error.colno}", where)
    except (ValueError, RecursionError):
        return _bad("a number with too many digits, or JSON nested too deeply", where)
    return row if isinstance(row, dict) else _bad(f"a JSON object is wanted; this is a {type(row).__name__}", where)


def _table(path: str, file: Path, skip: int) -> Iterator[Placed]:
    """CSV or TSV with a header; a row's place is the line where it begins."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    header: list[str] | None = None
    passed, begin = 0, 1
    with file.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        while True:
            before = csv.field_size_limit(LARGEST_CELL)
            try:
                cells = next(reader)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"broken CSV: {error}", f"{path} line {begin}", "mend the line there") from error
            finally:
                csv.field_size_limit(before)
            line, begin = begin, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                continue
            passed += 1
            where = f"{path} line {line}"
            if passed <= skip:
                continue
            if len(cells) != len(header):
                yield _bad(f"{len(cells)} cells, but the header names {len(header)} columns", where), where
            else:
                yield dict(zip(header, cells, strict=True)), where


def _parquet(path: str, file: Path, skip: int) -> Iterator[Placed]:
    """Row groups before the first record wanted are not read."""
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file)
        passed = 0
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if passed + rows <= skip:
                passed += rows
                continue
            for batch in opened.iter_batches(batch_size=1024, row_groups=[group]):
                for row in batch.to_pylist():
                    passed += 1
                    if passed > skip:
                        yield row, f"{path} row {passed}"
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"not a readable Parquet file: {reason}", where=path, remedy="write the file again") from error


def _hub(name: str, split: str, skip: int) -> Iterator[Placed]:
    import datasets

    name, _, own_split = name.partition(":")
    split = own_split or split
    try:
        rows: Any = datasets.load_dataset(name, split=split, streaming=True).skip(skip)
        for number, row in enumerate(rows, start=skip + 1):
            yield row, f"{name}:{split} row {number}"
    except DataError:
        raise
    except Exception as error:
        # datasets raises over twenty kinds, several of them bare: none of them is a fault of this program.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check the id, the split (org/name:split) and the network; or give a local file"
        raise DataError(f"the hub data set cannot be read: {reason}", f"{name} split {split}", remedy) from error


Reader = Callable[[str, Path, int], Iterator[Placed]]
READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
