"""The levers: each trades time for memory without changing the result, with its cost model beside its hook.

The planner walks this table, so a new lever is a file and a row. Choices stand fastest first; the first is "off".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from finetune.memory import (
    checkpointing,
    chunked_loss,
    host_embedding,
    host_optimizer,
    mlp_tiles,
    offload,
    step_in_backward,
)
from finetune.memory.case import Case

Exactness = Literal["bitwise", "reordered sums", "other roundings"]


@dataclass(frozen=True)
class Lever:
    """One row. `field` is the key under `plan.` and the Plan's field; `saves` gives bytes of the step's peak and
    `slowdown` the share of a step's time, for the value that the case's plan has, against "off"; `exact` is the class of
    what it changes. `to_host`: it moves bytes to the host, so it frees nothing where the device is the host."""

    name: str
    field: str
    choices: tuple[Any, ...]
    saves: Callable[[Case], int]
    slowdown: Callable[[Case], float]
    exact: Exactness
    note: str
    to_host: bool = False

    @property
    def off(self) -> Any:
        return self.choices[0]


LEVERS: dict[str, Lever] = {
    lever.name: lever
    for lever in (
        Lever(
            "activation checkpointing",
            "activation_checkpointing",
            (False, 2, 4, "selective", True),
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
        Lever(
            "MLP in tiles",
            "mlp_tile",
            mlp_tiles.CHOICES,
            mlp_tiles.saves,
            mlp_tiles.slowdown,
            "reordered sums",
            "runs the MLP of a recomputed block over so many tokens at a time",
        ),
        Lever(
            "activation offload",
            "activation_offload",
            (False, True),
            offload.saves,
            offload.slowdown,
            "bitwise",
            "keeps what blocks leave for backward in host memory",
            to_host=True,
        ),
        Lever(
            "step in backward",
            "optimizer_in_backward",
            (False, True),
            step_in_backward.saves,
            step_in_backward.slowdown,
            "bitwise",
            "updates each parameter when its gradient is complete; a diverging step is not undone",
        ),
        Lever(
            "optimizer on the host",
            "optimizer_placement",
            ("device", "host"),
            host_optimizer.saves,
            host_optimizer.slowdown,
            "bitwise",
            "keeps optimizer state in host memory; it passes through the GPU in the update",
            to_host=True,
        ),
        Lever(
            "embedding on the host",
            "embedding_placement",
            ("device", "host"),
            host_embedding.saves,
            host_embedding.slowdown,
            "bitwise",
            "keeps a frozen embedding in host memory and sends the rows of a batch",
            to_host=True,
        ),
    )
}
