"""What an update of one tensor is given: its states, and the numbers of the step. Values, shared by the plain form and the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

CORRECTION = "correction"
"""The name of the int16 state that makes a bf16 weight an exact fp32 one."""


@dataclass(frozen=True)
class States:
    """The states of one tensor: their format's name (of FORMATS), and flat tensors by name.

    `mean` and (AdamW) `square`: fp32 values or uint8 codes; `mean_scales`, `square_scales`: fp32, one a block, where coded.
    `correction`: int16, where the weight is split. Changed in place.
    """

    form: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Slice:
    """A part of a tensor that is updated: weight and gradient, flat [N], the states' parts by name; `start` in elements."""

    weight: Tensor
    gradient: Tensor
    states: dict[str, Tensor]
    start: int = 0


@dataclass(frozen=True)
class Scalars:
    """The numbers of one step. `step` counts from 1. For Lion beta1 mixes the update and beta2 the state; SGD's momentum is beta1."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1

    def numbers(self) -> tuple[float, ...]:
        """(decay, 1 - beta1, beta2, 1 - beta2, 1 / root of the second bias correction, epsilon, step size), in fp32."""
        first, second = 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step
        wanted = (
            1.0 - self.lr * self.weight_decay, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, second**-0.5, self.epsilon,
            self.lr / first,
        )  # fmt: skip
        return tuple(float(np.float32(number)) for number in wanted)
