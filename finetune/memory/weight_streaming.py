"""What streaming the blocks' weights from host memory takes and costs, from the shape alone (memory/streaming does it).

On the device: the slots, the resident blocks, the hidden states of all micro-batches between two blocks, and of one block
at a time what its forward or backward needs. On the host: every block's weights, their gradients and state where they are
trained, and the boundaries where they are offloaded. Each block crosses the link once in forward, once in backward; a
trained one also brings gradient and state up and its weights and state down in forward, and its gradient down in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.contracts import Shape
from finetune.memory.activations import boundary
from finetune.memory.case import Case, compute_seconds, link_seconds
from finetune.memory.checkpointing import forward_operations, step_operations
from finetune.memory.storage import Storage, coded_block_bytes

UPDATES_AHEAD = 2
"""Blocks whose gradients and state are on the device at once while updates pass."""
GRADIENTS_LEAVING = 2
"""Blocks whose gradients are on the device at once in backward: one that is made, one that goes down."""


def block_bytes(shape: Shape, storage: Storage) -> int:
    """Bytes of one block in its flat buffer, without what adapters add (that stays on the device)."""
    if storage.trained:
        return storage.weight * shape.block_parameters
    if storage.coded:
        return coded_block_bytes(shape, storage) + storage.frozen * shape.block_extra
    return storage.frozen * shape.block_parameters


@dataclass(frozen=True)
class Streaming:
    """The figures of one case: bytes of a block (`block`), of its trained tensors' gradients and state, of the carry."""

    block: int
    gradients: int
    state: int
    carry: int
    boundary: int
    streamed: int
    resident: int

    @property
    def passing(self) -> int:
        """Device bytes of gradients and state that pass for updates."""
        return UPDATES_AHEAD * (self.gradients + self.state)


def streaming_of(case: Case) -> Streaming:
    """The figures of a case whose plan streams."""
    shape, storage, plan = case.shape, case.storage, case.plan
    resident = min(plan.resident_blocks, shape.blocks)
    tokens = case.step_tokens
    trained = storage.trained
    state = block_state(case) if trained else 0
    return Streaming(
        block=block_bytes(shape, storage),
        gradients=storage.weight * shape.block_parameters if trained else 0,
        state=state,
        carry=tokens * storage.stream * shape.hidden,
        boundary=tokens * boundary(shape, storage),
        streamed=shape.blocks - resident,
        resident=resident,
    )


def block_state(case: Case) -> int:
    """Bytes of optimizer state of one block's trained tensors."""
    shape = case.shape
    inside = [each for each in case.tensors if each.elements < shape.embedding_parameters]
    total = sum(each.count * each.state for each in inside)
    return total // shape.blocks


def outside_parameters(shape: Shape) -> int:
    """Elements of embedding, head and final norm."""
    return shape.embedding_parameters + shape.head_parameters + shape.extra


def host_bytes(case: Case) -> dict[str, int]:
    """Bytes on the host by cause."""
    figures, blocks = streaming_of(case), case.shape.blocks
    causes = {"streamed weights": blocks * figures.block}
    if figures.gradients:
        causes["streamed gradients"] = blocks * figures.gradients
        causes["streamed optimizer"] = blocks * figures.state
    if case.plan.activation_offload:
        causes["parked boundaries"] = blocks * figures.boundary
    return causes


def slots_bytes(case: Case) -> int:
    """Device bytes of slots and resident blocks."""
    figures = streaming_of(case)
    return (min(case.plan.slots, figures.streamed) + figures.resident) * figures.block


def seconds(case: Case) -> float:
    """Seconds of a step: in each half of it the slower of computing and the busier direction of the link."""
    shape, storage, plan = case.shape, case.storage, case.plan
    figures, tokens = streaming_of(case), case.step_tokens
    forward = compute_seconds(case, tokens * forward_operations(shape, case.length))
    whole = compute_seconds(case, tokens * step_operations(shape, storage, case.length)) + forward
    weights = figures.streamed * figures.block
    updates = shape.blocks * (figures.gradients + figures.state)
    parked = shape.blocks * figures.boundary if plan.activation_offload else 0
    up = link_seconds(case, weights + updates)
    down = link_seconds(case, parked + (weights + shape.blocks * figures.state if figures.gradients else 0))
    back_up = link_seconds(case, weights + parked)
    back_down = link_seconds(case, shape.blocks * figures.gradients)
    return max(forward, up, down) + max(whole - forward, back_up, back_down)


def slowdown(case: Case) -> float:
    """The share of a step's time that streaming adds to the recomputing resident step."""
    resident = compute_seconds(
        case, case.step_tokens * step_operations(case.shape, case.storage, case.length)
    ) + compute_seconds(case, case.step_tokens * forward_operations(case.shape, case.length))
    return seconds(case) / resident - 1.0
