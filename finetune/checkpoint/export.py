"""Results that other tools load: a peft adapter, or a model folder of transformers.

A result appears whole or not at all, and only over nothing, an empty folder, or an earlier result of this program
(each carries `finetune.json`, which lists its files): a user's folder is never written into. What would make the save
fail is tried before the first step by `check_export`.
"""

from __future__ import annotations

import copy
import errno
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from finetune.checkpoint.folders import written
from finetune.checkpoint.generation import sound_generation_config
from finetune.checkpoint.initial import INITIAL, PAIR, widen, widen_config, widened
from finetune.checkpoint.merge import Merged, base_dtype, merge, merge_faults, merge_notices
from finetune.contracts import Model
from finetune.errors import CheckpointError, FinetuneError

MARKER = "finetune.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
SLACK = 256 * 1024
"""Bytes beside the weights, at the least: settings and a small tokenizer."""


def check_export(model: Model, kind: str = "") -> list[str]:
    """Tries everything of a save but the weights, before training; returns notices of what the export will change.

    `kind` is adapter or merged; by default what the model has. Raises CheckpointError for what would fail at the end.
    """
    kind = kind or ("adapter" if isinstance(model.module, PeftModel) else "merged")
    notices = adapter_notices(model) if kind == "adapter" else merge_notices(model.base)
    faults = merge_faults(model.base) if kind == "merged" else []
    if faults:
        raise CheckpointError(f"{len(faults)} layers cannot be merged: {'; '.join(faults[:3])}", "export")
    try:
        with tempfile.TemporaryDirectory() as place:
            _save_tokenizer(model, Path(place))
            if kind == "adapter":
                _rehearse_adapter(model, Path(place))
            else:
                generation, changed = sound_generation_config(model.base)
                notices = notices + changed
                skeleton = _skeleton(model.base, base_dtype(model.base), _tied(model.base))
                skeleton.config.save_pretrained(place)
                if generation is not None:
                    generation.save_pretrained(place)
    except OSError as error:
        raise CheckpointError(f"the temporary folder cannot be written: {error.strerror or error}", "export") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "repair the model's configuration or tokenizer files"
        raise CheckpointError(f"saving this model would fail after training: {error}", model.source, remedy) from error
    return notices


def _rehearse_adapter(model: Model, place: Path) -> None:
    """What `export_adapter` does, with the tensors made and not written."""
    module, name = _peft(model), _adapter_name(model)
    tensors = _adapter_tensors(model)
    _require_complete(model, set(tensors))
    module.peft_config[name].save_pretrained(str(place))
    _edit_json(place / ADAPTER_CONFIG, model.source)
    if INITIAL in module.peft_config:
        widened(tensors, module)
        widen_config(place / ADAPTER_CONFIG)


def adapter_notices(model: Model) -> list[str]:
    """Which tools will not load this adapter as one, and what to do."""
    extra = [name for name in _adapter_tensors(model) if not PAIR.search(name)]
    if not extra:
        return []
    what = f"the adapter holds {len(extra)} tensors that are not LoRA pairs (such as {extra[0]})"
    return [f"{what}: peft loads it, vLLM and llama.cpp do not; export it merged for them"]


