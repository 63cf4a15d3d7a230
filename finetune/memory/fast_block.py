"""What fast blocks (models/fast) keep for backward and need for a moment, from the shape alone; held to a count by a test.

Per token; D hidden, I intermediate, Q heads x head width, K key-value heads x head width, R the adapters' ranks. A block
keeps its input, two norms' outputs where adapters or trained weights read them, q, k, v, the attention's output, the
stream after it, and the outputs of gate and up. Nothing is kept twice, and no weight is cast for longer than its use.
"""

from __future__ import annotations

from functools import lru_cache

from finetune.contracts import Shape
from finetune.memory.storage import Storage, Work, place_of


def saved_by_block(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that one block leaves for backward, its input included."""
    return work.tokens * _upper(shape, storage, work) + _mlp(shape, storage, work)


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
    where the MLP's activations are gone. In tiles the MLP may need less than attention's own backward, and a trained
    weight's gradient stands from the first tile on.
    """
    wide, thin = storage.compute * shape.intermediate, storage.stream * shape.hidden
    largest = max((linear.parameters for linear in shape.linears), default=0)
    total = work.mlp_tokens * wide + work.tokens * thin
    if storage.trained:
        casts = 0
        if storage.stream != storage.compute:
            casts = work.mlp_tokens * storage.compute * shape.hidden + storage.compute * largest
        later = work.tokens * 2 * thin + storage.weight * shape.linear_parameters
        own = storage.weight * largest
        if work.mlp_tokens < work.tokens:
            own = storage.weight * (_mlp_parameters(shape) + (largest if storage.weight != storage.compute else 0))
        total = max(total + own, later - _mlp(shape, storage, work)) + casts
    if work.tile:
        total = max(total, _attention_backward(shape, storage, work) - _mlp(shape, storage, work))
    return total + (storage.compute * largest if storage.coded else 0)


def norm_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of the final norm's backward: the gradients on its two sides; without a GPU's kernel four fp32 tensors more."""
    plain = 0 if storage.device == "cuda" else 16
    return work.tokens * shape.hidden * (2 * storage.stream + plain)


def forward_workspace(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of one block's forward without gradients: the stream before and after, a norm's output, gate, up,
    their product and what is made of it."""
    largest = max((linear.parameters for linear in shape.linears), default=0)
    cast = storage.compute * largest if storage.coded or storage.stream != storage.compute else 0
    read = storage.compute * shape.hidden
    total = work.tokens * (storage.stream * 2 * shape.hidden + read)
    total += work.mlp_tokens * (read + 3 * storage.compute * shape.intermediate)
    return max(total, work.tokens * _attention_forward(shape, storage)) + cast


def _attention_forward(shape: Shape, storage: Storage) -> int:
    """Bytes a token of the attention half's forward, with the stream before it: q, k and v beside their input or beside
    attention's output; or the norm after it, beside its two inputs' sum."""
    read, thin = storage.compute * shape.hidden, storage.stream * shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    made = storage.compute * (queries + 2 * keys)
    return thin + max(read + made, made + storage.compute * queries + 4 * shape.heads, thin + 2 * read)


@lru_cache(4096)
def _attention_backward(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of attention's backward beyond what the upper half saved: the stream's gradient, the MLP's input's, the
    residual's, attention's output's, those of q, k and v. A GPU's flash kernel sums q's in fp32, and has one of k and one
    of v for every query head where several share a key head. Gradients of the MLP's and the output's trained weights
    are there."""
    read, thin = storage.compute * shape.hidden, storage.stream * shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    token = 2 * thin + read + storage.compute * (2 * queries + 2 * keys)
    token += read if storage.stream != storage.compute else 0
    if storage.device == "cuda":
        token += 4 * queries + (2 * storage.compute * queries if shape.heads != shape.kv_heads else 0)
    grown = 0
    if storage.trained:
        out = sum(linear.parameters for linear in shape.linears if place_of(linear, shape) == "attention_out")
        grown = storage.weight * (_mlp_parameters(shape) + out)
    return work.tokens * token + grown


def _mlp_parameters(shape: Shape) -> int:
    return sum(linear.parameters for linear in shape.linears if place_of(linear, shape) in ("mlp_in", "mlp_out"))


@lru_cache(4096)
def _mlp(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes that the MLP leaves for backward, or has again in it: in tiles its whole input, whose place the input's
    gradient takes, and the rest of one tile."""
    if not work.tile:
        return work.tokens * _half(shape, storage)
    read = storage.compute * shape.hidden
    inside = _half(shape, storage) - (read if _reads(shape, storage, "mlp_in") else 0)
    return work.tokens * read + work.mlp_tokens * inside


@lru_cache(4096)  # the planner asks for the same few thousand times
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


@lru_cache(4096)
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
