"""Records from files or a hub data set, each remembering where it stood.

`data.path` is a file, a pattern, a folder of plain texts, one list inside a JSON file (`file.json:key`), or a hub data set
(`org/name`, which is no file). How bytes become rows is in formats.py and tables.py.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from finetune.config.schema import DataSection
from finetune.data import files
from finetune.data.cells import BROKEN
from finetune.data.formats import LARGEST_CELL, Lines, read_document, read_json, read_key, read_table
from finetune.data.shaping import shaped
from finetune.data.tables import read_arrow, read_hub, read_parquet
from finetune.errors import DataError

__all__ = ["LARGEST_CELL", "SUFFIXES", "Record", "Records", "load_records"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.+-]+)?")
DOCUMENTS = (".txt", ".md")
"""Suffixes of plain texts: a file is one document."""

Record = dict[str, Any]


class Records(Sequence[Record]):
    """Rows of one or several files or of a hub split, in order. `where(i)` names the place of row i for messages.

    `parts` are (first row, path, unit) of the files, when they are several; `places` are lines or rows, from 1.
    """

    def __init__(
        self,
        rows: list[Record],
        path: str,
        places: list[int],
        unit: str,
        parts: Sequence[tuple[int, str, str]] = (),
    ) -> None:
        self._rows = rows
        self._places = places
        self._unit = unit
        self._parts = tuple(parts) or ((0, path, unit),)
        self._starts = [start for start, _, _ in self._parts]
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
        _, path, unit = self._parts[bisect_right(self._starts, index) - 1]
        return f"{path} {unit} {self._places[index]}"

    def columns(self) -> list[str]:
        """Every column that a row has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self._rows for name in row if name != BROKEN))

    def headers(self) -> list[tuple[list[str], int]]:
        """The columns of each part that a recipe names, with the part's first row. A missing column is a fault of a part."""
        return [(self.columns(), 0)]

    def first(self, count: int | None) -> Records:
        """The first rows; None: all of them."""
        if count is None or count >= len(self):
            return self
        return Records(self._rows[:count], self.path, self._places[:count], self._unit, self._parts)


def load_records(path: str | None, data: DataSection) -> Records:
    """The first `data.max_rows` records of what a path means, with `data.roles` and `data.system` applied.

    Lines that cannot be read are raised, or, with data.on_bad_row=skip, kept as records that cannot be rendered, so that
    they are counted with the others. Raises DataError, one line, for what cannot be read: a missing, empty or broken
    file, a pipe, a folder of data files, an unknown kind.
    """
    if not path:
        raise DataError("no data is named", where="data.path", remedy="give data.path=FILE or a hub data set id")
    try:
        records = _records(path, data).first(data.max_rows)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", where=path, remedy="check the file's permissions") from error
    if not len(records):
        raise DataError("the file has no rows", where=path, remedy="give a file with at least one row")
    if all(BROKEN in row for row in records):
        raise _nothing_left(records)
    rows = shaped(records[:], data)
    return Records(rows, records.path, records._places, records._unit, records._parts)


def _records(path: str, data: DataSection) -> Records:
    skip, file = data.on_bad_row == "skip", files.place(path)
    if file.is_dir():
        return _many(path, _documents(path, file), skip, data.max_rows)
    if file.exists():
        return _one(_read_file(path, file, skip))
    inside = _inside(path)
    if inside is not None:
        outer, file, key = inside
        return _one(read_key(outer, files.text(outer, files.contents(outer, file)), key, skip))
    if files.is_pattern(path):
        return _many(path, files.matching(path), skip, data.max_rows)
    if _is_hub_name(path, file):
        return _one(read_hub(path, data.split))
    raise files.missing_error(path, file)


def _nothing_left(records: Records) -> DataError:
    """What to say where data.on_bad_row=skip skips every row."""
    reasons = Counter(row[BROKEN][1] for row in records)
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    what = f"0 of {len(records):,} rows left ({counted}); the first: {records[0][BROKEN][0]}"
    return DataError(what, where=records.where(0), remedy="mend the rows, or look whether this is a file of that kind")


