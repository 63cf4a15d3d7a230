"""An adapter's folder as peft writes it, read as settings: what the plan counts and what loading holds the recipe to.

Imports no torch, so a plan of a run that goes on from an adapter needs none. Only safetensors are read; what this
version cannot train is refused by name.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from finetune.config.schema import AdapterSection, Recipe
from finetune.environment import user_path
from finetune.errors import ModelError
from finetune.models.new_tokens import with_tokens

WEIGHTS, PICKLE, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
MARKER = "finetune.json"
REFUSED_SETTINGS = {
    "bias": ("none", "trained biases"),
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
PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""First weights that leave the base as it is: the stored adapter belongs onto the plain base."""


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA that this version can train. ModelError says what is missing or not known."""
    where = str(folder)
    facts = _read(folder)
    if facts.get("peft_type") != "LORA":
        raise ModelError(f"an adapter of kind {facts.get('peft_type')}, not LoRA", where, "choose a LoRA adapter")
    for name, (plain, meaning) in REFUSED_SETTINGS.items():
        if facts.get(name, plain) not in (plain, None, [], {}):
            raise ModelError(
                f"the adapter has {meaning} ({name}={facts[name]}), which this version cannot train",
                where=where,
                remedy="merge it into its base with peft and set model.path to the result, or choose a plain LoRA",
            )
    if facts.get("init_lora_weights", True) not in PLAIN_INITS:
        raise ModelError(
            f"the adapter began with init_lora_weights={facts['init_lora_weights']}, so it belongs onto a changed base",
            where=where,
            remedy="save it again with peft's path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    for name, kinds in KINDS_OF_SETTINGS.items():
        if not isinstance(facts.get(name), kinds) or isinstance(facts.get(name), bool):
            raise ModelError(f"{name} of {CONFIG} is {facts.get(name)!r}", where, "save the adapter again with peft")
    return facts


def _read(folder: Path) -> dict[str, Any]:
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


def new_tokens_of(folder: Path) -> list[str]:
    """The tokens that the adapter's run added to the vocabulary, as its finetune.json says; else none."""
    try:
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    tokens = facts.get("new_tokens") if isinstance(facts, dict) else None
    return [token for token in tokens if isinstance(token, str)] if isinstance(tokens, list) else []


def settings_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The folder's settings as keys of the adapter section."""
    targets = facts["target_modules"]
    return {
        "kind": "dora" if facts.get("use_dora") else "lora",
        "rank": facts["r"],
        "alpha": float(facts["lora_alpha"]),
        "scaling": "rslora" if facts.get("use_rslora") else "standard",
        "targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        "ranks": dict(facts.get("rank_pattern") or {}),
        "modules_to_save": tuple(facts.get("modules_to_save") or ()),
    }


def is_written(adapter: AdapterSection, name: str) -> bool:
    """Whether the recipe says this key: with another value than the default, or with the default written out.

    A run's own recipe.yaml writes every key, so there a default says nothing.
    """
    fields = type(adapter).model_fields
    every = len(adapter.model_fields_set) == len(fields)
    return getattr(adapter, name) != fields[name].default or (name in adapter.model_fields_set and not every)


def held_to(facts: dict[str, Any], adapter: AdapterSection) -> None:
    """ModelError where the recipe names a value that is not the folder's."""
    stored = settings_of(facts)
    if adapter.init != "default":
        raise ModelError(
            f"adapter.init={adapter.init} says how a new adapter begins, and one is gone on from",
            where="adapter.init",
            remedy="leave it out: the folder's weights are where it begins",
        )
    for name in ("kind", "rank", "alpha", "scaling"):
        asked, has = getattr(adapter, name), stored[name]
        if asked != has and (name == "kind" or is_written(adapter, name)):
            given, has = (f"{value:g}" if isinstance(value, float) else value for value in (asked, has))
            raise ModelError(
                f"adapter.{name}={given}, but the adapter that is gone on from has {has}",
                where=f"adapter.{name}",
                remedy=f"set adapter.{name}={has}" + ("" if name == "kind" else ", or leave it out"),
            )
    for name in ("ranks", "alphas", "modules_to_save"):
        if getattr(adapter, name):
            raise ModelError(
                f"adapter.{name} makes a new adapter, and one is gone on from",
                where=f"adapter.{name}",
                remedy="leave it out: the folder decides",
            )


def as_planned(recipe: Recipe) -> Recipe:
    """The recipe with the settings of the adapter that it goes on from, and the new tokens of its file, for whoever
    counts bytes. Raises ModelError as loading does."""
    recipe = with_tokens(recipe)
    if recipe.adapter.path is None:
        return recipe
    facts = read_config(user_path(recipe.adapter.path, "adapter.path"))
    held_to(facts, recipe.adapter)
    known = {**settings_of(facts), "init": "default"}
    return recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update=known)})
