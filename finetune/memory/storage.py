"""How a recipe stores its numbers: the few facts that every cost model reads, taken from the recipe once.

Two widths matter. `compute` is that of matrix products and attention; `stream` that of the residual stream between
blocks. With bf16 they differ when every parameter trains in fp32: weights and stream are fp32, and autocast makes bf16
copies.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from finetune.config.schema import Recipe
from finetune.contracts import LinearShape, Shape
from finetune.errors import InputError
from finetune.memory.part import EMBEDDING_NAMES, HEAD_NAMES, Part, part_of

NF4_BITS = {True: 4 + 8 / 64 + 32 / (64 * 256), False: 4 + 32 / 64}
"""Bits a parameter in NF4, by whether its scales are quantised too: 4, and for every 64 a scale of 8 bits (with a fp32 for
every 64 x 256), or of 32. Source: bitsandbytes `quantize_4bit(blocksize=64, compress_statistics=...)`; 4.127 and 4.5."""
NF4_TABLES = {True: 4 * (16 + 256 + 1), False: 4 * 16}
"""Bytes of code tables and the scales' mean that bitsandbytes keeps with every 4-bit weight."""

PLACES = {
    "attention_in": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack"),
    "attention_out": ("o_proj", "out_proj"),
    "mlp_in": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3", "dense_h_to_4h", "fc_in"),
    "mlp_out": ("down_proj", "fc2", "w2", "dense_4h_to_h", "fc_out"),
}
"""Which input a block's linear reads, by the last part of its name; other names go by their widths."""
FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that models/fast can run."""
BLOCK_NUMBER = re.compile(r"(?<![^.])([0-9]+|\[[^].]*]|[*?]+)\.")
"""A part of an adapter's target that is a block's number, or a pattern of such."""


@dataclass(frozen=True)
class Work:
    """What one forward takes: `rows` padded to `length` tokens; the MLP of a recomputed fast block takes `tile` of them
    at a time (0: all)."""

    rows: int
    length: int
    tile: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def mlp_tokens(self) -> int:
        """Tokens whose MLP activations stand at once."""
        return min(self.tile or self.tokens, self.tokens)


@dataclass(frozen=True)
class Storage:
    """Bytes of an element where it matters, and what is trained.

    `compute`, `stream`: see the file's top. `frozen`: bytes of a frozen weight that is not quantised; `base`,
    `double_quant`: how the blocks' linears are stored (model.base). `dora`: every adapted output has a trained size;
    `doubled`: the adapter's first weights stay beside it (pissa, olora). `part`: trained tensors of the model's
    own where only some are: whole layers beside an adapter, or a part of a full fine-tune. `own_head`: the
    loss goes through the head's own forward (an adapter on it, a trained copy, changed logits). `trained`: every parameter
    trains. `rank` and `targets`: the adapter, by names of a block's linears (0 and empty: none); `head_adapted`,
    `embedding_adapted`: it reaches those too. `packed`: rows carry a dense bool attention mask (none where
    `varlen`). `weight`: bytes of a trained weight, and of its gradient.
    """

    compute: int
    stream: int
    frozen: int
    trained: bool
    nf4: bool = False
    rank: int = 0
    targets: frozenset[str] = frozenset()
    head_adapted: bool = False
    embedding_adapted: bool = False
    dropout: bool = False
    packed: bool = False
    eager: bool = False
    device: str = "cpu"
    base: str = "same"
    double_quant: bool = True
    dora: bool = False
    doubled: bool = False
    part: Part | None = None
    tied: bool = False
    own_head: bool = False
    fast: bool = False
    weight: int = 4

    @property
    def cast(self) -> bool:
        """Autocast is on: products are in 16 bits, and what is trained is in fp32."""
        return self.compute < 4 and self.weight == 4

    @property
    def varlen(self) -> bool:
        """Packed rows go through variable-length attention, which makes no mask: fast blocks on a GPU, in 16 bits."""
        return self.fast and self.device == "cuda" and self.compute == 2

    @property
    def coded(self) -> bool:
        """The blocks' linears are stored quantised: each is decoded to the compute type for a moment."""
        return self.base != "same"

    @property
    def recast(self) -> bool:
        """peft casts the input of each adapter to fp32 and autocast casts it back: a 16-bit copy for every reader. Its
        layers over 4-bit weights leave that out under autocast."""
        return self.cast and not self.trained and not self.nf4

    @property
    def whole_head(self) -> bool:
        """The head's own matrix (the embedding, where they are tied) is trained."""
        if self.part is None:
            return self.trained
        return any(role == "head" or (self.tied and role == "embedding") for _, role in self.part.tensors)

    def live_blocks(self, shape: Shape) -> int:
        """Blocks that keep anything for backward: in part of a full fine-tune, those from the first trained one on."""
        return shape.blocks - self.part.first if self.trained and self.part is not None else shape.blocks


