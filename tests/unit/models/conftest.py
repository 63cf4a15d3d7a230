"""Tiny models of several kinds, their folders, and batches made by hand."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.config.schema import Recipe
from finetune.contracts import IGNORED, Batch, Shape

WIDTHS = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen2-sliding": (Qwen2Config, Qwen2ForCausalLM, SLIDING),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "qwen3-sliding": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, **SLIDING}),
}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny(cache):
    """The folder of builtin:tiny."""
    from finetune.models.builtin import resolve

    return resolve("builtin:tiny")


@pytest.fixture
def make_base():
    def make(kind="llama", attention="sdpa", **changes):
        config_class, model_class, extra = KINDS[kind]
        torch.manual_seed(0)
        config = config_class(**{**WIDTHS, **extra, **changes}, attn_implementation=attention)
        return model_class(config).eval()

    return make


@pytest.fixture
def make_folder(make_base, tiny, tmp_path):
    """A model folder of a kind, with the tiny model's tokenizer."""
    from transformers import AutoTokenizer

    def make(kind="llama", name="base", tokenizer=None, **changes):
        folder = tmp_path / name
        make_base(kind, **changes).save_pretrained(folder)
        (tokenizer or AutoTokenizer.from_pretrained(tiny)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def shape():
    return Shape("tiny", 3, 32, 48, 4, 2, 8, 320, 128, False, (), 0, 0)


@pytest.fixture
def recipe():
    """A recipe for a model path; keyword arguments are sections."""

    def make(path, **sections):
        model = {"path": str(path), **sections.pop("model", {})}
        return Recipe.model_validate({"model": model, **sections})

    return make


@pytest.fixture
def make_batch():
    """Rows given as lists of documents (lists of ids), padded on the right by hand as the loader promises."""

    def make(rows, length=None, pad=258):
        length = length or max(sum(map(len, row)) for row in rows)
        packed = any(len(row) > 1 for row in rows)
        ids = np.full((len(rows), length), pad)
        labels = np.full((len(rows), length), IGNORED)
        documents, positions = np.full((len(rows), length), -1), np.zeros((len(rows), length), int)
        lengths = []
        for r, row in enumerate(rows):
            start = 0
            for d, document in enumerate(row):
                end = start + len(document)
                ids[r, start:end], labels[r, start + 1 : end] = document, document[1:]
                documents[r, start:end], positions[r, start:end] = d, range(len(document))
                start = end
            positions[r, start:] = range(length - start)
            lengths.append(start)
        tensors = [torch.from_numpy(array).long() for array in (ids, labels, documents, positions)]
        row_ids = torch.arange(len(rows))
        extra = tensors[2:] if packed else (None, None)
        return Batch(tensors[0], tensors[1], row_ids, *extra, tuple(lengths))

    return make
