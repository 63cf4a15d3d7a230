"""Records from a file or a hub data set, each remembering where it stood.

Local text files are read with the standard library rather than through `datasets`: an error can then name the line, a
number stays a number, and a line ends at a newline only (U+2028 inside a string is text). Parquet goes through pyarrow;
a name like `org/name` that is no file is a hub data set.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from finetune.config.schema import DataSection
from finetune.environment import user_path
from finetune.errors import DataError

SUFFIXES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
"""File suffix: which reader takes it. JSON lines and a JSON array are told apart by their first character."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.+-]+)?")
LARGEST_CELL = 2**31 - 1

Record = dict[str, Any]


class Records(Sequence[Record]):
    """Rows of one file or hub split, in its order. `where(i)` names the place of row i for messages."""

    def __init__(self, rows: list[Record], path: str, places: list[int], unit: str) -> None:
        self._rows = rows
        self._places = places
        self._unit = unit
        self.path = path

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._rows[index]

    def where(self, index: int) -> str:
        """`file.jsonl line 12`, or `file.parquet row 12` where a file has no lines; both count from 1."""
        return f"{self.path} {self._unit} {self._places[index]}"

    def columns(self) -> list[str]:
        """Every column that a row has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self._rows for name in row))


def load_records(path: str | None, data: DataSection) -> Records:
    """The first `data.max_rows` records of a file or a hub data set (`org/name:split`, else `data.split`).

    Raises DataError, one line, for what cannot be read: a missing, empty or broken file, a folder, an unknown kind.
    """
    if not path:
        raise DataError("no data is named", where="data.path", remedy="give data.path=FILE or a hub data set id")
    file = user_path(path, path)
    if file.is_dir():
        raise _folder_error(path, file)
    if file.is_file():
        records = _read_file(path, file)
    elif _is_hub_name(path, file):
        records = _read_hub(path, data.split)
    else:
        raise _missing_error(path, file)
    if not len(records):
        raise DataError("the file has no rows", where=path, remedy="give a file with at least one row")
    if data.max_rows is not None and data.max_rows < len(records):
        kept = data.max_rows
        records = Records(records[:kept], records.path, records._places[:kept], records._unit)
    return records


def _is_hub_name(path: str, file: Path) -> bool:
    """A typo in a local path must not be asked of the hub: no known suffix, and no such folder here."""
    known = file.suffix.lower() in SUFFIXES
    return bool(HUB_NAME.fullmatch(path)) and not known and not file.parent.is_dir()


def _folder_error(path: str, folder: Path) -> DataError:
    inside = sorted(item.name for item in folder.iterdir() if item.suffix.lower() in SUFFIXES)
    if not inside:
        kinds = ", ".join(SUFFIXES)
        return DataError("this is a folder without a data file", where=path, remedy=f"name a file ({kinds})")
    shown = ", ".join(inside[:5]) + (", ..." if len(inside) > 5 else "")
    return DataError("this is a folder; a file is wanted", where=path, remedy=f"name one of its files: {shown}")


def _missing_error(path: str, file: Path) -> DataError:
    folder = file.parent
    if not folder.is_dir():
        return DataError(
            "no such file, nor its folder", where=path, remedy="check the path, or give a hub id as org/name"
        )
    names = [item.name for item in folder.iterdir() if item.is_file()]
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    remedy = f"did you mean {folder / near[0]}?" if near else f"look into {folder.resolve()}"
    return DataError("no such file", where=path, remedy=remedy)


def _read_file(path: str, file: Path) -> Records:
    kind = SUFFIXES.get(file.suffix.lower())
    if kind is None:
        kinds = ", ".join(SUFFIXES)
        raise DataError(f"a file of unknown kind {file.suffix!r}", where=path, remedy=f"give one of {kinds}")
    if file.stat().st_size == 0:
        raise DataError("the file is empty (0 bytes)", where=path, remedy="give a file with at least one row")
    try:
        return _READERS[kind](path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", where=path, remedy="check the file's permissions") from error


def _text(path: str, file: Path) -> str:
    """The file as text, without a byte-order mark; DataError with the line where it is not UTF-8."""
    raw = file.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("the file is UTF-16", where=path, remedy="save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise DataError(
            f"not UTF-8 (byte 0x{byte:02x})", where=f"{path} line {line}", remedy="save it as UTF-8"
        ) from error


def _read_json(path: str, file: Path) -> Records:
    """JSON lines, or one array of objects; which one is told by the first character that is not white space."""
    text = _text(path, file)
    first = text.lstrip(" \t\r\n")[:1]
    if not first:
        raise DataError("the file has only blank lines", where=path, remedy="give a file with at least one row")
    if first == "[":
        return _json_array(path, text)
    if file.suffix.lower() == ".json":
        _refuse_one_object(path, text)
    return _json_lines(path, text)


def _parsed(text: str, path: str, line: int | None = None) -> Any:
    """The value of JSON text; `line` is where the text stands, None for a whole file. DataError for what is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _json_error(path, line or error.lineno, error) from error
    except (ValueError, RecursionError) as error:
        what = "a number with too many digits" if isinstance(error, ValueError) else "JSON nested too deeply"
        where = path if line is None else f"{path} line {line}"
        raise DataError(what, where=where, remedy="mend or remove the row") from error


