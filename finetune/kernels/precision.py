"""The arithmetic of a forward pass: plain fp32, bf16 throughout, or bf16 products over fp32 trained weights (autocast)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute(device: torch.device, precision: str, trained: str = "fp32") -> AbstractContextManager[object]:
    """The context a forward pass runs in. `precision` is fp32 or bf16; `trained` (`model.trained`) other than fp32: every
    weight is bf16 already."""
    if precision == "fp32" or trained != "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])
