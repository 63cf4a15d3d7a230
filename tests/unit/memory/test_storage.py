"""Which modules a plan counts an adapter on: whatever models/adapters accepts, never fewer than it adapts."""

from __future__ import annotations

import pytest

from finetune.config.schema import Recipe
from finetune.memory.storage import storage_of, weight_bytes
from finetune.models.adapters import match_targets
from finetune.models.shapes import SHAPES

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("targets", "linears", "head", "embedding"),
    [
        ("all-linear", ATTENTION | MLP, False, False),
        ("all-linear,q_proj", ATTENTION | MLP, False, False),
        ("all-linear,lm_head,embed_tokens", ATTENTION | MLP, True, True),
        ("q_proj", {"self_attn.q_proj"}, False, False),
        ("mlp.up_proj", {"mlp.up_proj"}, False, False),
        ("layers.1.mlp.up_proj", {"mlp.up_proj"}, False, False),
        ("*.down_proj", {"mlp.down_proj"}, False, False),
        ("*.[qv]_proj", {"self_attn.q_proj", "self_attn.v_proj"}, False, False),
        ("self_attn.*_proj", ATTENTION, False, False),
        ("model.layers.[02].self_attn.v_proj", {"self_attn.v_proj"}, False, False),
        ("model.layers.0.mlp.*_proj", MLP, False, False),
        ("*mlp*proj", MLP, False, False),
    ],
)
def test_targets_of_a_plan_are_those_of_the_adapter(
    targets: str, linears: set[str], head: bool, embedding: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = Recipe.model_validate({"model": {"path": "x"}, "adapter": {"kind": "lora", "targets": targets}})
    storage = storage_of(SHAPES["tiny"], recipe, "fp32")
    assert (storage.targets, storage.head_adapted, storage.embedding_adapted) == (linears, head, embedding)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes))
    found = {name for names in match_targets(base, recipe.adapter.targets).values() for name in names}
    inside = {name.split(".", 3)[3] for name in found if name.startswith("model.layers.")}
    assert inside == linears
    assert ("lm_head" in found, "model.embed_tokens" in found) == (head, embedding)


@pytest.mark.parametrize(("trained", "each"), [("fp32", 4), ("stochastic", 2), ("split", 2), ("bf16", 2)])
def test_bytes_of_trained_weights_are_those_of_their_dtype(trained: str, each: int) -> None:
    shape = SHAPES["tiny"]
    recipe = Recipe.model_validate({"model": {"path": "x", "trained": trained, "precision": "bf16"}})
    storage = storage_of(shape, recipe, "bf16")
    assert weight_bytes(shape, storage) == each * shape.parameters
    assert (storage.weight, storage.stream, storage.cast) == (each, each, trained == "fp32")
    lora = Recipe.model_validate({"model": {"path": "x", "precision": "bf16"}, "adapter": {"kind": "lora"}})
    assert storage_of(shape, lora, "bf16").weight == 4
