"""Which of a model's own tensors a recipe trains when it trains only some of them, by names and counts alone.

The names are those of LLaMA-shaped classes and the usual ones of others; an entry that means none of them (a norm, an
unusual name) counts for all norms and biases where it trains, and for nothing where it freezes: never too few bytes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from finetune.config.schema import Recipe
from finetune.contracts import Shape

EMBEDDING_NAMES = ("embed_tokens", "wte", "embed_in")
HEAD_NAMES = ("lm_head", "embed_out", "output")
BLOCKS = ("model.layers", "transformer.h", "gpt_neox.layers")
Tensor = tuple[int, str]
"""Elements, and role: embedding, head, block (a block's linear) or extra (norms and biases)."""


@dataclass(frozen=True)
class Part:
    """`tensors` are trained; `first` is the block where the first of them stands (0 where the embedding is trained)."""

    tensors: tuple[Tensor, ...]
    first: int


def part_of(shape: Shape, recipe: Recipe) -> Part | None:
    """The trained part of the model's own tensors; None where it is all of them, or none.

    Beside an adapter: layers that are trained whole and the rows of new tokens. Without: what train.* chooses.
    """
    places = list(_places(shape))
    if recipe.adapter.kind != "none":
        saved = _chosen(places, recipe.adapter.modules_to_save, True)
        rows = len(recipe.model.new_tokens) * shape.hidden
        sides = {"embedding"} if shape.tied else {"embedding", "head"}
        whole = {place.role for place in saved}
        fresh = [(rows, side) for side in sorted(sides - whole) if rows and not (shape.tied and "head" in whole)]
        return Part((*(place.tensor for place in saved), *fresh), 0) if saved or fresh else None
    train = recipe.train
    if not (train.last_blocks or train.modules or train.freeze):
        return None
    chosen = places if not (train.last_blocks or train.modules) else _chosen(places, train.modules, True)
    if train.last_blocks:
        chosen += [p for p in places if p.block is not None and p.block >= shape.blocks - train.last_blocks]
    frozen = set(map(id, _chosen(places, train.freeze, False)))
    kept = {id(place): place for place in chosen if id(place) not in frozen}
    firsts = [0 if p.role == "embedding" else shape.blocks if p.block is None else p.block for p in kept.values()]
    return Part(tuple(place.tensor for place in kept.values()), min(firsts, default=shape.blocks))


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor (or a block's norms together) with the names it may go by."""

    names: tuple[str, ...]
    tensor: Tensor
    block: int | None

    @property
    def role(self) -> str:
        return self.tensor[1]


def _places(shape: Shape) -> Iterator[_Place]:
    for block in range(shape.blocks):
        for linear in shape.linears:
            names = tuple(f"{place}.{block}.{linear.name}.weight" for place in BLOCKS)
            yield _Place(names, (linear.parameters, "block"), block)
        if shape.block_extra:
            yield _Place(tuple(f"{place}.{block}" for place in BLOCKS), (shape.block_extra, "extra"), block)
    embedding = tuple(f"model.{name}.weight" for name in EMBEDDING_NAMES)
    head = tuple(f"{name}.weight" for name in HEAD_NAMES)
    yield _Place(embedding + (head if shape.tied else ()), (shape.embedding_parameters, "embedding"), None)
    if not shape.tied:
        yield _Place(head, (shape.head_parameters, "head"), None)
    if shape.extra:
        yield _Place(("model.norm.weight",), (shape.extra, "extra"), None)


def _chosen(places: list[_Place], entries: tuple[str, ...], trains: bool) -> list[_Place]:
    found: dict[int, _Place] = {}
    for entry in entries:
        matched = [place for place in places if any(_means(entry, name) for name in place.names)]
        if not matched and trains:
            matched = [place for place in places if place.role == "extra"]
        found |= {id(place): place for place in matched}
    return list(found.values())


def _means(entry: str, name: str) -> bool:
    """Whether an entry of a recipe selects the parameter `name` or a module around it, as loading reads it."""
    parts = name.split(".")
    return any(_selects(entry, ".".join(parts[:length])) for length in range(1, len(parts) + 1))


def _selects(entry: str, name: str) -> bool:
    if any(sign in entry for sign in "*?["):
        return fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"*.{entry}")
    return name == entry or name.endswith(f".{entry}")
