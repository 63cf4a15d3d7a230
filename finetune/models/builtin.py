"""Models that need no hub: `builtin:NAME` becomes a normal model folder in the user's cache, made once per machine.

A folder is made aside and renamed, under a lock, so two processes at once or an interrupted one never leave a half-made
model behind; a marker with every file's size, written last, says that it is whole. Afterwards resolving costs a few
`stat` calls.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.environment import cache_folder
from finetune.errors import ModelError

PREFIX = "builtin:"
MARKER = "complete.json"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TINY_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
"""Tokens 256 to 260 of the tiny model; tokens 0 to 255 are the bytes."""


@dataclass(frozen=True)
class Builtin:
    """One embedded model: what it is, how to make its folder, and the version of the result (part of its name).

    `random`: the folder has a config and a tokenizer and no weights; they are drawn when the model is loaded.
    """

    about: str
    version: int
    make: Callable[[Path], None]
    announce: bool
    random: bool = False


def resolve(path: str) -> str:
    """The folder of a `builtin:NAME` model, made if it is not there yet; any other path comes back as it is.

    Raises ModelError for an unknown name, when the source can neither be found nor downloaded, and when the cache
    cannot be written.
    """
    if not path.startswith(PREFIX):
        return path
    name = path[len(PREFIX) :]
    if name not in BUILTINS:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        known = ", ".join(PREFIX + known for known in BUILTINS)
        raise ModelError(
            f"there is no model {path}",
            where="model.path",
            remedy=(f"did you mean {PREFIX}{near[0]}? " if near else "") + f"known are {known}",
        )
    row = BUILTINS[name]
    folder = cache_folder() / "models" / f"{name}-v{row.version}"
    if not _complete(folder):
        _make_once(folder, path, row)
    return str(folder)


def _complete(folder: Path) -> bool:
    """True when the marker is there and every file that it names has its size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make_once(folder: Path, name: str, row: Builtin) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", name):
            if _complete(folder):
                return
            for left_over in folder.parent.glob(f".{folder.name}.partial-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            aside = folder.parent / f".{folder.name}.partial-{os.getpid()}"
            aside.mkdir()
            try:
                if row.announce:
                    say(f"{name}: {row.about}; making {folder} (once per machine)")
                row.make(aside)
                _seal(aside)
                aside.rename(folder)
                _sync(folder.parent)
                if row.announce:
                    say(f"{name}: ready")
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{name} cannot be made in the cache: {error.strerror or error}",
            where=str(folder.parent),
            remedy="make room there, or set FINETUNE_CACHE to a folder that can be written",
        ) from error


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds the lock file; the operating system lets go of it when the process ends, however it ends."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is making it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _seal(folder: Path) -> None:
    """Makes the files durable, then writes the marker that lists them."""
    sizes = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(file)
        sizes[str(file.relative_to(folder))] = file.stat().st_size
    (folder / MARKER).write_text(json.dumps(sizes, indent=1))
    _sync(folder / MARKER)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def say(text: str) -> None:
    """A progress line: to standard error, so that reports on standard output stay clean."""
    print(text, file=sys.stderr, flush=True)


def _make_smollm2(folder: Path) -> None:
    from finetune.models.smollm2 import convert

    convert(folder)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte.

    Source: GPT-2's encoder (bytes_to_unicode): printable Latin-1 stands for itself, the rest for U+0100 onward.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def has_random_weights(path: str) -> bool:
    """Whether `path` names an embedded shape whose weights are drawn when it is loaded."""
    row = BUILTINS.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
    return row is not None and row.random


def _byte_tokenizer() -> Any:
    """A tokenizer in which every byte is a token, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = Tokenizer(models.BPE(vocab={text: byte for byte, text in enumerate(byte_characters())}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(list(TINY_SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
    )


def _token_ids() -> dict[str, Any]:
    """The special tokens of the byte tokenizer as a config names them: a turn's end stops an answer too."""
    bos, eos, pad, _, turn_end = range(256, 256 + len(TINY_SPECIALS))
    return {"bos_token_id": bos, "eos_token_id": [eos, turn_end], "pad_token_id": pad}


def _make_tiny(folder: Path) -> None:
    """A Llama of 115 thousand random parameters (seed 0, fp32) with a tokenizer in which every byte is a token."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **_token_ids(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)


def _make_shape(family: str, settings: dict[str, Any]) -> Callable[[Path], None]:
    """Makes a folder of a published shape: its config and the byte tokenizer, no weights."""

    def make(folder: Path) -> None:
        from transformers import LlamaConfig, Qwen2Config

        kind = {"Llama": LlamaConfig, "Qwen2": Qwen2Config}[family]
        kind(architectures=[f"{family}ForCausalLM"], dtype="bfloat16", **settings, **_token_ids()).save_pretrained(
            folder
        )
        _byte_tokenizer().save_pretrained(folder)

    return make


def _shape(family: str, widths: tuple[int, int, int], heads: tuple[int, int], **more: Any) -> Builtin:
    """A row of a published shape; widths: blocks, hidden, intermediate; heads: query, key-value."""
    settings = {
        "num_hidden_layers": widths[0],
        "hidden_size": widths[1],
        "intermediate_size": widths[2],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **more,
    }
    return Builtin("a published shape with random weights", 1, _make_shape(family, settings), False, random=True)


LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LLAMA3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
LLAMA32_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA32: dict[str, Any] = {
    **LLAMA3,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_parameters": LLAMA32_ROPE,
}
QWEN25: dict[str, Any] = {
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN25 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}

BUILTINS = {
    "smollm2-135m": Builtin("SmolLM2-135M-Instruct (Apache-2.0)", 1, _make_smollm2, announce=True),
    "tiny": Builtin("a random Llama for tests", 1, _make_tiny, announce=False),
    "tiny-random": _shape("Llama", (2, 64, 128), (4, 2), **{**LLAMA3, "vocab_size": 320, "rms_norm_eps": 1e-6}),
    "llama3-1b-random": _shape("Llama", (16, 2048, 8192), (32, 8), **LLAMA32),
    "llama3-3b-random": _shape("Llama", (28, 3072, 8192), (24, 8), **LLAMA32),
    "llama3-8b-random": _shape("Llama", (32, 4096, 14336), (32, 8), **LLAMA3),
    "llama3-70b-random": _shape("Llama", (80, 8192, 28672), (64, 8), **LLAMA3),
    "qwen2.5-7b-random": _shape("Qwen2", (28, 3584, 18944), (28, 4), **QWEN25),
    "qwen2.5-32b-random": _shape("Qwen2", (64, 5120, 27648), (40, 8), **QWEN25),
}
