"""The levers: each trades time for memory without changing the result, with its cost model beside its hook.

The planner walks this table, so a new lever is a file and a row. Choices stand fastest first; the first is "off".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from finetune.contracts import Shape
from finetune.memory import checkpointing, chunked_loss
from finetune.memory.storage import Storage, Work

Exactness = Literal["bitwise", "reordered sums", "other roundings"]


@dataclass(frozen=True)
class Lever:
    """One row. `field` is the key under `plan.` and the Plan's field; `saves` gives bytes of the step's peak and
    `slowdown` the share of a step's time, for a value against "off"; `exact` is the class of what it changes."""

    name: str
    field: str
    choices: tuple[Any, ...]
    saves: Callable[[Shape, Storage, Work, Any], int]
    slowdown: Callable[[Shape, Storage, Work, Any], float]
    exact: Exactness
    note: str

    @property
    def off(self) -> Any:
        return self.choices[0]


LEVERS: dict[str, Lever] = {
    lever.name: lever
    for lever in (
        Lever(
            "activation checkpointing",
            "activation_checkpointing",
            (False, True),
            checkpointing.saves,
            checkpointing.slowdown,
            "bitwise",
            "keeps each block's input only and runs the block again for its backward",
        ),
        Lever(
            "chunked loss",
            "loss_chunk",
            (0, 1024, 256),
            chunked_loss.saves,
            chunked_loss.slowdown,
            "reordered sums",
            "makes the logits of so many positions at a time",
        ),
    )
}
