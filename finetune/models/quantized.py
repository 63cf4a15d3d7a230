"""Frozen weights in 4 bits (QLoRA): NF4 with double quantisation, by bitsandbytes through transformers.

An approximation, so it is only ever chosen in a recipe. Norms, embedding and head keep the compute precision: peft's
prepare_model_for_kbit_training would turn them into fp32 without a word, so it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from finetune.errors import ModelError


def nf4_config(compute: torch.dtype, double_quant: bool = True) -> BitsAndBytesConfig:
    """NF4 in blocks of 64 (Dettmers et al. 2023, QLoRA, section 3); products are in `compute`.

    `double_quant` stores the blocks' scales in 8 bits, else they are fp32.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute,
    )


def check_stored(config: Any, base: str, where: str) -> str | None:
    """What a checkpoint that is stored quantised may be used for: only bitsandbytes 4-bit, and only as model.base=nf4.

    Returns a notice, or None for an ordinary checkpoint. Raises ModelError for the rest, by name.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    facts = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(facts.get("quant_method", "unknown"))
    if not (facts.get("load_in_4bit") and "bitsandbytes" in method.lower()):
        raise ModelError(
            f"the weights are stored quantised ({method}); they cannot be trained or adapted here",
            where=where,
            remedy="use the model's full-precision version (model.base=nf4 quantises it on loading)",
        )
    if base != "nf4":
        raise ModelError(
            "the weights are stored in 4 bits (bitsandbytes), but model.base=same asks for them as computed",
            where=where,
            remedy="set model.base=nf4, or use the model's full-precision version",
        )
    kind, double = facts.get("bnb_4bit_quant_type"), facts.get("bnb_4bit_use_double_quant")
    return f"the checkpoint is stored quantised already ({kind}, double quantisation {double}) and used as it is"


def freeze(base: nn.Module) -> None:
    """Nothing of the base is trained; no precision changes."""
    base.requires_grad_(False)


def keep_layout(base: nn.Module) -> None:
    """Keeps bitsandbytes 0.50 from repacking a layer at its first evaluation on a CPU with AVX512-BF16.

    The repacked layer has its scales rounded to bf16 and stays so in training, where its matmul has no backward: an
    evaluation before the first step would change the model and leave the adapter without most of its gradient.
    """
    for child in base.modules():
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False


def quantised_report(base: nn.Module) -> list[str]:
    """Notices: how many linear layers are in 4 bits, and each kind of weight that is not, by name and precision."""
    import bitsandbytes

    packed, others = [], []
    for name, child in base.named_modules():
        if isinstance(child, bitsandbytes.nn.Linear4bit):
            packed.append(name)
        elif isinstance(child, nn.Linear | nn.Embedding):
            others.append(f"{name} ({str(child.weight.dtype).removeprefix('torch.')})")
    if not packed:
        raise ModelError(
            f"{type(base).__name__} has no linear layer that can be stored in 4 bits", remedy="set model.base=same"
        )
    return [
        f"{len(packed)} linear layers are stored in NF4 with double quantisation; not quantised: {', '.join(others)}"
    ]
