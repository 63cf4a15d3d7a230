"""Seconds of one rank's step with resident weights and no lever: the base that levers add to.

A sum of what the shape says is done, each over the machine's rate: matrix products, attention, what only moves memory
(norms, rotary, gates, adapters' thin products, the loss), decoding of stored weights, the sum of gradients, the update. A
GPU computes while the host launches, so of a pass through the blocks the slower of the two counts; on a CPU both do.
Constants were fitted to benchmarks/results of one H200, where each says so; a test holds every line to its prediction.
"""

from __future__ import annotations

from finetune.memory.case import Case, Sums, compute_seconds, memory_seconds
from finetune.memory.operations import again_operations, attention_operations, forward_operations

ATTENTION = 0.6
"""What attention's products reach of what a step's other products do. Assumed of the fused kernels of a GPU."""
THIN = {"cpu": 8.0, "cuda": 256.0}
"""Tokens that a micro-batch's products cost beyond its own, because they are thin. A GPU's: micro-batches of 4,096 tokens in
frontier.jsonl beside those of 8,192 in ladder.jsonl."""
TRAFFIC = {True: 1.2, False: 4.0}
"""How often a forward of a block moves its linears' inputs and outputs through memory in operations of their own, by whether
blocks are fast: there two norms, rotary positions, the gate and two sums, counted from the code; else a pass an operation."""
ADAPTER_TRAFFIC = 1.5
"""The same for adapters: their inputs are read again, their outputs read and written."""
CAST_TRAFFIC = 6.0
"""The same for the casts of an adapter's inputs and outputs to fp32 and back. Fitted to the ladder's first rung."""
BACKWARD_TRAFFIC = 2.0
"""The backward's traffic, by the forward's: a gradient beside every value."""
LOGITS_TRAFFIC = 6
"""How often a step moves one logit: made, read twice for the sum, overwritten by its gradient, read by two products."""
BLOCK_LAUNCHES = 320.0
"""What launching one block's forward costs the host, in launches of one operation: Python and autograd included. Fitted to the
ladder's rungs with one row a micro-batch, where the host is what is waited for; a tiny Llama on a CPU costs as much."""
DECODE_LAUNCHES = 0.5
"""What launching the decoding of a block's stored weights adds to launching its forward, as a share of that. Fitted to the
ladder's rung in NF4."""
TENSOR_LAUNCHES = 10.0
"""What one trained tensor costs the host at the end of a step (its norm, its update), in launches. Fitted to the lines of
frontier.jsonl that differ in tokens a step alone."""


