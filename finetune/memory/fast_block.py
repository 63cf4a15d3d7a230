"""What fast blocks (models/fast) keep for backward and need for a moment, from the shape alone; held to a count by a test.

Per token; D hidden, I intermediate, Q heads x head width, K key-value heads x head width, R the adapters' ranks. A block
keeps its input, two norms' outputs where adapters or trained weights read them, q, k, v, the attention's output, the
stream after it, and the outputs of gate and up. Nothing is kept twice, and no weight is cast for longer than its use.
"""

from __future__ import annotations

from finetune.contracts import Shape
from finetune.memory.storage import Storage, Work, place_of


def saved_by_block(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that one block leaves for backward, its input included."""
    return work.tokens * (_upper(shape, storage, work) + _half(shape, storage))


def unsaved_by_first(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that the first block does not keep, when nothing before it is trained: what comes before its first adapter."""
    if storage.trained or storage.embedding_adapted:
        return 0
    norm = storage.stream * shape.hidden + 4
    if _reads(shape, storage, "attention_in"):
        return work.tokens * norm
    kept = 0
    if _reads(shape, storage, "attention_out"):
        kept = storage.compute * shape.heads * shape.head_dim + norm + _thin(shape, storage, ("attention_out",))
    return work.tokens * (_upper(shape, storage, work) - kept)


def saved_outside(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes kept outside the blocks: the final norm's input, and the rotary tables of the positions."""
    tables = 2 * shape.head_dim * storage.compute * work.length * (work.rows if storage.packed else 1)
    return work.tokens * (storage.stream * shape.hidden + 4) + tables


def block_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """The most that one block's backward needs beyond what it saved.

    In the MLP: the slope of the product of gate and up beside both, with the stream's gradient. Trained weights add
    their own gradients: that of the down projection there, and all of the block's when the attention half is reached,
    where the MLP's activations are gone.
    """
    wide, thin = storage.compute * shape.intermediate, storage.stream * shape.hidden
    largest = max((linear.parameters for linear in shape.linears), default=0)
    total = work.tokens * (wide + thin)
    if storage.trained:
        casts = 0
        if storage.stream != storage.compute:
            casts = work.tokens * storage.compute * shape.hidden + storage.compute * largest
        later = work.tokens * 2 * thin + storage.weight * shape.linear_parameters
        total = max(total + storage.weight * largest, later - work.tokens * _half(shape, storage)) + casts
    return total + (storage.compute * largest if storage.coded else 0)


def norm_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of the final norm's backward: the gradients on its two sides."""
    return work.tokens * shape.hidden * 2 * storage.stream


def forward_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of one block's forward without gradients: the stream before and after, a norm's output, gate, up, product."""
    token = storage.stream * 2 * shape.hidden + storage.compute * (shape.hidden + 3 * shape.intermediate)
    largest = max((linear.parameters for linear in shape.linears), default=0)
    return work.tokens * token + (
        storage.compute * largest if storage.coded or storage.stream != storage.compute else 0
    )


def _upper(shape: Shape, storage: Storage, work: Work) -> int:
    """The attention half: inputs of both norms with a scale each, and what q, k, v, attention and the output keep."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    read = storage.compute * shape.hidden
    token = 2 * (storage.stream * shape.hidden + 4)
    token += read if _reads(shape, storage, "attention_in") else 0
    token += storage.compute * (queries + 2 * keys) + storage.compute * queries + 4 * shape.heads
    if storage.packed and not storage.varlen:
        token += storage.compute * work.length
    if shape.family == "qwen3":
        token += storage.compute * (queries + keys) + 4 * (shape.heads + shape.kv_heads)
    return token + _thin(shape, storage, ("attention_in", "attention_out"))


def _half(shape: Shape, storage: Storage) -> int:
    """The MLP: its input where it is read, and the outputs of gate and up."""
    read = storage.compute * shape.hidden if _reads(shape, storage, "mlp_in") else 0
    return read + 2 * storage.compute * shape.intermediate + _thin(shape, storage, ("mlp_in", "mlp_out"))


def _reads(shape: Shape, storage: Storage, place: str) -> bool:
    """Whether a gradient of the linears at this place needs their input."""
    return storage.trained or any(
        linear.name in storage.targets for linear in shape.linears if place_of(linear, shape) == place
    )


def _thin(shape: Shape, storage: Storage, places: tuple[str, ...]) -> int:
    """The adapters' thin products."""
    count = sum(linear.name in storage.targets for linear in shape.linears if place_of(linear, shape) in places)
    return storage.compute * storage.rank * count
