"""Every adapter option there and back: train, export, reload with peft and transformers, go on from the folder."""

import json

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint.export import export_adapter, export_merged
from finetune.checkpoint.verify import verify_adapter, verify_merged
from finetune.config.schema import AdapterSection
from finetune.errors import ModelError
from finetune.models.adapter_folder import as_planned
from finetune.models.load import load_base, load_model, load_tokenizer
from finetune.models.new_tokens import tokens_of

IDS = (torch.arange(24) * 11 + 3).remainder(256).reshape(2, 12)
OPTIONS = {
    "rslora": {"scaling": "rslora"},
    "gaussian": {"init": "gaussian"},
    "dora": {"kind": "dora"},
    "dora-rslora": {"kind": "dora", "scaling": "rslora", "ranks": {"q_proj": 2}},
    "pissa": {"init": "pissa"},
    "pissa-rslora": {"init": "pissa", "scaling": "rslora", "ranks": {"up_proj": 3}, "alphas": {"q_proj": 5}},
    "olora": {"init": "olora", "alpha": 4},
    "ranks": {"ranks": {"q_proj": 2, "layers.1.mlp.*": 6}, "alphas": {"*.v_proj": 3}},
    "whole norms": {"modules_to_save": ["norm", "input_layernorm"]},
    "whole head": {"modules_to_save": ["lm_head"], "targets": ["q_proj", "v_proj"]},
    "whole vocabulary": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "whole, pissa": {"modules_to_save": ["lm_head"], "init": "pissa"},
}


def train(model, steps=2, ids=IDS):
    """A few plain steps with a rate large enough that everything trained shows in the logits."""
    model.module.train()
    parameters = list(model.trainable().values())
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=2e-2)
    for _ in range(steps):
        model.module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.module.eval()
    assert all(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
    return model


@torch.no_grad()
def logits(module, ids=IDS):
    return module.eval()(input_ids=ids, use_cache=False).logits


def there_and_back(made, place, tolerance=1e-4):
    """Trains, exports both ways, and compares what peft, transformers and this toolkit read with the live model."""
    model = train(load_model(made, "cpu", "fp32"))
    live = logits(model.module)
    base = load_base(made, "cpu", "fp32")
    plain = AutoModelForCausalLM.from_pretrained(base) if isinstance(base, str) else base
    assert (logits(plain)[..., : live.shape[-1]] - live).abs().max() > 100 * tolerance
    folder = export_adapter(model, place / "adapter", tokens_of(made.model))
    assert verify_adapter(folder, model, base if isinstance(base, str) else plain) < tolerance
    merged = export_merged(model, place / "merged")
    assert verify_merged(merged, model) < tolerance
    kept = AdapterSection(kind=made.adapter.kind, path=str(folder))
    again = load_model(made.model_copy(update={"adapter": kept}), "cpu", "fp32")
    torch.testing.assert_close(logits(again.module), live, atol=tolerance, rtol=0)
    return model, again, folder


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_comes_back_with_equal_logits(make_folder, recipe, tmp_path, name):
    options = {"kind": "lora", "rank": 4, "alpha": 8, **OPTIONS[name]}
    made = recipe(make_folder(), adapter=options)
    model, again, folder = there_and_back(made, tmp_path)
    # What goes on is trained as the first was, and comes back again.
    if "pissa" not in name and "olora" not in name:
        assert set(again.trainable()) == set(model.trainable())
    live = logits(train(again).module)
    second = export_adapter(again, tmp_path / "second")
    fresh = AutoModelForCausalLM.from_pretrained(made.model.path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(fresh, second)), live, atol=1e-4, rtol=0)
    assert json.loads((folder / "adapter_config.json").read_text())["init_lora_weights"] in (True, "gaussian")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_inits_from_the_base_leave_the_model_as_it_was(make_folder, recipe, init):
    folder = make_folder()
    model = load_model(recipe(folder, adapter={"kind": "lora", "rank": 4, "init": init}), "cpu", "fp32")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model.module), logits(plain), atol=1e-4, rtol=0)
    name = "model.layers.0.mlp.up_proj"
    residual = model.base.get_submodule(name).get_base_layer().weight
    assert (residual - plain.get_submodule(name).weight).abs().max() > 1e-2
    assert all("initial" not in name for name in model.trainable())
    assert any("twice the rank" in notice for notice in model.notices)


