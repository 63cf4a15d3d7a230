"""What streaming the blocks' weights from host memory takes and costs, from the shape alone (memory/streaming does it).

On the device: the slots, the resident blocks, the hidden states of all micro-batches between two blocks, and of one block
at a time what its forward or backward needs. On the host: every block's weights, their gradients and state where they are
trained, and the boundaries where they are offloaded. Each block crosses the link once in forward, once in backward; a
trained one also brings gradient and state up and its weights and state down in forward, and its gradient down in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.contracts import Bytes, Shape
from finetune.kernels.norms import tall_rows
from finetune.memory.activations import boundary
from finetune.memory.case import Case, both_ways_seconds, compute_seconds, link_seconds
from finetune.memory.host_embedding import staging_bytes
from finetune.memory.step_time import (
    again_seconds,
    backward_seconds,
    forward_seconds,
    head_seconds,
    micro_batches,
    step_seconds,
    update_seconds,
)
from finetune.memory.storage import Storage, coded_block_bytes

UPDATES_AHEAD = 2
"""Blocks whose gradients and state are on the device at once while updates pass."""
BEHIND = 6
"""Micro-batches whose inputs may still be on their way to the host: as many stand on the device beside those in work."""
AHEAD = 2
"""Inputs that are brought up ahead of the one in use: with one, each block's first would come behind the next block's weights."""
TILE = 4096
"""Positions whose logits for one part of the head exist at once."""
TOGETHER = 16384
"""Positions that pass a frozen head together; a trained one's gradient is summed over all."""


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
    inside = [each for each in case.tensors if each.role in ("block", "extra", "")]
    return sum(each.count * each.state for each in inside) // case.shape.blocks


@dataclass(frozen=True)
class StreamedEnds:
    """Embedding and head of a streamed plan: bytes that are on the host in place of the device (weights, gradients, state),
    and bytes of one part as it passes, alone and with what its update needs."""

    weights: int
    gradients: int
    state: int
    part: int
    part_with_update: int
    embedding_passes: bool
    head_passes: bool
    visiting: int
    head_comes: int
    """Bytes of a head's weight that comes whole for the head's phase of a step (0: it is on the device, or passes)."""
    checked: int
    """Bytes of a head's weight that comes whole for the checks of a loaded model."""

    def head_moments(self, case: Case) -> list[Bytes]:
        """The two passes of a head over the labelled positions, if every position has a label."""
        shape, storage = case.shape, case.storage
        rows = tall_rows(shape.vocabulary, shape.hidden)
        positions = case.step_tokens if storage.trained else min(case.step_tokens, max(TOGETHER, case.work.tokens))
        tile = min(TILE, positions)
        # Elsewhere than on a GPU slopes are made beside the logits.
        each = storage.compute * (1 if storage.device == "cuda" else 2)
        hidden = positions * shape.hidden
        logits = tile * rows * storage.compute
        cast = storage.compute * rows * shape.hidden if storage.compute < storage.weight and storage.trained else 0
        first = Bytes(
            {
                "passing head": 2 * self.part_with_update,
                "logits": logits,
                "workspace": storage.compute * hidden + cast,
            }
        )
        own = 3 * 4 * rows * shape.hidden if storage.trained else 0
        second = Bytes(
            {
                "passing head": 2 * self.part,
                "logits": tile * rows * each,
                "workspace": (storage.compute + 4) * hidden + max(4 * tile * shape.hidden, own) + cast,
            }
        )
        return [first, second]


def ends_of(case: Case) -> StreamedEnds:
    """The figures of embedding and head; a shared matrix goes where either is said to be."""
    shape, storage, plan = case.shape, case.storage, case.plan
    on_host = {"embedding": plan.embedding_placement == "host", "head": plan.head_placement != "device"}
    if shape.tied:
        both = on_host["embedding"] or on_host["head"]
        on_host = {"embedding": both, "head": False}
    each = storage.weight if storage.trained else storage.frozen
    elements = {"embedding": shape.embedding_parameters, "head": shape.head_parameters}
    moved = sum(elements[name] for name, there in on_host.items() if there)
    state = sum(t.count * t.state for t in case.tensors if on_host.get(t.role)) if storage.trained else 0
    part = tall_rows(shape.vocabulary, shape.hidden) * shape.hidden
    comes = plan.head_placement == "visit" and not shape.tied
    head_passes = (on_host["head"] and not comes) or (shape.tied and on_host["embedding"])
    share = part / max(shape.embedding_parameters, 1)
    one = max((t.state for t in case.tensors if t.role in ("embedding", "head")), default=0)
    looked_up = on_host["embedding"] and not (storage.trained or shape.tied)
    with_update = each * part + (int(share * one) + each * part if storage.trained else 0)
    checked = elements["embedding" if shape.tied else "head"] if on_host["embedding" if shape.tied else "head"] else 0
    return StreamedEnds(
        weights=each * moved,
        gradients=storage.weight * moved if storage.trained else 0,
        state=state,
        part=each * part,
        part_with_update=with_update,
        embedding_passes=on_host["embedding"] and (storage.trained or shape.tied),
        head_passes=head_passes,
        visiting=each * (moved - (elements["embedding"] if looked_up else 0)),
        head_comes=each * elements["head"] if comes else 0,
        checked=each * checked,
    )