def export_adapter(model: Model, folder: Path, new_tokens: Sequence[str] = ()) -> Path:
    """Writes the adapter, tokenizer and chat template so that peft loads them; returns `folder`.

    Weights are those trained (fp32). The base's path in adapter_config.json is the model's source. `new_tokens` were
    added to the vocabulary: the folder says what to do with the base before the adapter is loaded (case B94). An
    adapter that began as a part of its base is written with twice the rank, so that it fits the base as it was. Raises
    CheckpointError when `folder` holds something else, cannot be written or the disk is full.
    """
    module, name = _peft(model), _adapter_name(model)
    tensors = _adapter_tensors(model)
    _require_complete(model, set(tensors))
    needed = 2 * sum(t.numel() * t.element_size() for t in tensors.values()) + SLACK
    notices = adapter_notices(model) + ([vocabulary_notice(model, new_tokens)] if new_tokens else [])
    facts: dict[str, Any] = {"kind": "adapter", "base": model.source, "notices": notices}
    if new_tokens:
        facts |= {"new_tokens": list(new_tokens), "vocabulary": _rows(model)}
    with _result(folder, needed, facts) as new:
        module.save_pretrained(str(new), selected_adapters=[name], save_embedding_layers=False)
        _edit_json(new / ADAPTER_CONFIG, model.source)
        if INITIAL in module.peft_config:
            widen(new / ADAPTER_WEIGHTS, new / ADAPTER_CONFIG, module)
        if new_tokens:
            with (new / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\n## New tokens\n\n{vocabulary_notice(model, new_tokens)}\n")
        _save_tokenizer(model, new)
    return folder


def vocabulary_notice(model: Model, new_tokens: Sequence[str]) -> str:
    """What a reader of the adapter does first, since its base lacks the new tokens."""
    return (
        f"the adapter was trained with {len(new_tokens)} new tokens: before peft loads it, the base is resized "
        f"(base.resize_token_embeddings({_rows(model)})), and the tokenizer is the one in this folder"
    )


def _rows(model: Model) -> int:
    return int(model.base.get_input_embeddings().weight.shape[0])


def export_merged(model: Model, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Writes base plus adapter (or the fully trained model) as a plain transformers folder; returns `folder`.

    Weights are merged in fp32 and cast once to `dtype`, by default the base's type; a 4-bit base is dequantised. The
    live model is not changed. finetune.json keeps how far the cast moved weights (max, mean) and the notices. Errors as
    `export_adapter`.
    """
    merged = merge(model.base, dtype)
    tied = _tie(model.base, merged)
    generation, changed = sound_generation_config(model.base)
    skeleton = _skeleton(model.base, merged.dtype, tied)
    if generation is not None:
        skeleton.generation_config = generation
    sizes = {id(t): t.numel() * t.element_size() for t in merged.tensors.values()}
    facts = {
        "kind": "merged",
        "base": model.source,
        "dtype": str(merged.dtype).removeprefix("torch."),
        "rounding": {"max": merged.rounding_max, "mean": merged.rounding_mean},
        "notices": [*merge_notices(model.base), *changed],
    }
    with _result(folder, sum(sizes.values()) + SLACK, facts) as new:
        skeleton.save_pretrained(str(new), state_dict=dict(merged.tensors))
        _save_tokenizer(model, new)
    return folder


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The facts of an exported result: kind, base, files, notices, ...; None when the folder is not one."""
    try:
        facts = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("files"), list) else None


def read_adapter(folder: Path, module: nn.Module) -> int:
    """Loads an adapter's weights into a peft model that has its layers already; the number of tensors loaded.

    All tensors of the file must match all of the model's adapter in name and shape; only copies of the base's own
    weights (peft adds them for targeted embeddings) may come on top. CheckpointError gives the counts and one example of
    each side, so that an adapter without effect never passes; then nothing was changed.
    """
    if not isinstance(module, PeftModel):
        raise FinetuneError("an adapter is read into a peft model", str(folder))
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        what = (
            "only a pickled adapter_model.bin is there, which may run code"
            if pickled
            else f"{ADAPTER_WEIGHTS} is missing"
        )
        raise CheckpointError(what, str(folder), "give a folder with adapter_model.safetensors")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = opened.keys()
            tensors = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the file is truncated or corrupt: {error}", str(file), "export or copy it again"
        ) from error
    name = module.active_adapters[0]
    wanted = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
    tensors = {
        key: tensor for key, tensor in tensors.items() if key in wanted or not _is_base_copy(module, key, tensor)
    }
    _require_match(file, tensors, wanted)
    set_peft_model_state_dict(module, tensors, adapter_name=name)
    return len(tensors)


def _is_base_copy(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    own = dict(module.named_parameters(remove_duplicate=False)).get(name)
    return own is not None and own.shape == tensor.shape and torch.equal(own.detach().cpu(), tensor.to(own.dtype))


def _require_match(file: Path, tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    shared = [name for name in wanted if name in tensors]
    strange = [name for name in tensors if name not in wanted]
    lacking = [name for name in wanted if name not in tensors]
    shapes = [name for name in shared if tensors[name].shape != wanted[name].shape]
    what = f"{len(shared)} of {len(tensors)} tensors matched the model's {len(wanted)}"
    if strange:
        what += f"; only in the file: {len(strange)}, such as {strange[0]}"
    if lacking:
        what += f"; only in the model: {len(lacking)}, such as {lacking[0]}"
    if shapes:
        first = shapes[0]
        sizes = f"{list(tensors[first].shape)} in the file, {list(wanted[first].shape)} in the model"
        what += f"; of another shape: {len(shapes)}, such as {first} ({sizes})"
    if strange or lacking or shapes or not tensors:
        raise CheckpointError(what, str(file), "use the base model, rank and targets that the adapter was made with")


@contextmanager
def _result(folder: Path, needed: int, facts: dict[str, Any]) -> Iterator[Path]:
    """A folder to fill that becomes `folder` when whole; `facts` and the list of its files go into the marker."""
    _require_free(folder)
    with written(folder, needed) as new:
        try:
            yield new
        except SafetensorError as error:
            # The library hands the system's error on as text only.
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error), str(folder)) from error
        files = sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file())
        (new / MARKER).write_text(json.dumps({"format": 1, **facts, "files": files}, indent=1) + "\n")


