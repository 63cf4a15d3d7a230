"""The one order in which a loaded model is made ready: keyed draws, then levers. Nothing later undoes something earlier."""

from __future__ import annotations

from finetune.contracts import Model, Plan
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.memory import checkpointing


def assemble(model: Model, plan: Plan, seed: int) -> DrawKey:
    """Makes `model` ready to train under `plan`; returns the key that the loop sets before each micro-batch."""
    key = DrawKey(seed)
    key_dropouts(model.module, key)
    if plan.activation_checkpointing:
        checkpointing.apply(model.module)
    return key
