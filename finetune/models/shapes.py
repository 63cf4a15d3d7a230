"""The counts of models that shipped recipes name, and how to count any other.

Rows need neither network nor weights, so a plan can be made anywhere. Every row is held to transformers' own class by a
test. Other models are built on torch's meta device (no memory) from their config and counted; a model whose parts do
not sum to its whole is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.contracts import LinearShape, Shape
from finetune.errors import ModelError
from finetune.kernels.logits_change import logits_change

if TYPE_CHECKING:
    from torch import nn

    from finetune.config.schema import Recipe


def _llama(
    name: str,
    blocks: int,
    widths: tuple[int, int],
    heads: tuple[int, int],
    vocabulary: int,
    positions: int,
) -> Shape:
    """A LLaMA-shaped row; widths (hidden, intermediate), heads (query, key-value), head width hidden / heads."""
    hidden, intermediate = widths
    queries, keys = hidden, heads[1] * (hidden // heads[0])
    linears = (
        LinearShape("self_attn.q_proj", hidden, queries),
        LinearShape("self_attn.k_proj", hidden, keys),
        LinearShape("self_attn.v_proj", hidden, keys),
        LinearShape("self_attn.o_proj", queries, hidden),
        LinearShape("mlp.gate_proj", hidden, intermediate),
        LinearShape("mlp.up_proj", hidden, intermediate),
        LinearShape("mlp.down_proj", intermediate, hidden),
    )
    return Shape(
        name=name,
        blocks=blocks,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=hidden // heads[0],
        vocabulary=vocabulary,
        positions=positions,
        tied=False,
        linears=linears,
        block_extra=2 * hidden,
        extra=hidden,
        family="llama",
    )


def _biased(shape: Shape) -> Shape:
    """The row with a bias on queries, keys and values, as Qwen2 has."""
    biases = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    return replace(shape, block_extra=shape.block_extra + biases, family="qwen2")


def _tied(shape: Shape) -> Shape:
    """The row with the embedding as its head."""
    return replace(shape, tied=True)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _tied(_llama("llama3-1b", 16, (2048, 8192), (32, 8), 128256, 131072)),
        _tied(_llama("llama3-3b", 28, (3072, 8192), (24, 8), 128256, 131072)),
        _llama("llama3-8b", 32, (4096, 14336), (32, 8), 128256, 8192),
        _llama("llama3-70b", 80, (8192, 28672), (64, 8), 128256, 8192),
        _biased(_llama("qwen2.5-7b", 28, (3584, 18944), (28, 4), 152064, 32768)),
        _biased(_llama("qwen2.5-32b", 64, (5120, 27648), (40, 8), 152064, 32768)),
        replace(_llama("mistral-7b", 32, (4096, 14336), (32, 8), 32768, 32768), family="mistral"),
        _tied(_llama("smollm2-135m", 30, (576, 1536), (9, 3), 49152, 8192)),
        _llama("tiny", 2, (64, 128), (4, 2), 320, 2048),
        _llama("tiny-random", 2, (64, 128), (4, 2), 320, 8192),
    )
}

NAMES: dict[str, str] = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama3-70b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "builtin:smollm2-135m": "smollm2-135m",
    "builtin:tiny": "tiny",
    "builtin:tiny-random": "tiny-random",
    "builtin:llama3-1b-random": "llama3-1b",
    "builtin:llama3-3b-random": "llama3-3b",
    "builtin:llama3-8b-random": "llama3-8b",
    "builtin:llama3-70b-random": "llama3-70b",
    "builtin:qwen2.5-7b-random": "qwen2.5-7b",
    "builtin:qwen2.5-32b-random": "qwen2.5-32b",
    "meta-llama/Llama-3.2-1B": "llama3-1b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3-1b",
    "meta-llama/Llama-3.2-3B": "llama3-3b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3-3b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
}
"""Hub ids and built-in names, each with its row."""


def shape_for(recipe: Recipe) -> Shape:
    """The shape of a recipe's model: a folder's own config.json, else a row, else the config that the hub gives.

    With model.layers, of its first blocks. ModelError says what was looked for when there is none of these.
    """
    from finetune.models.config import check_layers, load_config

    path, layers = recipe.model.path, recipe.model.layers
    if Path(path).is_dir():
        return shape_of(load_config(recipe.model))
    row = NAMES.get(path, path)
    if row in SHAPES:
        if layers is None:
            return SHAPES[row]
        check_layers(layers, SHAPES[row].blocks, path)
        return replace(SHAPES[row], blocks=layers)
    if path.startswith("builtin:"):
        known = ", ".join(name for name in NAMES if name.startswith("builtin:"))
        raise ModelError(
            f"there is no built-in model '{path.removeprefix('builtin:')}'", "model.path", f"one of {known}"
        )
    return shape_of(load_config(recipe.model))


def shape_of(config: Any) -> Shape:
    """The counts of any transformers causal language model, from its config.

    Blocks are the list of modules with the most parameters. ModelError where there is no causal model class for the
    config, where blocks differ, or where the parts do not add up to the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    name = str(getattr(config, "name_or_path", "") or getattr(config, "model_type", "model"))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # Numbers of a config.json that make no model raise nearly anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"{name}: transformers has no causal language model for it ({reason[:300]})"
        raise ModelError(what, "model.path", "check the model's config.json") from error
    return _counted(name, model, config.get_text_config())