def _require_free(folder: Path) -> None:
    """Refuses a target that is neither absent, nor empty, nor an earlier result with nothing added."""
    remedy = "give another path, or move what is there"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError("the export's target is not a folder", str(folder), remedy)
    there = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} if folder.exists() else set()
    )
    ours = read_marker(folder)
    foreign = there - {MARKER, *(ours["files"] if ours else ())}
    if there and (ours is None or foreign):
        what = f"it holds files that no export wrote, such as {min(foreign) if foreign else MARKER}"
        raise CheckpointError(f"the export's target is not empty: {what}", str(folder), remedy)


def _peft(model: Model) -> PeftModel:
    if not isinstance(model.module, PeftModel):
        raise CheckpointError("the model has no adapter to export", "export", "export it as a model: to=merged")
    return model.module


def _adapter_name(model: Model) -> str:
    names = _peft(model).active_adapters
    if names != ["default"]:
        raise FinetuneError(f"one adapter named default is wanted, the model has {names}", "export")
    return names[0]


def _adapter_tensors(model: Model) -> dict[str, torch.Tensor]:
    # False: "auto" would ask a model hub whether the vocabulary changed.
    return get_peft_model_state_dict(_peft(model), adapter_name=_adapter_name(model), save_embedding_layers=False)


def _require_complete(model: Model, saved: set[str]) -> None:
    """Every trained tensor must be in the file: a trained one that peft does not count as the adapter's would be lost."""
    lost = [name for name in model.trainable() if _saved_name(name) not in saved]
    if lost:
        what = f"{len(lost)} trained tensors are not part of the adapter, such as {lost[0]}"
        raise CheckpointError(what, "export", "export the model merged: to=merged")


def _saved_name(name: str) -> str:
    """A live parameter's name as peft saves it: without the adapter's name, DoRA's sizes without their last part."""
    name = re.sub(r"(\.lora_magnitude_vector)\.default\.weight$", r"\1", name)
    return re.sub(r"\.(modules_to_save\.)?default(?=\.|$)", "", name)


def _edit_json(path: Path, source: str) -> None:
    """The base's path as the recipe named it, and targets in a fixed order (peft keeps a set)."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = source
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _save_tokenizer(model: Model, folder: Path) -> None:
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(str(folder))


def _skeleton(base: nn.Module, dtype: torch.dtype, tied: bool) -> PreTrainedModel:
    """A weightless twin that knows how to save the model's class, with a configuration of its own to change."""
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in (config, config.get_text_config()):
        if hasattr(part, "tie_word_embeddings"):
            part.tie_word_embeddings = tied
    with torch.device("meta"):
        return type(base)(config).to(dtype)


def _tied(base: nn.Module) -> bool:
    return bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))


def _tie(base: nn.Module, merged: Merged) -> bool:
    """Whether the merged model is tied, from its weights: embedding and head that were trained apart are stored apart."""
    names = [_name_of(base, base.get_input_embeddings()), _name_of(base, base.get_output_embeddings())]
    if None in names or any(f"{name}.weight" not in merged.tensors for name in names):
        return _tied(base)
    embedding, head = (merged.tensors[f"{name}.weight"] for name in names)
    if _tied(base) and (embedding is head or torch.equal(embedding, head)):
        merged.tensors[f"{names[1]}.weight"] = embedding
        return True
    if embedding is head:
        merged.tensors[f"{names[1]}.weight"] = embedding.clone()
    return False


def _name_of(base: nn.Module, wanted: nn.Module | None) -> str | None:
    """A module's plain name. Adapters wrap in place, so the wrapper (or what is in it) stands under the same name."""
    for name, module in base.named_modules():
        if module is wanted and wanted is not None:
            return re.split(r"\.(?:base_layer|original_module|modules_to_save)(?:\.|$)", name)[0]
    return None