def test_the_first_step_of_pissa_is_along_the_largest_singular_values(make_folder, recipe):
    folder = make_folder()
    model = load_model(recipe(folder, adapter={"kind": "lora", "rank": 4, "alpha": 8, "init": "pissa"}), "cpu", "fp32")
    weight = AutoModelForCausalLM.from_pretrained(folder).get_submodule("model.layers.0.mlp.up_proj").weight
    layer = model.base.get_submodule("model.layers.0.mlp.up_proj")
    product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    values = torch.linalg.svdvals(weight)
    torch.testing.assert_close(torch.linalg.svdvals(product)[:4], values[:4], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.linalg.svdvals(layer.get_base_layer().weight)[0], values[4], rtol=1e-4, atol=1e-5)


def test_ranks_and_alphas_go_to_the_layers_that_they_name(make_folder, recipe):
    options = {
        "kind": "lora",
        "rank": 4,
        "alpha": 8,
        "ranks": {"q_proj": 2, "layers.1.mlp.*": 6},
        "alphas": {"*.v_proj": 3},
    }
    model = load_model(recipe(make_folder(), adapter=options), "cpu", "fp32")
    layers = {name: child for name, child in model.base.named_modules() if isinstance(child, LoraLayer)}
    assert len(layers) == 21
    for name, child in layers.items():
        rank = 2 if name.endswith("q_proj") else 6 if "layers.1.mlp" in name else 4
        alpha = 3 if name.endswith("v_proj") else 8
        assert (child.r["default"], child.scaling["default"]) == (rank, alpha / rank), name
    assert any("q_proj 2" in notice for notice in model.notices)


def test_rslora_scales_by_the_root_of_the_rank(make_folder, recipe):
    model = load_model(
        recipe(make_folder(), adapter={"kind": "lora", "rank": 4, "alpha": 6, "scaling": "rslora"}), "cpu", "fp32"
    )
    scales = {child.scaling["default"] for child in model.base.modules() if isinstance(child, LoraLayer)}
    assert scales == {3.0}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks": {"qproj": 2}}, r"'qproj' selects none(.|\n)*did you mean 'q_proj'"),
        ({"targets": ["q_proj"], "ranks": {"v_proj": 2}}, "selects none of the adapter's layers"),
        ({"ranks": {"q_proj": 2, "layers.0.self_attn.q_proj": 3}}, "is selected twice"),
        ({"modules_to_save": ["lm_heat"]}, r"'lm_heat' matches nothing with weights(.|\n)*did you mean 'lm_head'"),
        ({"modules_to_save": ["mlp"]}, "is to be trained whole, and adapter.targets puts an adapter on"),
        ({"kind": "dora", "targets": ["q_proj", "embed_tokens"]}, "adapter.kind=dora is for linear layers"),
        ({"init": "pissa", "targets": ["embed_tokens"]}, "adapter.init=pissa is for linear layers"),
    ],
)
def test_b106_options_that_select_nothing_or_clash_are_refused(make_folder, recipe, options, match):
    with pytest.raises(ModelError, match=match):
        load_model(recipe(make_folder(), adapter={"kind": "lora", "rank": 4, **options}), "cpu", "fp32")


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_b92_a_tied_matrix_that_is_trained_whole_stays_tied(make_folder, recipe, tmp_path, saved):
    made = recipe(
        make_folder(tie_word_embeddings=True),
        adapter={"kind": "lora", "rank": 4, "targets": ["q_proj"], "modules_to_save": saved},
    )
    model, _, _ = there_and_back(made, tmp_path)
    assert model.base.get_input_embeddings().weight is model.base.get_output_embeddings().weight
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def test_b96_whole_layers_are_said_to_be_no_adapter_for_servers(make_folder, recipe, tmp_path):
    made = recipe(make_folder(), adapter={"kind": "lora", "rank": 4, "modules_to_save": ["lm_head"]})
    folder = export_adapter(train(load_model(made, "cpu", "fp32")), tmp_path / "out")
    notices = json.loads((folder / "finetune.json").read_text())["notices"]
    assert any("vLLM and llama.cpp do not" in notice for notice in notices)


