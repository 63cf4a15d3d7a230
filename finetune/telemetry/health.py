"""Signs of a run that goes wrong, seen in figures that a step has anyway: a loss far above its past, and parameters that get no gradient.

Only watched: nothing here changes a step, and what it remembers is not saved, so after a resume it watches anew.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW = 64
"""Losses that a new one is held to."""
LEAST = 16
"""Losses before the first judgement: the first steps of a run fall fast."""
SPREADS = 10.0
"""Robust standard deviations (1.4826 x the median distance from the median) above the median that are a spike."""
SMALLEST = 0.2
"""And at least this share of the median, so that a loss without spread is not a spike at its first ripple."""
ZERO_STEPS = 20
"""Steps in a row with a gradient of exactly zero before it is told. LoRA's B begins at zero, which makes A's gradient zero
in the first step only."""
SHOWN = 8


class Health:
    """Watches one run. `names` are the trained parameters in model order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = False
        self._zeros_P: Tensor | None = None
        self._told: set[int] = set()

    def spike(self, step: int, loss: float, rows: Sequence[int]) -> str | None:
        """A warning when the loss leaves its past; told once until it comes back. Median and spread are those of the
        last WINDOW losses, so that a few outliers do not move them."""
        past = list(self._losses)
        self._losses.append(loss)
        if len(past) < LEAST:
            return None
        middle = statistics.median(past)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in past)
        high = loss > middle + max(SPREADS * spread, SMALLEST * abs(middle))
        first = high and not self._high
        self._high = high
        if not first:
            return None
        shown = ", ".join(map(str, rows[:SHOWN])) + (" ..." if len(rows) > SHOWN else "")
        return f"step {step}: the loss is {loss:.4f}, its median over the last {len(past)} steps {middle:.4f}; rows {shown}"

    def count_zeros(self, norms_P: Tensor) -> Tensor:
        """Takes a step's norms of each parameter's gradient; the longest run of zeros now, a scalar on their device, for
        the caller to read together with what it reads anyway."""
        before_P = torch.zeros_like(norms_P) if self._zeros_P is None else self._zeros_P
        self._zeros_P = torch.where(norms_P == 0, before_P + 1, 0.0)
        return self._zeros_P.max() if norms_P.numel() else norms_P.new_zeros(())

    def zero_gradients(self, longest: float) -> str | None:
        """A warning that names parameters whose gradient was exactly zero for ZERO_STEPS steps; each is told once."""
        if longest < ZERO_STEPS or self._zeros_P is None:
            return None
        dead = [i for i, zeros in enumerate(self._zeros_P.tolist()) if zeros >= ZERO_STEPS and i not in self._told]
        if not dead:
            return None
        self._told.update(dead)
        shown = ", ".join(self.names[i] for i in dead[:SHOWN]) + (" ..." if len(dead) > SHOWN else "")
        return (
            f"{len(dead)} of {len(self.names)} trained parameters got a gradient of zero in {ZERO_STEPS} steps: {shown}"
        )
