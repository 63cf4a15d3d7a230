"""Full fine-tuning of a part of the model: which of its own parameters are trained, by the recipe's train section.

Trained ones are fp32, frozen ones in the compute precision, so freezing saves three quarters of a parameter's bytes and
more (no gradient, no optimizer state).
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from finetune.config.schema import TrainSection
from finetune.errors import ModelError
from finetune.models.decoder import find_blocks
from finetune.models.targets import selects


def is_partial(train: TrainSection) -> bool:
    """Whether the recipe trains less than every parameter."""
    return bool(train.last_blocks or train.modules or train.freeze)


def choose(
    base: nn.Module, train: TrainSection, frozen: torch.dtype, trained: torch.dtype = torch.float32
) -> list[str]:
    """Makes `base` train what the section says and nothing else, in the given types. Returns notices.

    train.last_blocks and train.modules are added together (neither: everything), then train.freeze is taken away. An
    entry is a name, the end of one, or a pattern, of a module or a parameter. ModelError for one that selects nothing.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    chosen: set[int] = set() if train.last_blocks or train.modules else set(parameters)
    if train.last_blocks:
        blocks = find_blocks(base)
        if train.last_blocks > len(blocks):
            what = f"train.last_blocks={train.last_blocks}, but {type(base).__name__} has {len(blocks)} blocks"
            raise ModelError(what, "train.last_blocks", f"at most {len(blocks)}")
        chosen |= {id(p) for block in blocks[-train.last_blocks :] for p in block.parameters()}
    chosen |= _selected(base, train.modules, names, "train.modules")
    chosen -= _selected(base, train.freeze, names, "train.freeze")
    if not chosen:
        raise ModelError("nothing is left to train", "train.freeze", "freeze less, or choose more in train.modules")
    for key, parameter in parameters.items():
        parameter.requires_grad_(key in chosen)
        parameter.data = parameter.data.to(trained if key in chosen else frozen)
    return [_report(base, parameters, chosen, (trained, frozen))]


def check_rows_trained(base: Any, new_rows: tuple[int, ...]) -> None:
    """ModelError when tokens were added and embedding or head, whose rows they have, stay frozen: the rows would stay
    the mean of the others for good."""
    sides = {id(side.weight): side for side in (base.get_input_embeddings(), base.get_output_embeddings())}
    frozen = [
        name for name, child in base.named_modules() if child in sides.values() and not child.weight.requires_grad
    ]
    if new_rows and frozen:
        raise ModelError(
            f"{len(new_rows)} tokens are added, and their rows in {' and '.join(frozen)} are not trained",
            where="model.new_tokens",
            remedy=f"train {' and '.join(frozen)} too (name it in train.modules, not in train.freeze), "
            "leave model.new_tokens out, or set adapter.kind=lora, which trains these rows alone",
        )


def _selected(base: nn.Module, entries: tuple[str, ...], names: dict[int, list[str]], where: str) -> set[int]:
    found: set[int] = set()
    for entry in entries:
        matched = {key for key, aliases in names.items() if any(_means(entry, alias) for alias in aliases)}
        if not matched:
            parts = sorted({part for aliases in names.values() for alias in aliases for part in alias.split(".")})
            near = difflib.get_close_matches(entry.rpartition(".")[2], parts, n=1)
            raise ModelError(
                f"{entry!r} matches no parameter of {type(base).__name__}",
                where=where,
                remedy=f"did you mean {near[0]!r}?" if near else "name modules such as embed_tokens, lm_head, mlp",
            )
        found |= matched
    return found


def _means(entry: str, name: str) -> bool:
    """Whether an entry selects the parameter, or a module that it is inside of."""
    parts = name.split(".")
    return any(selects(entry, ".".join(parts[:length])) for length in range(1, len(parts) + 1))


def _report(
    base: nn.Module,
    parameters: dict[int, nn.Parameter],
    chosen: set[int],
    types: tuple[torch.dtype, torch.dtype],
) -> str:
    total = sum(p.numel() for p in parameters.values())
    count = sum(p.numel() for key, p in parameters.items() if key in chosen)
    blocks = find_blocks(base)
    touched = sum(any(id(p) in chosen for p in block.parameters()) for block in blocks)
    inside = {id(p) for block in blocks for p in block.parameters()}
    others = [name for name, p in base.named_parameters() if id(p) in chosen and id(p) not in inside]
    outside = f"; outside them {', '.join(others)}" if others else ""
    held, short = (str(dtype).removeprefix("torch.") for dtype in types)
    return (
        f"{count:,} of {total:,} parameters ({count / total:.1%}) are trained ({held}), in {touched} of {len(blocks)} blocks"
        f"{outside}; the others are frozen and held in {short}"
    )
