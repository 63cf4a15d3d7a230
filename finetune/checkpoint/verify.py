"""Every export is read back by the tool that users will read it with, and must give the live model's logits.

Names and shapes that fit prove little: an adapter under a wrong prefix, a head that lost its tie or a merge in too few
bits all load without a word. The logits show each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint.merge import base_dtype
from finetune.contracts import Model
from finetune.errors import CheckpointError

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest logit difference allowed, times the largest live logit where that is above 1, by the type of the weights."""


def sample_ids(vocabulary: int) -> Tensor:
    """Two rows of 16 token ids [2, 16], spread over the vocabulary, always the same."""
    return (torch.arange(32) * 7919 + 13).remainder(vocabulary).reshape(2, 16)


def verify_adapter(
    folder: Path,
    model: Model,
    base: str | Path | nn.Module | None = None,
    tolerance: float | None = None,
    loading: Mapping[str, Any] | None = None,
) -> float:
    """Loads the adapter with peft over a fresh base; the largest logit difference to the live model.

    `base` is where transformers finds the base (by default what adapter_config.json says), or an untouched base module
    (the adapter is put into it). It is loaded in the live base's type, 4-bit if that is; `loading` adds arguments for from_pretrained. CheckpointError
    above `tolerance` (default: TOLERANCES).
    """
    if not isinstance(base, nn.Module):
        place = str(base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)
        base, _ = _load(place, model, base_dtype(model.base), {**_quantisation(model), **(loading or {})})
    return _compare(folder, model, PeftModel.from_pretrained(base, str(folder)), tolerance)


def verify_merged(
    folder: Path, model: Model, tolerance: float | None = None, loading: Mapping[str, Any] | None = None
) -> float:
    """Loads the folder with transformers in its saved type; the largest logit difference to the live model.

    Also wanted: no weight missing or left over, and a tokenizer of the same size and chat template. CheckpointError else.
    """
    reloaded, report = _load(str(folder), model, "auto", loading or {})
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    faults = [f"{kind}: {sorted(report[kind])[:3]}" for kind in kinds if report[kind]]
    if faults:
        raise CheckpointError(f"weights do not fit after reloading: {'; '.join(faults)}", str(folder))
    if model.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        if len(tokenizer) != len(model.tokenizer) or tokenizer.chat_template != model.tokenizer.chat_template:
            raise CheckpointError("the exported tokenizer is not the run's after reloading", str(folder))
    return _compare(folder, model, reloaded, tolerance)


def _load(
    place: str, model: Model, dtype: torch.dtype | str, loading: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    device = next(model.base.parameters()).device
    options = {"attn_implementation": model.base.config._attn_implementation, "device_map": {"": device}, **loading}
    try:
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be loaded again: {error}", place) from error


def _quantisation(model: Model) -> dict[str, Any]:
    config = getattr(model.base.config, "quantization_config", None)
    return {"quantization_config": config} if config is not None else {}


def _compare(folder: Path, model: Model, reloaded: nn.Module, tolerance: float | None) -> float:
    embedding = model.base.get_input_embeddings().weight
    ids_BS = sample_ids(model.base.config.get_text_config().vocab_size).to(embedding.device)
    live_BSV, again_BSV = _logits(model.module, ids_BS), _logits(reloaded, ids_BS)
    difference = (live_BSV - again_BSV).abs().max().item()
    weights = next(p.dtype for p in reloaded.parameters() if p.is_floating_point())
    scale = max(1.0, live_BSV.abs().max().item())
    allowed = TOLERANCES.get(weights, 5e-2) * scale if tolerance is None else tolerance
    # Not "difference > allowed": a NaN must not pass.
    if not difference <= allowed:
        what = f"after reloading, logits differ from the live model's by {difference:.3g} (allowed {allowed:.3g})"
        raise CheckpointError(
            what, str(folder), "the export is not usable as it is; the checkpoint it was made from is"
        )
    return difference


@torch.no_grad()
def _logits(module: nn.Module, ids_BS: Tensor) -> Tensor:
    """fp32 logits [B, S, V] in evaluation mode; the modules' modes and weights are as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    # On some CPUs bitsandbytes repacks 4-bit weights at the first evaluation, for good and with coarser scales.
    repacking = [part for part in module.modules() if getattr(part, "support_avx512bf16_for_cpu", False)]
    module.eval()
    try:
        for part in repacking:
            part.support_avx512bf16_for_cpu = False
        # Layers that are trained whole are fp32 in the live model, beside frozen ones in 16 bits.
        with torch.autocast(ids_BS.device.type, torch.bfloat16, enabled=_is_mixed(module)):
            return module(input_ids=ids_BS, use_cache=False).logits.float()
    finally:
        for part in repacking:
            part.support_avx512bf16_for_cpu = True
        for part, training in modes:
            part.training = training


def _is_mixed(module: nn.Module) -> bool:
    kinds = {p.dtype for name, p in module.named_parameters() if p.is_floating_point() and ".lora_" not in name}
    return kinds == {torch.float32, torch.bfloat16}
