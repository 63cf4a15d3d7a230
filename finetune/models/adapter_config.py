"""peft's LoraConfig from a recipe or from an adapter's folder.

What peft matches by the ends of names is given to it by names that were matched here, each entry to something. New
tokens are trained as single rows (trainable_token_indices) and not as whole matrices: the rows of a few tokens, where
embedding and head in fp32 with their optimizer state would be most of a run's memory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.config.schema import AdapterSection
from finetune.errors import ModelError
from finetune.models.adapter_folder import CONFIG, held_to, new_tokens_of, read_config
from finetune.models.targets import ALL_LINEAR, match_modules, match_targets, selects, short_names

INITS: dict[str, Any] = {"default": True, "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}
"""adapter.init: peft's init_lora_weights."""
CHANGES_BASE = ("pissa", "olora")


def new_config(base: Any, adapter: AdapterSection, new_rows: tuple[int, ...]) -> tuple[LoraConfig, list[str]]:
    """The config of a new adapter, and notices; `new_rows` are the ids of tokens that were added. ModelError by name."""
    chosen = {name for names in match_targets(base, adapter.targets).values() for name in names}
    saved = _saved(base, adapter, chosen)
    kinds = {name: base.get_submodule(name) for name in chosen}
    embedded = sorted(name for name, child in kinds.items() if isinstance(child, nn.Embedding))
    turned = any(isinstance(child, Conv1D) for child in kinds.values())
    if embedded and (adapter.kind == "dora" or adapter.init in CHANGES_BASE):
        key, value = ("kind", "dora") if adapter.kind == "dora" else ("init", adapter.init)
        raise ModelError(
            f"adapter.{key}={value} is for linear layers, and adapter.targets has {embedded[0]}",
            where="adapter.targets",
            remedy=f"leave {embedded[0]} out, or add it to adapter.modules_to_save",
        )
    if turned and adapter.init in CHANGES_BASE:
        raise ModelError(
            f"adapter.init={adapter.init} is not known for layers of type Conv1D (GPT-2)",
            where="adapter.init",
            remedy="set adapter.init=default",
        )
    notices = _check_ranks(base, adapter, chosen)
    if adapter.dropout and embedded:
        notices.append("adapter.dropout does not act on the embedding's adapter")
    if saved:
        notices.append(f"trained whole, in fp32, and saved with the adapter: {', '.join(saved)}")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=short_names(base, chosen),
        use_rslora=adapter.scaling == "rslora",
        use_dora=adapter.kind == "dora",
        init_lora_weights=INITS[adapter.init],
        rank_pattern=_pattern(base, adapter.ranks, chosen, "adapter.ranks"),
        alpha_pattern=_pattern(base, adapter.alphas, chosen, "adapter.alphas"),
        modules_to_save=short_names(base, set(saved), by_end=True) or None,
        trainable_token_indices=_token_rows(base, new_rows, set(saved), chosen),
        ensure_weight_tying=_is_tied(base) and any(_is_vocabulary(base, name) for name in saved),
        bias="none",
        fan_in_fan_out=turned,
    )
    return config, notices


def _check_ranks(base: Any, adapter: AdapterSection, chosen: set[str]) -> list[str]:
    """A notice where a rank is above the smaller side of its matrix; ModelError where the adapter begins as a part of it.

    Of a matrix no more directions than its smaller side can be taken, so peft would cut the two first matrices to that.
    """
    sides = {name: _sides(base.get_submodule(name)) for name in chosen}
    above = [name for name in chosen if _rank_of(adapter, name) > min(sides[name])]
    if not above:
        return []
    name = min(above, key=lambda name: (min(sides[name]), name))
    smallest, size = min(sides[name]), "x".join(map(str, sides[name]))
    key = "adapter.rank" if _rank_of(adapter, name) == adapter.rank else "adapter.ranks"
    what = f"rank {_rank_of(adapter, name)} is above the smaller side of {len(above)} of the {len(chosen)} matrices"
    if adapter.init in CHANGES_BASE:
        raise ModelError(
            f"{what}, of which adapter.init={adapter.init} takes its directions: {name} is {size}, so it has {smallest}",
            where=key,
            remedy=f"set {key} to {smallest} or less, give these layers their own in adapter.ranks, or adapter.init=default",
        )
    return [
        f"{what} (such as {name}, {size}): more than {smallest} trains more parameters than the matrix itself has "
        "directions for"
    ]


