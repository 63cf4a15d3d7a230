"""LoRA adapters, made by peft, with the questions that peft leaves open answered before the first step.

peft accepts a target list as soon as one entry matches, and loads an adapter none of whose keys match with a warning.
Here every entry must match something that can be adapted, every key of a folder must find its place, and what was
matched is counted and shown. Nothing of the base is trained; adapter weights are fp32.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from finetune.config.schema import AdapterSection
from finetune.environment import user_path
from finetune.errors import ModelError
from finetune.models.adapter_config import CHANGES_BASE, entries_of, new_config, stored_config
from finetune.models.adapter_folder import WEIGHTS, is_written, read_config
from finetune.models.decoder import find_blocks
from finetune.models.quantized import freeze
from finetune.models.targets import match_targets

__all__ = ["attach", "match_targets", "seeded"]

INITIAL = "initial"
"""The name of the frozen adapter that holds what pissa and olora took out of the base; the export needs it."""


def attach(
    base: nn.Module,
    adapter: AdapterSection,
    source: str,
    seed: int,
    new_rows: tuple[int, ...] = (),
    new_tokens: tuple[str, ...] = (),
) -> tuple[PeftModel, list[str]]:
    """`base` with a LoRA on every target, and notices (matches of each entry, trainable parameters).

    `source` is what the adapter's config names as its base model, `new_rows` are token rows that are trained too,
    `new_tokens` every token that the recipe adds (an adapter's folder is held to them). The
    first weights depend on `seed` alone, so every rank and every micro-batch gets the same (case B116). `adapter.path` goes on from that folder: its config decides
    rank, alpha and targets. Raises ModelError for entries that match nothing or nothing that can be adapted (B106),
    for targets that would not be trained (B107), for keys that find no place (B97), and for contradictions.
    """
    folder = None if adapter.path is None else user_path(adapter.path, "adapter.path")
    if folder is None:
        config, notices = new_config(base, adapter, new_rows)
    else:
        config, notices = stored_config(folder, adapter, base, new_rows, new_tokens)
    wanted = match_targets(base, adapter.targets if folder is None else entries_of(config))
    if folder is not None:
        _check_same_targets(base, adapter, wanted)
    _check_embeddings(base, wanted, adapter.dropout)
    freeze(base)
    with seeded(seed), warnings.catch_warnings():
        # peft 0.21 reads this property of transformers 5.24 by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        module = get_peft_model(base, config)
        if config.init_lora_weights in CHANGES_BASE:
            notices += _keep_initial(module, config)
    module.peft_config["default"].base_model_name_or_path = source
    if folder is not None:
        notices += _load(module, folder, source)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    _check_trained(module, wanted)
    return module, notices + _report(module, base, wanted, config)


def _check_embeddings(base: Any, wanted: dict[str, list[str]], dropout: float) -> None:
    """Case B107: an embedding or a head that is listed is trained, or refused by name."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    for entry, names in wanted.items():
        for child in (base.get_submodule(name) for name in names):
            if (child is head or child is embedding) and head.weight is embedding.weight:
                raise ModelError(
                    f"{entry!r} is a matrix that {type(base).__name__} shares between embedding and head; an adapter "
                    "would train one side only, and merging it would change both",
                    where="adapter.targets",
                    remedy=f"leave {entry!r} out, or train every parameter with adapter.kind=none",
                )
            if child is head and dropout:
                raise ModelError(
                    f"{entry!r} is the head, whose loss is made in chunks without dropout",
                    where="adapter.dropout",
                    remedy=f"set adapter.dropout=0 or leave {entry!r} out of adapter.targets",
                )


def _check_trained(module: PeftModel, wanted: dict[str, list[str]]) -> None:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for entry, names in wanted.items():
        for name in names:
            if not any(f".{name}.lora_" in parameter for parameter in trained):
                raise ModelError(f"{entry!r}: {name} got no adapter that is trained", where="adapter.targets")


def _report(module: PeftModel, base: nn.Module, wanted: dict[str, list[str]], config: LoraConfig) -> list[str]:
    blocks = {id(block) for block in find_blocks(base)}
    prefixes = [f"{name}." for name, child in base.named_modules() if id(child) in blocks]
    parts = []
    for entry, names in wanted.items():
        inside = sum(any(name.startswith(prefix) for name in names) for prefix in prefixes)
        place = f" in {inside} of {len(prefixes)} blocks" if inside else ""
        parts.append(f"{entry}: {len(names)} modules{place}")
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    name = ("DoRA" if config.use_dora else "LoRA") + (", rank-stabilised," if config.use_rslora else "")
    others = "".join(f", {pattern} {rank}" for pattern, rank in (config.rank_pattern or {}).items()).replace("\\", "")
    tokens = config.trainable_token_indices
    notices = [
        f"{name} rank {config.r}{others}, alpha {config.lora_alpha:g} on {type(base).__name__}: {'; '.join(parts)}",
        f"{trainable:,} parameters are trained (fp32); the base is frozen",
    ]
    if tokens:
        sides = tokens if isinstance(tokens, dict) else {"embedding": tokens}
        count = len(next(iter(sides.values())))
        notices.append(f"of the vocabulary, the rows of {count} tokens are trained, in {' and '.join(sides)}")
    adapted = {id(p) for names in wanted.values() for name in names for p in base.get_submodule(name).parameters()}
    experts = [n for n, p in base.named_parameters() if p.dim() == 3 and id(p) not in adapted]
    if experts:
        notices.append(f"not adapted: {len(experts)} stacked expert weights (such as {experts[0]})")
    return notices


def _check_same_targets(base: nn.Module, adapter: AdapterSection, stored: dict[str, list[str]]) -> None:
    """Targets may be written otherwise than in the folder, but select the same modules."""
    if not is_written(adapter, "targets"):
        return
    asked = {name for names in match_targets(base, adapter.targets).values() for name in names}
    if asked != {name for names in stored.values() for name in names}:
        raise ModelError(
            f"adapter.targets={','.join(adapter.targets)}, but the adapter has {','.join(stored)}",
            where="adapter.targets",
            remedy=f"set adapter.targets={','.join(stored)}, or leave it out",
        )


def _load(module: PeftModel, folder: Path, source: str) -> list[str]:
    """Case B97: every stored tensor has its place, and every place its tensor."""
    try:
        stored = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ModelError(f"{WEIGHTS} is damaged: {error}", str(folder)) from error
    # Not auto: for that peft would ask the hub for the base's vocabulary.
    places = get_peft_model_state_dict(module, save_embedding_layers=False)
    own = dict(module.named_parameters(remove_duplicate=False))
    # peft saves the base's own matrix beside an adapter on the embedding; a true copy of it says nothing new.
    stored = {name: t for name, t in stored.items() if name in places or not _is_copy(own.get(name), t)}
    matched = stored.keys() & places.keys()
    if len(matched) < max(len(stored), len(places)):
        raise ModelError(
            f"{len(matched)} of the adapter's {len(stored)} tensors matched the model's {len(places)} places"
            + "".join(
                f"; {whose} only: {sorted(names)[0]}"
                for whose, names in (("adapter", stored.keys() - matched), ("model", places.keys() - matched))
                if names
            ),
            where=str(folder),
            remedy="use the base model that the adapter was made for, or rename its keys",
        )
    for name in sorted(matched):
        if stored[name].shape != places[name].shape:
            raise ModelError(
                f"{name} is {list(stored[name].shape)} in the adapter and {list(places[name].shape)} in the model",
                where=str(folder),
                remedy="use the base model that the adapter was made for",
            )
    set_peft_model_state_dict(module, stored)
    made_for = read_config(folder).get("base_model_name_or_path")
    other = made_for and made_for != source
    return [f"the adapter names {made_for} as its base; it is put on {source}"] if other else []


def _is_copy(own: nn.Parameter | None, stored: torch.Tensor) -> bool:
    return own is not None and own.shape == stored.shape and torch.equal(own.detach().cpu(), stored.to(own.dtype))


def _keep_initial(module: PeftModel, config: LoraConfig) -> list[str]:
    """Keeps a frozen, inactive copy of the first A and B. Base and copy together are the base that was loaded."""
    plain = dataclasses.replace(
        config, init_lora_weights=True, lora_dropout=0.0, modules_to_save=None, trainable_token_indices=None
    )
    module.add_adapter(INITIAL, plain)
    for layer in module.modules():
        if isinstance(layer, LoraLayer) and INITIAL in layer.lora_A:
            for pair in (layer.lora_A, layer.lora_B):
                pair[INITIAL].weight.data = pair["default"].weight.detach().clone()
    for name, parameter in module.named_parameters():
        if f".{INITIAL}." in name:
            parameter.requires_grad_(False)
    return [
        f"adapter.init={config.init_lora_weights} took the first A and B out of the base's weights; the exported adapter "
        f"has twice the rank, so that it loads onto the base as it was"
    ]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block whose draws come from `seed`, and that leaves the caller's generators as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