def files_of(path: str) -> list[Path] | None:
    """The files that a path means, in the order of their rows; None for a hub data set. DataError as load_records raises."""
    if not path:
        raise DataError("no data is named", where="data.path", remedy="give data.path=FILE or a hub data set id")
    file = files.place(path)
    if file.is_dir():
        return _documents(path, file)
    if file.exists():
        return [file]
    inside = _inside(path)
    if inside is not None:
        return [inside[1]]
    if files.is_pattern(path):
        return files.matching(path)
    if _is_hub_name(path, file):
        return None
    raise files.missing_error(path, file)


def _inside(path: str) -> tuple[str, Path, str] | None:
    """The file's name, the file and the key of `file.json:key`; None for what is no such path."""
    outer, _, key = path.rpartition(":")
    file = files.place(outer) if outer else None
    if file is None or files.inner_suffix(file) != ".json" or not file.exists():
        return None
    return outer, file, key


def _one(lines: Lines) -> Records:
    return Records(lines.rows, lines.path, lines.places, lines.unit)


def _many(path: str, found: Sequence[Path], skip: bool, most: int | None) -> Records:
    """Rows of several files behind one another. An empty text file is an empty row, which rendering reports."""
    rows: list[Record] = []
    places: list[int] = []
    parts = []
    for file in found:
        if most is not None and len(rows) >= most:
            break
        name = str(file)
        empty = file.suffix.lower() in DOCUMENTS and file.stat().st_size == 0
        lines = Lines(name, "row") if empty else _read_file(name, file, skip)
        if empty:
            lines.add(1, {"text": ""})
        parts.append((len(rows), name, lines.unit))
        rows += lines.rows
        places += lines.places
    return Records(rows, path, places, "row", parts)


def _is_hub_name(path: str, file: Path) -> bool:
    """A typo in a local path must not be asked of the hub: no known suffix, and no such folder here."""
    known = files.inner_suffix(file) in READERS
    return bool(HUB_NAME.fullmatch(path)) and not known and not file.parent.is_dir()


def _documents(path: str, folder: Path) -> list[Path]:
    """The plain texts of a folder, by name, those in its folders too; DataError where it holds data files, or nothing."""
    try:
        inside = sorted(item for item in folder.rglob("*") if item.is_file())
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", where=path, remedy="check the folder's permissions") from error
    kinds = {item: files.inner_suffix(item) for item in inside}
    texts = [item for item, kind in kinds.items() if kind in DOCUMENTS and item.name.lower() != "readme.md"]
    tables = [item for item, kind in kinds.items() if kind in READERS and kind not in DOCUMENTS]
    if tables:
        names = [str(item.relative_to(folder)) for item in tables]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        remedy = f"name one of its files: {shown}; or several by a pattern: {folder}/*{kinds[tables[0]]}"
        raise DataError("this is a folder; a file is wanted", where=path, remedy=remedy)
    if not texts:
        remedy = f"name a file ({', '.join(READERS)})"
        raise DataError("this is a folder without a data file", where=path, remedy=remedy)
    return texts


def _read_file(path: str, file: Path, skip: bool) -> Lines:
    kind = files.inner_suffix(file)
    files.check_regular(path, file)
    if kind not in READERS:
        kinds = f"{', '.join(READERS)}, each also as {', '.join(files.COMPRESSED)}"
        raise DataError(f"a file of unknown kind {kind!r}", where=path, remedy=f"give one of {kinds}")
    return READERS[kind](path, files.contents(path, file), skip)


def _json(path: str, raw: bytes, skip: bool) -> Lines:
    return read_json(path, files.text(path, raw), one_object=True, skip=skip)


def _json_lines(path: str, raw: bytes, skip: bool) -> Lines:
    return read_json(path, files.text(path, raw), one_object=False, skip=skip)


def _csv(path: str, raw: bytes, skip: bool) -> Lines:
    return read_table(path, files.text(path, raw), ",", skip)


def _tsv(path: str, raw: bytes, skip: bool) -> Lines:
    return read_table(path, files.text(path, raw), "\t", skip)


def _document(path: str, raw: bytes, skip: bool) -> Lines:
    return read_document(path, files.text(path, raw), skip)


def _parquet(path: str, raw: bytes, skip: bool) -> Lines:
    return read_parquet(path, raw)


def _arrow(path: str, raw: bytes, skip: bool) -> Lines:
    return read_arrow(path, raw)


READERS: dict[str, Callable[[str, bytes, bool], Lines]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".txt": _document,
    ".md": _document,
}
"""File suffix: which reader takes it. JSON lines and a JSON array are told apart by their first character."""

SUFFIXES = tuple(READERS)
