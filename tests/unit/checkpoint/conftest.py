"""Tiny models on the disk and in memory, built by hand, for the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from finetune.contracts import Model, Shape

VOCABULARY = 260
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
NO_SHAPE = Shape("tiny", 2, 64, 96, 4, 2, 16, VOCABULARY, 128, False, (), 0, 0)


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<eos>", *letters]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


def make_base(kind: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model with weights large enough that every one of them shows in the logits."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=tied
        )
        module: nn.Module = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            attention_bias=False,
        )
        module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.08 if parameter.dim() > 1 else 0.2))
    return module.to(dtype).eval()


def as_model(module: nn.Module, source: str) -> Model:
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    backbone = base.model if hasattr(base, "model") else base.transformer
    blocks = backbone.layers if hasattr(backbone, "layers") else backbone.h
    return Model(module, base, backbone, base.get_output_embeddings(), blocks, tokenizer(), NO_SHAPE, source)


def with_adapter(base: nn.Module, **options) -> nn.Module:
    """peft over the base, with adapter weights that do something, and in fp32 as they are trained."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    module = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                # DoRA's magnitudes are norms of rows: doubled or zeroed by noise they would say nothing.
                parameter.add_(torch.randn_like(parameter) * (0.02 if "magnitude" in name else 0.05))
    return module


class Tiny:
    """Builders that keep their base on the disk, where reloading finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def base_folder(self, **options) -> Path:
        name = "base-" + "-".join(f"{key}-{value}" for key, value in sorted(options.items(), key=str))
        path = self.folder / name
        if not path.exists():
            make_base(**options).save_pretrained(path)
        return path

    def full(self, **options) -> Model:
        path = self.base_folder(**options)
        # Loaded, not cast: a cast would take the rotary frequencies to 16 bits, which loading keeps in fp32.
        return as_model(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), str(path))

    def lora(self, adapter: dict | None = None, **options) -> Model:
        plain = self.full(**options)
        return as_model(with_adapter(plain.module, **(adapter or {})), plain.source)

    def qlora(self, adapter: dict | None = None, double: bool = False) -> Model:
        from transformers import BitsAndBytesConfig

        path = self.base_folder(dtype=torch.float32)
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=torch.float32,
        )
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
        )
        for part in base.modules():
            if hasattr(part, "support_avx512bf16_for_cpu"):
                # As a run keeps them: else the first evaluation on such a CPU repacks the weights for good.
                part.support_avx512bf16_for_cpu = False
        return as_model(with_adapter(base, **(adapter or {})), str(path))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("bases"))
