"""Frozen weights in fewer bits: NF4 (QLoRA) by bitsandbytes through transformers, int8 and fp8 by kernels/stored_linear.

Approximations, so they are only ever chosen in a recipe. Norms, embedding and head keep the compute precision: peft's
prepare_model_for_kbit_training would turn them into fp32 without a word, so it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from finetune.errors import ModelError
from finetune.kernels.stored_linear import StoredLinear


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
            f"the weights are stored in 4 bits (bitsandbytes), but model.base={base} asks for them otherwise",
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
    facts: Any = next(child for child in base.modules() if isinstance(child, bitsandbytes.nn.Linear4bit)).weight
    double = "with" if facts.compress_statistics else "without"
    return [
        f"{len(packed)} linear layers are stored in NF4 {double} double quantisation; not quantised: {', '.join(others)}"
    ]


def is_linear(module: nn.Module) -> bool:
    """Whether `dequantised` gives this module's weight: a plain linear, or one stored in 4 or 8 bits."""
    return type(module) in (nn.Linear, StoredLinear) or type(module).__name__ == "Linear4bit"


def dequantised(module: Any) -> Tensor:
    """The weight [out, in] that a linear multiplies with: its own, or decoded anew at each call (4 and 8 bits).

    The type is that of the weight before it was stored. ModelError for a module that `is_linear` refuses.
    """
    if type(module) in (nn.Linear, StoredLinear):
        return module.weight
    if not is_linear(module):
        raise ModelError(f"{type(module).__name__} is no linear layer whose weight is known")
    from bitsandbytes.functional import dequantize_4bit

    packed = module.weight
    state = packed.quant_state if packed.quant_state is not None else module.quant_state
    if packed.is_cuda:
        from finetune.kernels.fused.four_bit import decoded

        return decoded(packed.data, state, state.dtype)
    return dequantize_4bit(packed.data, state)
