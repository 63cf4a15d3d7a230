"""Adapters: plain peft loads them with the live model's logits, and reading one never passes by mistake."""

import errno
import json
import os

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint.export import check_export, export_adapter, export_merged, read_adapter, read_marker
from finetune.checkpoint.verify import sample_ids, verify_adapter
from finetune.errors import CheckpointError


@torch.no_grad()
def logits(module: torch.nn.Module) -> torch.Tensor:
    return module(input_ids=sample_ids(module.config.vocab_size), use_cache=False).logits.float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_plain_peft_gives_the_live_logits(tiny, tmp_path, kind, tied):
    model = tiny.lora(kind=kind, tied=tied)
    folder = export_adapter(model, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    untouched = logits(base)
    reloaded = PeftModel.from_pretrained(base, folder)
    assert torch.allclose(logits(reloaded), logits(model.module), atol=1e-5, rtol=0)
    assert (logits(model.module) - untouched).abs().max() > 0.1
    assert verify_adapter(folder, model, tolerance=1e-5) <= 1e-5


def test_b96_plain_lora_has_only_pairs_and_a_standard_config(tiny, tmp_path):
    model = tiny.lora()
    folder = export_adapter(model, tmp_path / "adapter")
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    paths = [f"self_attn.{name}" for name in names] + [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert set(tensors) == {
        f"base_model.model.model.layers.{layer}.{path}.lora_{side}.weight"
        for layer in (0, 1)
        for path in paths
        for side in "AB"
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model.source
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["inference_mode"]) == ("LORA", 4, 8, True)
    assert config["target_modules"] == sorted(config["target_modules"])
    assert check_export(model) == []
    assert read_marker(folder)["notices"] == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == model.tokenizer.chat_template
    assert model.module.peft_config["default"].inference_mode is False


def test_b96_a_trained_head_is_said_to_be_no_adapter_for_servers(tiny, tmp_path):
    model = tiny.lora(adapter={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    (notice,) = check_export(model)
    assert "1 tensors that are not LoRA pairs (such as base_model.model.lm_head.weight)" in notice
    assert "vLLM and llama.cpp do not" in notice
    folder = export_adapter(model, tmp_path / "adapter")
    assert read_marker(folder)["notices"] == [notice]
    assert verify_adapter(folder, model, tolerance=1e-5) <= 1e-5


def test_a_trained_tensor_outside_the_adapter_is_not_dropped(tiny, tmp_path):
    model = tiny.lora(adapter={"target_modules": ["q_proj"]})
    model.base.model.norm.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"1 trained tensors are not part of the adapter, such as .*norm.weight"):
        export_adapter(model, tmp_path / "adapter")
    assert os.listdir(tmp_path) == []


def test_bf16_base_keeps_fp32_adapters(tiny, tmp_path):
    model = tiny.lora(dtype=torch.bfloat16)
    folder = export_adapter(model, tmp_path / "adapter")
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert verify_adapter(folder, model) == 0.0


def test_4_bit_base_is_reloaded_in_4_bits(tiny, tmp_path):
    model = tiny.qlora()
    folder = export_adapter(model, tmp_path / "adapter")
    assert verify_adapter(folder, model, tolerance=1e-5) <= 1e-5


def test_verification_takes_another_place_of_the_base(tiny, tmp_path):
    model = tiny.lora()
    place, model.source = model.source, "builtin:nowhere"
    folder = export_adapter(model, tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:nowhere"
    assert verify_adapter(folder, model, base=place) <= 1e-5
    assert verify_adapter(folder, model, base=AutoModelForCausalLM.from_pretrained(place)) <= 1e-5


def test_read_adapter_gives_the_same_logits(tiny, tmp_path):
    model = tiny.lora()
    folder = export_adapter(model, tmp_path / "adapter")
    other = tiny.lora()
    with torch.no_grad():
        for parameter in other.trainable().values():
            parameter.zero_()
    assert read_adapter(folder, other.module) == 28
    assert torch.equal(logits(other.module), logits(model.module))


@pytest.mark.parametrize("adapter", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_read_adapter_takes_what_plain_peft_wrote(tiny, tmp_path, adapter):
    settings = {"target_modules": ["q_proj"], **adapter}
    model = tiny.lora(adapter=settings)
    model.module.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert ("base_model.model.model.embed_tokens.base_layer.weight" in names) == ("modules_to_save" not in adapter)
    other = tiny.lora(adapter=settings)
    with torch.no_grad():
        for parameter in other.trainable().values():
            parameter.zero_()
    read_adapter(tmp_path, other.module)
    assert torch.equal(logits(other.module), logits(model.module))


def test_read_adapter_refuses_an_embedding_that_is_not_this_bases(tiny, tmp_path):
    settings = {"target_modules": ["q_proj", "embed_tokens"]}
    model = tiny.lora(adapter=settings)
    model.module.save_pretrained(tmp_path)
    with torch.no_grad():
        model.base.get_input_embeddings().base_layer.weight[3] += 1
    with pytest.raises(CheckpointError, match=r"only in the file: 1, such as .*embed_tokens.base_layer.weight"):
        read_adapter(tmp_path, model.module)


def rewrite(folder, change) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(dict(change(name, tensor) for name, tensor in tensors.items()), file)


def test_b97_wrong_prefix_is_0_of_n_with_an_example_of_each_side(tiny, tmp_path):
    model = tiny.lora()
    folder = export_adapter(model, tmp_path / "adapter")
    rewrite(folder, lambda name, tensor: (name.replace("model.layers", "language_model.model.layers"), tensor))
    before = logits(model.module)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, model.module)
    message = str(caught.value)
    assert "0 of 28 tensors matched the model's 28" in message
    assert "such as base_model.model.language_model.model.layers.0." in message
    assert "such as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in message
    assert torch.equal(logits(model.module), before)
    # And what plain peft makes of it is caught by comparing logits.
    with pytest.raises(CheckpointError, match="logits differ"):
        verify_adapter(folder, model)


def test_b97_partial_match_lists_counts(tiny, tmp_path):
    model = tiny.lora()
    folder = export_adapter(model, tmp_path / "adapter")
    rewrite(folder, lambda name, tensor: (name.replace("layers.1.mlp", "layers.9.mlp"), tensor))
    with pytest.raises(CheckpointError, match=r"22 of 28 tensors matched.*only in the file: 6.*only in the model: 6"):
        read_adapter(folder, model.module)


def test_b97_another_rank_names_both_shapes(tiny, tmp_path):
    folder = export_adapter(tiny.lora(), tmp_path / "adapter")
    with pytest.raises(
        CheckpointError, match=r"of another shape: 28, such as .*\[4, 64\] in the file, \[8, 64\] in the model"
    ):
        read_adapter(folder, tiny.lora(adapter={"r": 8}).module)


def test_broken_and_pickled_adapter_files_are_refused(tiny, tmp_path):
    model = tiny.lora()
    folder = export_adapter(model, tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"truncated or corrupt") as caught:
        read_adapter(folder, model.module)
    assert "adapter_model.safetensors" in str(caught.value)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        read_adapter(folder, model.module)


def test_an_earlier_result_is_replaced_and_anything_else_is_not(tiny, tmp_path):
    model = tiny.lora()
    target = tmp_path / "result"
    target.mkdir()
    export_adapter(model, target)
    export_merged(model, target)
    assert read_marker(target)["kind"] == "merged"
    assert not (target / "adapter_model.safetensors").exists()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"files that no export wrote, such as notes.txt"):
        export_adapter(model, target)
    assert (target / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="not a folder"):
        export_adapter(model, tmp_path / "file")
    with pytest.raises(CheckpointError, match="a file stands where a folder is needed"):
        export_adapter(model, tmp_path / "file" / "adapter")
    assert sorted(os.listdir(tmp_path)) == ["file", "result"]


@pytest.mark.parametrize("export", [export_adapter, export_merged])
def test_b78_disk_full_in_an_export_keeps_the_earlier_result(tiny, tmp_path, monkeypatch, export):
    model = tiny.lora()
    folder = export(model, tmp_path / "result")
    files = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"not enough disk space: [\d,]+ bytes needed, [\d,]+ free"):
        export(model, folder)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == files
    assert os.listdir(tmp_path) == ["result"]


def test_a_model_without_adapter_says_what_to_export(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="to=merged"):
        export_adapter(tiny.full(), tmp_path / "adapter")