def micro_batches(case: Case) -> int:
    return -(-case.step_rows // case.plan.micro_batch)


def micro_tokens(case: Case) -> float:
    """Tokens of a micro-batch in the mean, padding included; the last of a step may have fewer rows."""
    return case.step_tokens * case.filled / micro_batches(case)


def _length(case: Case) -> int:
    return max(1, round(case.length * case.filled))


def sums_of(case: Case) -> Sums:
    """The sums of a case, made here where it does not carry them."""
    if case.sums is not None:
        return case.sums
    shape, storage = case.shape, case.storage
    return Sums(
        forward_operations(shape, 0),
        again_operations(shape, storage),
        sum(one.inputs + one.outputs for one in shape.linears),
        sum(one.inputs + one.outputs for one in shape.linears if one.name in storage.targets),
    )


def _products(case: Case, operations: float) -> float:
    """Seconds of one micro-batch's linears, of so many operations a token."""
    return compute_seconds(case, operations * (micro_tokens(case) + THIN[case.storage.device]))


def _attention(case: Case, passes: float) -> float:
    return (
        compute_seconds(case, passes * micro_tokens(case) * attention_operations(case.shape, _length(case))) / ATTENTION
    )


def _traffic(case: Case) -> float:
    """Seconds of what one micro-batch's forward moves through memory."""
    shape, storage, sums = case.shape, case.storage, sums_of(case)
    casts = CAST_TRAFFIC if storage.recast and not storage.fast else 0.0
    moved = TRAFFIC[storage.fast] * sums.widths + (ADAPTER_TRAFFIC + casts) * sums.adapted
    return memory_seconds(case, micro_tokens(case) * shape.blocks * storage.compute * moved)


def decode_seconds(case: Case, passes: float = 1.0) -> float:
    """Seconds in which all blocks' stored weights are decoded once, which every pass of a micro-batch does anew."""
    stored = case.shape.blocks * case.shape.linear_parameters if case.storage.coded else 0
    return passes * stored / case.speed.decode_weights_per_s


def launch_seconds(case: Case, passes: float) -> float:
    """Seconds that the host takes to launch all blocks, in passes as long as a forward."""
    return passes * case.shape.blocks * BLOCK_LAUNCHES * case.speed.launch_s


def _with_launches(case: Case, busy: float, passes: float, decoded: float) -> float:
    launching = launch_seconds(case, passes + (DECODE_LAUNCHES * decoded if case.storage.coded else 0.0))
    return max(busy, launching) if case.storage.device == "cuda" else busy + launching


def forward_seconds(case: Case, decoded: float = 1.0) -> float:
    """One micro-batch's forward through the blocks. `decoded`: the share of stored weights that are decoded for it."""
    linears = sums_of(case).linears
    busy = _products(case, linears) + _attention(case, 1.0) + _traffic(case) + decode_seconds(case, decoded)
    return _with_launches(case, busy, 1.0, decoded)


def again_seconds(case: Case, decoded: float = 1.0, attention: bool = True) -> float:
    """One micro-batch's forward through the blocks, run again for their backward."""
    linears, again = sums_of(case).linears, sums_of(case).again
    busy = _products(case, again) + _traffic(case) + decode_seconds(case, decoded * again / max(linears, 1.0))
    return _with_launches(case, busy + (_attention(case, 1.0) if attention else 0.0), 1.0, decoded)


def backward_seconds(case: Case, decoded: float = 1.0) -> float:
    """One micro-batch's backward through the blocks, what it needs being there."""
    storage = case.storage
    linears = sums_of(case).linears * (2 if storage.trained else 1)
    busy = _products(case, linears) + _attention(case, 2.5) + BACKWARD_TRAFFIC * _traffic(case)
    busy += decode_seconds(case, decoded)
    if storage.trained:
        # Each weight's gradient is made, and added to what stands.
        busy += memory_seconds(case, 3.0 * storage.weight * case.shape.blocks * case.shape.linear_parameters)
    return _with_launches(case, busy, 2.0, decoded)


def head_seconds(case: Case) -> float:
    """One micro-batch's head and loss, there and back."""
    shape, storage = case.shape, case.storage
    products = _products(case, 2.0 * shape.vocabulary * shape.hidden * (3 if storage.whole_head else 2))
    return products + memory_seconds(case, LOGITS_TRAFFIC * storage.compute * micro_tokens(case) * shape.vocabulary)


def update_seconds(case: Case) -> float:
    """The norm and the update of every trained tensor, and the sum of gradients over processes."""
    speed = case.speed
    moved = 4 * case.gradients + 2 * case.state
    tensors = sum(each.count for each in case.tensors)
    summed = 0.0
    if case.plan.ranks > 1:
        between = speed.collective_bytes_per_s or speed.both_bytes_per_s
        summed = 2 * case.gradients * (case.plan.ranks - 1) / case.plan.ranks / between
    return memory_seconds(case, moved) + tensors * TENSOR_LAUNCHES * speed.launch_s + summed


def step_seconds(case: Case) -> float:
    """Seconds of a step of one rank, nothing recomputed, moved or parted."""
    each = forward_seconds(case) + backward_seconds(case) + head_seconds(case)
    return micro_batches(case) * each + update_seconds(case)
