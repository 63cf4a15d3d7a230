"""The layers that a recipe names, looked for before there are weights: on the model of its config, on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from finetune.config.schema import Recipe
from finetune.models.adapter_config import new_config
from finetune.models.config import load_config
from finetune.models.shapes import NAMES, SHAPES
from finetune.models.trained import choose, is_partial


def check_layer_names(recipe: Recipe) -> None:
    """ModelError, as training raises it, for a name in the adapter or train section that no layer of the model has."""
    if recipe.adapter.kind == "none":
        if is_partial(recipe.train):
            choose(_without_weights(recipe), recipe.train, torch.float32)
    elif recipe.adapter.path is None:
        new_config(_without_weights(recipe), recipe.adapter, ())


def _without_weights(recipe: Recipe) -> Any:
    """The model without memory. One that has a row of counts is built from its family, so that no hub is asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    row = SHAPES.get(NAMES.get(recipe.model.path, recipe.model.path))
    if row is None:
        config = load_config(recipe.model)
    else:
        config = AutoConfig.for_model(
            row.family,
            num_hidden_layers=recipe.model.layers or row.blocks,
            hidden_size=row.hidden,
            intermediate_size=row.intermediate,
            num_attention_heads=row.heads,
            num_key_value_heads=row.kv_heads,
            vocab_size=row.vocabulary,
            tie_word_embeddings=row.tied,
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
