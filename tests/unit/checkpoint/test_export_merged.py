"""Merged and fully trained models: what transformers loads again has the live model's logits."""

import copy
import json
import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.checkpoint.export import check_export, export_merged, read_marker
from finetune.checkpoint.verify import sample_ids, verify_merged
from finetune.errors import CheckpointError


@torch.no_grad()
def logits(module: torch.nn.Module) -> torch.Tensor:
    return module(input_ids=sample_ids(module.config.vocab_size), use_cache=False).logits.float()


def stored(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_b103_saved_once_and_reloaded_with_equal_logits(tiny, tmp_path, kind, tied, method):
    model = getattr(tiny, method)(kind=kind, tied=tied)
    live = logits(model.module)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    config = copy.deepcopy(model.base.config.to_dict())
    folder = export_merged(model, tmp_path / "model")
    assert verify_merged(folder, model, tolerance=1e-5) <= 1e-5
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(reloaded), live, atol=1e-5, rtol=0)
    embedding, head = reloaded.get_input_embeddings().weight, reloaded.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert reloaded.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in stored(folder)) == (not tied)
    # The live model is as it was, its configuration too.
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert model.base.config.to_dict() == config
    assert torch.equal(logits(model.module), live)
    if method == "lora":
        assert (logits(reloaded) - logits(AutoModelForCausalLM.from_pretrained(model.source))).abs().max() > 0.1


def test_the_folder_has_tokenizer_template_and_marker(tiny, tmp_path):
    model = tiny.lora(tied=True)
    folder = export_merged(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hello")["input_ids"] == model.tokenizer("hello")["input_ids"]
    assert tokenizer.chat_template == model.tokenizer.chat_template
    marker = read_marker(folder)
    assert marker["kind"] == "merged"
    assert marker["base"] == model.source
    assert set(marker["files"]) == set(os.listdir(folder)) - {"finetune.json"}
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("adapter", "tied_after"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj"]}, True),
    ],
    ids=["head", "embedding", "both", "kept-tied", "lora-embedding", "lora-head", "neither"],
)
def test_b92_tied_embeddings_trained_through_the_adapter(tiny, tmp_path, adapter, tied_after):
    model = tiny.lora(adapter={"target_modules": ["q_proj"], **adapter}, tied=True)
    folder = export_merged(model, tmp_path / "model")
    assert verify_merged(folder, model, tolerance=1e-5) <= 1e-5
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == tied_after
    assert ("lm_head.weight" in stored(folder)) == (not tied_after)


