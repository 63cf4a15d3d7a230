"""Whole jobs on a tiny Llama in memory: packed rows, full or LoRA with dropout, under any plan, fp32 on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.schema import Recipe
from finetune.contracts import IGNORED, Plan, Row
from finetune.data.dataset import Splits
from finetune.data.loader import Order
from finetune.kernels.precision import loss_scale
from finetune.machine.collectives import World
from finetune.models.decoder import assemble as parts_of
from finetune.models.shapes import shape_of
from finetune.optim.groups import roles_of
from finetune.optim.table import build
from finetune.tasks.text import TextTask
from finetune.telemetry.health import Health
from finetune.telemetry.log import Log
from finetune.train.assemble import Update, assemble
from finetune.train.job import Job, Progress, StopSignal

VOCABULARY, LENGTH = 96, 24
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
CPU = torch.device("cpu")


def base(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes}))


def adapted(**changes: Any) -> nn.Module:
    """With a LoRA wide enough that its matrices have 4,096 elements, whose B is not zero."""
    torch.manual_seed(1)
    settings = {"r": 64, "lora_alpha": 64, "lora_dropout": 0.1, "target_modules": "all-linear"}
    module = get_peft_model(base(), LoraConfig(**{**settings, **changes}))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return module


def packed_rows(count: int = 12, seed: int = 3) -> list[Row]:
    """Rows of three documents each, of uneven lengths."""
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        first, second = (int(n) for n in draw.integers(3, 9, 2))
        ids = draw.integers(0, VOCABULARY, LENGTH)
        labels = ids.copy()
        starts = (0, first, first + second)
        for start in starts:
            labels[start : start + 2] = IGNORED
        lengths = (first, second, LENGTH - first - second)
        rows.append(Row(index, ids, labels, lengths, (3 * index, 3 * index + 1, 3 * index + 2)))
    return rows


def job_of(module: nn.Module, folder: Path, plan: Plan, rows: list[Row] | None = None, **sections: Any) -> Job:
    """A job on a copy of `module`; `sections` are the recipe's."""
    module = copy.deepcopy(module).train()
    recipe = Recipe.model_validate(
        {
            "model": {"path": "x"},
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "epsilon": 1e-3},
            "schedule": {"name": "constant"},
            **sections,
            "train": {"batch": 4, "max_grad_norm": None, **sections.get("train", {})},
        }
    )
    shape = shape_of(module.config)
    model = parts_of(module, None, shape, "tiny")
    precision = "fp32" if recipe.model.precision == "auto" else recipe.model.precision
    ready = assemble(model, plan, recipe.train.seed, CPU, "fp32")
    optimizer = build(recipe.optimizer, model.trainable(), roles_of(module))
    rows = packed_rows() if rows is None else rows
    log = Log()
    return Job(
        recipe, plan, World(0, 1, CPU), precision, folder, Splits(rows, {}), Order([LENGTH] * len(rows), 4, None, 0),
        TextTask(0), model, optimizer, Update(model, optimizer, plan, CPU), ready.key, ready.given,
        loss_scale(precision), Health(list(model.trainable())), StopSignal(log), log, Progress(),
    )  # fmt: skip
