"""Adapters that began as a part of their base (PiSSA, OLoRA), written so that they fit the base as it was.

Loading took s B0 A0 out of every adapted matrix: W' = W - s B0 A0. What was trained is W' + s B A, which is
W + s [B, -B0] [A; A0]: a LoRA of twice the rank on the unchanged W, with the same scale s. The first A and B stand in a
frozen, inactive adapter of the live model.
Sources: https://arxiv.org/abs/2404.02948 (PiSSA, its conversion to LoRA), https://arxiv.org/abs/2406.01775 (OLoRA).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointError

INITIAL = "initial"
"""The name of the frozen adapter, as models/adapters gives it."""
PAIR = re.compile(r"\.lora_([AB])\.weight$")


def widen(weights: Path, config: Path, module: PeftModel) -> None:
    """Rewrites a saved adapter's two files to twice the rank."""
    save_file(widened(load_file(weights), module), weights, metadata={"format": "pt"})
    widen_config(config)


def widened(stored: dict[str, torch.Tensor], module: PeftModel) -> dict[str, torch.Tensor]:
    """The saved tensors with every A and B at twice the rank; layers and rows that are trained whole stay as they are.

    CheckpointError when a pair has no first A or B, or one of another shape.
    """
    # By the parameters' own names: peft's state dict asks layers that are trained whole for this adapter too.
    first = {name: parameter.detach() for name, parameter in module.named_parameters() if f".{INITIAL}." in name}
    made = dict(stored)
    for name, tensor in stored.items():
        found = PAIR.search(name)
        if found is None:
            continue
        start = first.get(PAIR.sub(rf".lora_\1.{INITIAL}.weight", name))
        if start is None or start.shape != tensor.shape:
            what = "has no first weights" if start is None else f"began with another shape, {list(start.shape)}"
            raise CheckpointError(f"{name} {what}, so it cannot be written onto the base as it was", "export")
        side = (tensor, start.to(tensor)) if found[1] == "A" else (tensor, -start.to(tensor))
        made[name] = torch.cat(side, dim=0 if found[1] == "A" else 1).contiguous()
    return made


def widen_config(config: Path) -> None:
    """Rewrites a saved adapter's settings to twice the rank."""
    config.write_text(json.dumps(_widened(json.loads(config.read_text())), indent=2, sort_keys=True) + "\n")


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
