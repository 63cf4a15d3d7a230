"""Loading: precision, refusals by name, and messages that say what to do."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, T5Config

from finetune.errors import InputError, ModelError
from finetune.generate.engine import answer
from finetune.models.load import load_config, load_model, load_tokenizer
from finetune.models.shapes import shape_for
from finetune.models.verify import check_lengths
from tests.unit.models.conftest import WIDTHS

LORA = {"kind": "lora", "rank": 4}


def edit(folder, file="config.json", **changes):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def dtypes(parameters):
    return {p.dtype for p in parameters}


def test_fp32_is_fp32_everywhere(tiny, recipe, shape):
    model = load_model(recipe(tiny, adapter=LORA), "cpu", "fp32", shape=shape)
    assert dtypes(model.module.parameters()) == {torch.float32}
    assert model.source == tiny
    assert model.base.config._attn_implementation == "sdpa"
    assert model.tokenizer.pad_token == "<|pad|>"


def test_bf16_holds_frozen_weights_in_bf16_and_trained_ones_in_fp32(tiny, recipe, shape):
    model = load_model(recipe(tiny, adapter=LORA), "cpu", "bf16", shape=shape)
    assert dtypes(model.trainable().values()) == {torch.float32}
    assert dtypes(p for p in model.module.parameters() if not p.requires_grad) == {torch.bfloat16}
    assert any("stored in float32 and held in bfloat16" in notice for notice in model.notices)


def test_bf16_full_training_holds_fp32_and_says_so(tiny, recipe, shape):
    model = load_model(recipe(tiny), "cpu", "bf16", shape=shape)
    assert dtypes(model.module.parameters()) == {torch.float32}
    assert len(model.trainable()) == len(list(model.module.parameters()))
    assert any("held in fp32" in notice for notice in model.notices)
    answering = load_model(recipe(tiny), "cpu", "bf16", shape=shape, training=False)
    assert dtypes(answering.module.parameters()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("trained", "said"), [("stochastic", "keyed draw"), ("split", "the other 16 bits"), ("bf16", "nothing is learned")]
)
def test_b127_trained_weights_in_16_bits_are_asked_for_and_said(tiny, recipe, shape, trained, said):
    wanted = recipe(tiny).model_copy(update={"model": recipe(tiny).model.model_copy(update={"trained": trained})})
    model = load_model(wanted, "cpu", "bf16", shape=shape)
    assert dtypes(model.trainable().values()) == {torch.bfloat16}
    assert any(said in notice for notice in model.notices)
    assert any("stored in float32; what bf16 cannot show" in notice for notice in model.notices)
    with pytest.raises(
        ModelError, match=f"model.trained={trained} keeps weights in bf16, and this run computes in fp32"
    ):
        load_model(wanted, "cpu", "fp32", shape=shape)


def test_eager_attention_is_the_recipes(tiny, recipe, shape):
    model = load_model(recipe(tiny, model={"attention": "eager"}), "cpu", "fp32", shape=shape)
    assert model.base.config._attn_implementation == "eager"


def test_b116_every_rank_gets_the_same_weights(tiny, recipe, shape):
    models = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        models.append(load_model(recipe(tiny, adapter=LORA, train={"seed": 3}), "cpu", "fp32", shape=shape))
    first, second = (dict(model.module.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["mistral", "qwen2-sliding", "qwen3"])
def test_other_decoders_load_packed(kind, make_folder, recipe, shape):
    model = load_model(recipe(make_folder(kind), data={"pack": True}), "cpu", "fp32", shape=shape)
    assert len(model.blocks) == 3


def test_a_folder_with_pickles_only_is_refused_with_the_remedy(make_folder, recipe, shape):
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle(.|\n)*save_pretrained"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


def test_weights_that_are_missing_are_an_error_and_unused_ones_a_notice(make_folder, recipe, shape):
    folder = make_folder()
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "visual.extra": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(recipe(folder), "cpu", "fp32", shape=shape)
    assert any("1 stored tensors are not used" in notice and "visual.extra" in notice for notice in model.notices)
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights .*lm_head\.weight.*would be random"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


def test_a_mistyped_folder_names_the_nearest(make_folder, recipe):
    folder = make_folder(name="my-llama")
    with pytest.raises(ModelError, match=r"did you mean .*my-llama\?"):
        load_config(recipe(folder.parent / "my-lama").model)
    with pytest.raises(ModelError, match="no such folder"):
        load_config(recipe("./nothing/of/that/kind").model)


def test_a_folder_that_is_no_model_says_what_it_is(tmp_path, recipe):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"this is an adapter(.|\n)*adapter\.path"):
        load_config(recipe(tmp_path).model)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(ModelError, match=r"config\.json is missing \(weights\.gguf is a GGUF"):
        load_config(recipe(tmp_path).model)
    with pytest.raises(ModelError, match="is a file"):
        load_config(recipe(tmp_path / "weights.gguf").model)


def test_a_hub_id_without_a_hub_is_one_clear_error(recipe, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"hub is switched off(.|\n)*builtin:smollm2-135m"):
        load_config(recipe("no-such-owner/no-such-model").model)


def test_gated_missing_and_unreachable_hub_models_each_have_their_remedy():
    from finetune.models.source import Source, hub_fault

    source = Source("owner/name", "owner/name", hub=True, offline=False)
    kinds = {
        "GatedRepoError": "hf auth login",
        "RevisionNotFoundError": "revision",
        "ConnectError": "cannot be reached",
    }
    for name, remedy in kinds.items():
        error = OSError("something general")
        error.__cause__ = type(name, (Exception,), {})("the cause")
        assert remedy in str(hub_fault(error, source, False))


def test_code_of_the_model_does_not_run_unless_the_recipe_says_so(make_folder, recipe):
    folder = make_folder()
    edit(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"its own Python code(.|\n)*model\.trust_remote_code=true"):
        load_config(recipe(folder).model)


def test_architectures_that_are_not_text_decoders_are_refused_by_name(tmp_path, recipe):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"T5Config \(model type t5\) is an encoder-decoder"):
        load_config(recipe(tmp_path).model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match=r"ViTConfig .*not a causal language model"):
        load_config(recipe(tmp_path).model)


def test_logits_changed_in_a_way_that_is_not_known_are_refused(make_folder, recipe):
    folder = make_folder()
    edit(folder, final_logit_softcapping=30.0)
    with pytest.raises(ModelError, match=r"final_logit_softcapping=30.*not known here"):
        load_config(recipe(folder).model)


def test_attention_dropout_is_refused_in_training_with_the_remedy(make_folder, recipe, shape):
    folder = make_folder()
    edit(folder, attention_dropout=0.1)
    with pytest.raises(ModelError, match=r"attention_dropout=0\.1(.|\n)*set attention_dropout to 0"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)
    load_model(recipe(folder), "cpu", "fp32", shape=shape, training=False)


def gpt2(folder, tokenizer, **rates):
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, **rates)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_dropout_modules_are_allowed_and_functional_draws_are_found(tiny, tmp_path, recipe, shape, monkeypatch):
    folder = gpt2(tmp_path / "gpt2", AutoTokenizer.from_pretrained(tiny), attn_pdrop=0.0)
    model = load_model(recipe(folder, data={"pack": True}), "cpu", "fp32", shape=shape)
    assert any(isinstance(child, nn.Dropout) and child.p > 0 for child in model.module.modules())
    block = type(model.blocks[0])
    forward = block.forward

    def noisy(self, hidden, *arguments, **named):
        return forward(self, nn.functional.dropout(hidden, 0.1, self.training), *arguments, **named)

    monkeypatch.setattr(block, "forward", noisy)
    with pytest.raises(ModelError, match="GPT2LMHeadModel draws at random inside its functions"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


def test_a_tokenizer_with_more_ids_than_rows_is_refused(make_folder, recipe, shape):
    folder = make_folder(vocab_size=259)
    with pytest.raises(ModelError, match="ids up to 260 and the embedding 259 rows"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


def test_a_missing_pad_token_is_chosen_and_said(make_folder, tiny, recipe, shape):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.pad_token = None
    folder = make_folder(tokenizer=tokenizer)
    assert load_tokenizer(recipe(folder).model).pad_token == "<|eos|>"
    model = load_model(recipe(folder), "cpu", "fp32", shape=shape)
    assert any("no pad token; '<|eos|>' is used" in notice for notice in model.notices)


def test_loading_leaves_the_callers_random_state_alone(tiny, recipe, shape):
    torch.manual_seed(4)
    state = torch.get_rng_state()
    load_model(recipe(tiny, adapter={**LORA, "dropout": 0.1}), "cpu", "fp32", shape=shape)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "null"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "[]"),
    ],
)
def test_broken_files_of_a_model_are_one_message(make_folder, recipe, shape, file, text):
    folder = make_folder()
    (folder / file).write_text(text)
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 100}, {"hidden_size": 63}, {"num_attention_heads": 0}, {"hidden_act": "nope"}]
)
def test_numbers_of_a_config_that_make_no_model_are_one_message(make_folder, recipe, change):
    folder = make_folder()
    edit(folder, **change)
    with pytest.raises(ModelError, match=r"no causal language model for it|the model cannot be loaded"):
        shape_for(recipe(folder))


def test_a_revision_of_a_folder_is_refused(make_folder, recipe):
    for path in (make_folder(), "builtin:tiny"):
        with pytest.raises(ModelError, match="it has no revisions"):
            load_config(recipe(path, model={"revision": "v2"}).model)


def test_weights_that_are_no_numbers_are_said_to_be_so(make_folder, recipe, shape):
    folder = make_folder()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="logits that are not finite numbers"):
        load_model(recipe(folder), "cpu", "fp32", shape=shape)


def test_b41_positions_that_a_model_does_not_have(tiny, tmp_path, recipe, make_folder):
    rates = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
    whole = recipe(gpt2(tmp_path / "gpt2", AutoTokenizer.from_pretrained(tiny), **rates))
    learned = load_model(whole, "cpu", "fp32")
    assert check_lengths(learned, 64, 64) == []
    with pytest.raises(ModelError, match=r"has 64 learned positions; a row has 65 tokens(.|\n)*data\.max_tokens=64"):
        check_lengths(learned, 65, 20)
    settings = whole.generate.model_copy(update={"max_tokens": 64})
    assert len(answer(learned, [[5] * 60, [5]], settings, "fp32")) == 2
    with pytest.raises(InputError, match="a prompt of 64 tokens leaves no room in 64 positions"):
        answer(learned, [[5] * 64], settings, "fp32")
    rotary = load_model(recipe(make_folder()), "cpu", "fp32")
    assert check_lengths(rotary, 4096, 128) == []
    assert "has 129 tokens; the model was made for 128" in check_lengths(rotary, 4096, 129)[0]


GEMMA2 = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8, "head_dim": 8}


def changed_logits(kind):
    """A tiny model of a family that changes its logits after the head."""
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    config, model, more = {
        "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**GEMMA2, "attn_implementation": "eager"}),
        "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}),
        "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
    }[kind]
    torch.manual_seed(0)
    return model(config(**{**WIDTHS, **more}))


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_models_that_change_their_logits_train_by_their_own_loss(tiny, recipe, tmp_path, make_batch, kind, adapter):
    from finetune.memory.chunked_loss import loss_sum
    from finetune.models.decoder import hidden_states

    changed_logits(kind).save_pretrained(tmp_path)
    load_tokenizer(recipe(tiny).model).save_pretrained(tmp_path)
    made = recipe(tmp_path, model={"attention": "eager"}, adapter={"kind": adapter})
    model = load_model(made, "cpu", "fp32")
    assert model.shape.changed_logits
    batch = make_batch([[[1, 2, 3, 4, 5, 9, 8, 7, 6]], [[5, 6, 7, 3, 9, 1, 0, 2, 11]]])
    own = model.module(input_ids=batch.input_ids, labels=batch.labels)
    for chunk in (0, 3):
        total = loss_sum(hidden_states(model, batch), model.head, batch.labels, chunk, model.base.config)
        torch.testing.assert_close(total / 16, own.loss, rtol=1e-5, atol=1e-6)
    # Left out, the change would be a much different loss.
    plain = loss_sum(hidden_states(model, batch), model.head, batch.labels, 3) / 16
    assert (plain - own.loss).abs() > 0.1
    own.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
    model.module.zero_grad()
    (loss_sum(hidden_states(model, batch), model.head, batch.labels, 3, model.base.config) / 16).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.trainable()[name].grad, gradient, rtol=1e-4, atol=1e-6)


def test_capped_attention_wants_eager(tiny, recipe, tmp_path):
    model = changed_logits("gemma2")
    model.config.attn_logit_softcapping = 20.0
    model.save_pretrained(tmp_path)
    load_tokenizer(recipe(tiny).model).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"caps its attention scores(.|\n)*model\.attention=eager"):
        load_model(recipe(tmp_path), "cpu", "fp32")
    assert load_model(recipe(tmp_path, model={"attention": "eager"}), "cpu", "fp32").shape.changed_logits
