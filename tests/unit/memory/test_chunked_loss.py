"""The loss hook: the shift of labels, heads of every kind, changed logits, and the bytes it needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
)

from finetune.errors import ModelError
from finetune.kernels.logits_change import LOGITS_RULES, logits_change
from finetune.memory.chunked_loss import loss_sum
from tests.unit.memory.tiny_models import tiny, with_lora

WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("chunk", [0, 1, 2, 100])
def test_position_t_is_held_to_the_next_label_and_rows_do_not_meet(chunk: int) -> None:
    # The head is the identity, so a hidden state is its own logits: 0 where it says the next token, else very low.
    head = nn.Linear(4, 4, bias=False)
    head.weight.data = torch.eye(4)
    labels = torch.tensor([[0, 1, 2], [3, -100, 1]])
    hidden = torch.zeros(2, 3, 4)
    for row, column, word in [(0, 0, 1), (0, 1, 2), (1, 1, 1)]:
        hidden[row, column, word] = 1e4
    hidden[0, 2, 0] = hidden[1, 0, 0] = 1e4  # held to nothing: the end of a row, and a label that is ignored
    assert loss_sum(hidden, head, labels, chunk).item() == pytest.approx(0.0, abs=1e-6)
    uniform = loss_sum(torch.zeros(2, 3, 4), head, labels, chunk)
    assert uniform.item() == pytest.approx(3 * torch.tensor(4.0).log().item(), rel=1e-6)
    assert uniform.dtype == torch.float32


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("head", [nn.Linear(6, 9), nn.Sequential(nn.Linear(6, 9))], ids=["linear", "other"])
def test_nothing_trained_is_zero_that_can_be_differentiated(chunk: int, head: nn.Module) -> None:
    hidden = torch.randn(2, 3, 6, requires_grad=True)
    loss = loss_sum(hidden, head, torch.full((2, 3), -100), chunk)
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**WIDTHS, head_dim=8, final_logit_softcapping=2.0)),
        (GraniteForCausalLM, GraniteConfig(**WIDTHS, logits_scaling=3.0)),
        (CohereForCausalLM, CohereConfig(**WIDTHS, logit_scale=0.25)),
    ],
    ids=["capped", "divided", "multiplied"],
)
def test_changed_logits_are_changed_as_the_model_does(model_class: type, config: object) -> None:
    torch.manual_seed(0)
    model = model_class(config).train()
    model.get_output_embeddings().weight.data *= 20
    ids = torch.randint(0, 64, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(input_ids=ids, use_cache=False).logits.float()
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    for chunk in (0, 5):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = loss_sum(hidden, model.get_output_embeddings(), labels, chunk, model.config)
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-6)
        for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_logits_rules_are_all_walked_and_unknown_families_refused_by_name() -> None:
    class Config:
        model_type = ""

    for rule in LOGITS_RULES:
        config = Config()
        setattr(config, rule.attribute, 0.5)
        for family in rule.families:
            config.model_type = family
            change = logits_change(config)
            assert change is not None
            logits = torch.tensor([1.0])
            torch.testing.assert_close(change(logits), rule.change(0.5)(logits))
        config.model_type = "newcomer"
        with pytest.raises(ModelError, match=f"'newcomer' change their logits \\({rule.attribute}=0.5\\)"):
            logits_change(config)
    assert len(LOGITS_RULES) == 5
    assert logits_change(LlamaConfig()) is None
    assert logits_change(GraniteConfig(**WIDTHS, logits_scaling=1.0)) is None
    assert logits_change(None) is None


def test_dropout_on_the_heads_adapter_is_refused_in_chunks_only() -> None:
    model = with_lora(tiny(), target_modules=["lm_head"], lora_dropout=0.1).train()
    head, hidden, labels = (
        model.get_base_model().get_output_embeddings(),
        torch.randn(1, 5, 32),
        torch.ones(1, 5).long(),
    )
    with pytest.raises(ModelError, match="dropout"):
        loss_sum(hidden, head, labels, 2)
    assert loss_sum(hidden, head, labels, 0).isfinite()
    head.eval()
    assert loss_sum(hidden, head, labels, 2).isfinite()


def test_autocast_gives_an_fp32_sum_on_both_ways() -> None:
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(16, 40), torch.randn(2, 8, 16), torch.randint(0, 40, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = loss_sum(hidden, head, labels, 0), loss_sum(hidden, head, labels, 3)
    assert whole.dtype == chunked.dtype == torch.float32
    # The whole logits are rounded to bf16 with the bias in them; the chunked ones before it.
    torch.testing.assert_close(whole, chunked, rtol=5e-3, atol=0)
