"""Adapter options at their limits: ranks above the matrices, other tokens, rows that stay frozen, words that say nothing."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.checkpoint.export import check_export, export_adapter
from finetune.config.schema import AdapterSection
from finetune.errors import CheckpointError, ModelError
from finetune.models.adapter_folder import as_planned
from finetune.models.load import load_model
from tests.unit.models.test_adapter_options import TOKENS, logits, there_and_back, train


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("saved", [[], ["norm"], ["embed_tokens", "lm_head"]])
def test_inits_from_the_base_come_back_with_new_tokens_and_whole_layers(
    make_folder, recipe, tmp_path, init, tied, saved
):
    place = make_folder(tie_word_embeddings=tied, vocab_size=261)
    adapter = {"kind": "lora", "rank": 4, "alpha": 4, "init": init, "modules_to_save": saved}
    made = recipe(place, model={"new_tokens": TOKENS}, adapter=adapter)
    model = load_model(made, "cpu", "fp32")
    check_export(model)
    batch = torch.tensor([[1, 2, 261, 3, 262, 263, 4, 261, 9]])
    train(model, ids=batch)
    live = logits(model.module, batch)
    folder = export_adapter(model, tmp_path / "adapter", TOKENS)
    plain = AutoModelForCausalLM.from_pretrained(place)
    plain.resize_token_embeddings(264)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, folder), batch), live, atol=1e-4, rtol=0)
    kept = AdapterSection(kind="lora", path=str(folder))
    again = load_model(made.model_copy(update={"adapter": kept}), "cpu", "fp32")
    torch.testing.assert_close(logits(again.module, batch), live, atol=1e-4, rtol=0)


def test_an_export_that_cannot_be_widened_is_found_before_training(make_folder, recipe):
    model = load_model(recipe(make_folder(), adapter={"kind": "lora", "rank": 4, "init": "pissa"}), "cpu", "fp32")
    layer = model.base.get_submodule("model.layers.0.self_attn.q_proj")
    layer.lora_A["initial"].weight.data = torch.zeros(3, 32)
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A\.weight began with another shape, \[3, 32\]"):
        check_export(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init": "pissa", "rank": 64}, r"rank 64 is above the smaller side of 21 of the 21 matrices(.|\n)*16x32"),
        (
            {"init": "olora", "rank": 20},
            r"rank 20 is above the smaller side of 6 of the 21(.|\n)*adapter\.rank to 16 or",
        ),
        ({"init": "olora", "rank": 4, "ranks": {"q_proj": 33}}, r"adapter\.ranks: rank 33 is above(.|\n)*32x32"),
    ],
)
def test_a_rank_that_the_matrix_has_not_is_refused_where_it_is_taken_out_of_it(make_folder, recipe, options, match):
    with pytest.raises(ModelError, match=match):
        load_model(recipe(make_folder(), adapter={"kind": "lora", **options}), "cpu", "fp32")


def test_the_largest_rank_that_the_matrices_have_comes_back(make_folder, recipe, tmp_path):
    options = {"kind": "lora", "init": "pissa", "rank": 32, "alpha": 16, "ranks": {"k_proj": 16, "v_proj": 16}}
    model, again, folder = there_and_back(recipe(make_folder(), adapter=options), tmp_path)
    ranks = {name: p.shape[0] for name, p in model.trainable().items() if ".lora_A." in name}
    assert {rank for name, rank in ranks.items() if "k_proj" in name or "v_proj" in name} == {16}
    assert {rank for name, rank in ranks.items() if "q_proj" in name} == {32}
    # The exported adapter has twice the rank: what was learned, and less what was there at first.
    wide = {p.shape[0] for name, p in again.trainable().items() if ".lora_A." in name and "q_proj" in name}
    assert wide == {64}
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("base", ["same", "nf4", "int8"])
def test_a_rank_above_the_matrices_is_said(make_folder, recipe, base):
    def notices(rank):
        made = recipe(make_folder(hidden_size=64), model={"base": base}, adapter={"kind": "lora", "rank": rank})
        return [n for n in load_model(made, "cpu", "fp32").notices if "above the smaller side" in n]

    assert notices(32) == []
    assert "rank 1000 is above the smaller side of 21 of the 21 matrices" in notices(1000)[0]
    assert "k_proj, 32x64): more than 32" in notices(1000)[0]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["<b c>", "<a>", "ünï"], r'token 1 of the 3 (.|\n)*is "<a>", and "<b c>" in the recipe'),
        (["<a>", "<b c>"], r'token 3 of the 3 (.|\n)*is "ünï", and missing'),
        (["<a>", "<x>", "ünï"], r'token 2 of the 3 (.|\n)*is "<b c>", and "<x>" in the recipe'),
        (["<x>", *TOKENS], "token 1 of the 3"),
    ],
)
@pytest.mark.parametrize("saved", [[], ["embed_tokens", "lm_head"]])
def test_b94_going_on_with_other_tokens_is_refused(make_folder, recipe, tmp_path, asked, match, saved):
    place, options = make_folder(), {"kind": "lora", "rank": 4, "modules_to_save": saved}
    model = load_model(recipe(place, model={"new_tokens": TOKENS}, adapter=options), "cpu", "fp32")
    folder = export_adapter(model, tmp_path / "out", TOKENS)
    kept = {"kind": "lora", "path": str(folder)}
    with pytest.raises(ModelError, match=match):
        load_model(recipe(place, model={"new_tokens": asked}, adapter=kept), "cpu", "fp32")
    load_model(recipe(place, model={"new_tokens": [*TOKENS, "<a>"]}, adapter=kept), "cpu", "fp32")
    # More tokens are an extension where the whole matrices are trained, and untrained rows are refused.
    longer = recipe(place, model={"new_tokens": [*TOKENS, "<x>"]}, adapter=kept)
    if saved:
        assert load_model(longer, "cpu", "fp32").tokenizer.convert_tokens_to_ids("<x>") == 264
    else:
        with pytest.raises(ModelError, match=r"1 of model\.new_tokens are not trained by the adapter"):
            load_model(longer, "cpu", "fp32")


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({"init": "gaussian"}, r"adapter\.init=gaussian says how a new adapter begins"),
        ({"scaling": "standard"}, r"adapter\.scaling=standard, but .* has rslora"),
        ({"rank": 16}, r"adapter\.rank=16, but .* has 3"),
        ({"alpha": 32}, r"adapter\.alpha=32, but .* has 7"),
        ({"targets": ["all-linear"]}, r"adapter\.targets=all-linear, but the adapter has q_proj"),
    ],
)
def test_what_is_written_out_is_held_to_the_folder_even_where_it_is_the_default(
    make_folder, recipe, tmp_path, written, match
):
    place = make_folder()
    options = {"kind": "lora", "rank": 3, "alpha": 7, "targets": ["q_proj"], "scaling": "rslora"}
    folder = export_adapter(load_model(recipe(place, adapter=options), "cpu", "fp32"), tmp_path / "out")
    kept = {"kind": "lora", "path": str(folder)}
    with pytest.raises(ModelError, match=match):
        load_model(recipe(place, adapter={**kept, **written}), "cpu", "fp32")
    if "targets" not in written:
        with pytest.raises(ModelError, match=match):
            as_planned(recipe(place, adapter={**kept, **written}))
    # A run's own recipe has every default written out, and goes on.
    every = AdapterSection(**kept).model_dump()
    load_model(recipe(place, adapter=every), "cpu", "fp32")


def test_alphas_are_numbers_like_alpha(make_folder, recipe, tmp_path):
    options = {"kind": "lora", "rank": 4, "alpha": 8, "alphas": {"q_proj": 2.5, "v_proj": 3.0}}
    model, _, folder = there_and_back(recipe(make_folder(), adapter=options), tmp_path)
    layer = model.base.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == 0.625
    stored = json.loads((folder / "adapter_config.json").read_text())["alpha_pattern"]
    assert stored == {"q_proj": 2.5, "v_proj": 3}
    assert isinstance(stored["v_proj"], int)


@pytest.mark.parametrize(
    ("train_section", "match"),
    [
        ({"freeze": ["embed_tokens"]}, r"3 tokens are added, and their rows in model\.embed_tokens are not trained"),
        ({"freeze": ["lm_head"]}, r"rows in lm_head are not trained"),
        ({"last_blocks": 1}, r"rows in model\.embed_tokens and lm_head are not trained"),
        ({"modules": ["mlp"]}, r"rows in model\.embed_tokens and lm_head are not trained"),
    ],
)
def test_b94_new_tokens_whose_rows_stay_frozen_are_refused(make_folder, recipe, train_section, match):
    with pytest.raises(ModelError, match=match):
        load_model(recipe(make_folder(), model={"new_tokens": TOKENS}, train=train_section), "cpu", "fp32")
    trained = {"last_blocks": 1, "modules": ["embed_tokens", "lm_head"]}
    load_model(recipe(make_folder(), model={"new_tokens": TOKENS}, train=trained), "cpu", "fp32")
    tied = make_folder(name="tied", tie_word_embeddings=True)
    load_model(recipe(tied, model={"new_tokens": TOKENS}, train={"modules": ["embed_tokens"]}), "cpu", "fp32")
