"""The arithmetic of a forward pass: plain fp32, or bf16 matrix products over fp32 trained weights (autocast)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context a forward pass runs in. `precision` is fp32 or bf16."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])
