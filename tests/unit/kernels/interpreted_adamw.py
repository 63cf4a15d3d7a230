"""Runs the AdamW kernel in Triton's interpreter beside the plain form and prints where they differ. A program of its own:
the interpreter is chosen by an environment variable before Triton is imported."""

from __future__ import annotations

import json

import torch

from finetune.kernels.adam_values import Scalars
from finetune.kernels.adamw import RULES, new_states, update_slice_
from finetune.kernels.fused import adamw as fused
from finetune.kernels.state_codes import FORMATS
from finetune.kernels.stochastic_rounding import Draws

MODES = ("fp32", "bf16", "stochastic", "split")


def differences(form: str, trained: str, count: int, first: int) -> list[str]:
    """Names of the tensors that differ in any bit after three steps."""
    rule, generator = RULES["adamw"], torch.Generator().manual_seed(0)
    dtype = torch.float32 if trained == "fp32" else torch.bfloat16
    plain = (torch.randn(count, generator=generator) * 0.1).to(dtype)
    kernel = plain.clone()
    states, fast = (new_states(rule, plain, form, trained == "split") for _ in range(2))
    for step in range(1, 4):
        noise = torch.randn(count, generator=generator)
        slope = (noise * torch.exp(2 * torch.randn(count, generator=generator))).to(dtype)
        slope[:300] = 0.0
        scalars = Scalars(1e-3, weight_decay=0.1, step=step)
        draws = Draws(7, step, 3, first) if trained == "stochastic" else None
        update_slice_(rule, plain, slope, states, scalars, draws)
        fused.launch(kernel, slope, fast, scalars, draws)
    found = [] if torch.equal(plain, kernel) else ["weight"]
    return found + [name for name in states.tensors if not torch.equal(states.tensors[name], fast.tensors[name])]


if __name__ == "__main__":
    found = {}
    for form in FORMATS:
        for trained in MODES:
            found[f"{form} {trained}"] = differences(form, trained, 1024 + 333, 2**33 - 700)
    print(json.dumps(found))