def test_b101_delta_is_added_in_fp32_and_cast_once(tiny, tmp_path):
    model = tiny.lora(dtype=torch.bfloat16)
    folder = export_merged(model, tmp_path / "model")
    tensors = stored(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    largest, total, elements = 0.0, 0.0, 0
    for name, layer in model.base.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        full = layer.base_layer.weight.float() + delta
        assert torch.equal(tensors[f"{name}.weight"], full.to(torch.bfloat16))
        gap = (full - full.to(torch.bfloat16).float()).abs()
        largest, total = max(largest, gap.max().item()), total + gap.double().sum().item()
    elements = sum(tensor.numel() for tensor in tensors.values())
    rounding = read_marker(folder)["rounding"]
    assert rounding["max"] == pytest.approx(largest)
    assert rounding["mean"] == pytest.approx(total / elements)

    bf16 = tiny.lora(dtype=torch.bfloat16)
    careless = bf16.module.to(torch.bfloat16).merge_and_unload()
    worse = sum(
        (careless.state_dict()[name].float() - tensor.float()).abs().gt(0).sum().item()
        for name, tensor in tensors.items()
    )
    assert worse > 1000
    assert 0 < verify_merged(folder, model) < 0.2


def test_b101_merged_in_fp32_when_asked(tiny, tmp_path):
    model = tiny.lora(dtype=torch.bfloat16)
    folder = export_merged(model, tmp_path / "model", dtype=torch.float32)
    assert {tensor.dtype for tensor in stored(folder).values()} == {torch.float32}
    assert read_marker(folder)["rounding"] == {"max": 0.0, "mean": 0.0}


def test_full_fine_tune_in_fp32_is_exported_in_bf16(tiny, tmp_path):
    model = tiny.full(tied=True)
    folder = export_merged(model, tmp_path / "model", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype == torch.bfloat16
    weights = reloaded.state_dict()
    assert all(torch.equal(weights[name], t.to(torch.bfloat16)) for name, t in model.base.state_dict().items())
    assert verify_merged(folder, model) < 0.2
    assert {parameter.dtype for parameter in model.base.parameters()} == {torch.float32}


@pytest.mark.parametrize("double", [False, True])
def test_b90_a_4_bit_base_is_dequantised_and_says_so(tiny, tmp_path, double):
    model = tiny.qlora(double=double)
    notices = check_export(model, "merged")
    assert notices == ["the base's 14 4-bit layers are dequantised: the result is in 16 or 32 bits"]
    folder = export_merged(model, tmp_path / "model")
    difference = verify_merged(folder, model, tolerance=1e-4)
    assert difference <= 1e-4
    assert read_marker(folder)["notices"] == notices
    tensors = stored(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    # What was merged is the quantised base, not the one it was made from.
    plain = tiny.lora(dtype=torch.float32)
    assert (logits(plain.module) - logits(model.module)).abs().max() > 100 * difference


def test_b100_dora_is_merged_with_its_magnitudes(tiny, tmp_path):
    model = tiny.lora(adapter={"target_modules": ["q_proj", "down_proj"], "use_dora": True})
    folder = export_merged(model, tmp_path / "model")
    assert verify_merged(folder, model, tolerance=1e-5) <= 1e-5


def test_b100_dora_over_a_4_bit_base_is_called_approximate(tiny, tmp_path):
    model = tiny.qlora(adapter={"target_modules": ["q_proj"], "use_dora": True})
    (notice,) = check_export(model, "merged")
    assert "approximate" in notice


def test_rank_stabilised_and_biased_adapters(tiny, tmp_path):
    model = tiny.lora(
        adapter={"target_modules": ["c_attn", "c_fc"], "use_rslora": True, "lora_bias": True}, kind="gpt2"
    )
    folder = export_merged(model, tmp_path / "model")
    assert verify_merged(folder, model, tolerance=1e-5) <= 1e-5


def test_layers_that_cannot_be_merged_are_named_before_training(tiny):
    model = tiny.lora(adapter={"target_modules": ["q_proj"], "lora_bias": True})
    with pytest.raises(CheckpointError, match=r"q_proj: its adapter has a bias and the layer has none"):
        check_export(model, "merged")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"temperature": None, "top_p": None}),
        ({"num_beams": 1, "length_penalty": 2.0}, {"length_penalty": None}),
        ({"do_sample": False, "num_return_sequences": 4}, {"num_return_sequences": None}),
    ],
    ids=["sampling", "beams", "hopeless"],
)
def test_b104_invalid_generation_settings_are_dropped_with_a_notice(tiny, tmp_path, settings, kept):
    model = tiny.full()
    model.base.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    for name, value in settings.items():
        setattr(model.base.generation_config, name, value)
    with pytest.raises(ValueError, match=r"Fix these issues|Greedy"):
        model.base.generation_config.save_pretrained(tmp_path / "plain")
    (notice,) = check_export(model)
    assert "generation settings of the base" in notice
    folder = export_merged(model, tmp_path / "model")
    written = GenerationConfig.from_pretrained(folder)
    plain = GenerationConfig()
    assert (written.eos_token_id, written.pad_token_id) == (1, 0)
    assert all(getattr(written, name) in (value, getattr(plain, name)) for name, value in kept.items())
    assert read_marker(folder)["notices"] == [notice]
    assert all(getattr(model.base.generation_config, name) == value for name, value in settings.items())


def test_valid_generation_settings_are_kept_as_they_are(tiny, tmp_path):
    model = tiny.full()
    model.base.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[1, 2])
    assert check_export(model) == []
    written = GenerationConfig.from_pretrained(export_merged(model, tmp_path / "model"))
    assert (written.do_sample, written.temperature, written.top_p, written.eos_token_id) == (True, 0.6, 0.9, [1, 2])


def test_b105_a_config_that_cannot_be_saved_is_found_before_training(tiny):
    model = tiny.full()
    model.base.config.odd = object()
    with pytest.raises(CheckpointError, match="would fail after training"):
        check_export(model)


def test_a_changed_weight_does_not_pass_verification(tiny, tmp_path):
    model = tiny.full()
    folder = export_merged(model, tmp_path / "model")
    with torch.no_grad():
        model.base.get_output_embeddings().weight[:, 0] += 1.0
    with pytest.raises(CheckpointError, match=r"logits differ from the live model's by"):
        verify_merged(folder, model)
    assert [part.training for part in model.module.modules()] == [False] * len(list(model.module.modules()))