def _json_array(path: str, text: str) -> Records:
    rows = _parsed(text, path)
    for number, row in enumerate(rows, start=1):
        _want_object(row, f"{path} row {number}")
    return Records(rows, path, list(range(1, len(rows) + 1)), "row")


def _refuse_one_object(path: str, text: str) -> None:
    """A .json file that is one object is no table of rows; several objects, one a line, are read as JSON lines."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return  # several lines, or broken: reading it line by line says where
    _want_object(whole, path)
    lists = [key for key, value in whole.items() if isinstance(value, list)]
    hint = (
        f"the rows seem to stand under {lists[0]!r}: save that list alone"
        if lists
        else "put the rows into a list [...]"
    )
    raise DataError("one JSON object at the top; a list of rows is wanted", where=path, remedy=hint)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1. Only a newline ends a line; str.splitlines would cut at U+2028."""
    start, number = 0, 1
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].strip(" \t\r")
        if line:
            yield number, line
        start, number = end + 1, number + 1


def _json_lines(path: str, text: str) -> Records:
    rows: list[Record] = []
    places: list[int] = []
    for number, line in _lines(text):
        row = _parsed(line, path, number)
        _want_object(row, f"{path} line {number}")
        rows.append(row)
        places.append(number)
    return Records(rows, path, places, "line")


def _want_object(row: object, where: str) -> None:
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise DataError(
            f"a JSON object is wanted; this is a {kind}", where=where, remedy='write rows as {"column": ...}'
        )


def _json_error(path: str, line: int, error: json.JSONDecodeError) -> DataError:
    remedy = "mend or remove the line; if it is the last one, the file was cut off"
    return DataError(f"broken JSON: {error.msg} at column {error.colno}", where=f"{path} line {line}", remedy=remedy)


def _read_csv(path: str, file: Path) -> Records:
    """A table with a header; every cell is text. A row's place is the line where it begins."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    text = _text(path, file)
    before = csv.field_size_limit(LARGEST_CELL)
    try:
        return _table(path, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    finally:
        csv.field_size_limit(before)


def _table(path: str, reader: Any) -> Records:
    header: list[str] | None = None
    rows: list[Record] = []
    places: list[int] = []
    begin = 1
    try:
        for cells in reader:
            line, begin = begin, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = _header(path, cells)
                continue
            if len(cells) != len(header):
                what = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise DataError(what, where=f"{path} line {line}", remedy="quote cells that hold commas or line ends")
            rows.append(dict(zip(header, cells, strict=True)))
            places.append(line)
    except csv.Error as error:
        raise DataError(f"broken CSV: {error}", where=f"{path} line {begin}", remedy="mend the quotes there") from error
    if header is None:
        raise DataError("the file has only blank lines", where=path, remedy="give a file with at least one row")
    return Records(rows, path, places, "line")


def _header(path: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        what = (
            f"the header names {', '.join(twice)} twice" if twice and twice != [""] else "the header has an empty name"
        )
        raise DataError(what, where=f"{path} line 1", remedy="give every column its own name")
    return names


def _read_parquet(path: str, file: Path) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"not a readable Parquet file: {reason}", where=path, remedy="write the file again") from error
    return Records(rows, path, list(range(1, len(rows) + 1)), "row")


_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}


def _read_hub(name: str, split: str) -> Records:
    """A hub data set's split through `datasets`; whatever goes wrong there is one line here."""
    import datasets

    name, _, own_split = name.partition(":")
    split = own_split or split
    try:
        table = datasets.load_dataset(name, split=split)
        rows = table.to_list()
    except Exception as error:
        # datasets raises over twenty kinds, several of them bare: none of them is a fault of this program.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check the id, the split (org/name:split) and the network; or give a local file"
        raise DataError(
            f"the hub data set cannot be loaded: {reason}", where=f"{name} split {split}", remedy=remedy
        ) from error
    return Records(rows, f"{name}:{split}", list(range(1, len(rows) + 1)), "row")