def storage_of(shape: Shape, recipe: Recipe, precision: str, device: str = "cpu") -> Storage:
    """The storage of a recipe at a resolved precision.

    InputError names adapter targets that match nothing.
    """
    compute = 2 if precision in ("bf16", "fp16") else 4
    trained = recipe.adapter.kind == "none"
    weight = 2 if trained and recipe.model.trained != "fp32" else 4
    blocks, head, embedding = (frozenset[str](), False, False) if trained else _targets(shape, recipe.adapter.targets)
    part = part_of(shape, recipe)
    roles = {role for _, role in part.tensors} if part is not None else set()
    # The residual stream is as wide as the embedding's rows.
    wide = trained and (part is None or "embedding" in roles)
    return Storage(
        compute=compute,
        stream=weight if wide else compute,
        frozen=compute,
        trained=trained,
        nf4=recipe.model.base == "nf4",
        # The widest of ranks by name counts for all.
        rank=0 if trained else max(recipe.adapter.rank, *recipe.adapter.ranks.values(), 1),
        targets=blocks,
        head_adapted=head,
        embedding_adapted=embedding,
        dropout=not trained and recipe.adapter.dropout > 0,
        packed=recipe.data.pack,
        eager=recipe.model.attention == "eager",
        device=device,
        base=recipe.model.base,
        double_quant=recipe.model.double_quant,
        dora=recipe.adapter.kind == "dora",
        doubled=recipe.adapter.init in ("pissa", "olora"),
        part=part,
        tied=shape.tied,
        own_head=head or shape.changed_logits or (not trained and bool(roles & {"head", "embedding"})),
        weight=weight,
        fast=runs_fast(shape, recipe, device),
    )


def runs_fast(shape: Shape, recipe: Recipe, device: str) -> bool:
    """Whether the blocks run as fast blocks: as the recipe says, else on a GPU where nothing speaks against it."""
    wanted = recipe.plan.fast_block
    if wanted != "auto":
        return wanted
    return device == "cuda" and not why_not_fast(shape, recipe) and recipe.plan.exact != "bitwise"


def why_not_fast(shape: Shape, recipe: Recipe) -> str:
    """Why fast blocks cannot run this recipe's blocks, as the end of a sentence; empty where they can."""
    adapter = recipe.adapter
    outside = (*HEAD_NAMES, *EMBEDDING_NAMES, "model.norm")
    if shape.family not in FAST_FAMILIES:
        return f"is for {', '.join(FAST_FAMILIES)}, and the model is of another form ({shape.name})"
    if recipe.model.attention == "eager":
        return "has kernels of its own for attention, and model.attention=eager asks for another"
    if adapter.kind == "dora":
        return "knows plain LoRA, and adapter.kind is dora"
    if adapter.init in ("pissa", "olora"):
        return f"knows plain LoRA, and adapter.init={adapter.init} keeps a second one beside it"
    if any(name not in outside for name in adapter.modules_to_save):
        return "does not know whole trained layers in blocks, and adapter.modules_to_save names some"
    return ""


def _targets(shape: Shape, wanted: tuple[str, ...]) -> tuple[frozenset[str], bool, bool]:
    """The block's linears that an adapter reaches, and whether it reaches the head and the embedding.

    Entries are those of models/adapters. One that names some blocks only counts for all: never too few bytes.
    """
    found: set[str] = set()
    outside: set[str] = set()
    unmatched = []
    for target in wanted:
        matches = {linear.name for linear in shape.linears if target == "all-linear" or _names(target, linear.name)}
        ends = {name for name in (*HEAD_NAMES, *EMBEDDING_NAMES) if target != "all-linear" and _names(target, name)}
        found |= matches
        outside |= ends
        if not matches and not ends:
            unmatched.append(target)
    if unmatched:
        names = ", ".join(sorted({linear.name.rpartition(".")[2] for linear in shape.linears}))
        raise InputError(
            f"no linear layer of {shape.name} is called {', '.join(unmatched)}",
            where="adapter.targets",
            remedy=f"all-linear, or some of {names}",
        )
    return frozenset(found), bool(outside & set(HEAD_NAMES)), bool(outside & set(EMBEDDING_NAMES))


