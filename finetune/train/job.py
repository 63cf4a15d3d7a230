"""A job: everything one run needs, made once by `start` and handed down whole; and its progress, the only thing that changes."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from finetune.config.schema import Recipe
from finetune.contracts import Model, Plan
from finetune.data.dataset import Splits
from finetune.data.loader import Order, Position
from finetune.kernels.keyed_dropout import DrawKey
from finetune.kernels.precision import LossScale
from finetune.machine.collectives import World
from finetune.memory.host_rows import GivenIds
from finetune.tasks.text import TextTask
from finetune.telemetry.health import Health
from finetune.telemetry.log import Log
from finetune.telemetry.memory import Peaks
from finetune.train.assemble import Update


class StopAskedError(Exception):
    """A signal asked the run to stop; the loop saves and leaves."""


class StopSignal:
    """Notes SIGTERM, SIGINT and SIGHUP (the terminal is gone) while a run is on; the loop looks between steps. A second
    SIGINT interrupts at once. A SIGHUP that is ignored already, as under nohup, stays ignored.

    With `at_once`, once nothing is left to be saved, a signal raises StopAskedError where it finds the program.
    """

    def __init__(self, log: Log, keep: bool = True) -> None:
        self.log = log
        self.keep = keep
        self.asked: str | None = None
        self.at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if self.at_once:
            raise StopAskedError(self.asked)
        then = "saving" if self.keep else "stopping; nothing of a trial is kept"
        self.log.say(f"{self.asked}: finishing this step, then {then}. Ctrl-C again leaves at once.")

    def check(self) -> None:
        """Raises when a signal came."""
        if self.asked is not None:
            raise StopAskedError(self.asked)


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint. `row` counts rows consumed in the epoch's permutation; `evaluated` is
    the step of the last evaluation that came to its end."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    eval_before: dict[str, float] = field(default_factory=dict)
    eval_last: dict[str, float] = field(default_factory=dict)
    samples_before: list[dict[str, str]] = field(default_factory=list)
    best: float | None = None
    best_step: int | None = None
    evaluated: int | None = None
    lowest: float | None = None
    evaluations_without_gain: int = 0
    complete: bool = False
    out_of_memory: list[dict[str, Any]] = field(default_factory=list)
    """Each time that memory ran out: the step, where in it, and the plans before and after. The last `after` is in force."""
    saved: Path | None = None
    """The newest checkpoint of this run's own history; not part of a checkpoint."""

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.row)

    def ended(self, steps: int, stop_after: int | None) -> bool:
        """Whether no step is left: all are done, or so many evaluations brought no gain."""
        return self.step >= steps or (stop_after is not None and self.evaluations_without_gain >= stop_after)

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["saved"]
        return facts


@dataclass(frozen=True)
class Job:
    """One run's parts. `folder` is the run folder; `precision` is resolved; `scale` is fp16's loss scale."""

    recipe: Recipe
    plan: Plan
    world: World
    precision: str
    folder: Path
    splits: Splits
    order: Order
    task: TextTask
    model: Model
    optimizer: Optimizer
    update: Update
    key: DrawKey
    given: GivenIds | None
    scale: LossScale | None
    health: Health
    stop: StopSignal
    log: Log
    progress: Progress
    peaks: Peaks = field(default_factory=Peaks)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"
