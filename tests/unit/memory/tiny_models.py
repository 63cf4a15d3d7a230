"""Tiny Llamas for the tests of levers, bare or with LoRA, in fp32 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.memory import checkpointing
from finetune.memory.chunked_loss import loss_sum

VOCABULARY = 96


def tiny(tied: bool = False, blocks: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def with_lora(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))
    for name, parameter in adapted.named_parameters():
        # B starts at zero, which would make the gradients of A zero.
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


def base_of(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def rows(count: int = 4, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, the first tokens of each row not trained."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, : 2 + row] = -100
    return ids, labels


def step(model: nn.Module, micro_batch: int, checkpoint: bool, chunk: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss a trained token and gradients of a whole step, on a copy of the model."""
    model = copy.deepcopy(model).train()
    if checkpoint:
        checkpointing.apply(model)
    base = base_of(model)
    ids, labels = rows()
    count = int((labels[:, 1:] != -100).sum())
    total = 0.0
    for start in range(0, len(ids), micro_batch):
        part = slice(start, start + micro_batch)
        hidden = base.model(input_ids=ids[part], use_cache=False).last_hidden_state
        loss = loss_sum(hidden, base.get_output_embeddings(), labels[part], chunk, base.config) / count
        loss.backward()
        total += loss.item()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total, found
