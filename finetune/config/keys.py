"""Every key of the schema as one flat table, and the nearest key to one that does not exist.

The help texts and the did-you-mean read the same table, so neither can drift from the schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from finetune.config.schema import Recipe, Section
from finetune.config.values import Wants

Path = tuple[str, ...]

NOT_BUILT = ("model.fp8_compute", "generate.kv_cache")
"""Keys that the design promises and this version lacks."""

NOT_BUILT_VALUES = {
    "task": ("vision", "recommender"),
}
"""Values that the design promises and this version lacks."""

WORD_KEYS = {
    "run": "generate, evaluate and export",
    "prompt": "generate",
    "to": "export",
    "path": "export",
    "repo": "export",
    "hardware": "plan",
    "diff": "runs",
    "kind": "launch",
}
"""Keys of single words of the command line, which no recipe holds."""

ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.name",
    "optimizer_name": "optimizer.name",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler": "schedule.name",
    "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "per_device_train_batch_size": "plan.micro_batch",
    "micro_batch_size": "plan.micro_batch",
    "gradient_accumulation_steps": "train.batch",
    "gradient_checkpointing": "plan.activation_checkpointing",
    "activation_checkpointing": "plan.activation_checkpointing",
    "torch_compile": "plan.compile",
    "lora": "adapter",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "use_rslora": "adapter.scaling",
    "use_dora": "adapter.kind",
    "init_lora_weights": "adapter.init",
    "rank_pattern": "adapter.ranks",
    "alpha_pattern": "adapter.alphas",
    "unfrozen_parameters": "train.modules",
    "freeze_trainable_layers": "train.last_blocks",
    "lora_target_modules": "adapter.targets",
    "target_modules": "adapter.targets",
    "base_model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "load_in_4bit": "model.base",
    "load_in_8bit": "model.base",
    "bnb_4bit_use_double_quant": "model.double_quant",
    "bf16": "model.precision",
    "dtype": "model.precision",
    "mixed_precision": "model.precision",
    "dataset": "data.path",
    "train_file": "data.path",
    "validation_file": "data.valid_path",
    "val_set_size": "data.valid_share",
    "prompt_template": "data.template",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "sequence_length": "data.max_tokens",
    "sample_packing": "data.pack",
    "packing": "data.pack",
    "eval_steps": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "early_stopping_patience": "train.stop_after",
    "max_new_tokens": "generate.max_tokens",
    "output_dir": "run.dir",
    "report_to": "run.trackers",
    "resume_from_checkpoint": "resume",
}
"""Names that other tools give to keys of ours."""


@dataclass(frozen=True)
class Key:
    """One key: its dotted name, what it takes in words, its default as text, what it means; `pairs`: it holds NAME: value."""

    name: str
    wants: str
    default: str
    doc: str
    pairs: bool
    choices: tuple[str, ...]


def show(value: Any) -> str:
    """A value as a person would write it in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field of Recipe holds; None for a plain field."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _key(name: str, field: FieldInfo) -> Key:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    words = next((entry.text for entry in field.metadata if isinstance(entry, Wants)), "")
    wants = words or "one of " + ", ".join(choices)
    default = "(must be given)" if field.default is PydanticUndefined else show(field.default)
    return Key(name, wants, default, field.description or "", get_origin(field.annotation) is dict, choices)


def _flatten() -> dict[Path, Key]:
    keys: dict[Path, Key] = {}
    for name, field in Recipe.model_fields.items():
        section = section_of(field)
        if section is not None:
            for leaf, inner in section.model_fields.items():
                keys[name, leaf] = _key(f"{name}.{leaf}", inner)
        else:
            keys[name,] = _key(name, field)
    return keys


KEYS: Mapping[Path, Key] = _flatten()
SECTIONS: tuple[str, ...] = tuple(name for name, field in Recipe.model_fields.items() if section_of(field))


def key_of(path: Path) -> Key | None:
    """The schema's key that `path` names, an entry of a NAME: text key included."""
    if path in KEYS:
        return KEYS[path]
    parent = KEYS.get(path[:-1])
    return parent if parent is not None and parent.pairs else None


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely means, if any is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.strip().lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _placed(leaf: str) -> list[str]:
    """Dotted names of the keys and sections whose last part is `leaf`."""
    return [key.name for path, key in KEYS.items() if path[-1] == leaf]


def _belongs(names: list[str]) -> str:
    """Where keys of one name belong, in words."""
    if len(names) == 1:
        section = names[0].rpartition(".")[0]
        place = f"in the section {section}" if section else "at the top, outside every section"
        return f"it belongs {place}: {names[0]}"
    return "keys of that name are " + ", ".join(names)


def suggest(path: Path) -> str:
    """What to do about a key that does not exist: where it belongs, or the nearest key that does."""
    parts = tuple(part.strip("+~- ").replace("-", "_").lower() for part in path)
    dotted, leaf = ".".join(parts), parts[-1]
    if dotted in NOT_BUILT:
        return f"{dotted} is not built yet in this version; leave it out"
    if parts != path and (parts in KEYS or dotted in SECTIONS):
        return f"write {dotted}"
    if len(parts) == 1 and leaf in WORD_KEYS:
        return f"it is a key of the command line's {WORD_KEYS[leaf]}, and no part of a recipe"
    for start in range(1, len(parts)):
        if parts[start:] in KEYS:
            return _belongs([".".join(parts[start:])])
    if len(parts) > 1 and leaf in SECTIONS:
        return f"{leaf} is a section of its own, at the top"
    if _placed(leaf):
        return _belongs(_placed(leaf))
    for name in (dotted, leaf):
        if name in ELSEWHERE:
            return f"it is called {ELSEWHERE[name]} here"
    return _near(parts)


def _near(parts: Path) -> str:
    dotted, leaf = ".".join(parts), parts[-1]
    if len(parts) > 1:
        siblings = {key[-1] for key in KEYS if len(key) > 1 and key[0] == parts[0]}
        close = nearest(leaf, siblings)
        if close:
            return f"did you mean {parts[0]}.{close}?"
    targets = {name: name for name in (*SECTIONS, *(key.name for key in KEYS.values()))}
    meanings = {**ELSEWHERE, **targets}
    close = nearest(dotted, meanings)
    if close is None:
        leaves = {**{path[-1]: path[-1] for path in KEYS}, **{name: name for name in ELSEWHERE}}
        close = nearest(leaf, leaves)
        if close in ELSEWHERE:
            return f"did you mean {ELSEWHERE[close]} ({close} elsewhere)?"
        if close:
            return "did you mean " + " or ".join(_placed(close)) + "?"
        return "no key is near; `finetune train --help` lists them all"
    if close in targets:
        return f"did you mean {close}?"
    return f"did you mean {meanings[close]} ({close} elsewhere)?"
