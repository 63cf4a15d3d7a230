"""Parquet, Arrow and Feather files, and hub data sets, to rows."""

from __future__ import annotations

from typing import Any

from finetune.data.formats import Lines, check_header
from finetune.errors import DataError


def read_parquet(path: str, raw: bytes) -> Lines:
    """The rows of a Parquet file. DataError for one that is broken or has a column twice."""
    import pyarrow.parquet

    return _rows(path, "Parquet", lambda: pyarrow.parquet.ParquetFile(_buffer(raw)).read())


def read_arrow(path: str, raw: bytes) -> Lines:
    """The rows of an Arrow file, an Arrow stream or a Feather file."""
    import pyarrow
    import pyarrow.feather

    def table() -> Any:
        if raw.startswith(b"ARROW1"):
            return pyarrow.ipc.open_file(_buffer(raw)).read_all()
        if raw.startswith(b"FEA1"):
            return pyarrow.feather.read_table(_buffer(raw))
        return pyarrow.ipc.open_stream(_buffer(raw)).read_all()

    return _rows(path, "Arrow", table)


def _buffer(raw: bytes) -> Any:
    import pyarrow

    return pyarrow.BufferReader(raw)


def _rows(path: str, kind: str, read: Any) -> Lines:
    import pyarrow

    try:
        table = read()
        check_header(path, list(table.column_names))
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"not a readable {kind} file: {reason}", where=path, remedy="write the file again") from error
    lines = Lines(path, "row")
    lines.rows, lines.places = rows, list(range(1, len(rows) + 1))
    return lines


def read_hub(name: str, split: str) -> Lines:
    """A hub data set's split through `datasets`; whatever goes wrong there is one line here."""
    import datasets

    name, _, own_split = name.partition(":")
    split = own_split or split
    try:
        rows = datasets.load_dataset(name, split=split).to_list()
    except Exception as error:
        # datasets raises over twenty kinds, several of them bare: none of them is a fault of this program.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check the id, the split (org/name:split) and the network; or give a local file"
        what = f"the hub data set cannot be loaded: {reason}"
        raise DataError(what, where=f"{name} split {split}", remedy=remedy) from error
    lines = Lines(f"{name}:{split}", "row")
    lines.rows, lines.places = rows, list(range(1, len(rows) + 1))
    return lines
