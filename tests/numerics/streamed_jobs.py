"""Jobs on models that are loaded from a folder, resident or streamed, on any device: parts of a run in its own order, no files.

More blocks than slots, so that slots are overwritten; rows of one document, or of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.schema import ModelSection, Recipe
from finetune.contracts import Plan, Row
from finetune.data.dataset import Splits
from finetune.data.loader import Order
from finetune.kernels.precision import loss_scale
from finetune.machine.collectives import World
from finetune.models.load import load_model, load_tokenizer
from finetune.optim.groups import roles_of
from finetune.optim.table import build
from finetune.tasks.text import TextTask
from finetune.telemetry.health import Health
from finetune.telemetry.log import Log
from finetune.train.assemble import Update, assemble, host_blocks, streamed
from finetune.train.job import Job, Progress, StopSignal
from finetune.train.step import train_step
from tests.numerics.tiny_jobs import CPU

BLOCKS, VOCABULARY = 5, 600


def model_folder(place: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Path:
    """A Llama of five blocks with random weights, and the tiny model's tokenizer."""
    form: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "pad_token_id": 7,  # stands in rows too, so that its row of the embedding has no gradient where it could have one
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**{**form, **changes}))
    model.to(dtype).save_pretrained(place)
    load_tokenizer(ModelSection(path="builtin:tiny")).save_pretrained(place)
    return place


def recipe_of(place: Path, kind: str, **sections: Any) -> Recipe:
    """fp32, unless a section says otherwise; adapters on every linear layer."""
    adapter = {"kind": "lora", "rank": 64, "alpha": 64} if kind == "lora" else {"kind": "none"}
    given = {
        "model": {"precision": "fp32"},
        "adapter": adapter,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "epsilon": 1e-4},
        "train": {"batch": 4, "max_grad_norm": None},
        "schedule": {"name": "constant"},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    given["model"]["path"] = str(place)
    return Recipe.model_validate(given)


def loaded_job(recipe: Recipe, plan: Plan, rows: list[Row], device: torch.device = CPU) -> Job:
    """As train/start makes it."""
    precision: Any = recipe.model.precision
    host = host_blocks(plan, recipe, device)
    tokenizer = load_tokenizer(recipe.model)
    model = load_model(recipe, host or device, precision, tokenizer=tokenizer)
    model.module.train()
    ready = assemble(model, plan, recipe.train.seed, device, precision, host)
    optimizer = build(
        recipe.optimizer, model.trainable(), roles_of(model.module), recipe.model.trained, recipe.train.seed
    )
    stream = streamed(model, plan, recipe, host, optimizer, precision)
    log = Log()
    return Job(
        recipe, plan, World(0, 1, device), precision, Path("unused"), Splits(rows, {}),
        Order([len(row.input_ids) for row in rows], 4, None, 0), TextTask(tokenizer.pad_token_id), model, optimizer,
        Update(model, optimizer, plan, device, stream), ready.key, ready.given, loss_scale(precision),
        Health(list(model.trainable())), StopSignal(log), log, Progress(),
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What some steps gave: per step the loss and the gradient's norm; at the end every tensor of model and optimizer."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]


def taken(job: Job, steps: int = 4) -> Outcome:
    """Trains for `steps` steps of four rows, from the first again after the last."""
    losses, norms = [], []
    for step in range(steps):
        first = 4 * step % len(job.splits.train)
        result = train_step(job, range(first, first + 4), 10)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        job.progress.step += 1
    job.update.wait()
    return Outcome(losses, norms, tensors_of(job))


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """Copies of every tensor of the model and of the optimizer's state, on the host."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in job.model.module.state_dict().items()}
    for name, parameter in job.model.trainable().items():
        for key, value in job.optimizer.state[parameter].items():
            tensors[f"{name} {key}"] = torch.as_tensor(value).detach().cpu().clone().view(-1)
    return tensors


def different(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """The names whose tensors are not the same bits, in type, form and value."""
    assert some.keys() == others.keys()
    return [name for name, tensor in some.items() if not _same(tensor, others[name])]


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other)


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert different(one.tensors, other.tensors) == []
