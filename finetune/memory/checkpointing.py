"""Activation checkpointing: keep only each block's input, run the block again for its backward.

Saves nearly all of what blocks keep, for one more forward of the blocks. Bitwise: the recomputation runs the same
operations on the same input (random draws inside a block are keyed, and the generator's state is restored besides).
Always the non-reentrant kind: the other loses gradients when a block's input needs none (case B132).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.contracts import Shape
from finetune.errors import ModelError
from finetune.memory.activations import boundary, saved_by_block, unsaved_by_first
from finetune.memory.storage import Storage, Work

if TYPE_CHECKING:
    from torch import nn

ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
DISABLE = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
"""The method's name in new and in older transformers; the first that a class has is called, so none warns."""


def kept_bytes(shape: Shape, storage: Storage, work: Work, on: bool) -> int:
    """Bytes that all blocks keep between forward and backward."""
    if on:
        return shape.blocks * work.tokens * boundary(shape, storage)
    return shape.blocks * saved_by_block(shape, storage, work) - unsaved_by_first(shape, storage, work)


def recomputed_bytes(shape: Shape, storage: Storage, work: Work, on: bool) -> int:
    """Bytes of the one block whose activations stand again during its backward; a fp32 input is the kept one itself."""
    if not on:
        return 0
    shared = work.tokens * boundary(shape, storage) if storage.stream == 4 else 0
    return saved_by_block(shape, storage, work) - shared


def saves(shape: Shape, storage: Storage, work: Work, on: bool) -> int:
    """Bytes of a step's peak that the lever takes away (negative for a model of one block)."""
    with_it = kept_bytes(shape, storage, work, on) + recomputed_bytes(shape, storage, work, on)
    return kept_bytes(shape, storage, work, False) - with_it


def forward_operations(shape: Shape, length: int) -> float:
    """Operations a token of all blocks' forward: two a weight, and 2 x length x width of causal attention."""
    attention = 2.0 * length * shape.heads * shape.head_dim
    return shape.blocks * (2.0 * shape.linear_parameters + attention)


def step_operations(shape: Shape, storage: Storage, length: int) -> float:
    """Floating-point operations a token of forward and backward, nothing recomputed.

    Backward of a linear costs one forward for its input's gradient and, where it trains, one for its own; backward of
    attention two and a half forwards.
    """
    attention = shape.blocks * 2.0 * length * shape.heads * shape.head_dim
    linears = forward_operations(shape, length) - attention
    head = 2.0 * shape.vocabulary * shape.hidden
    return linears * (3 if storage.trained else 2) + attention * 3.5 + head * (3 if storage.trained else 2)


def slowdown(shape: Shape, storage: Storage, work: Work, on: bool) -> float:
    """The share of a step's time that the lever adds."""
    return forward_operations(shape, work.length) / step_operations(shape, storage, work.length) if on else 0.0


def apply(module: nn.Module, on: bool = True) -> None:
    """Switches checkpointing of every block of a transformers model, bare or inside peft, on or off.

    It works while the module is in training mode. Frozen embeddings are fine, and so is an adapter attached before or
    after. ModelError names an architecture that does not support it.
    """
    model, method = _owner(module, ENABLE if on else DISABLE)
    if not on:
        getattr(model, method)()
        _release_inputs(model)
        return
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise ModelError(
            f"{type(model).__name__} does not support activation checkpointing",
            where="plan.activation_checkpointing",
            remedy="plan.activation_checkpointing=false",
        )
    getattr(model, method)({"use_reentrant": False})
    _release_inputs(model)


def _owner(module: nn.Module, names: tuple[str, str]) -> tuple[Any, str]:
    """The first module inside whose class has one of the methods (peft's wrappers only pass attributes through)."""
    for part in module.modules():
        for name in names:
            if hasattr(type(part), name):
                return part, name
    raise ModelError(
        f"{type(module).__name__} has no {names[0]}: activation checkpointing needs a transformers model",
        where="plan.activation_checkpointing",
        remedy="plan.activation_checkpointing=false",
    )


def _release_inputs(model: Any) -> None:
    """Takes back the hook that makes embeddings require a gradient: only re-entrant checkpointing needs it, and it
    costs the first block's backward to its input."""
    if hasattr(type(model), "disable_input_require_grads") and getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()
