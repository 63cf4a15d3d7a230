"""Adapters: every target is matched and trained, every stored key finds its place, first weights depend on the seed."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from finetune.errors import ModelError
from finetune.kernels.keyed_dropout import DrawKey, KeyedDropout, key_dropouts
from finetune.models.adapters import attach


@pytest.fixture
def section(recipe):
    return lambda **values: recipe("x", adapter={"kind": "lora", "rank": 4, **values}).adapter


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_all_linear_is_every_linear_of_the_blocks_and_not_the_head(make_base, section):
    module, notices = attach(make_base(), section(), "base", 0)
    assert len(trained(module)) == 3 * 7 * 2
    assert not any("lm_head" in name for name in trained(module))
    assert all(p.dtype == torch.float32 for p in trained(module).values())
    count = 3 * 4 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 48))
    assert any("all-linear: 21 modules in 3 of 3 blocks" in notice for notice in notices)
    assert any(f"{count:,} parameters are trained" in notice for notice in notices)
    assert sorted(module.peft_config["default"].target_modules) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_b106_one_misspelt_entry_is_an_error_that_lists_every_fault(make_base, section):
    with pytest.raises(ModelError, match=r"'qq_proj' matches nothing.*did you mean 'q_proj'.*'mlp' selects .*LlamaMLP"):
        attach(make_base(), section(targets="q_proj,qq_proj,mlp"), "base", 0)


def test_b106_matches_of_each_entry_are_shown_with_the_blocks_they_are_in(make_base, section):
    targets = "q_proj,layers.1.mlp.up_proj,model.layers.[02].self_attn.v_proj,*.down_proj"
    module, notices = attach(make_base(), section(targets=targets), "base", 0)
    shown = " ".join(notices)
    assert "q_proj: 3 modules in 3 of 3 blocks" in shown
    assert "layers.1.mlp.up_proj: 1 modules in 1 of 3 blocks" in shown
    assert "model.layers.[02].self_attn.v_proj: 2 modules in 2 of 3 blocks" in shown
    assert "*.down_proj: 3 modules in 3 of 3 blocks" in shown
    assert len(trained(module)) == 2 * (3 + 1 + 2 + 3)


@pytest.mark.parametrize("targets", ["q_proj,embed_tokens,lm_head", "all-linear,lm_head,embed_tokens"])
def test_b107_embedding_and_head_that_are_listed_are_trained(make_base, section, targets):
    module, _ = attach(make_base(), section(targets=targets), "base", 0)
    before = {name: p.detach().clone() for name, p in trained(module).items()}
    assert any("embed_tokens" in name for name in before)
    assert any("lm_head" in name for name in before)
    optimizer = torch.optim.SGD(list(trained(module).values()), lr=0.5)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for _ in range(3):
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(before[name], p) for name, p in trained(module).items())


@pytest.mark.parametrize("targets", ["q_proj,lm_head", "embed_tokens"])
def test_b107_a_shared_embedding_is_refused_by_name(make_base, section, targets):
    with pytest.raises(ModelError, match="shares between embedding and head"):
        attach(make_base(tie_word_embeddings=True), section(targets=targets), "base", 0)


def test_b107_head_with_dropout_is_refused(make_base, section):
    with pytest.raises(ModelError, match=r"'lm_head' is the head(.|\n)*adapter\.dropout=0"):
        attach(make_base(), section(targets="lm_head", dropout=0.1), "base", 0)


def test_b116_first_weights_depend_on_the_seed_alone(make_base, section):
    torch.manual_seed(1)
    one = trained(attach(make_base(), section(), "base", 7)[0])
    torch.manual_seed(2)
    state = torch.get_rng_state()
    same = trained(attach(make_base(), section(), "base", 7)[0])
    other = trained(attach(make_base(), section(), "base", 8)[0])
    torch.manual_seed(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_b116_the_callers_generator_is_left_alone(make_base, section):
    base = make_base()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    attach(base, section(), "base", 0)
    assert torch.equal(torch.rand(4), expected)


def test_dropout_of_the_adapter_is_keyed_and_independent_of_the_micro_batch(make_base, section):
    module, _ = attach(make_base(), section(dropout=0.5, targets="q_proj,down_proj"), "base", 0)
    for name, parameter in trained(module).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    key = DrawKey(0)
    assert key_dropouts(module, key) == 6
    assert sum(isinstance(child, KeyedDropout) for child in module.modules()) == 6
    module.train()
    ids = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([5, 2, 9, 4])
    key.set(1, rows)
    whole = module(input_ids=ids).logits
    for size in (1, 2):
        parts = []
        for start in range(0, 4, size):
            key.set(1, rows[start : start + size])
            parts.append(module(input_ids=ids[start : start + size]).logits)
        assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    key.set(2, rows)
    assert not torch.allclose(module(input_ids=ids).logits, whole, atol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_b132_checkpointing_gives_the_adapter_the_same_gradients(make_base, section, reentrant):
    module, _ = attach(make_base(), section(dropout=0.2), "base", 0)
    key_dropouts(module, DrawKey(0, 0, torch.tensor([0])))
    module.train()
    for name, parameter in trained(module).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])

    def gradients():
        module.zero_grad()
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in trained(module).items()}

    plain = gradients()
    base = module.get_base_model()
    if reentrant:
        base.enable_input_require_grads()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    checkpointed = gradients()
    assert any(value.any() for value in plain.values())
    for name, value in plain.items():
        assert torch.allclose(value, checkpointed[name], atol=1e-5)


@pytest.fixture
def stored(make_base, section, tmp_path):
    """A folder with an adapter whose B is not zero, and the logits of its model."""
    module, _ = attach(make_base(), section(alpha=8), "base", 0)
    for parameter in trained(module).values():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    module.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with torch.no_grad():
        return tmp_path / "adapter", module(input_ids=torch.tensor([[1, 2, 3]])).logits


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_going_on_from_a_folder_takes_its_settings_and_weights(make_base, recipe, stored):
    folder, logits = stored
    adapter = recipe("x", adapter={"kind": "lora", "path": str(folder)}).adapter
    module, notices = attach(make_base(), adapter, "base", 0)
    assert module.peft_config["default"].r == 4
    assert module.peft_config["default"].base_model_name_or_path == "base"
    with torch.no_grad():
        assert torch.allclose(module(input_ids=torch.tensor([[1, 2, 3]])).logits, logits, atol=1e-6)
    assert len(trained(module)) == 42
    assert any(str(folder) in notice for notice in notices)
    module.save_pretrained(folder.parent / "again", save_embedding_layers=False)
    assert isinstance(PeftModel.from_pretrained(make_base(), folder.parent / "again"), PeftModel)


def test_going_on_with_another_rank_alpha_or_targets_is_a_contradiction(make_base, recipe, stored):
    for field, value in (("rank", 8), ("alpha", 64), ("targets", "q_proj")):
        adapter = recipe("x", adapter={"kind": "lora", "path": str(stored[0]), field: value}).adapter
        with pytest.raises(ModelError, match=rf"adapter\.{field}"):
            attach(make_base(), adapter, "base", 0)
    same = recipe("x", adapter={"kind": "lora", "path": str(stored[0]), "rank": 4, "alpha": 8, "dropout": 0.1}).adapter
    assert any("dropout is the recipe's 0.1" in notice for notice in attach(make_base(), same, "base", 0)[1])


def test_going_on_with_the_same_targets_in_other_words_is_no_contradiction(make_base, recipe, tmp_path):
    def adapter(**values):
        return recipe("x", adapter={"kind": "lora", "targets": "layers.[02].mlp.up_proj,q_proj", **values}).adapter

    module, _ = attach(make_base(), adapter(), "base", 0)
    module.save_pretrained(tmp_path, save_embedding_layers=False)
    again, _ = attach(make_base(), adapter(path=str(tmp_path)), "base", 0)
    assert trained(again).keys() == trained(module).keys()


def test_b97_a_wrong_prefix_is_an_error_with_counts_and_examples(make_base, section, stored):
    folder = stored[0]
    weights = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("model.layers", "language_model.layers"): value for name, value in weights.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"0 of the adapter's 42 tensors.*adapter only: .*language.*model only: "):
        attach(make_base(), section(path=str(folder), alpha=8), "base", 0)
    partly = dict(list(weights.items())[:40])
    save_file(partly, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="40 of the adapter's 40 tensors matched the model's 42 places; model only"):
        attach(make_base(), section(path=str(folder), alpha=8), "base", 0)


def test_b94_an_adapter_of_another_width_is_refused_with_both_shapes(make_base, section, stored):
    with pytest.raises(ModelError, match=r"\[32, 4\] in the adapter and \[40, 4\] in the model"):
        attach(make_base(hidden_size=40), section(path=str(stored[0]), alpha=8), "base", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"adapter\.kind=lora, but .* has dora"),
        ({"modules_to_save": ["lm_head"]}, r"42 tensors matched the model's 43 places; model only: .*lm_head"),
        ({"trainable_token_indices": {"embed_tokens": [5]}}, r"model only: .*embed_tokens\.token_adapter"),
        ({"trainable_token_indices": [320]}, r"1 new tokens, which this model does not have"),
        ({"init_lora_weights": "pissa"}, "belongs onto a changed base"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "IA3"}, "IA3, not LoRA"),
        ({"target_modules": ".*q_proj"}, "regular expression"),
        ({"target_modules": None}, "target_modules of adapter_config.json is None"),
        ({"target_modules": 5}, "target_modules of adapter_config.json is 5"),
        ({"r": "four"}, "r of adapter_config.json is 'four'"),
        ({"lora_alpha": None}, "lora_alpha of adapter_config.json is None"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused_by_name(make_base, section, stored, change, message):
    edit(stored[0], **change)
    with pytest.raises(ModelError, match=message):
        attach(make_base(), section(path=str(stored[0]), alpha=8), "base", 0)


def test_folders_without_an_adapter_or_with_a_pickle_are_refused(make_base, section, stored):
    folder = stored[0]
    with pytest.raises(ModelError, match=r"did you mean .*adapter\?"):
        attach(make_base(), section(path=str(folder.parent / "adaptr")), "base", 0)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        attach(make_base(), section(path=str(folder)), "base", 0)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "[" * 100_000])
def test_an_adapter_config_that_holds_no_settings_is_refused(make_base, section, stored, text):
    (stored[0] / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"adapter_config\.json (holds|is not JSON)"):
        attach(make_base(), section(path=str(stored[0])), "base", 0)
