"""Text with trained spans, to token ids and labels.

A token is trained when any of its characters is (their places: the tokenizer's offsets, or for byte-level tokenizers
the lengths of the tokens, which say the same and cost less). So a token that straddles prompt and answer belongs to the answer,
and no prefix is ever tokenised alone (a prompt's tokens need not be the first tokens of prompt and answer). Labels come
from spans only; no token is masked for its id, so a pad token that equals the end token costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from finetune.contracts import IGNORED
from finetune.data.byte_lengths import ByteLengths, labelled
from finetune.data.rendering import Rendered
from finetune.data.spans import Span
from finetune.errors import DataError

BATCH = 1000
"""Texts in one call of the tokenizer."""


def tokenise(rendered: Rendered, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels (int32) of one text. The first token is never trained: nothing predicts it."""
    return next(tokenise_all([rendered], tokenizer, byte_lengths(tokenizer)))


def byte_lengths(tokenizer: Any) -> ByteLengths | None:
    """The bytes of the tokenizer's tokens, where they tell where tokens stand; to be made once for many texts."""
    return ByteLengths.of(tokenizer.backend_tokenizer) if getattr(tokenizer, "is_fast", False) else None


def tokenise_all(
    rendered: Sequence[Rendered], tokenizer: Any, lengths: ByteLengths | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`tokenise` of many, in batches, in order. DataError for a tokenizer that cannot give character offsets.

    `lengths`: of a byte-level tokenizer (`ByteLengths.of`); then only texts that they do not fit are asked for offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "the tokenizer gives no character offsets, so it cannot be told which tokens are learned",
            where=str(getattr(tokenizer, "name_or_path", "")),
            remedy="use a model with a fast tokenizer (a tokenizer.json)",
        )
    backend = _whole_texts(tokenizer)
    for start in range(0, len(rendered), BATCH):
        some = rendered[start : start + BATCH]
        if lengths is None:
            yield from _by_offsets(some, backend)
        else:
            yield from _by_lengths(some, backend, lengths)


def _by_offsets(some: Sequence[Rendered], backend: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Past transformers' wrapper, which copies every encoding into lists of its own: half of the time.
    encoded = backend.encode_batch([item.text for item in some], add_special_tokens=False)
    for item, encoding in zip(some, encoded, strict=True):
        ids, offsets = encoding.ids, encoding.offsets
        id_array = np.asarray(ids, dtype=np.int32)
        learned = _learned(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), item.spans)
        learned[:1] = False
        yield id_array, np.where(learned, id_array, np.int32(IGNORED))


def _by_lengths(
    some: Sequence[Rendered], backend: Any, lengths: ByteLengths
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    encoded = backend.encode_batch_fast([item.text for item in some], add_special_tokens=False)
    raw = [item.text.encode() for item in some]
    spans = [_in_bytes(item, len(text)) for item, text in zip(some, raw, strict=True)]
    found = labelled(lengths, [encoding.ids for encoding in encoded], raw, spans)
    for item, own in zip(some, found, strict=True):
        if own is not None and lengths.unchanged(item.text):
            yield own
        else:
            yield from _by_offsets([item], backend)


def _in_bytes(item: Rendered, size: int) -> list[Span]:
    """The learned spans in bytes of the text, which has `size` of them."""
    text = item.text
    if len(text) == size:  # one byte a character
        return list(item.spans)
    return [(len(text[:first].encode()), len(text[:last].encode())) for first, last in item.spans]


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