def _sides(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a layer; not by its weight, which is packed where it is stored in 4 bits."""
    for names in (("out_features", "in_features"), ("num_embeddings", "embedding_dim")):
        if all(hasattr(module, name) for name in names):
            return int(getattr(module, names[0])), int(getattr(module, names[1]))
    first, second = module.weight.shape
    return int(first), int(second)


def _rank_of(adapter: AdapterSection, name: str) -> int:
    own = (rank for entry, rank in adapter.ranks.items() if entry == ALL_LINEAR or selects(entry, name))
    return next(own, adapter.rank)


def _saved(base: Any, adapter: AdapterSection, chosen: set[str]) -> list[str]:
    """Full names of adapter.modules_to_save; ModelError for what an adapter is put on too, or what holds such a layer."""
    names = [name for names in match_modules(base, adapter.modules_to_save).values() for name in names]
    for name in names:
        clash = next((target for target in sorted(chosen) if f"{target}.".startswith(f"{name}.")), None)
        if clash:
            raise ModelError(
                f"{name} is to be trained whole, and adapter.targets puts an adapter on {clash}",
                where="adapter.modules_to_save",
                remedy="name it in one of the two",
            )
        if _quantised(base.get_submodule(name)):
            raise ModelError(
                f"{name} is stored quantised and cannot be trained whole", "adapter.modules_to_save", "model.base=same"
            )
    return sorted(set(names))


def _quantised(module: nn.Module) -> bool:
    kinds = ("Linear4bit", "StoredLinear")
    return any(type(child).__name__ in kinds for child in module.modules())


def _pattern(base: nn.Module, wanted: Mapping[str, float], chosen: set[str], key: str) -> dict[str, Any]:
    """Regular expressions as peft wants them, one a layer or one a last name that means these layers alone."""
    found: dict[str, float] = {}
    for entry, given in wanted.items():
        value = int(given) if float(given).is_integer() else given
        names = {name for name in chosen if entry == ALL_LINEAR or selects(entry, name)}
        if not names:
            leaves = sorted({name.rpartition(".")[2] for name in chosen})
            near = difflib.get_close_matches(entry.rpartition(".")[2], leaves, n=1)
            raise ModelError(
                f"{entry!r} selects none of the adapter's layers",
                where=key,
                remedy=f"did you mean {near[0]!r}?" if near else f"name some of {', '.join(leaves)}",
            )
        for name in short_names(base, names):
            if any(_same_layer(name, other) and value != other_value for other, other_value in found.items()):
                raise ModelError(f"{name} is selected twice, with different numbers", key, "let one entry select it")
            found[name] = value
    return {re.escape(name): value for name, value in found.items()}


def _same_layer(first: str, second: str) -> bool:
    return first == second or first.endswith(f".{second}") or second.endswith(f".{first}")


def _is_tied(base: Any) -> bool:
    return base.get_output_embeddings().weight is base.get_input_embeddings().weight


def _is_vocabulary(base: Any, name: str) -> bool:
    return base.get_submodule(name) in (base.get_input_embeddings(), base.get_output_embeddings())


def _token_rows(base: Any, new_rows: tuple[int, ...], saved: set[str], chosen: set[str]) -> dict[str, list[int]] | None:
    """Embedding and head, each with the rows of the new tokens, where they are not trained whole anyway."""
    if not new_rows:
        return None
    sides = [base.get_input_embeddings()] + ([] if _is_tied(base) else [base.get_output_embeddings()])
    names = {name for name, child in base.named_modules() if any(child is side for side in sides)}
    if _is_tied(base) and any(_is_vocabulary(base, name) for name in saved):
        return None
    both = sorted(names & chosen)
    if both:
        raise ModelError(
            f"the rows of new tokens are trained themselves, and adapter.targets puts an adapter on {both[0]}",
            where="adapter.targets",
            remedy=f"leave {both[0]} out of adapter.targets, or write it in adapter.modules_to_save",
        )
    left = names - saved
    return {name: list(new_rows) for name in short_names(base, left, by_end=True)} or None


def stored_config(
    folder: Path, adapter: AdapterSection, base: Any, new_rows: tuple[int, ...], new_tokens: tuple[str, ...] = ()
) -> tuple[LoraConfig, list[str]]:
    """The folder's own config; a recipe value that is written out and differs is a contradiction."""
    where = str(folder)
    facts = read_config(folder)
    held_to(facts, adapter)
    try:
        config = LoraConfig.from_pretrained(where)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{CONFIG} cannot be read: {error}", where) from error
    _check_tokens(folder, new_tokens)
    _check_rows(folder, config, base, new_rows)
    notices = [f"going on from the adapter in {where}"]
    if config.lora_dropout != adapter.dropout:
        notices.append(
            f"dropout is the recipe's {adapter.dropout:g}; the adapter was made with {config.lora_dropout:g}"
        )
        config.lora_dropout = adapter.dropout
    config.inference_mode = False
    config.init_lora_weights = True  # whatever the first weights were, the stored ones take their place
    config.base_model_name_or_path = None  # peft fills it in, and attach corrects it
    return config, notices


def _check_tokens(folder: Path, asked: tuple[str, ...]) -> None:
    """Case B94: a trained row is found by its place, so the recipe's new tokens are the folder's, in the same order.

    Others may come after them. A recipe without any, and a folder that does not say which it had, are `_check_rows`'s.
    """
    stored = new_tokens_of(folder)
    if not stored or not asked or list(asked[: len(stored)]) == stored:
        return
    place = next((i for i, (old, new) in enumerate(zip(stored, asked, strict=False)) if old != new), len(asked))
    now = json_text(asked[place]) if place < len(asked) else "missing"
    raise ModelError(
        f"token {place + 1} of the {len(stored)} that the adapter was trained with is {json_text(stored[place])}, and "
        f"{now} in the recipe: the trained rows would go to other tokens",
        where="model.new_tokens",
        remedy="set model.new_tokens=[" + ", ".join(json_text(token) for token in stored) + "]",
    )


def _check_rows(folder: Path, config: LoraConfig, base: Any, new_rows: tuple[int, ...]) -> None:
    """Case B94: the token rows that the adapter trains are there, and the recipe's new tokens are among them."""
    indices = config.trainable_token_indices or {}
    trained = [row for rows in (indices.values() if isinstance(indices, dict) else [indices]) for row in rows]
    rows = base.get_input_embeddings().weight.shape[0]
    tokens = new_tokens_of(folder)
    listed = "[" + ", ".join(json_text(token) for token in tokens) + "]" if tokens else "the tokens that it added"
    beyond = [row for row in trained if row >= rows]
    if beyond or (tokens and not new_rows):
        what = f"the adapter was trained with {len(tokens) or len(beyond)} new tokens, which this model does not have"
        raise ModelError(what, str(folder), f"set model.new_tokens={listed}")
    whole = any(name.endswith(("embed_tokens", "wte", "embed_in")) for name in config.modules_to_save or ())
    lacking = [] if whole else [row for row in new_rows if row not in trained]
    if lacking:
        raise ModelError(
            f"{len(lacking)} of model.new_tokens are not trained by the adapter that is gone on from",
            where="model.new_tokens",
            remedy=f"set model.new_tokens={listed}" if tokens else "leave model.new_tokens out, or start a new adapter",
        )


def json_text(token: str) -> str:
    """The token in quotes, as YAML and JSON read it."""
    import json

    return json.dumps(token, ensure_ascii=False)


def entries_of(config: LoraConfig) -> tuple[str, ...]:
    """The stored targets as entries; ModelError for a regular expression."""
    targets = config.target_modules
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(
            f"the adapter's targets are a regular expression ({targets})",
            where="adapter.path",
            remedy=f"list the layers by name in target_modules of its {CONFIG}",
        )
    return (targets,) if isinstance(targets, str) else tuple(sorted(targets or ()))