def host_bytes(case: Case) -> dict[str, int]:
    """Bytes on the host by cause."""
    figures, ends, blocks = streaming_of(case), ends_of(case), case.shape.blocks
    causes = {"streamed weights": blocks * figures.block}
    if figures.gradients:
        causes["streamed gradients"] = blocks * figures.gradients
        causes["streamed optimizer"] = blocks * figures.state
    if ends.weights:
        causes["embedding and head"] = ends.weights + ends.gradients + ends.state
    if case.plan.embedding_placement == "host" and not (case.storage.trained or case.shape.tied):
        causes["parked embedding"] = staging_bytes(case.shape, case.storage, case.work)
    if case.plan.activation_offload:
        causes["parked boundaries"] = blocks * figures.boundary
    return causes


def slots_bytes(case: Case) -> int:
    """Device bytes of slots and resident blocks."""
    figures = streaming_of(case)
    return (min(case.plan.slots, figures.streamed) + figures.resident) * figures.block


def lent_bytes(case: Case) -> int:
    """Device bytes of slots that are given up while a head is whole on the device."""
    figures = streaming_of(case)
    lent = max(0, min(case.plan.slots, figures.streamed) - 1) * figures.block
    return lent if ends_of(case).head_comes else 0


def seconds(case: Case) -> float:
    """Seconds of a step: in each half of it the slower of computing and of moving what the link has to, both ways."""
    shape, plan = case.shape, case.plan
    figures, count = streaming_of(case), micro_batches(case)
    # Fast blocks decode a stored block once for all micro-batches.
    decoded = 1.0 / count if plan.fast_block else 1.0
    forward = count * forward_seconds(case, decoded)
    backward = count * (again_seconds(case, decoded) + backward_seconds(case, decoded) + head_seconds(case))
    weights = figures.streamed * figures.block
    states = shape.blocks * figures.state
    parked = shape.blocks * figures.boundary if plan.activation_offload else 0
    ends = ends_of(case)
    own = ends.head_comes if case.storage.trained else 0
    down = weights + states if figures.gradients else 0
    # A frozen head comes while the last block computes; blocks that gave their slots to a head come again.
    up = weights + shape.blocks * figures.gradients + states + ends.head_comes - own
    there = both_ways_seconds(case, up, down + parked)
    back = both_ways_seconds(case, weights + parked + lent_bytes(case), shape.blocks * figures.gradients + own)
    return max(forward, there) + max(backward, back) + update_seconds(case) + _ends_seconds(case)


def _ends_seconds(case: Case) -> float:
    """What passing ends add: nothing is computed while an embedding's update passes, or that of a head which comes whole;
    logits in parts are made twice, the first time beside the head's update."""
    shape, storage, ends = case.shape, case.storage, ends_of(case)
    passing = link_seconds(
        case, ends.part_with_update * shape.embedding_parameters * storage.weight // max(ends.part, 1)
    )
    aside = passing if ends.embedding_passes else 0.0
    if ends.head_passes:
        again = compute_seconds(case, 2.0 * case.step_tokens * case.filled * shape.vocabulary * shape.hidden)
        aside += max(again, passing) if storage.trained and not shape.tied else again
    if ends.head_comes and storage.trained:
        aside += passing
    return aside


def slowdown(case: Case) -> float:
    """The share of a step's time that streaming adds to the recomputing resident step."""
    resident = step_seconds(case) + micro_batches(case) * again_seconds(case)
    return seconds(case) / resident - 1.0