def test_b100_a_dora_folder_is_not_gone_on_from_as_lora(make_folder, recipe, tmp_path):
    place = make_folder()
    folder = export_adapter(train(load_model(recipe(place, adapter={"kind": "dora"}), "cpu", "fp32")), tmp_path / "out")
    assert any("magnitude" in name for name in load_file(folder / "adapter_model.safetensors"))
    with pytest.raises(ModelError, match=r"adapter\.kind=lora, but .* has dora(.|\n)*set adapter\.kind=dora"):
        load_model(recipe(place, adapter={"kind": "lora", "path": str(folder)}), "cpu", "fp32")


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_b100_dora_over_a_quantised_base(make_folder, recipe, tmp_path, base):
    made = recipe(make_folder(), model={"base": base}, adapter={"kind": "dora", "rank": 4})
    model = train(load_model(made, "cpu", "fp32"))
    folder = export_adapter(model, tmp_path / "adapter")
    assert verify_adapter(folder, model, load_base(made, "cpu", "fp32")) < 1e-4
    merged = export_merged(model, tmp_path / "merged")
    assert verify_merged(merged, model) < 1e-3
    notices = json.loads((merged / "finetune.json").read_text())["notices"]
    kind = "4-bit" if base == "nf4" else base
    assert any(f"21 {kind} layers are dequantised" in notice and "approximate" in notice for notice in notices)


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_b90_an_8_bit_base_is_merged_decoded(make_folder, recipe, tmp_path, base):
    made = recipe(make_folder(), model={"base": base}, adapter={"kind": "lora", "rank": 4})
    model = train(load_model(made, "cpu", "fp32"))
    assert verify_merged(export_merged(model, tmp_path / "whole"), model) < 1e-4
    merged = export_merged(model, tmp_path / "merged", torch.bfloat16)
    stored = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not any("codes" in name or "scale" in name for name in stored)


def test_the_plan_counts_the_folders_rank_and_targets(make_folder, recipe, tmp_path):
    place = make_folder()
    options = {"kind": "lora", "rank": 3, "alpha": 7, "targets": ["q_proj", "up_proj"], "scaling": "rslora"}
    folder = export_adapter(load_model(recipe(place, adapter=options), "cpu", "fp32"), tmp_path / "out")
    planned = as_planned(recipe(place, adapter={"kind": "lora", "path": str(folder)})).adapter
    assert (planned.rank, planned.alpha, planned.scaling) == (3, 7.0, "rslora")
    assert planned.targets == ("q_proj", "up_proj")
    assert planned.path == str(folder)
    with pytest.raises(ModelError, match=r"adapter\.rank=8, but .* has 3"):
        as_planned(recipe(place, adapter={"kind": "lora", "path": str(folder), "rank": 8}))
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing"):
        as_planned(recipe(place, adapter={"kind": "lora", "path": str(tmp_path)}))


def test_adapters_that_began_in_a_changed_base_are_refused(make_folder, recipe, tmp_path):
    from peft import LoraConfig, get_peft_model

    place = make_folder()
    base = AutoModelForCausalLM.from_pretrained(place)
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")).save_pretrained(
        tmp_path / "p"
    )
    with pytest.raises(ModelError, match="init_lora_weights=pissa, so it belongs onto a changed base"):
        load_model(recipe(place, adapter={"kind": "lora", "path": str(tmp_path / "p")}), "cpu", "fp32")


