"""Floating-point operations a token: of attention, of a forward, of a step, of a recomputed block. From the shape alone."""

from __future__ import annotations

from finetune.contracts import Shape
from finetune.memory.storage import Storage, place_of


def attention_operations(shape: Shape, length: int) -> float:
    """Operations a token of all blocks' causal attention: 2 x length x width."""
    return shape.blocks * 2.0 * length * shape.heads * shape.head_dim


def forward_operations(shape: Shape, length: int) -> float:
    """Operations a token of all blocks' forward: two a weight, and attention."""
    return shape.blocks * 2.0 * shape.linear_parameters + attention_operations(shape, length)


def step_operations(shape: Shape, storage: Storage, length: int) -> float:
    """Floating-point operations a token of forward and backward, nothing recomputed.

    Backward of a linear costs one forward for its input's gradient and, where it trains, one for its own; backward of
    attention two and a half forwards.
    """
    attention = attention_operations(shape, length)
    linears = forward_operations(shape, length) - attention
    head = 2.0 * shape.vocabulary * shape.hidden
    return linears * (3 if storage.trained else 2) + attention * 3.5 + head * (3 if storage.trained else 2)


def again_operations(shape: Shape, storage: Storage) -> float:
    """Operations a token of the blocks' linears when their forward is run again: a fast block's recomputation stops before
    the linear whose output no gradient needs."""
    again = sum(one.parameters for one in shape.linears if not (storage.fast and place_of(one, shape) == "mlp_out"))
    return shape.blocks * 2.0 * again
