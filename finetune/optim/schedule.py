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
    from finetune.config.schema import OptimizerSection, ScheduleSection, TrainSection


@dataclass(frozen=True)
class ScheduleRow:
    """A named shape: `factor(left, decay)` is the share of the way from the final rate (0) to the peak (1).

    `left` runs from 1 to 0 over the steps after the warm-up; `decay` is the share of these that `schedule.decay` takes.
    """

    name: str
    factor: Callable[[float, float], float]
    note: str


def _constant(left: float, decay: float) -> float:
    return 1.0


def _linear(left: float, decay: float) -> float:
    return left


def _cosine(left: float, decay: float) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * left))


def _stable_then_down(left: float, decay: float) -> float:
    return min(1.0, left / decay) if decay > 0 else 1.0


SCHEDULES: dict[str, ScheduleRow] = {
    "constant": ScheduleRow("constant", _constant, "the peak rate after warm-up; `final` is not used"),
    "linear": ScheduleRow("linear", _linear, "a straight line from the peak to `final`"),
    "cosine": ScheduleRow("cosine", _cosine, "half a cosine wave from the peak to `final`"),
    "wsd": ScheduleRow(
        "wsd", _stable_then_down, "the peak until `decay` steps are left, then a straight line to `final`"
    ),
}


def warmup_steps(section: ScheduleSection, steps: int) -> int:
    """Steps of warm-up: `warmup` itself from 1 on, below 1 that share of all `steps`; fractions of a step count as one.

    Never more than `steps`.
    """
    return min(_whole_steps(section.warmup, steps), steps)


def _whole_steps(count: float, steps: int) -> int:
    wanted = count * steps if count < 1 else count
    # 0.07 * 100 is 7.000000000000001: a share that means whole steps must not gain one by rounding.
    return math.ceil(wanted - 1e-9)


def peak_rate(section: OptimizerSection, train: TrainSection) -> float:
    """The peak rate of a run: `lr`, scaled where the recipe asks for it by its batch over `base_batch`, or the root of that.

    The batch is counted in what the recipe gives it in, rows (`batch`) or tokens (`batch_tokens`).
    """
    batch = train.batch or train.batch_tokens
    if section.scale_lr == "none" or section.base_batch is None or batch is None:
        return section.lr
    ratio = batch / section.base_batch
    return section.lr * (ratio if section.scale_lr == "linear" else math.sqrt(ratio))


def rate_notices(section: OptimizerSection, train: TrainSection) -> list[str]:
    """What a user should see of the rate's scaling."""
    if section.scale_lr == "none":
        return []
    unit = "rows" if train.batch else "tokens"
    return [
        f"the peak rate is {peak_rate(section, train):.4g}: lr {section.lr:g}, scaled ({section.scale_lr}) from a batch of "
        f"{section.base_batch} {unit} to {train.batch or train.batch_tokens}"
    ]


def schedule_notices(section: ScheduleSection, steps: int) -> list[str]:
    """What of a schedule does not fit into a run of `steps` steps."""
    found = []
    warmup, decay = _whole_steps(section.warmup, steps), _whole_steps(section.decay, steps)
    if warmup >= steps and warmup > 0:
        found.append(f"schedule.warmup takes {warmup} steps and the run has {steps}: the peak rate is never reached")
    if section.name == "wsd" and decay > max(steps - warmup, 0):
        found.append(
            f"schedule.decay takes {decay} steps and {max(steps - warmup, 0)} are left after the warm-up: it is cut to those"
        )
    return found


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
    # One part more than steps: the first of them is below the peak already, the last not yet at the final rate.
    after = max(steps - warmup, 1)
    share = row.factor(left, (min(_whole_steps(section.decay, steps), after) + 1) / after)
    return peak * (share + section.final * (1.0 - share))
