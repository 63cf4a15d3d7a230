"""Learning-rate schedules as pure functions of the step, so resuming a run needs no scheduler state.

A rate depends only on (section, peak, step, steps): not on how many processes run, nor on how often anything was
called before. That rules out by construction the schedules that end too early on several processes, or that jump
after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.errors import InputError

if TYPE_CHECKING:
    from finetune.config.schema import ScheduleSection


@dataclass(frozen=True)
class ScheduleRow:
    """A named shape: `factor(left)` is the share of the way from peak (1) to the final rate (0), `left` running from 1 to 0."""

    name: str
    factor: Callable[[float], float]
    note: str


def _constant(left: float) -> float:
    return 1.0


def _linear(left: float) -> float:
    return left


def _cosine(left: float) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * left))


SCHEDULES: dict[str, ScheduleRow] = {
    "constant": ScheduleRow("constant", _constant, "the peak rate after warm-up; `final` is not used"),
    "linear": ScheduleRow("linear", _linear, "a straight line from the peak to `final`"),
    "cosine": ScheduleRow("cosine", _cosine, "half a cosine wave from the peak to `final`"),
}


def warmup_steps(section: ScheduleSection, steps: int) -> int:
    """Steps of warm-up: `warmup` itself from 1 on, below 1 that share of all `steps`; fractions of a step count as one.

    Never more than `steps`.
    """
    wanted = section.warmup * steps if section.warmup < 1 else section.warmup
    # 0.07 * 100 is 7.000000000000001: a share that means whole steps must not gain one by rounding.
    return min(math.ceil(wanted - 1e-9), steps)


def rate(section: ScheduleSection, peak: float, step: int, steps: int) -> float:
    """The learning rate of optimizer step number `step`, counted from 0, in a run of `steps` steps.

    With w steps of warm-up:

    - step < w: peak * (step + 1) / (w + 1). It rises in a straight line, the first step is not wasted on a rate of 0, and
      step w, the first after the warm-up, is the first at the peak.
    - step >= w: from the peak at step w to `final * peak` at step `steps`, which is one after the last. So `linear` over 10
      steps without warm-up gives 1.0 for the first step, and after k finished steps the next one has 1 - k/10:
      0.9, 0.8, ... 0.1.
    - step >= steps (a finished run): the final rate.

    Raises InputError for a name that the table lacks.
    """
    row = SCHEDULES.get(section.name)
    if row is None:
        raise InputError(f"unknown schedule '{section.name}'", "schedule.name", f"one of {', '.join(SCHEDULES)}")
    warmup = warmup_steps(section, steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    left = max(steps - step, 0) / (steps - warmup) if steps > warmup else 0.0
    share = row.factor(left)
    return peak * (share + section.final * (1.0 - share))
