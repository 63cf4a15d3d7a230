"""Which tensors are decayed, and the order of names."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from finetune.config.schema import OptimizerSection
from finetune.errors import InputError
from finetune.optim.groups import divide, parameter_groups, role_by_name, roles_of
from finetune.optim.table import build, notices

LLAMA = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_matrices_decay_norms_and_embeddings_do_not():
    named = trainable(LlamaForCausalLM(LLAMA))
    decayed, plain = parameter_groups(named, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert plain["names"] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert decayed["names"] == [name for name in named if name not in plain["names"]]
    assert "lm_head.weight" in decayed["names"]


def test_names_stand_beside_their_parameters_in_model_order():
    named = trainable(LlamaForCausalLM(LLAMA))
    for group in parameter_groups(named, 0.1):
        assert all(named[name] is parameter for name, parameter in zip(group["names"], group["params"], strict=True))
        assert group["names"] == [name for name in named if name in group["names"]]


def test_lora_matrices_are_one_decayed_group():
    model = get_peft_model(LlamaForCausalLM(LLAMA), LoraConfig(r=2, target_modules=["q_proj"]))
    (group,) = parameter_groups(trainable(model), 0.1)
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == 2


def test_roles_come_from_modules_whatever_their_names():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = nn.Embedding(8, 4)
            self.body = nn.Linear(4, 4)
            self.out = nn.Linear(4, 8, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    odd = Odd()
    roles = roles_of(odd)
    assert roles == {"lookup.weight": "embedding", "body.weight": "", "body.bias": "", "out.weight": "head"}
    decayed, plain = parameter_groups(dict(odd.named_parameters()), 0.1, roles)
    assert (decayed["names"], plain["names"]) == (["body.weight", "out.weight"], ["lookup.weight", "body.bias"])


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_modules_agree_on_known_models(tied):
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=tied))
    llama = LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied}))
    adapted = get_peft_model(
        LlamaForCausalLM(LLAMA), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    )
    for module in (gpt, llama, adapted):
        assert roles_of(module) == {name: role_by_name(name) for name, _ in module.named_parameters()}
    found = {name: role for name, role in roles_of(adapted).items() if role}
    assert set(found.values()) == {"embedding", "head"}
    assert found["base_model.model.lm_head.modules_to_save.default.weight"] == "head"


def test_a_tensor_of_no_dimension_is_not_decayed():
    (group,) = parameter_groups({"scale": nn.Parameter(torch.tensor(1.0))}, 0.1)
    assert group["weight_decay"] == 0.0


def test_patterns_set_rates_and_decays_and_the_first_that_matches_counts():
    named = trainable(LlamaForCausalLM(LLAMA))
    wanted = {"*embed*": "lr_factor=0.1", "*.layers.0.mlp.*": "weight_decay=0.3, lr_factor=0.5", "*mlp*": "lr_factor=9"}
    with pytest.raises(InputError, match=r"no trained parameter is left for the pattern '\*mlp\*'"):
        parameter_groups(named, 0.1, wanted=wanted)
    del wanted["*mlp*"]
    groups = parameter_groups(named, 0.1, wanted=wanted)
    facts = {name: (g["lr_factor"], g["weight_decay"]) for g in groups for name in g["names"]}
    assert facts["model.embed_tokens.weight"] == (0.1, 0.0)
    assert facts["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.3)
    assert facts["model.layers.0.self_attn.q_proj.weight"] == (1.0, 0.1)
    assert facts["model.norm.weight"] == (1.0, 0.0)
    assert set(facts) == set(named)


def test_places_are_numbers_in_model_order_whatever_the_groups():
    named = trainable(LlamaForCausalLM(LLAMA))
    order = {name: place for place, name in enumerate(named)}
    groups = parameter_groups(named, 0.1, wanted={"*mlp*": "lr_factor=2"})
    cut = divide(groups, lambda count, role, p: count > 300, "large")
    assert {g["large"] for g in cut} == {True, False}
    for group in (*groups, *cut):
        assert group["places"] == [order[name] for name in group["names"]]
        assert len(group["params"]) == len(group["roles"]) == len(group["names"])


def test_groups_reach_the_optimizer_and_are_said():
    named = trainable(LlamaForCausalLM(LLAMA))
    section = OptimizerSection(name="adamw8bit", groups={"*embed*": "lr_factor=0.1 weight_decay=0.2"})
    optimizer = build(section, named)
    assert [(g["lr_factor"], g["weight_decay"]) for g in optimizer.param_groups if "embed" in g["names"][0]] == [
        (0.1, 0.2)
    ]
    assert notices(section, named)[-1] == "1 tensors at 0.1 of the rate, decay 0.2: model.embed_tokens.weight"
