"""What a recipe may say of the optimizer and of trained weights, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.commands.arguments import known_names
from finetune.config.load import load_recipe
from finetune.config.schema import Recipe
from finetune.environment import Launch
from finetune.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "builtin:tiny"}, "data": {"path": "x.jsonl"}, "train": {"batch": 4}}


def load(*words: str, **base: Any) -> Recipe:
    return load_recipe({**BASE, **base}, words, known_names(), Launch())


def only(*words: str, **base: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(*words, **base)
    assert len(raised.value.faults) == 1, raised.value
    return str(raised.value)


def test_full_state_is_a_list_of_roles() -> None:
    assert load("optimizer.name=adamw8bit", "optimizer.full_state=[]").optimizer.full_state == ()
    assert load("optimizer.name=adamw8bit", "optimizer.full_state=head").optimizer.full_state == ("head",)
    assert load().optimizer.full_state == ("embedding", "head")
    assert "is not a list of embedding and head" in only("optimizer.full_state=norm")


def test_groups_are_patterns_with_changes() -> None:
    groups = {"*embed*": "lr_factor=0.1", "model.layers.0.*": "weight_decay=0"}
    assert load(optimizer={"groups": groups}).optimizer.groups == groups
    assert load("optimizer.groups.*embed*=lr_factor=0.1").optimizer.groups == {"*embed*": "lr_factor=0.1"}
    for wrong in ("lr=0.1", "lr_factor=x", "lr_factor=-1", "lr_factor", "lr_factor=1 lr_factor=2"):
        assert "is not a section of PATTERN" in only(optimizer={"groups": {"*": wrong}})


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("optimizer.name=sgd", "optimizer.beta2=0.9"), "optimizer.beta2 is 0.9, and sgd does not use it"),
        (("optimizer.name=lion", "optimizer.epsilon=1e-6"), "optimizer.epsilon is 1e-06, and lion does not use it"),
        (("optimizer.name=adafactor", "optimizer.beta1=0.5"), "optimizer.beta1 is 0.5, and adafactor does not use it"),
        (("optimizer.full_state=[]",), "optimizer.full_state is [], and adamw does not use it"),
        (("optimizer.scale_lr=sqrt",), "nothing says which batch it belongs to"),
        (("optimizer.base_batch=8",), "base_batch is 8, and the rate is not scaled"),
        (("schedule.decay=0.3",), "schedule.decay is 0.3, and cosine has no part of its own for it"),
        (("model.trained=split", "model.precision=fp32"), "keeps weights in bf16, and products are to be made in fp32"),
        (("model.trained=split", "adapter.kind=lora"), "adapter.kind=lora trains adapters in fp32"),
        (
            ("model.trained=stochastic", "optimizer.name=paged_adamw8bit"),
            "paged_adamw8bit trains fp32 weights only, and model.trained is stochastic",
        ),
    ],
)
def test_what_would_be_ignored_or_contradicts_is_refused(words: tuple[str, ...], what: str) -> None:
    assert what in only(*words)


def test_16_bit_weights_make_bf16_the_precision_that_auto_means() -> None:
    from finetune.planner.budget import precision_of
    from finetune.planner.hardware import parse

    recipe = load("model.trained=stochastic")
    assert precision_of(recipe, parse("1x24GB,64GB")) == "bf16"
    assert load("model.trained=split", "optimizer.name=muon").model.trained == "split"
