"""Cells of a record as the values a template wants: text, or JSON that may be kept as text.

The rule for text columns: text is taken as it is; a whole or decimal number is converted with str() and counted, so the
report shows it; anything else is a fault of the row. A fault names its column, and whether `data.on_bad_row=skip` may
leave the row out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from finetune.errors import DataError

BROKEN = "\0broken"
"""The one key of a record that stands for a line that could not be read: [what, reason, remedy]. No column is called so."""
CONVERTED = "rows with a number converted to text"


class RowError(DataError):
    """One row that cannot be rendered. `reason` is the same for all rows of a kind, so that they can be counted."""

    def __init__(self, what: str, where: str, reason: str = "", skippable: bool = True, remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.reason = reason or what
        self.skippable = skippable


def empty_answer(where: str, what: str = "the answer is empty") -> RowError:
    """The fault of a row that leaves nothing to learn; an answer that is a stop token only is empty too."""
    return RowError(what, where, reason=what, remedy="write it, or set data.on_bad_row=skip")


def is_empty(value: object) -> bool:
    """None, NaN (an empty cell of a table of numbers) or white space only."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def kind_of(value: object) -> str:
    """What a value is, in words of data files."""
    kinds: tuple[tuple[Any, str], ...] = (
        (str, "a text"), (bool, "a boolean"), ((int, float), "a number"), (Mapping, "an object"),
        ((list, tuple), "a list"), ((bytes, bytearray), "bytes"),
    )  # fmt: skip
    named = type(value).__name__
    return next((words for kind, words in kinds if isinstance(value, kind)), f"a value of the kind {named}")


class KeyTwiceError(ValueError):
    """An object that has a key twice; JSON readers keep the last one without a word."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its keys and values. KeyTwiceError for a key that is given twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyTwiceError(f"the key {twice!r} is given twice")
    return made


decode = json.JSONDecoder(object_pairs_hook=once).decode
"""The value of a JSON text. ValueError (JSONDecodeError, KeyTwiceError) or RecursionError for what is none."""


def check_finite(value: Any, what: str, where: str) -> None:
    """Raises RowError for NaN or an infinite number anywhere in the value: JSON has none, so it would teach broken JSON."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, float) and not math.isfinite(item):
            reason = f"{what} hold a number that JSON does not have"
            raise RowError(f"{reason} ({item})", where, reason=reason, remedy="write a number, or null")


def text_cell(value: object, column: str, where: str, notes: set[str]) -> str:
    """The cell as text. None is ''. Adds to `notes` when a number was converted; raises RowError for other types."""
    if value is None or value != value:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isinf(value):
        reason = f"{column!r} is an infinite number"
        raise RowError(f"column {column!r} holds {value}", where, reason=reason, remedy="write the value as a string")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        notes.add(CONVERTED)
        return str(value)
    kind = kind_of(value)
    raise RowError(
        f"column {column!r} holds {kind}; text is wanted",
        where,
        reason=f"{column!r} is {kind}, not text",
        remedy="write the value as a string",
    )


def json_cell(value: object, column: str, where: str) -> Any:
    """The cell, parsed if it is JSON kept as text. Raises RowError for text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value)
    except KeyTwiceError as error:
        what = f"column {column!r} is JSON text in which {error}"
        raise RowError(
            what, where, f"{column!r} is JSON text with a key twice", remedy="keep one of the two"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or too long a number"
        raise RowError(
            f"column {column!r} is text that is not JSON: {reason}",
            where,
            reason=f"{column!r} is text that is not JSON",
            remedy="mend it, or keep a list, or a list written as JSON text",
        ) from error
