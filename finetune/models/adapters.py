"""LoRA adapters, made by peft, with the questions that peft leaves open answered before the first step.

peft accepts a target list as soon as one entry matches, and loads an adapter none of whose keys match with a warning.
Here every entry must match something that can be adapted, every key of a folder must find its place, and what was
matched is counted and shown. Nothing of the base is trained; adapter weights are fp32.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.config.schema import AdapterSection
from finetune.environment import user_path
from finetune.errors import ModelError
from finetune.models.decoder import find_blocks
from finetune.models.quantized import freeze

ALL_LINEAR = "all-linear"
LINEARS = (nn.Linear, Conv1D)
WEIGHTS, PICKLE, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
REFUSED_SETTINGS = {
    "use_dora": (False, "DoRA"),
    "bias": ("none", "trained biases"),
    "modules_to_save": (None, "whole trained layers (modules_to_save)"),
    "trainable_token_indices": (None, "trained token rows"),
    "target_parameters": (None, "adapted expert parameters"),
    "alora_invocation_tokens": (None, "activated LoRA"),
    "use_bdlora": (None, "block-diagonal LoRA"),
    "layer_replication": (None, "replicated layers"),
    "layers_to_transform": (None, "a choice of layers"),
    "exclude_modules": (None, "excluded modules"),
}
"""Settings of an adapter folder: the value that is plain LoRA, and what another value means."""

KINDS_OF_SETTINGS: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "target_modules": (list, str),
}


def attach(base: nn.Module, adapter: AdapterSection, source: str, seed: int) -> tuple[PeftModel, list[str]]:
    """`base` with a LoRA on every target, and notices (matches of each entry, trainable parameters).

    `source` is what the adapter's config names as its base model. The first weights depend on `seed` alone, so every
    rank and every micro-batch gets the same (case B116). `adapter.path` goes on from that folder: its config decides
    rank, alpha and targets. Raises ModelError for entries that match nothing or nothing that can be adapted (B106),
    for targets that would not be trained (B107), for keys that find no place (B97), and for contradictions.
    """
    folder = None if adapter.path is None else user_path(adapter.path, "adapter.path")
    config, notices = _new_config(base, adapter) if folder is None else _stored_config(folder, adapter)
    wanted = match_targets(base, adapter.targets if folder is None else _entries(config))
    if folder is not None:
        _check_same_targets(base, adapter, wanted)
    _check_embeddings(base, wanted, adapter.dropout)
    freeze(base)
    with seeded(seed), warnings.catch_warnings():
        # peft 0.21 reads this property of transformers 5.24 by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        module = get_peft_model(base, config)
    module.peft_config["default"].base_model_name_or_path = source
    if folder is not None:
        notices += _load(module, folder, source)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    _check_trained(module, wanted)
    return module, notices + _report(module, base, wanted, config)


def match_targets(base: nn.Module, entries: tuple[str, ...]) -> dict[str, list[str]]:
    """Entry: the full names of the modules that it selects.

    An entry is all-linear (every linear layer of the blocks), a name or dotted end of a name, or such a pattern with
    * and ?. Raises one ModelError that lists every entry that selects nothing, or something that cannot be adapted.
    """
    modules = dict(base.named_modules())
    found: dict[str, list[str]] = {}
    faults = []
    for entry in entries:
        if entry == ALL_LINEAR:
            names, others = block_linears(base), []
        else:
            selected = [name for name in modules if name and _selects(entry, name)]
            names = [name for name in selected if isinstance(modules[name], (*LINEARS, nn.Embedding))]
            others = [name for name in selected if name not in names]
        if names and not others:
            found[entry] = names
        elif others:
            faults.append(
                f"{entry!r} selects {others[0]} ({type(modules[others[0]]).__name__}), which is not a linear layer"
            )
        else:
            leaves = sorted({name.rpartition(".")[2] for name, child in modules.items() if isinstance(child, LINEARS)})
            near = difflib.get_close_matches(entry.rpartition(".")[2], leaves, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its linear layers are {', '.join(leaves)}"
            faults.append(f"{entry!r} matches nothing in {type(base).__name__}; {hint}")
    if faults:
        raise ModelError("; ".join(faults), where="adapter.targets", remedy=f"name linear layers, or {ALL_LINEAR}")
    return found


def _selects(entry: str, name: str) -> bool:
    if any(sign in entry for sign in "*?["):
        return fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"*.{entry}")
    return name == entry or name.endswith(f".{entry}")


def block_linears(base: nn.Module) -> list[str]:
    """Full names of the linear layers inside the repeated blocks: neither head nor embedding."""
    inside = {id(child) for block in find_blocks(base) for child in block.modules() if isinstance(child, LINEARS)}
    return [name for name, child in base.named_modules() if id(child) in inside]


def _entries(config: LoraConfig) -> tuple[str, ...]:
    targets = config.target_modules
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(
            f"the adapter's targets are a regular expression ({targets})",
            where="adapter.path",
            remedy=f"list the layers by name in target_modules of its {CONFIG}",
        )
    return (targets,) if isinstance(targets, str) else tuple(sorted(targets))


def _new_config(base: nn.Module, adapter: AdapterSection) -> tuple[LoraConfig, list[str]]:
    chosen = {name for names in match_targets(base, adapter.targets).values() for name in names}
    notices = []
    if adapter.dropout and any(isinstance(base.get_submodule(name), nn.Embedding) for name in chosen):
        notices.append("adapter.dropout does not act on the embedding's adapter")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_short_names(base, chosen),
        bias="none",
        fan_in_fan_out=any(isinstance(base.get_submodule(name), Conv1D) for name in chosen),
    )
    return config, notices


def _short_names(base: nn.Module, chosen: set[str]) -> list[str]:
    """Last parts of the names where they select exactly these modules (serving tools expect that), else full names."""
    last = sorted({name.rpartition(".")[2] for name in chosen})
    selected = {name for name, _ in base.named_modules() if name.rpartition(".")[2] in last}
    return last if selected == chosen else sorted(chosen)


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
    notices = [
        f"LoRA rank {config.r}, alpha {config.lora_alpha:g} on {type(base).__name__}: {'; '.join(parts)}",
        f"{trainable:,} parameters are trained (fp32); the base is frozen",
    ]
    adapted = {id(p) for names in wanted.values() for name in names for p in base.get_submodule(name).parameters()}
    experts = [n for n, p in base.named_parameters() if p.dim() == 3 and id(p) not in adapted]
    if experts:
        notices.append(f"not adapted: {len(experts)} stacked expert weights (such as {experts[0]})")
    return notices


def _stored_config(folder: Path, adapter: AdapterSection) -> tuple[LoraConfig, list[str]]:
    """The folder's own settings; a recipe value that is not the field's default and differs is a contradiction."""
    where = str(folder)
    facts = _read_config(folder)
    if facts.get("peft_type") != "LORA":
        raise ModelError(f"an adapter of kind {facts.get('peft_type')}, not LoRA", where, "choose a LoRA adapter")
    for name, (plain, meaning) in REFUSED_SETTINGS.items():
        if facts.get(name, plain) not in (plain, None, [], {}):
            raise ModelError(
                f"the adapter has {meaning} ({name}={facts[name]}), which this version cannot train",
                where=where,
                remedy="merge it into its base with peft and set model.path to the result, or choose a plain LoRA",
            )
    for name, kinds in KINDS_OF_SETTINGS.items():
        if not isinstance(facts.get(name), kinds) or isinstance(facts.get(name), bool):
            raise ModelError(f"{name} of {CONFIG} is {facts.get(name)!r}", where, "save the adapter again with peft")
    try:
        config = LoraConfig.from_pretrained(where)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{CONFIG} cannot be read: {error}", where) from error
    fields = AdapterSection.model_fields
    stored = {"rank": config.r, "alpha": float(config.lora_alpha)}
    for name, value in stored.items():
        asked = getattr(adapter, name)
        if asked not in (fields[name].default, value):
            raise ModelError(
                f"adapter.{name}={asked:g}, but the adapter that is gone on from has {value:g}",
                where=f"adapter.{name}",
                remedy=f"leave adapter.{name} out, or set it to {value:g}",
            )
    notices = [f"going on from the adapter in {where}"]
    if config.lora_dropout != adapter.dropout:
        notices.append(
            f"dropout is the recipe's {adapter.dropout:g}; the adapter was made with {config.lora_dropout:g}"
        )
        config.lora_dropout = adapter.dropout
    config.inference_mode = False
    config.base_model_name_or_path = None  # peft fills it in, and attach corrects it
    return config, notices


def _check_same_targets(base: nn.Module, adapter: AdapterSection, stored: dict[str, list[str]]) -> None:
    """Targets may be written otherwise than in the folder, but select the same modules; the default says nothing."""
    if adapter.targets == AdapterSection.model_fields["targets"].default:
        return
    asked = {name for names in match_targets(base, adapter.targets).values() for name in names}
    if asked != {name for names in stored.values() for name in names}:
        raise ModelError(
            f"adapter.targets={','.join(adapter.targets)}, but the adapter has {','.join(stored)}",
            where="adapter.targets",
            remedy="leave adapter.targets out",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        parent = folder.parent
        near = difflib.get_close_matches(folder.name, os.listdir(parent), n=1) if parent.is_dir() else []
        hint = f"did you mean {parent / near[0]}? " if near and near[0] != folder.name else ""
        raise ModelError(
            f"no adapter here: {CONFIG} is missing", str(folder), hint + "set adapter.path to a peft folder"
        )
    if not (folder / WEIGHTS).is_file():
        pickle = f"; {PICKLE} is a pickle, which may run code and is not opened" if (folder / PICKLE).is_file() else ""
        raise ModelError(f"{WEIGHTS} is missing{pickle}", str(folder), "save the adapter again as safetensors")
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG} is not JSON: {error}", str(folder), "save the adapter again") from error
    if not isinstance(facts, dict):
        raise ModelError(f"{CONFIG} holds a {type(facts).__name__}, not settings", str(folder), "save it again")
    return facts


def _load(module: PeftModel, folder: Path, source: str) -> list[str]:
    """Case B97: every stored tensor has its place, and every place its tensor."""
    try:
        stored = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ModelError(f"{WEIGHTS} is damaged: {error}", str(folder)) from error
    # Not auto: for that peft would ask the hub for the base's vocabulary.
    places = get_peft_model_state_dict(module, save_embedding_layers=False)
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
    made_for = _read_config(folder).get("base_model_name_or_path")
    other = made_for and made_for != source
    return [f"the adapter names {made_for} as its base; it is put on {source}"] if other else []


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block whose draws come from `seed`, and that leaves the caller's generators as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
