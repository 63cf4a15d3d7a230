"""Embedded shapes without weights: what is drawn, that it depends on seed and name alone, and that it trains and exports."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM

from finetune.errors import ModelError
from finetune.kernels import stored_linear
from finetune.models.builtin import BUILTINS, resolve
from finetune.models.load import load_model
from finetune.models.random_weights import Making, make
from finetune.models.shapes import NAMES, SHAPES, shape_for, shape_of
from finetune.models.storing import Storing
from tests.unit.planner.live_bytes import LiveBytes

PATH = "builtin:tiny-random"
RANDOM = [name for name, row in BUILTINS.items() if row.random]


@pytest.mark.parametrize("name", RANDOM)
def test_every_config_has_the_counts_of_its_row_and_no_weights(name):
    from transformers import AutoConfig

    folder = Path(resolve(f"builtin:{name}"))
    row, counted = SHAPES[NAMES[f"builtin:{name}"]], shape_of(AutoConfig.from_pretrained(folder))
    assert (counted.parameters, counted.linears, counted.tied) == (row.parameters, row.linears, row.tied)
    assert not list(folder.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 50_000
    assert len(RANDOM) == 7


def test_matrices_are_normal_and_norms_are_one(recipe):
    model = load_model(recipe(PATH), "cpu", "fp32")
    for name, parameter in model.base.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.001, name
            assert abs(parameter.mean().item()) < 0.001, name
    assert any("are random (train.seed=0)" in notice for notice in model.notices)
    # The rotary tables are those of the model class.
    own = AutoModelForCausalLM.from_config(model.base.config)
    assert torch.equal(own.model.rotary_emb.inv_freq, model.base.model.rotary_emb.inv_freq)


def test_b116_weights_depend_on_seed_and_name_alone(recipe):
    torch.manual_seed(1)
    first = load_model(recipe(PATH), "cpu", "fp32").base.state_dict()
    torch.manual_seed(2)
    fewer = load_model(recipe(PATH, model={"layers": 1}), "cpu", "fp32").base.state_dict()
    other = load_model(recipe(PATH, train={"seed": 1}), "cpu", "fp32").base.state_dict()
    assert {name for name in first if name not in fewer} == {name for name in first if "layers.1." in name}
    assert all(torch.equal(first[name], tensor) for name, tensor in fewer.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_nf4_is_made_packed_from_the_same_weights(recipe):
    whole = load_model(recipe(PATH, adapter={"kind": "lora"}), "cpu", "bf16")
    packed = load_model(recipe(PATH, model={"base": "nf4"}, adapter={"kind": "lora"}), "cpu", "bf16")
    layers = {name: child for name, child in packed.base.named_modules() if isinstance(child, Linear4bit)}
    assert len(layers) == 14
    for name, child in layers.items():
        weight = dequantize_4bit(child.weight.data, child.weight.quant_state)
        original = whole.base.get_submodule(name).weight
        # NF4's widest step is a sixth of a block's largest magnitude (4 to 5 spreads).
        assert (weight - original).abs().max() < 0.02 * 5 / 6, name
    assert packed.base.is_loaded_in_4bit


class RealBytes(LiveBytes):
    """Bytes without those of the meta device, which are none."""

    def _count(self, storage):
        if storage.device.type != "meta":
            super()._count(storage)


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_making_a_packed_model_never_holds_more_than_it_and_one_block(base, monkeypatch):
    from transformers import LlamaConfig

    monkeypatch.setattr(stored_linear, "ROWS", 32)  # matrices of a real size have many times the rows that are encoded
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=8)
    making = Making(torch.bfloat16, torch.device("cpu"), 0, "sdpa", base == "nf4")
    with RealBytes() as live:
        model = make(config, making, None if base == "nf4" else Storing(base))
    block = 2 * shape_of(config).block_parameters
    assert live.now < 8 * block  # packed it is less than its blocks in bf16
    assert live.peak - live.now <= block
    assert model.config.num_hidden_layers == 8


@pytest.mark.parametrize("path", [PATH, "builtin:tiny"])
def test_layers_keeps_the_first_blocks(recipe, path):
    short, whole = (load_model(recipe(path, model={"layers": n}), "cpu", "fp32") for n in (1, 2))
    assert (len(short.blocks), short.base.config.num_hidden_layers, short.shape.blocks) == (1, 1, 1)
    assert torch.equal(short.blocks[0].mlp.up_proj.weight, whole.blocks[0].mlp.up_proj.weight)
    assert shape_for(recipe(path, model={"layers": 1})).parameters == short.shape.parameters
    said = [notice for notice in short.notices if "only the first 1 blocks are used" in notice]
    assert len(said) == (path == "builtin:tiny")


def test_more_layers_than_there_are_is_refused(recipe):
    for take in (shape_for, lambda r: load_model(r, "cpu", "fp32")):
        with pytest.raises(ModelError, match=r"model\.layers=3, but .* has 2 blocks"):
            take(recipe(PATH, model={"layers": 3}))


@pytest.mark.parametrize(("method", "to"), [("lora", "adapter"), ("lora", "merged"), ("none", "merged")])
def test_it_trains_and_exports(tmp_path, method, to):
    import finetune
    from finetune.train.after import export

    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "to be or not"}\n{"text": "that is the question"}\n')
    recipe = {
        "model": {"path": PATH, "layers": 1},
        "adapter": {"kind": method},
        "data": {"path": str(data), "template": "text", "train_on": "all", "max_tokens": 32},
        "train": {"batch": 2, "max_steps": 2},
        "run": {"dir": str(tmp_path / "run")},
        "device": "cpu",
        "generate": {"max_tokens": 2},
    }
    result = finetune.run(recipe)
    assert result.summary["steps"] == 2
    assert export(result.dir, to, tmp_path / "out", None)["largest_logit_difference"] < 1e-4
    if to == "merged":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 1
