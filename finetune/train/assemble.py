"""The one order in which a loaded model is made ready: keyed draws, fast blocks, levers. Nothing later undoes something
earlier."""

from __future__ import annotations

from finetune.contracts import Model, Plan
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.kernels.precision import DTYPES
from finetune.memory import checkpointing
from finetune.models.fast import backbone


def assemble(model: Model, plan: Plan, seed: int, precision: str) -> DrawKey:
    """Makes `model` ready to train under `plan`; returns the key that the loop sets before each micro-batch."""
    key = DrawKey(seed)
    key_dropouts(model.module, key)
    if plan.fast_block:
        model.fast = backbone.install(model, plan.attention, DTYPES[precision])
        backbone.recompute(model, plan.activation_checkpointing)
    elif plan.activation_checkpointing:
        checkpointing.apply(model.module)
    return key
