"""50 steps of a run equal a plain transformers + peft loop, written here in the plainest way: one document at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.config.load import load_recipe
from finetune.contracts import IGNORED
from finetune.data.dataset import prepare
from finetune.data.loader import Order
from finetune.models.builtin import resolve
from finetune.models.load import load_tokenizer
from tests.conftest import alpaca_rows, changed, method, write_jsonl

STEPS = 50


def plain_losses(recipe: dict[str, Any]) -> list[float]:
    """Losses of a loop over transformers and peft alone: sum of token losses of each document, over the step's count."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    schema = load_recipe(recipe)
    torch.manual_seed(schema.train.seed)
    model = AutoModelForCausalLM.from_pretrained(resolve(schema.model.path), dtype=torch.float32)
    if schema.adapter.kind == "lora":
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        settings = LoraConfig(
            r=schema.adapter.rank, lora_alpha=schema.adapter.alpha, target_modules=linears, task_type="CAUSAL_LM"
        )
        torch.manual_seed(schema.train.seed)
        model = get_peft_model(model, settings)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=schema.optimizer.lr, weight_decay=0.0)
    rows = prepare(schema, load_tokenizer(schema.model)).train
    order = Order(rows.lengths, schema.train.batch, schema.train.batch_tokens, schema.train.seed)
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        for step_rows in order.batches(epoch):
            if len(losses) == STEPS:
                break
            documents = [document for row in step_rows for document in split(rows[int(row)])]
            count = sum(int((labels[1:] != IGNORED).sum()) for _, labels in documents)
            total = 0.0
            for ids, labels in documents:
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=IGNORED)
                (loss / count).backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = schema.optimizer.lr * 0.5 * (1 + math.cos(math.pi * len(losses) / STEPS))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / count)
        epoch += 1
    return losses


def split(row: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    documents, start = [], 0
    for length in row.document_lengths:
        ids = torch.tensor(row.input_ids[start : start + length].astype("int64"))
        labels = torch.tensor(row.labels[start : start + length].astype("int64"))
        documents.append((ids, labels))
        start += length
    return documents


def our_losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def recipe(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "train.jsonl", alpaca_rows(40))
    base = changed(tiny, train__max_steps=STEPS, train__batch=4, optimizer__lr=1e-3)
    del base["data"]["valid_path"]
    return base


@pytest.mark.parametrize("pack", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["none", "lora"], ids=["full", "lora"])
def test_fifty_steps_equal_the_plain_loop(recipe: dict[str, Any], tmp_path: Path, kind: str, pack: bool) -> None:
    recipe = changed(method(recipe, kind), data__pack=pack)
    wanted = plain_losses(recipe)
    for micro_batch in (4, 2, 1):
        folder = tmp_path / f"run{micro_batch}"
        finetune.run(changed(recipe, plan__micro_batch=micro_batch, run__dir=str(folder)))
        got = our_losses(folder)
        assert len(got) == STEPS
        assert got == pytest.approx(wanted, abs=1e-5), f"micro_batch {micro_batch}"
    assert wanted[-1] < wanted[0]
