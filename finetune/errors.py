"""The error tree. Every error says what is wrong, where, and what to do; the command line prints it without a traceback.

An error's class decides the process's exit code: 2 the user's input, 3 nothing fits, 4 stopped by a signal, 1 a fault of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where (file and key, or file and line), what, and the remedy."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n    -> {self.remedy}" if self.remedy else text


class FinetuneError(Exception):
    """The root: `what` is wrong, `where` it is, and the `remedy`.

    `everywhere` says that all processes of a run raise it alike, so that one of them prints it. Errors travel between
    processes whole, whatever their constructors take.
    """

    exit_code = 1
    everywhere = False

    def __init__(self, what: str, where: str = "", remedy: str = "") -> None:
        self.fault = Fault(where, what, remedy)
        super().__init__(str(self.fault))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[FinetuneError], arguments: tuple[Any, ...], facts: Mapping[str, Any]) -> FinetuneError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(facts)
    return error


class InputError(FinetuneError):
    """Something that the user gave or the machine has is wrong; nothing was lost."""

    exit_code = 2


class ConfigError(InputError):
    """Faults of a recipe or the command line, all of them at once."""

    everywhere = True

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} faults in the recipe:\n" if len(faults) > 1 else ""
        FinetuneError.__init__(self, count + "\n".join(str(fault) for fault in faults))


class DataError(InputError):
    """A data file, a row or a template that cannot be trained on."""


class ModelError(InputError):
    """A model, tokenizer or adapter that cannot be loaded or is not supported."""


class CheckpointError(InputError):
    """A checkpoint or an export that is incomplete, corrupt, does not fit, or cannot be written."""


class DivergedError(InputError):
    """A loss that is not a finite number; the last good checkpoint stays."""

    everywhere = True


class NotBuiltError(InputError):
    """A word or a choice that the design has and this version does not."""

    everywhere = True

    def __init__(self, name: str, remedy: str = "") -> None:
        super().__init__(f"{name} is not built yet in this version", remedy=remedy)


class NothingFitsError(FinetuneError):
    """No exact plan fits the memory; the message gives the bytes that lack and what would fit."""

    exit_code = 3


class StoppedError(FinetuneError):
    """A signal stopped the run after a checkpoint was saved."""

    exit_code = 4
    everywhere = True


class LostProcessError(FinetuneError):
    """Another process of the run ended, so that this one cannot go on; that one's own message says why."""
