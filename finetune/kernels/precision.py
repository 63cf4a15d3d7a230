"""The arithmetic of a step: plain fp32, tf32 products, bf16 throughout, or 16-bit products over fp32 trained
weights (autocast).

Trained weights are fp32 but under bf16 with another `model.trained`, so under fp16 always (case B125: gradients of fp16 weights cannot be unscaled). fp16 has few
exponents, so its loss is scaled before backward; `LossScale` finds the factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What frozen weights are held in."""


def compute(device: torch.device, precision: str, trained: str = "fp32") -> AbstractContextManager[object]:
    """The context a forward pass runs in. `precision` is a key of DTYPES; `trained` (`model.trained`) other than fp32: every
    weight is bf16 already."""
    if precision == "fp32" or trained != "fp32":
        return nullcontext()
    if precision == "tf32":
        return products("tf32")
    return torch.autocast(device.type, dtype=DTYPES[precision])


@contextmanager
def products(precision: str) -> Iterator[None]:
    """How fp32 matrix products are made inside: tf32 with that precision, whole otherwise; restored after.

    Backward needs it too, since autograd's products are made outside of the forward's context.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class LossScale:
    """The factor of an fp16 run's loss: halved at each overflow, doubled after `patience` steps without one.

    Powers of two, so scaling changes no bit of a gradient that neither overflows nor vanishes. A step that overflows is
    skipped. Its fields are the state; every rank sees the same summed gradient, so all hold the same.
    """

    scale: float = 65536.0
    clean: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    patience: int = 2000

    def note(self, overflowed: bool) -> None:
        """Counts a step and moves the scale for the next."""
        if overflowed:
            self.scale /= 2
            self.clean = 0
            self.skipped += 1
            self.skipped_in_a_row += 1
            return
        self.skipped_in_a_row = 0
        self.clean += 1
        if self.clean >= self.patience:
            self.scale, self.clean = min(self.scale * 2, 2.0**24), 0

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def loss_scale(precision: str) -> LossScale | None:
    """A new scale for fp16; None for what needs none."""
    return LossScale() if precision == "fp16" else None