def _counted(name: str, model: Any, text: Any) -> Shape:
    blocks = _blocks(name, model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise ModelError(f"{name}: the model has no input embedding or no output projection", "model.path")
    linears = tuple(_linears(blocks[0]))
    tied = head.weight is embedding.weight or bool(getattr(text, "tie_word_embeddings", False))
    block = _parameters(blocks[0])
    vocabulary, hidden = embedding.weight.shape
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    if tied and head.weight is not embedding.weight:
        total -= head.weight.numel()
    inside = len(blocks) * block + vocabulary * hidden * (1 if tied else 2)
    heads = int(text.num_attention_heads)
    shape = Shape(
        name=name,
        blocks=len(blocks),
        hidden=hidden,
        intermediate=_intermediate(text, linears, hidden),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        vocabulary=vocabulary,
        positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        tied=tied,
        linears=linears,
        block_extra=block - sum(linear.parameters for linear in linears),
        extra=total - inside,
        changed_logits=logits_change(text) is not None,
        family=str(text.model_type) if getattr(text, "hidden_act", None) == "silu" else "",
    )
    if shape.parameters != total or shape.extra < 0 or tuple(head.weight.shape) != (vocabulary, hidden):
        raise ModelError(
            f"{name}: {total:,} parameters, but its blocks, embedding and head make {inside:,}",
            where="model.path",
            remedy="this architecture cannot be planned yet",
        )
    return shape


def _linears(block: nn.Module) -> Iterator[LinearShape]:
    import torch

    for path, part in block.named_modules():
        if isinstance(part, torch.nn.Linear):
            yield LinearShape(path, part.in_features, part.out_features)
        elif type(part).__name__ == "Conv1D":
            # GPT-2's linear, with its weight [inputs, outputs].
            yield LinearShape(path, part.weight.shape[0], part.weight.shape[1])


def _blocks(name: str, model: nn.Module) -> list[nn.Module]:
    import torch

    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    if not lists:
        raise ModelError(
            f"{name}: the model has no list of blocks", "model.path", "this architecture cannot be planned"
        )
    sizes_of = [_parameters(part) for part in lists]
    blocks = list(lists[sizes_of.index(max(sizes_of))])
    sizes = sorted({_parameters(block) for block in blocks})
    if len(sizes) > 1:
        raise ModelError(
            f"{name}: its blocks differ ({sizes[0]:,} to {sizes[-1]:,} parameters)",
            where="model.path",
            remedy="models of unlike blocks cannot be planned yet",
        )
    return blocks


def _parameters(module: nn.Module) -> int:
    return sum({id(p): p.numel() for p in module.parameters()}.values())


def _intermediate(text: Any, linears: tuple[LinearShape, ...], hidden: int) -> int:
    """The MLP's width: as the config says, else the widest input of a block's linears."""
    for attribute in ("intermediate_size", "ffn_dim", "n_inner"):
        width = getattr(text, attribute, None)
        if isinstance(width, int) and width > 0:
            return width
    return max((linear.inputs for linear in linears), default=4 * hidden)
