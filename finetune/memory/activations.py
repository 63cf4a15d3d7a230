"""What a step keeps for backward, from the shape alone: per block, between blocks, and for a moment while it works.

The formulas list what autograd saves in transformers' LLaMA-shaped blocks (RMS norm, rotary attention, gated MLP) and
are held to a count of saved tensors by a test. Other architectures go by the same four inputs of linears, so their
figure is an estimate. Per token; D hidden, I intermediate, Q heads x head width, K key-value heads x head width.
"""

from __future__ import annotations

from collections import Counter

from finetune.contracts import Shape
from finetune.memory import fast_block
from finetune.memory.storage import Storage, Work, adapter_elements, place_of


def boundary(shape: Shape, storage: Storage) -> int:
    """Bytes a token of one block's input."""
    return storage.stream * shape.hidden


def saved_by_block(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that one block leaves for backward, its input included."""
    if storage.fast:
        return fast_block.saved_by_block(shape, storage, work)
    token = 2 * _norm(shape, storage) + _attention(shape, storage, work.length) + _mlp(shape, storage)
    counted = _readers(shape, storage)
    heads = shape.heads * shape.head_dim
    token += _inputs(counted["attention_in"], shape.hidden, storage)
    token += _inputs(counted["mlp_in"], shape.hidden, storage)
    token += _attention_output(counted["attention_out"], heads, storage)
    token += storage.compute * shape.intermediate * counted["mlp_out"]
    token += storage.compute * storage.rank * len(storage.targets)
    if storage.dora:
        token += _dora(shape, storage)
    return work.tokens * token + cast_weights(shape, storage)


def _dora(shape: Shape, storage: Storage) -> int:
    """Bytes a token of DoRA's own: each target keeps its frozen output and the adapter's, for the sizes' gradients.

    A ninth more than those two: small tensors of each layer, measured.
    """
    outputs = sum(linear.outputs for linear in shape.linears if linear.name in storage.targets)
    return outputs * (2 * storage.compute + 1)


def _dora_workspace(shape: Shape, storage: Storage) -> int:
    """What peft makes for a target's norm: B A from an identity [inputs, inputs], it and the weight as they compute."""
    wide = [linear for linear in shape.linears if linear.name in storage.targets]
    return max((4 * li.inputs**2 + (4 + 3 * storage.compute) * li.parameters for li in wide), default=0)


def cast_weights(shape: Shape, storage: Storage) -> int:
    """Bytes of the 16-bit copies that autocast makes of one block's trained fp32 weights, kept until its backward."""
    if not storage.cast or storage.fast:
        return 0
    if storage.trained and storage.part is not None:
        linears = sum(elements for elements, role in storage.part.tensors if role == "block")
        return storage.compute * linears // max(1, storage.live_blocks(shape))
    if storage.trained:
        return storage.compute * shape.linear_parameters
    return storage.compute * (adapter_elements(shape, storage) // shape.blocks)


def unsaved_by_first(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that the first block does not keep: with a frozen embedding, what comes before its first adapter."""
    if storage.fast:
        return fast_block.unsaved_by_first(shape, storage, work)
    if storage.trained or storage.embedding_adapted:
        return 0
    readers = _readers(shape, storage)
    token = _norm(shape, storage)
    if not readers["attention_in"]:
        kept = storage.compute * shape.heads * shape.head_dim if readers["attention_out"] else 0
        token += _attention(shape, storage, work.length) - (0 if storage.cast else kept)
        if not readers["attention_out"]:
            token += _norm(shape, storage)
            token += 0 if readers["mlp_in"] else _mlp(shape, storage)
    return work.tokens * token


def saved_outside(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes kept outside the blocks: the final norm, and the rotary tables of the positions."""
    if storage.fast:
        return fast_block.saved_outside(shape, storage, work)
    final = (4 * shape.hidden + 4 + (storage.stream * shape.hidden if storage.trained else 0)) * work.tokens
    return final + 2 * shape.head_dim * storage.stream * work.length * (work.rows if storage.packed else 1)


def attention_mask(storage: Storage, work: Work) -> int:
    """Bytes of the dense bool mask [rows, 1, length, length] of packed rows."""
    if storage.varlen:
        return 0
    return work.tokens * work.length if storage.packed else 0


def block_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """The most that one block's forward or backward needs beyond what it saved.

    Backward is widest in the MLP: the gradients of both factors stand beside that of their product, whose saved value
    is gone. A trained linear's own gradient stands there too before it is added. With adapters under autocast, forward
    is widest at the down projection, whose input peft casts to fp32 (not over 4-bit weights).
    """
    if storage.fast:
        return fast_block.block_workspace(shape, storage, work)
    tokens, length = work.tokens, work.length
    wide, thin = storage.compute * shape.intermediate, storage.stream * shape.hidden
    largest = max((linear.parameters for linear in shape.linears), default=0)
    backward = tokens * 2 * wide
    if storage.trained:
        fresh = tokens * (wide + (storage.compute * shape.hidden if storage.cast else 0)) + storage.compute * largest
        recast = tokens * wide + 6 * largest if storage.cast else 0
        # The down projection's own gradient stands there already.
        backward = max(backward + storage.weight * largest, fresh, recast)
    if storage.eager:
        backward = max(backward, tokens * 3 * 4 * shape.heads * length)
    total = tokens * thin + backward
    if storage.targets and storage.recast:
        total = max(total, tokens * (wide + 4 * shape.intermediate + 7 * thin))
    if storage.dora:
        total += _dora_workspace(shape, storage)
    return total + (storage.compute * largest if storage.coded else 0)


def norm_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of the final norm's backward: four fp32 tensors as wide as the stream, and two of a 16-bit stream."""
    if storage.fast:
        return fast_block.norm_workspace(shape, storage, work)
    return work.tokens * shape.hidden * (16 + (4 if storage.stream == 2 else 0))


def forward_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of one block's forward without gradients: four tensors of the stream's width and the MLP's wide ones.

    The four: the embedding's output, which the model holds, the block's input, the residual, a norm's output. Adapters
    add one more wide tensor, and under autocast the fp32 copy that peft makes of a linear's input.
    """
    if storage.fast:
        return fast_block.forward_workspace(shape, storage, work)
    wide = storage.compute * shape.intermediate * (4 if storage.targets else 3)
    if storage.targets and storage.recast:
        wide += 4 * shape.hidden
    if storage.eager:
        wide = max(wide, (4 + 2 * storage.compute) * shape.heads * work.length)
    casts = cast_weights(shape, storage) * shape.blocks
    return work.tokens * (4 * storage.stream * shape.hidden + wide) + casts


def _readers(shape: Shape, storage: Storage) -> Counter[str]:
    """How many linears of a block save their input, by the input that they read."""
    return Counter(
        place_of(linear, shape) for linear in shape.linears if storage.trained or linear.name in storage.targets
    )


def _norm(shape: Shape, storage: Storage) -> int:
    # The fp32 input (the stream itself if that is fp32), one scale a token, the normed value if its gain trains.
    return 4 * shape.hidden + 4 + (storage.stream * shape.hidden if storage.trained else 0)


def _inputs(readers: int, width: int, storage: Storage) -> int:
    """A norm's output, kept for its readers: one tensor for all in fp32, a copy for each under autocast or dropout."""
    if not readers:
        return 0
    copies = readers if storage.recast or (storage.trained and storage.cast) or storage.dropout else 1
    return storage.compute * width * copies


def _attention(shape: Shape, storage: Storage, length: int) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    grouped = shape.heads != shape.kv_heads
    # With a mask or eager attention, keys and values are repeated for every head first.
    wide_keys = queries if grouped and (storage.packed or storage.eager) else keys
    token = storage.compute * (queries + 2 * wide_keys)
    if storage.eager:
        # The softmax keeps its fp32 result, the product with the values a copy as wide as it computes.
        return token + shape.heads * length * (4 + (storage.compute if storage.cast else 0))
    token += storage.compute * queries + 4 * shape.heads
    # The kernel adds a float mask made from the bool one.
    return token + (storage.compute * length if storage.packed else 0)


def _attention_output(readers: int, width: int, storage: Storage) -> int:
    """What the output projection keeps beyond the attention's own saved output, which it shares where it can."""
    shared = not storage.eager and (storage.trained or not (storage.recast or storage.dropout))
    return 0 if shared else storage.compute * width * readers


def _mlp(shape: Shape, storage: Storage) -> int:
    """The activation's input, its output and the other factor; without a gate, the activation's input alone."""
    outputs = sum(linear.outputs for linear in shape.linears if place_of(linear, shape) == "mlp_in")
    gated = outputs != shape.intermediate
    return storage.compute * shape.intermediate * (3 if gated else 1)
