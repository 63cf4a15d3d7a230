"""Records of a file or a hub data set one after another, never all in memory, from any of them on.

A record that cannot be read is given as its error, so that data.on_bad_row decides; whatever makes the rest of the file
unreadable is raised. JSON lines, CSV, TSV and Parquet files, and hub data sets; a JSON array is no stream.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.config.schema import DataSection
from finetune.data.cells import RowError
from finetune.data.files import check_regular, is_pattern
from finetune.data.formats import check_header, parsed
from finetune.data.shaping import shaped
from finetune.data.sources import LARGEST_CELL, Record, files_of
from finetune.environment import user_path
from finetune.errors import DataError

Placed = tuple[Record | RowError, str]
"""A record, or why it is none, and its place: `file.jsonl line 12`."""

UNREADABLE = "rows that cannot be read"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
WHITE = b" \t\r\n"
"""What a blank line consists of, as without streaming."""


def stream_records(data: DataSection, skip: int) -> Iterator[Placed]:
    """The records of data.path from number `skip` on (blank lines do not count), with data.roles and data.system applied.

    DataError for what cannot be opened.
    """
    found = _placed(data, skip)
    if not data.roles and data.system is None:
        return found
    return ((row if isinstance(row, RowError) else shaped([row], data)[0], where) for row, where in found)


def _placed(data: DataSection, skip: int) -> Iterator[Placed]:
    path = data.path or ""
    file = user_path(path, path)
    try:
        if file.is_file():
            return _reader(path, file)(path, file, skip)
        if file.exists():
            check_regular(path, file)
            raise _unstreamed(path, "a folder cannot be streamed")
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", where=path, remedy="check the file's permissions") from error
    found = files_of(path)  # DataError where there is nothing
    if found is not None:
        raise _unstreamed(
            path, f"{'a pattern' if is_pattern(path) else 'a list inside a JSON file'} cannot be streamed"
        )
    return _hub(path, data.split, skip)


def _reader(path: str, file: Path) -> Reader:
    kind = file.suffix.lower()
    reader = READERS.get(kind)
    if reader is None:
        raise _unstreamed(path, f"a {kind or 'nameless'} file cannot be streamed")
    with file.open("rb") as opened:
        begin = opened.read(2)
    if not begin:
        raise DataError("the file is empty (0 bytes)", where=path, remedy="give a file with at least one row")
    if begin in UTF_16:
        raise DataError("the file is UTF-16", where=path, remedy="save it as UTF-8")
    return reader


def _unstreamed(path: str, what: str) -> DataError:
    remedy = f"give one file ({', '.join(READERS)}) or a hub data set, or leave data.streaming out"
    return DataError(what, where=path, remedy=remedy)


def _bad(what: str, where: str) -> RowError:
    return RowError(what, where, reason=UNREADABLE, remedy="mend the line, or set data.on_bad_row=skip")


def _json_lines(path: str, file: Path, skip: int) -> Iterator[Placed]:
    """Only a newline ends a line; a skipped one is not parsed."""
    passed = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip(WHITE):
                continue
            passed += 1
            if passed > skip:
                yield _parsed(line.strip(WHITE), path, number), f"{path} line {number}"


def _parsed(line: bytes, path: str, number: int) -> Record | RowError:
    """As without streaming: broken JSON costs the row, bytes that are no text say that the file is of another kind."""
    where = f"{path} line {number}"
    try:
        row = parsed(line.decode(), path, number)
    except UnicodeDecodeError as error:
        what = f"not UTF-8 (byte 0x{line[error.start]:02x})"
        raise DataError(what, where=where, remedy="save it as UTF-8") from error
    except DataError as error:
        return _bad(error.fault.what, where)
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
                header = check_header(path, [cell.strip() for cell in cells], where=f"{path} line {line}")
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
        check_header(path, list(opened.schema_arrow.names))
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
