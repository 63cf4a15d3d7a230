"""What fast blocks keep for backward, as the plan counts it, against what autograd saves of them."""

from __future__ import annotations

import pytest
import torch

from finetune.contracts import Batch
from finetune.memory import activations, checkpointing
from finetune.memory.storage import Work, storage_of
from finetune.models import decoder
from finetune.models.fast import backbone
from finetune.models.shapes import shape_of
from tests.unit.planner.live_bytes import saved_bytes
from tests.unit.planner.test_estimate_counts import LENGTH, ROWS, TARGETS, built, config_of, recipe_of


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_saved_bytes_are_as_counted(packed: bool, kind: str, precision: str, recompute: bool) -> None:
    config = config_of()
    module, _ = built(kind, config, precision)
    shape = shape_of(config)
    model = decoder.assemble(module, None, shape, "test")
    model.fast = backbone.install(model, "auto", torch.bfloat16 if precision == "bf16" else torch.float32)
    checkpointing.apply(module, recompute)
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    places = torch.arange(LENGTH)[None].expand(ROWS, -1)
    documents = torch.zeros_like(ids) if packed else None
    batch = Batch(ids, ids, torch.arange(ROWS), documents, places if packed else None, (LENGTH,) * ROWS)
    with saved_bytes(module) as seen:
        decoder.hidden_states(model, batch)
    recipe = recipe_of(kind, packed)
    recipe = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"fast_block": True})})
    storage = storage_of(shape, recipe, precision)
    assert storage.fast
    work = Work(ROWS, LENGTH)
    wanted = checkpointing.kept_bytes(shape, storage, work, recompute)
    wanted += activations.saved_outside(shape, storage, work)
    wanted += 8 * ROWS * LENGTH if storage.trained else 0  # the embedding keeps the token ids
    if recompute:
        # The tables wait as arguments of the recomputation, not as saved tensors.
        wanted -= 2 * shape.head_dim * storage.compute * LENGTH * (ROWS if packed else 1)
    assert wanted == pytest.approx(sum(seen.values()), rel=0.02)
