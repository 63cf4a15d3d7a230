"""Text formats to rows: JSON lines, JSON, CSV, TSV, plain documents. Each row keeps the line where it begins.

They are read with the standard library, so that an error can name the line, a number stays a number, a key given twice
is seen, and only a newline ends a line (U+2028 inside a string is text). A line that cannot be read is handed to `Lines`,
which stops or keeps it as a row that says what is wrong, as `data.on_bad_row` has it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from finetune.data.cells import BROKEN, KeyTwiceError, decode
from finetune.errors import DataError

LARGEST_CELL = 2**31 - 1
Record = dict[str, Any]


class Lines:
    """Rows of one file as they are read. `unit` says what `places` count: lines or rows, from 1."""

    def __init__(self, path: str, unit: str = "line", skip: bool = False) -> None:
        self.path, self.unit, self.skip = path, unit, skip
        self.rows: list[Record] = []
        self.places: list[int] = []
        self.first_fault: DataError | None = None

    def add(self, number: int, row: Record) -> None:
        self.rows.append(row)
        self.places.append(number)

    def bad(self, number: int, fault: DataError, reason: str) -> None:
        """A row that cannot be read: raised, or kept as a row that cannot be rendered, which is then counted."""
        if not self.skip:
            raise fault
        self.first_fault = self.first_fault or fault
        self.add(number, {BROKEN: [fault.fault.what, reason, fault.fault.remedy]})

    def where(self, number: int) -> str:
        return f"{self.path} {self.unit} {number}"


def parsed(text: str, path: str, line: int | None = None) -> Any:
    """The value of JSON text; `line` is where the text stands, None for a whole file. DataError for what is none."""
    where = path if line is None else f"{path} line {line}"
    try:
        return decode(text)
    except json.JSONDecodeError as error:
        remedy = "mend or remove the line; if it is the last one, the file was cut off"
        remedy += "" if line is None else "; data.on_bad_row=skip leaves it out"
        what = f"broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError(what, where=f"{path} line {line or error.lineno}", remedy=remedy) from error
    except KeyTwiceError as error:
        raise DataError(str(error), where=where, remedy="keep one of the two") from error
    except (ValueError, RecursionError) as error:
        what = "a number with too many digits" if isinstance(error, ValueError) else "JSON nested too deeply"
        raise DataError(what, where=where, remedy="mend or remove the row") from error


def read_json(path: str, text: str, one_object: bool, skip: bool) -> Lines:
    """JSON lines, or one array of objects, which begins with a bracket.

    `one_object`: the file may be one JSON value over several lines (.json), and then has to be a table of columns. Else a
    text that is no array as a whole is read line by line: there the bracket is the fault of one line.
    """
    first = text.lstrip(" \t\r\n")[:1]
    if not first:
        raise DataError("the file has only blank lines", where=path, remedy="give a file with at least one row")
    if first == "[" and (one_object or _is_array(text)):
        return _listed(path, *_marked(text, path), skip)
    if one_object:
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None  # several lines, or broken: reading it line by line says where
        else:
            if isinstance(whole, dict):
                return _columns(path, *_marked(text, path), skip)
            raise _no_object(whole, path)
    return _json_lines(path, text, skip)


def read_key(path: str, text: str, key: str, skip: bool) -> Lines:
    """The rows under one key of a JSON object: `file.json:key`."""
    whole, marked = _marked(text, path)
    if not isinstance(whole, dict) or not isinstance(whole.get(key), list):
        lists = [name for name, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
        remedy = f"lists in it: {', '.join(lists) or 'none'}"
        raise DataError(f"there is no list {key!r} at the top of the file", where=path, remedy=remedy)
    return _listed(f"{path}:{key}", whole[key], marked, skip)


def _is_array(text: str) -> bool:
    """Whether a text that begins with a bracket is one JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Twice(dict[str, Any]):
    """An object of a file that was given a key twice."""

    key = ""


def _marking(found: list[tuple[str, Any]]) -> Record:
    names = [name for name, _ in found]
    made = dict(found)
    if len(made) == len(names):
        return made
    twice = _Twice(made)
    twice.key = next(name for name in names if names.count(name) > 1)
    return twice


def _marked(text: str, path: str) -> tuple[Any, bool]:
    """A whole file's value, and whether a row of it holds a key twice: that is a fault of the row, and has its number."""
    try:
        return parsed(text, path), False
    except DataError as error:
        if not isinstance(error.__cause__, KeyTwiceError):
            raise
        try:
            whole = json.loads(text, object_pairs_hook=_marking)
        except (ValueError, RecursionError):
            raise error from error.__cause__
        if isinstance(whole, _Twice):
            raise error from error.__cause__
        return whole, True


