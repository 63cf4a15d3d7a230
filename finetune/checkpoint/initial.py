"""Adapters that began as a part of their base (PiSSA, OLoRA), written so that they fit the base as it was.

Loading took s B0 A0 out of every adapted matrix: W' = W - s B0 A0. What was trained is W' + s B A, which is
W + s [B, -B0] [A; A0]: a LoRA of twice the rank on the unchanged W, with the same scale s. The first A and B stand in a
frozen, inactive adapter of the live model.
Sources: https://arxiv.org/abs/2404.02948 (PiSSA, its conversion to LoRA), https://arxiv.org/abs/2406.01775 (OLoRA).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

INITIAL = "initial"
"""The name of the frozen adapter, as models/adapters gives it."""


def widen(weights: Path, config: Path, module: PeftModel) -> None:
    """Rewrites a saved adapter's two files to twice the rank."""
    stored = load_file(weights)
    first = get_peft_model_state_dict(module, adapter_name=INITIAL, save_embedding_layers=False)
    for name, tensor in stored.items():
        if name not in first:
            continue  # a layer that is trained whole
        start = first[name].to(tensor)
        if ".lora_A." in name:
            stored[name] = torch.cat([tensor, start], dim=0).contiguous()
        elif ".lora_B." in name:
            stored[name] = torch.cat([tensor, -start], dim=1).contiguous()
    save_file(stored, weights, metadata={"format": "pt"})
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(_widened(facts), indent=2, sort_keys=True) + "\n")


def _widened(facts: dict[str, Any]) -> dict[str, Any]:
    """Settings with twice the rank and the same scale: alpha / rank, or alpha / the root of the rank."""
    factor = 2**0.5 if facts.get("use_rslora") else 2
    ranks, alphas = facts.get("rank_pattern") or {}, facts.get("alpha_pattern") or {}
    return {
        **facts,
        "r": 2 * facts["r"],
        "lora_alpha": factor * facts["lora_alpha"],
        "rank_pattern": {name: 2 * rank for name, rank in ranks.items()},
        "alpha_pattern": {name: factor * alpha for name, alpha in alphas.items()},
        "init_lora_weights": True,
    }
