"""The kinds of values that a recipe's fields take, each read from text by its own rules and told in words.

Values come as text (from YAML and the command line) and the field's type decides what they are, so `012` is 12 for a
count and stays `012` for a name.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from finetune.config.group_text import group_changes

NULLS = ("null", "Null", "NULL", "~", "", "none", "None")
"""Texts that mean "not set" where a key may be unset. Quotes make no difference: a name called null is written ./null."""

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"TB": 10**12, "B": 1, "": 1}

DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
"""A number of YAML 1.2's core schema: no underscores, no base sixty; 2e-5 needs no dot."""


@dataclass(frozen=True)
class Wants:
    """What a field takes, in words, for messages and help."""

    text: str


def _null(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip() in NULLS else value


def _number(value: Any) -> Any:
    """A finite number. Text is read by YAML 1.2's rules; a truth value is not a number."""
    if isinstance(value, bool):
        raise ValueError("a truth value where a number is wanted")
    if isinstance(value, str):
        if not DECIMAL.fullmatch(value.strip()):
            raise ValueError("not a number")
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _whole(value: Any) -> Any:
    """A whole number: 12, 012 (twelve), 0x10, 0o14, and 5e5 or 12.0, which name a whole number too."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return int(text, 10)
        if re.fullmatch(r"0x[0-9a-fA-F]+|0o[0-7]+", text):
            return int(text, 0)
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _temperature(value: float) -> float:
    """Scores are divided by it in fp32, which overflows far below 1e-6."""
    if 0 < value < 1e-6:
        raise ValueError("too near to 0")
    return value


def _list(value: Any) -> Any:
    """`a,b` and `[a, b]` from the command line are lists; `all-linear` alone is a list of one; null is the empty one."""
    if value is None:
        return []
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in NULLS:
        return []
    if text.startswith("[") != text.endswith("]"):
        raise ValueError("a bracket is missing")
    inner = text[1:-1] if text.startswith("[") else text
    return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]


def _pairs(value: Any) -> Any:
    return {} if _null(value) is None else value


def _text(value: Any) -> Any:
    """Text that a path and a UTF-8 file can hold: no null character, no half of a character."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a null character")
    if isinstance(value, str):
        value.encode()
    return value


def _auto(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _auto_whole(value: Any) -> Any:
    return "auto" if _auto(value) == "auto" else _whole(value)


def _blocks(value: Any) -> Any:
    """A count of blocks from 2 on; words are read as switches or refused."""
    value = _auto(value)
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value):
        if int(value) < 2:
            raise ValueError("too few blocks")
        return int(value)
    return value


def _bytes(value: Any) -> Any:
    """`8GiB`, `24GB`, `512MiB`, a bare number of bytes, or `auto`."""
    if _auto(value) == "auto":
        return "auto"
    if not isinstance(value, str):
        return _whole(value)
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", value.strip())
    if parts is None or parts[2] not in UNITS:
        raise ValueError("not a size")
    return int(Fraction(parts[1]) * UNITS[parts[2]])


def _group(value: str) -> str:
    group_changes(value)
    return value


Nullable = BeforeValidator(_null)
Text = Annotated[str, BeforeValidator(_text), Field(min_length=1), Wants("text")]
Name = Annotated[
    str,
    BeforeValidator(_text),
    Field(pattern=r"^[^/\\]*[^/\\.]$"),
    Wants("a name: no slash, and no dot at its end"),
]
Switch = Annotated[bool, Wants("true or false")]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1), Wants("a whole number of at least 1")]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0), Wants("a whole number of at least 0")]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63), Wants("a whole number from 0 to below 2^63")]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0), Wants("a number above 0")]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0), Wants("a number of at least 0")]
Temperature = Annotated[
    float, BeforeValidator(_number), Field(ge=0), AfterValidator(_temperature), Wants("0, or a number of at least 1e-6")
]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1), Wants("a number from 0 to below 1")]
Portion = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1), Wants("a number from 0 to 1")]
OptionalCount = Annotated[Count | None, Nullable, Wants("a whole number of at least 1, or null")]
OptionalPositive = Annotated[Positive | None, Nullable, Wants("a number above 0, or null")]
OptionalText = Annotated[Text | None, Nullable, Wants("text, or null")]
Names = Annotated[tuple[Text, ...], BeforeValidator(_list), Wants("a list: a,b or [a, b]")]
Pairs = Annotated[dict[str, Text], BeforeValidator(_pairs), Wants("a section of NAME: text")]
Counts = Annotated[
    dict[str, Annotated[int, BeforeValidator(_whole), Field(ge=1)]],
    BeforeValidator(_pairs),
    Wants("a section of NAME: whole number"),
]
Weights = Annotated[dict[str, Positive], BeforeValidator(_pairs), Wants("a section of NAME: number above 0")]
Groups = Annotated[
    dict[str, Annotated[Text, AfterValidator(_group)]],
    BeforeValidator(_pairs),
    Wants("a section of PATTERN: lr_factor=NUMBER weight_decay=NUMBER (one or both)"),
]
Roles = Annotated[
    tuple[Literal["embedding", "head"], ...], BeforeValidator(_list), Wants("a list of embedding and head, or []")
]
Size = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    BeforeValidator(_bytes),
    Wants("a size such as 8GiB, 24GB or 512MiB, or auto"),
]
AutoCount = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    BeforeValidator(_auto_whole),
    Wants("a whole number of at least 1, or auto"),
]
AutoWhole = Annotated[
    Annotated[int, Field(ge=0)] | Literal["auto"],
    BeforeValidator(_auto_whole),
    Wants("a whole number of at least 0, or auto"),
]
AutoBlocks = Annotated[
    bool | Annotated[int, Field(ge=2)] | Literal["auto", "selective"],
    BeforeValidator(_blocks),
    Wants("true, false, selective, a whole number of at least 2, or auto"),
]
AutoSwitch = Annotated[bool | Literal["auto"], BeforeValidator(_auto), Wants("true, false or auto")]
