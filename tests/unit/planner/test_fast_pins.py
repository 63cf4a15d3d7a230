"""Pins of fast blocks: kept, or refused with the reason before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import InputError
from finetune.memory.storage import storage_of
from finetune.models.shapes import SHAPES
from tests.unit.planner.test_decide import chosen, recipe


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapter__kind": "dora"}, "adapter.kind is dora"),
        ({"adapter__init": "pissa"}, "adapter.init=pissa"),
        ({"model__attention": "eager"}, "model.attention=eager"),
        ({"adapter__modules_to_save": ["mlp"]}, "adapter.modules_to_save"),
    ],
)
def test_fast_blocks_are_refused_by_the_key_that_forbids_them(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        chosen("h200-141", plan__fast_block=True, **changes)
    assert not chosen("h200-141", **changes).plan.fast_block


def test_an_attention_kernel_without_fast_blocks_is_refused_or_told() -> None:
    with pytest.raises(InputError, match="is for fast blocks, and they are off"):
        chosen("h200-141", plan__attention="flash", plan__fast_block=False, data__pack=False)
    reasons = chosen("cpu,64GiB", shape="smollm2-135m", plan__attention="flash", data__pack=False).reasons
    assert any("plan.attention=flash does nothing here" in reason for reason in reasons)
    assert chosen("h200-141", plan__attention="flash", data__pack=False).plan.attention == "flash"
    with pytest.raises(InputError, match=r"data\.pack=true packs them"):
        chosen("h200-141", plan__attention="flash")


def test_fast_blocks_are_on_by_default_on_a_gpu_alone() -> None:
    assert chosen("h200-141").plan.fast_block
    assert not chosen("h200-141", plan__exact="bitwise").plan.fast_block
    assert not storage_of(SHAPES["llama3-8b"], recipe(), "bf16", "cpu").fast


@pytest.mark.parametrize("changes", [{"model__new_tokens": ["<a>"]}, {"adapter__modules_to_save": ["embed_tokens"]}])
def test_an_embedding_with_trained_rows_is_never_planned_on_the_host(changes: dict[str, Any]) -> None:
    assert chosen("h200-141", plan__gpu_memory="30GiB", **changes).plan.embedding_placement == "device"
    with pytest.raises(InputError, match="train rows of it"):
        chosen("h200-141", plan__embedding_placement="host", **changes)


def test_packed_rows_in_fp32_have_their_mask_counted() -> None:
    """Variable-length attention is for 16 bits; in fp32 fast blocks make a mask of rows x length x length."""
    pins = {"plan__micro_batch": 2, "plan__activation_checkpointing": True, "plan__loss_chunk": 1024}
    narrow, wide = (
        chosen("h200-141", shape="smollm2-135m", model__precision=precision, **pins).estimate.phases["step"].causes
        for precision in ("bf16", "fp32")
    )
    assert narrow.get("attention mask", 0) == 0
    assert wide["attention mask"] == 2 * 2048 * 2048
