"""Shape rows against transformers' own classes on the meta device, and counting from a config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from finetune.config.schema import Recipe
from finetune.contracts import LinearShape
from finetune.errors import ModelError
from finetune.models.shapes import NAMES, SHAPES, shape_for, shape_of


def llama(blocks: int, widths: tuple[int, int], heads: tuple[int, int], **more: object) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=widths[0],
        intermediate_size=widths[1],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        **more,
    )


CONFIGS = {
    "llama3-8b": llama(32, (4096, 14336), (32, 8), vocab_size=128256, max_position_embeddings=8192),
    "llama3-70b": llama(80, (8192, 28672), (64, 8), vocab_size=128256, max_position_embeddings=8192),
    "qwen2.5-7b": Qwen2Config(
        num_hidden_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
    ),
    "mistral-7b": MistralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
        max_position_embeddings=32768,
        sliding_window=None,
    ),
    "smollm2-135m": llama(
        30, (576, 1536), (9, 3), vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True
    ),
    "tiny": llama(2, (64, 128), (4, 2), vocab_size=320),
    "tiny-random": llama(2, (64, 128), (4, 2), vocab_size=320, max_position_embeddings=8192),
    "llama3-1b": llama(
        16, (2048, 8192), (32, 8), vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True
    ),
    "llama3-3b": llama(
        28, (3072, 8192), (24, 8), vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True
    ),
    "qwen2.5-32b": Qwen2Config(
        num_hidden_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        max_position_embeddings=32768,
    ),
}
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "tiny": 115_008,
    "tiny-random": 115_008,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "qwen2.5-32b": 32_763_876_352,
}


def recipe(path: str, **model: object) -> Recipe:
    return Recipe.model_validate({"model": {"path": path, **model}})


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_is_what_transformers_builds(name: str) -> None:
    assert CONFIGS.keys() == SHAPES.keys() == PARAMETERS.keys()
    row, counted = SHAPES[name], shape_of(CONFIGS[name])
    for field in row.__dataclass_fields__:
        if field != "name":
            assert getattr(counted, field) == getattr(row, field), field
    assert row.parameters == PARAMETERS[name]


def test_every_name_has_its_row() -> None:
    for path, row in NAMES.items():
        assert shape_for(recipe(path)) is SHAPES[row]
    assert shape_for(recipe("llama3-8b")) is SHAPES["llama3-8b"]
    assert len(NAMES) == 24


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100),
        GPTNeoXConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100
        ),
        Phi3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, pad_token_id=0),
        Qwen3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, head_dim=32, vocab_size=100),
        Gemma3TextConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, head_dim=16, vocab_size=100),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_are_counted(config: object) -> None:
    shape = shape_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.blocks == 2
    assert shape.hidden == 64
    assert len(shape.linears) >= 4


def test_a_folder_is_read_before_a_row_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama(3, (64, 96), (4, 2), vocab_size=50).save_pretrained(tmp_path / "llama3-8b")
    monkeypatch.chdir(tmp_path)
    shape = shape_for(recipe("llama3-8b"))
    assert (shape.blocks, shape.vocabulary) == (3, 50)
    assert shape.linears[0] == LinearShape("self_attn.q_proj", 64, 64)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no causal language model"):
        shape_of(T5Config())
    with pytest.raises(ModelError, match="no built-in model 'huge'"):
        shape_for(recipe("builtin:huge"))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        shape_for(recipe(str(tmp_path)))


def test_rows_and_planner_need_no_torch() -> None:
    code = (
        "import sys, finetune.models.shapes, finetune.planner.plan, finetune.planner.report, finetune.planner.refusal;"
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
