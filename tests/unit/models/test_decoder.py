"""Hidden states: packed documents and padding leak nothing, on every attention backend and window."""

import math

import pytest
import torch
from torch.nn import functional

from finetune.contracts import IGNORED
from finetune.errors import ModelError
from finetune.models import adapters
from finetune.models.decoder import (
    additive_mask,
    assemble,
    attention_windows,
    document_mask,
    head_weight,
    hidden_states,
)
from finetune.models.verify import verify_packing

FIRST, SECOND = [5, 17, 200, 31], [44, 9, 250, 120, 77, 3]
LONG = [61, 8, 90, 33, 12, 240, 71, 19, 150, 6]


def loss_sum(model, batch):
    hidden = hidden_states(model, batch)
    logits = functional.linear(hidden, *head_weight(model))[:, :-1]
    labels = batch.labels[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen2-sliding", "qwen3", "qwen3-sliding"])
class TestEveryBackend:
    def test_b11_packed_documents_give_what_they_give_alone(self, kind, attention, make_base, make_batch, shape):
        model = assemble(make_base(kind, attention), None, shape, "tiny")
        documents = [FIRST, SECOND, LONG]
        alone = sum(loss_sum(model, make_batch([[document]])).item() for document in documents)
        for rows in ([documents], [[LONG, FIRST], [SECOND]]):
            packed = loss_sum(model, make_batch(rows)).item()
            assert packed == pytest.approx(alone, rel=1e-5)

    def test_b11_a_document_does_not_depend_on_its_neighbour(self, kind, attention, make_base, make_batch, shape):
        model = assemble(make_base(kind, attention), None, shape, "tiny")
        one = hidden_states(model, make_batch([[LONG, SECOND]]))
        other = hidden_states(model, make_batch([[LONG[::-1], SECOND]]))
        assert torch.equal(one[:, len(LONG) :], other[:, len(LONG) :])

    def test_b24_right_padding_changes_nothing(self, kind, attention, make_base, make_batch, shape):
        model = assemble(make_base(kind, attention), None, shape, "tiny")
        alone = hidden_states(model, make_batch([[FIRST]]))
        padded = hidden_states(model, make_batch([[FIRST], [LONG]], length=16))
        assert torch.allclose(padded[:1, :4], alone, atol=1e-5)
        in_packed_batch = hidden_states(model, make_batch([[FIRST], [SECOND, LONG]]))
        assert torch.allclose(in_packed_batch[:1, :4], alone, atol=1e-5)
        assert in_packed_batch.isfinite().all()

    def test_the_start_up_check_passes(self, kind, attention, make_base, shape):
        verify_packing(assemble(make_base(kind, attention), None, shape, "tiny"))


def test_b13_targets_of_a_packed_row_are_eight(make_batch):
    batch = make_batch([[FIRST, SECOND]])
    assert int((batch.labels[:, 1:] != IGNORED).sum()) == 3 + 5


def test_the_window_really_bounds_what_a_token_sees(make_base, make_batch, shape):
    """A row longer than the window differs from the same model without a window, so the tests above test the window."""
    batch = make_batch([[LONG, SECOND]])
    windowed = assemble(make_base("mistral"), None, shape, "tiny")
    wide = assemble(make_base("mistral", sliding_window=None), None, shape, "tiny")
    assert not torch.allclose(hidden_states(windowed, batch), hidden_states(wide, batch), atol=1e-2)


def test_document_mask_is_causal_by_document_with_a_window():
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, -1]]), window=2)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_additive_mask_is_zero_or_the_lowest_number():
    mask = additive_mask(torch.tensor([True, False]), torch.bfloat16)
    assert mask.tolist() == [0.0, torch.finfo(torch.bfloat16).min]
    assert not math.isinf(mask[1])


def test_packing_is_refused_where_attention_has_no_known_mask(make_base):
    config = make_base("llama").config
    config.sliding_window = 8
    with pytest.raises(ModelError, match=r"llama.*sliding_window=8(.|\n)*data\.pack=false"):
        attention_windows(config)
    config.layer_types = ["full_attention", "chunked_attention", "linear_attention"]
    with pytest.raises(ModelError, match="chunked_attention, linear_attention"):
        attention_windows(config)


def test_a_model_that_ignores_the_mask_fails_the_start_up_check(make_base, make_batch, shape):
    class Deaf(torch.nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, attention_mask=None, **arguments):
            return self.backbone(**{**arguments, "position_ids": None})

    model = assemble(make_base("llama"), None, shape, "tiny")
    model.backbone = Deaf(model.backbone)
    with pytest.raises(ModelError, match="lets packed documents see each other"):
        verify_packing(model)


def test_parts_of_a_model(make_base, shape):
    base = make_base("qwen3")
    model = assemble(base, None, shape, "tiny")
    assert model.backbone is base.model
    assert model.head is base.lm_head
    assert [id(block) for block in model.blocks] == [id(layer) for layer in base.model.layers]
    base.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM has no list of 7 repeated blocks \(found: 3\)"):
        assemble(base, None, shape, "tiny")


def test_adapters_act_in_hidden_states_and_head_weight(make_base, make_batch, shape, recipe):
    adapter = recipe("x", adapter={"kind": "lora", "targets": "q_proj,down_proj,embed_tokens,lm_head"}).adapter
    module, _ = adapters.attach(make_base("llama"), adapter, "tiny", 0)
    model = assemble(module, None, shape, "tiny")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if "lora_B" in name or "lora_embedding" in name:
                parameter.normal_(std=0.3)
    batch = make_batch([[FIRST, SECOND], [LONG]])
    loss = loss_sum(model, batch)
    logits = module(input_ids=torch.tensor([LONG])).logits
    ours = functional.linear(hidden_states(model, make_batch([[LONG]])), *head_weight(model))
    assert torch.allclose(logits, ours, atol=1e-4)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.trainable().values())
