"""A packed row is its documents run alone: losses and gradients, on every attention that trains on a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from finetune.contracts import IGNORED, Batch, Row
from finetune.data.loader import collate
from finetune.data.packing import pack, pack_parts, pack_rows
from finetune.models.decoder import document_mask, packed_masks

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral with a window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "qwen3 with norms of q and k": lambda: Qwen3Config(**SIZES),
}
LENGTHS = (4, 6, 9)


def tiny(kind: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).float()


def documents() -> list[Row]:
    draw = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = draw.integers(3, 96, length).astype(np.int32)
        labels = ids.copy()
        labels[0] = IGNORED
        rows.append(Row(number, ids, labels, (length,), (number,)))
    return rows


def packed(rows: list[Row]) -> Row:
    ids, labels = (np.concatenate([getattr(row, name) for row in rows]) for name in ("input_ids", "labels"))
    return Row(0, ids, labels, tuple(len(row.input_ids) for row in rows), tuple(range(len(rows))))


def loss_of(model: nn.Module, batch: Batch, masks: Any) -> torch.Tensor:
    hidden = model.model(
        input_ids=batch.input_ids, attention_mask=masks, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


class Held:
    """What packed_masks asks of a model."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base


def alone(model: nn.Module) -> torch.Tensor:
    return sum((loss_of(model, collate([row], 0), None) for row in documents()), start=torch.zeros(()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_b11_packed_gradients_equal_those_of_the_documents_alone(kind: str, attention: str) -> None:
    model = tiny(kind, attention)
    expected = alone(model)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    short = Row(1, np.asarray([5, 6, 7], dtype=np.int32), np.full(3, IGNORED, dtype=np.int32), (3,), (9,))
    batch = collate([packed(documents()), short], 0)  # the second row is untrained: padding must do no harm either
    assert batch.document_ids is not None
    loss = loss_of(model, batch, packed_masks(Held(model), batch.document_ids))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["llama", "qwen3 with norms of q and k"])
def test_b11_flex_attention_gives_the_same_losses(kind: str) -> None:
    """torch's flex attention has no backward on a CPU, so the values alone are compared here."""
    from torch.nn.attention.flex_attention import create_block_mask

    model = tiny(kind, "flex_attention").eval()
    batch = collate([packed(documents())], 0)
    ids = batch.document_ids
    assert ids is not None
    allowed = document_mask(ids)[:, 0]
    mask = create_block_mask(lambda b, h, q, k: allowed[b, q, k], 1, None, ids.shape[1], ids.shape[1], device="cpu")
    with torch.no_grad():
        found = loss_of(model, batch, mask)
        expected = alone(tiny(kind, "sdpa").eval())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_b11_a_plain_causal_mask_would_be_seen() -> None:
    """The measure: without the documents' mask the same row gives another loss."""
    model = tiny("llama", "sdpa")
    whole = collate([Row(0, *(getattr(packed(documents()), n) for n in ("input_ids", "labels")), (19,), (0,))], 0)
    with torch.no_grad():
        assert abs(float(loss_of(model, whole, None) - alone(model))) > 1e-2


def test_b13_no_label_crosses_documents() -> None:
    """Case B13: documents of 4 and 6 tokens, all supervised: 3 + 5 targets."""
    batch = collate([packed(documents()[:2])], 0)
    assert int((batch.labels[:, 1:] != IGNORED).sum()) == 8


def best_fit(lengths: list[int], limit: int) -> list[list[int]]:
    """The plain reference: longest first, each into the row with the least room that takes it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and how recently it came to be
    for clock, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)), start=1):
        fitting = [(room, -when, row) for row, (room, when) in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            row = min(fitting)[2]
        else:
            row = len(rows)
            rows.append([])
            rooms.append((limit, 0))
        rows[row].append(index)
        rooms[row] = (rooms[row][0] - lengths[index], clock)
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


@pytest.mark.parametrize(("low", "high", "limit"), [(1, 40, 40), (3, 9, 64), (1, 3, 8), (30, 65, 64)])
def test_packing_by_length_is_best_fit_decreasing(low: int, high: int, limit: int) -> None:
    lengths = np.random.default_rng(low).integers(low, high, 400).tolist()
    assert pack(lengths, limit) == best_fit(lengths, limit)


def test_a_hundred_thousand_documents_are_dense_and_each_stands_once() -> None:
    lengths = np.random.default_rng(2).integers(1, 2049, 100_000)
    order, cuts = pack_rows(lengths, 2048)
    assert np.array_equal(np.sort(order), np.arange(100_000))
    assert np.add.reduceat(lengths[order], cuts[:-1]).max() <= 2048
    assert lengths.sum() / ((len(cuts) - 1) * 2048) > 0.99


def test_rows_of_a_mixture_never_mix_its_parts() -> None:
    lengths, part_of = np.asarray([3, 3, 5, 2, 2, 2]), np.asarray([1, 1, 1, 2, 2, 2])
    order, cuts = pack_parts(lengths, 8, part_of)
    assert [order[a:b].tolist() for a, b in pairwise(cuts)] == [[0, 2], [1], [3, 4, 5]]
    assert pack_parts(np.zeros(0, dtype=np.int64), 8, np.zeros(0))[1].tolist() == [0]