def _twice_in(value: Any) -> str | None:
    """The key that an object anywhere in a value was given twice."""
    if isinstance(value, _Twice):
        return value.key
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((key for item in inside if (key := _twice_in(item)) is not None), None)


def _listed(path: str, values: list[Any], marked: bool, skip: bool) -> Lines:
    lines = Lines(path, "row", skip)
    for number, value in enumerate(values, start=1):
        twice = _twice_in(value) if marked else None
        if twice is not None:
            fault = DataError(f"the key {twice!r} is given twice", lines.where(number), "keep one of the two")
            lines.bad(number, fault, fault.fault.what)
        elif isinstance(value, dict):
            lines.add(number, value)
        else:
            lines.bad(number, _no_object(value, lines.where(number)), "no JSON object")
    return lines


def _columns(path: str, whole: Record, marked: bool, skip: bool) -> Lines:
    """An object of columns (lists of one length) is a table; any other object at the top is none."""
    lists = {name: value for name, value in whole.items() if isinstance(value, list)}
    objects = [name for name, value in lists.items() if value and all(isinstance(item, dict) for item in value)]
    lengths = {len(value) for value in lists.values()}
    if len(lists) == len(whole) and len(lengths) == 1 and not objects:
        names = list(whole)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*whole.values(), strict=True)]
        return _listed(path, rows, marked, skip)
    if objects:
        ways = " or ".join(f"{path}:{name}" for name in objects)
        hint = f"the rows seem to stand under {objects[0]!r}: name it as {ways}, or save that list alone"
    elif len(lists) == len(whole) and whole:
        hint = (
            f"its columns have different lengths: {', '.join(f'{name} {len(value)}' for name, value in lists.items())}"
        )
    elif whole and all(isinstance(value, dict) for value in whole.values()):
        hint = 'put the rows into a list [...] (pandas: to_json(orient="records"))'
    else:
        hint = "put the rows into a list [...]"
    raise DataError("one JSON object at the top; a list of rows is wanted", where=path, remedy=hint)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1. Only a newline ends a line; str.splitlines would cut at U+2028."""
    start, number = 0, 1
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].strip(" \t\r")
        if line:
            yield number, line
        start, number = end + 1, number + 1


def _json_lines(path: str, text: str, skip: bool) -> Lines:
    lines = Lines(path, skip=skip)
    for number, line in lines_of(text):
        try:
            row = parsed(line, path, number)
        except DataError as fault:
            lines.bad(number, fault, fault.fault.what.split(":")[0])
            continue
        if isinstance(row, dict):
            lines.add(number, row)
        else:
            lines.bad(number, _no_object(row, lines.where(number)), "no JSON object")
    return lines


def _no_object(value: object, where: str) -> DataError:
    what = f"a JSON object is wanted; this is a {type(value).__name__}"
    return DataError(what, where=where, remedy='write rows as {"column": ...}')


def read_table(path: str, text: str, delimiter: str, skip: bool) -> Lines:
    """A table with a header; every cell is text. A row's place is the line where it begins."""
    before = csv.field_size_limit(LARGEST_CELL)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return _table(Lines(path, skip=skip), reader)
    finally:
        csv.field_size_limit(before)


def _table(lines: Lines, reader: Any) -> Lines:
    header: list[str] | None = None
    begin, path = 1, lines.path
    try:
        for cells in reader:
            line, begin = begin, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = check_header(path, [cell.strip() for cell in cells], f"{path} line 1")
                continue
            if len(cells) != len(header):
                what = f"{len(cells)} cells, but the header names {len(header)} columns"
                fault = DataError(what, where=lines.where(line), remedy="quote cells that hold commas or line ends")
                lines.bad(line, fault, "another number of cells than the header")
                continue
            lines.add(line, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"broken CSV: {error}", where=f"{path} line {begin}", remedy="mend the quotes there") from error
    if header is None:
        raise DataError("the file has only blank lines", where=path, remedy="give a file with at least one row")
    return lines


def check_header(path: str, names: list[str], where: str = "") -> list[str]:
    """The names of a table's columns. DataError where two are the same, or one is empty."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        named = twice and twice != [""]
        what = f"the header names {', '.join(twice)} twice" if named else "the header has an empty name"
        raise DataError(what, where=where or path, remedy="give every column its own name")
    return names


def read_document(path: str, text: str, skip: bool) -> Lines:
    """A plain text file: one row whose `text` is all of it."""
    if not text.strip():
        raise DataError("the file has only blank lines", where=path, remedy="give a file with text in it")
    lines = Lines(path, "row", skip)
    lines.add(1, {"text": text})
    return lines
