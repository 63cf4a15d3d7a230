"""Text with trained spans, to token ids and labels.

A token is trained when any of its characters is. So a token that straddles prompt and answer belongs to the answer,
and no prefix is ever tokenised alone (a prompt's tokens need not be the first tokens of prompt and answer). Labels come
from spans only; no token is masked for its id, so a pad token that equals the end token costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from finetune.contracts import IGNORED
from finetune.data.rendering import Rendered
from finetune.data.spans import Span
from finetune.errors import DataError

BATCH = 1000
"""Texts in one call of the tokenizer."""


def tokenise(rendered: Rendered, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels (int32) of one text. The first token is never trained: nothing predicts it."""
    return next(tokenise_all([rendered], tokenizer))


def tokenise_all(rendered: Sequence[Rendered], tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`tokenise` of many, in batches, in order. DataError for a tokenizer that cannot give character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "the tokenizer gives no character offsets, so it cannot be told which tokens are learned",
            where=str(getattr(tokenizer, "name_or_path", "")),
            remedy="use a model with a fast tokenizer (a tokenizer.json)",
        )
    backend = _whole_texts(tokenizer)
    for start in range(0, len(rendered), BATCH):
        some = rendered[start : start + BATCH]
        # Past transformers' wrapper, which copies every encoding into lists of its own: half of the time.
        encoded = backend.encode_batch([item.text for item in some], add_special_tokens=False)
        for item, encoding in zip(some, encoded, strict=True):
            ids, offsets = encoding.ids, encoding.offsets
            id_array = np.asarray(ids, dtype=np.int32)
            learned = _learned(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), item.spans)
            learned[:1] = False
            yield id_array, np.where(learned, id_array, np.int32(IGNORED))


def _whole_texts(tokenizer: Any) -> Any:
    """The tokenizer's own engine, set as a call without truncation and padding sets it."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _learned(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Bool per token: whether [start, end) of its characters meets a span.

    Some tokenizers cut white space from a token's offsets, which leaves blanks of no width; such a token reaches from
    the end of the one before it, or, where there is nothing between, stands at its place.
    """
    start, end = offsets[:, 0].copy(), offsets[:, 1]
    blank = start == end
    before = np.concatenate([[0], end[:-1]]) if len(end) else end
    start[blank] = np.minimum(before[blank], start[blank])
    point = start == end
    learned = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        learned |= (start < last) & (end > first)
        learned |= point & (start >= first) & (start < last)
    return learned