TOKENS = ["<a>", "<b c>", "ünï"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [261, 320])
@pytest.mark.parametrize("saved", [[], ["embed_tokens", "lm_head"]])
def test_b94_new_tokens_come_back_with_their_rows(make_folder, recipe, tmp_path, tied, rows, saved):
    place = make_folder(tie_word_embeddings=tied, vocab_size=rows)
    made = recipe(place, model={"new_tokens": TOKENS}, adapter={"kind": "lora", "rank": 4, "modules_to_save": saved})
    model = load_model(made, "cpu", "fp32")
    old = AutoModelForCausalLM.from_pretrained(place)
    ids = model.tokenizer.convert_tokens_to_ids(TOKENS)
    assert ids == [261, 262, 263]
    grown = max(264, rows)
    for side, original in (
        (model.base.get_input_embeddings(), old.get_input_embeddings()),
        (model.base.get_output_embeddings(), old.get_output_embeddings()),
    ):
        assert side.weight.shape[0] == grown
        torch.testing.assert_close(side.weight[ids], original.weight[:261].mean(0).expand(3, -1))
        assert torch.equal(side.weight[:261], original.weight[:261])
    assert model.tokenizer("x<b c>y", add_special_tokens=False)["input_ids"] == [120, 262, 121]
    batch = torch.tensor([[1, 2, 261, 3, 262, 263, 4, 261, 9]])
    train(model, ids=batch)
    live = logits(model.module, batch)
    # Only the new rows of the base's matrices moved.
    if not saved:
        assert torch.equal(model.base.get_input_embeddings().weight[:261], old.get_input_embeddings().weight[:261])
    folder = export_adapter(model, tmp_path / "adapter", tokens_of(made.model))
    verify_adapter(folder, model, load_base(made, "cpu", "fp32"))
    merged = export_merged(model, tmp_path / "merged")
    verify_merged(merged, model)
    reloaded = AutoModelForCausalLM.from_pretrained(merged)
    assert reloaded.config.vocab_size == reloaded.get_input_embeddings().weight.shape[0] == grown
    assert reloaded.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits(reloaded, batch), live, atol=1e-4, rtol=0)
    for result in (folder, merged):
        assert AutoTokenizer.from_pretrained(result).convert_tokens_to_ids(TOKENS) == ids
    # As the folder's note says: resize, then plain peft.
    note = (folder / "README.md").read_text()
    assert f"base.resize_token_embeddings({grown})" in note
    old.resize_token_embeddings(grown)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(old, folder), batch), live, atol=1e-4, rtol=0)
    # Going on, and what is said when the tokens are left out.
    kept = AdapterSection(kind="lora", path=str(folder))
    again = load_model(made.model_copy(update={"adapter": kept}), "cpu", "fp32")
    torch.testing.assert_close(logits(again.module, batch), live, atol=1e-4, rtol=0)
    assert set(again.trainable()) == set(model.trainable())
    with pytest.raises(
        ModelError, match=r"trained with 3 new tokens(.|\n)*model\.new_tokens=\[\"<a>\", \"<b c>\", \"ünï\"\]"
    ):
        load_model(recipe(place, adapter=kept.model_dump()), "cpu", "fp32")


def test_b94_full_training_with_new_tokens_goes_on_from_its_own_result(make_folder, recipe, tmp_path):
    made = recipe(make_folder(vocab_size=261), model={"new_tokens": TOKENS})
    model = train(load_model(made, "cpu", "fp32"))
    folder = export_merged(model, tmp_path / "out")
    again = load_model(recipe(folder, model={"new_tokens": TOKENS}), "cpu", "fp32")
    assert again.base.get_input_embeddings().weight.shape[0] == 264
    torch.testing.assert_close(logits(again.module), logits(model.module), atol=1e-5, rtol=0)
    assert any("3 of model.new_tokens are in the vocabulary already" in notice for notice in again.notices)


def test_new_tokens_of_a_file_join_those_of_the_recipe(tiny, recipe, tmp_path):
    (tmp_path / "tokens.txt").write_text("<b>\n\n<c>\n<a>\n")
    section = recipe(tiny, model={"new_tokens": ["<a>"], "new_tokens_path": str(tmp_path / "tokens.txt")}).model
    assert tokens_of(section) == ("<a>", "<b>", "<c>")
    assert load_tokenizer(section).convert_tokens_to_ids(["<a>", "<b>", "<c>"]) == [261, 262, 263]
    (tmp_path / "empty.txt").write_text("\n")
    for name, what in (("empty.txt", "holds no token"), ("none.txt", "cannot be read")):
        with pytest.raises(ModelError, match=what):
            tokens_of(recipe(tiny, model={"new_tokens_path": str(tmp_path / name)}).model)


def test_new_tokens_and_an_adapter_on_the_embedding_are_refused(make_folder, recipe):
    made = recipe(make_folder(), model={"new_tokens": TOKENS}, adapter={"kind": "lora", "targets": ["embed_tokens"]})
    with pytest.raises(ModelError, match=r"rows of new tokens(.|\n)*adapter\.modules_to_save"):
        load_model(made, "cpu", "fp32")
