"""Weights from files straight to where a streamed model keeps them, with no second copy of a block in memory.

Only where the stored names are the model's own, one to one, and every shape fits: then reading a tensor is all there is to
do. Whatever needs more (renamed or merged tensors, tables that are no function of the config, a checkpoint that is stored in
4 bits) is left to transformers' loader, which knows it; the reason is given.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from finetune.config.schema import ModelSection
from finetune.models.config import origin
from finetune.models.skeleton import Making, furnish, skeleton
from finetune.models.source import Source
from finetune.models.storing import Storing
from finetune.models.weight_files import FLOATING, WeightFiles, open_files


@dataclass(frozen=True)
class Read:
    """A model that was read, the stored tensors that it does not use, and notices."""

    base: Any
    unused: list[str]
    notices: list[str]


def read(
    source: Source, section: ModelSection, config: Any, making: Making, host: Any, store: Storing | None
) -> Read | str:
    """The model with its blocks on `host` (packed or stored as `making` and `store` say), or why it cannot be read so."""
    if section.trust_remote_code:
        return "the model may bring its own code"
    if getattr(config, "quantization_config", None) is not None:
        return "it is stored in 4 bits"
    files = open_files(source, section)
    base = skeleton(config, making)
    reason = _obstacle(base, files, making)
    if reason:
        return reason
    furnish(base, making, _Reading(files, making), store, host)
    _take_generation(base, source, section)
    used = set(_wanted(base)) | set(base.all_tied_weights_keys)
    unused = sorted(name for name in files.tensors if name not in used and not _is_known(base, name))
    return Read(base, unused, files.notices())


class _Reading:
    """The values of a checkpoint, for models/skeleton."""

    def __init__(self, files: WeightFiles, making: Making) -> None:
        self.files = files
        self.making = making
        self.into = files.into

    def made(self, name: str, leaf: str, shape: torch.Size) -> Tensor:
        return self.files.tensor(name, self.making.dtype).to(self.making.device)


def _wanted(base: Any) -> dict[str, nn.Parameter]:
    """The model's parameters that a file must have: a tied one only under its first name."""
    return {name: each for name, each in base.named_parameters() if name not in base.all_tied_weights_keys}


def _obstacle(base: Any, files: WeightFiles, making: Making) -> str:
    """Why this model's files cannot be read tensor by tensor; empty if they can."""
    wanted = _wanted(base)
    for name, parameter in wanted.items():
        stored = files.tensors.get(name)
        if stored is None:
            return f"no stored tensor is named {name}"
        if stored.kind not in FLOATING:
            return f"{name} is stored as {stored.kind}"
        if stored.shape != tuple(parameter.shape):
            return f"{name} is stored as {list(stored.shape)}, and the model has {list(parameter.shape)}"
        if parameter.dtype != making.dtype:
            return f"{name} has a type of its own"
    doubled = [name for name in base.all_tied_weights_keys if name in files.tensors]
    if doubled:
        return f"{doubled[0]} is stored although it is tied to another tensor"
    persistent = set(base.state_dict()) - set(wanted) - set(base.all_tied_weights_keys)
    if persistent:
        return f"{min(persistent)} is no parameter"
    for name, module in base.named_modules():
        if list(module.buffers(recurse=False)) and (
            "RotaryEmbedding" not in type(module).__name__ or list(module.parameters())
        ):
            return f"{name} has tables of its own"
        if making.nf4 and type(module).__name__ == "Conv1D":
            return f"{name} is stored transposed"
    kept = set(base._keep_in_fp32_modules_strict or ())
    if making.dtype == torch.float16:
        kept |= set(base._keep_in_fp32_modules or ())
    return f"{min(kept)} is kept in fp32" if kept and making.dtype != torch.float32 else ""


def _is_known(base: Any, name: str) -> bool:
    """Whether transformers would pass over an unused tensor without a word: tables that older versions stored."""
    patterns = {*(base._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"}
    return any(re.search(pattern, name) for pattern in patterns)


def _take_generation(base: Any, source: Source, section: ModelSection) -> None:
    """The folder's own settings for generation, where it has any."""
    where = origin(source, section)
    with contextlib.suppress(OSError):  # then the model class made them from its config
        base.generation_config = GenerationConfig.from_pretrained(
            source.place, revision=where["revision"], local_files_only=where["local_files_only"]
        )
