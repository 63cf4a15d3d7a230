"""A contradiction between keys, as the rules of config/check give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A contradiction between keys; the caller knows in which files they stand."""

    keys: tuple[str, ...]
    what: str
    remedy: str
    training: bool = False
    """It is about how training begins: a finished run, which is only read, is not held to it."""


Problems = Iterator[Problem]