def _names(target: str, name: str) -> bool:
    """Whether a target may select a module `name`, which is written without what stands before it in the model.

    A target is a name, its end after a dot, or a pattern; it may name the block as well (model.layers.3.mlp.up_proj,
    layers.[02].mlp.*), and then what follows the block's number is what the name is held to.
    """
    tails = [target, *(target[number.end() :] for number in BLOCK_NUMBER.finditer(target))]
    if any(sign in target for sign in "*?["):
        return any(
            fnmatch.fnmatchcase(full, tail) for tail in tails for full in (name, f"x.{name}", f"model.layers.0.{name}")
        )
    return name in tails or name.endswith(f".{target}")


def place_of(linear: LinearShape, shape: Shape) -> str:
    """Which of a block's four inputs a linear reads: a key of PLACES."""
    last = linear.name.rpartition(".")[2]
    for place, names in PLACES.items():
        if last in names:
            return place
    if linear.inputs == shape.intermediate and linear.inputs != shape.hidden:
        return "mlp_out"
    if "attn" in linear.name or "attention" in linear.name:
        return "attention_out" if linear.outputs == shape.hidden and last != "query" else "attention_in"
    return "mlp_in"


def adapter_tensors(shape: Shape, storage: Storage) -> list[int]:
    """Elements of each tensor that the adapter trains: A [rank, inputs], B [outputs, rank] and, with DoRA, a size
    for every output of every target."""
    pairs = [
        (linear.inputs, linear.outputs) for linear in shape.linears if linear.name in storage.targets
    ] * shape.blocks
    if storage.head_adapted:
        pairs.append((shape.hidden, shape.vocabulary))
    if storage.embedding_adapted:
        pairs.append((shape.vocabulary, shape.hidden))
    sizes = [outputs for _, outputs in pairs] if storage.dora else []
    return [storage.rank * width for pair in pairs for width in pair] + sizes


def adapter_elements(shape: Shape, storage: Storage) -> int:
    """Elements of all tensors of `adapter_tensors`, without listing them."""
    inside = shape.blocks * sum(
        linear.inputs + linear.outputs for linear in shape.linears if linear.name in storage.targets
    )
    outside = (storage.head_adapted + storage.embedding_adapted) * (shape.hidden + shape.vocabulary)
    sizes = shape.blocks * sum(linear.outputs for linear in shape.linears if linear.name in storage.targets)
    sizes += storage.head_adapted * shape.vocabulary + storage.embedding_adapted * shape.hidden
    return storage.rank * (inside + outside) + storage.dora * sizes


def trained_tensors(shape: Shape, storage: Storage) -> list[tuple[int, str]]:
    """Elements and role (`embedding`, `head`, `block`, `extra`) of every trained tensor."""
    own = list(storage.part.tensors) if storage.part is not None else []
    if not storage.trained:
        return [(elements, "block") for elements in adapter_tensors(shape, storage)] + own
    if storage.part is not None:
        return own
    block = [(linear.parameters, "block") for linear in shape.linears]
    # Norms and biases are vectors; their exact number does not matter to a byte count, their width nearly does.
    vectors = max(1, round(shape.block_extra / shape.hidden))
    block += [(shape.block_extra // vectors, "extra")] * vectors if shape.block_extra else []
    outside = [(shape.embedding_parameters, "embedding"), (shape.extra, "extra")]
    if not shape.tied:
        outside.append((shape.head_parameters, "head"))
    return block * shape.blocks + [pair for pair in outside if pair[0]]


def weight_bytes(shape: Shape, storage: Storage) -> int:
    """All weights as they stand in memory during a run: frozen ones as stored, trained ones as `weight` says.

    Adapters, and layers that are trained whole beside them, are fp32. The rest of a split weight counts as optimizer state.
    """
    own = sum(elements for elements, _ in storage.part.tensors) if storage.part is not None else 0
    if storage.trained:
        part = shape.parameters if storage.part is None else own
        return storage.weight * part + storage.frozen * (shape.parameters - part)
    adapter = 4 * (adapter_elements(shape, storage) * (2 if storage.doubled else 1) + own)
    if not storage.coded:
        return storage.frozen * shape.parameters + adapter
    linears = shape.blocks * shape.linear_parameters
    return shape.blocks * coded_block_bytes(shape, storage) + storage.frozen * (shape.parameters - linears) + adapter


def coded_block_bytes(shape: Shape, storage: Storage) -> int:
    """One block's linears as they are stored: in 4 bits with scales and tables, or a byte each and a fp32 a row."""
    if not storage.nf4:
        return sum(linear.parameters + 4 * linear.outputs for linear in shape.linears)
    double = storage.double_quant
    bits = shape.linear_parameters * NF4_BITS[double]
    return int(bits / 8) + len(shape.linears) * NF4_TABLES[double]
