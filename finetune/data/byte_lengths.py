"""Where tokens stand in a text, by their lengths alone: exact for byte-level tokenizers, and cheaper than offsets.

A byte-level vocabulary writes every byte of a text as one letter of its tokens. When nothing is put in or taken out, the
tokens' bytes behind one another are the text's, so running sums of their lengths are their places. What could take bytes
out is not told by looking (an added token that swallows blanks, a pattern that leaves something away), but by the sum: a
text whose tokens do not come to its own length is measured by the tokenizer's offsets instead. What could put bytes in
(a blank in front, unknown tokens, affixes) or moves offsets on purpose is looked for once, and rules the method out.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

from finetune.contracts import IGNORED

PLAIN_STEPS = ("ByteLevel", "Digits", "Split", "Punctuation")
"""Parts of a pre-tokenizer that only cut; `ByteLevel` also writes the bytes as letters, and stands once, at the end."""
BYTES = 256


class ByteLengths:
    """The bytes of each token of one tokenizer. `of` makes it, or says that the method does not hold there."""

    def __init__(self, lengths: np.ndarray, composed: bool) -> None:
        self.lengths, self.composed = lengths, composed

    @classmethod
    def of(cls, backend: Any) -> ByteLengths | None:
        """`backend`: a `tokenizers.Tokenizer`. None where it is not byte-level, or adds or trims something."""
        from tokenizers.models import BPE

        model, steps = backend.model, _steps(backend.pre_tokenizer)
        plain = isinstance(model, BPE) and not (
            model.dropout or model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix
        )
        kinds = [step["type"] for step in steps]
        plain = plain and kinds[-1:] == ["ByteLevel"] and kinds.count("ByteLevel") == 1
        if not plain or not set(kinds) <= set(PLAIN_STEPS) or any(step.get("add_prefix_space") for step in steps):
            return None
        normal = [step["type"] for step in _steps(backend.normalizer)]
        trims = any(step.get("trim_offsets") for step in _steps(backend.post_processor))
        if trims or normal not in ([], ["NFC"]):
            return None
        added = {number: len(token.content.encode()) for number, token in backend.get_added_tokens_decoder().items()}
        tokens = [backend.id_to_token(number) or "" for number in range(max(backend.get_vocab_size(), *added, 0) + 1)]
        lengths = [added.get(number, len(token)) for number, token in enumerate(tokens)]
        return cls(np.asarray(lengths, dtype=np.int64), normal == ["NFC"])

    def unchanged(self, text: str) -> bool:
        """Whether the tokenizer's normalizer leaves the text as it is."""
        return not self.composed or unicodedata.is_normalized("NFC", text)


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a tokenizer's part, those of a sequence one by one."""
    if part is None:
        return []
    settings = json.loads(part.__getstate__())
    inner = settings.get("pretokenizers") or settings.get("normalizers") or settings.get("processors")
    return inner if settings["type"] == "Sequence" and inner is not None else [settings]


def labelled(
    lengths: np.ndarray, ids: list[list[int]], texts: list[bytes], spans: list[list[tuple[int, int]]]
) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
    """Ids and labels (int32) of each text, the first token never trained; None for a text whose tokens do not add up.

    `lengths`: bytes of each token of the vocabulary. `spans`: what is learned of each text, in bytes of it. A token is
    trained when any of its bytes is; all texts are worked on at once, as one text.
    """
    counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    cuts = np.concatenate([[0], np.cumsum(counts)])
    flat = np.fromiter((token for each in ids for token in each), dtype=np.int32, count=int(cuts[-1]))
    ends = np.concatenate([[0], np.cumsum(lengths[flat])])
    starts = ends[cuts[:-1]]
    whole = ends[cuts[1:]] - starts == np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    bounds = np.array([(number, *span) for number, own in enumerate(spans) for span in own], dtype=np.int64)
    number, first, last = bounds.reshape(-1, 3).T
    held = whole[number]
    number, first, last = number[held], first[held], last[held]
    change = np.zeros(len(flat) + 1, dtype=np.int64)
    np.add.at(change, np.searchsorted(ends[1:], starts[number] + first, side="right"), 1)
    np.add.at(change, np.searchsorted(ends[:-1], starts[number] + last, side="left"), -1)
    learned = np.cumsum(change[:-1]) > 0
    learned[cuts[:-1][counts > 0]] = False
    labels = np.where(learned, flat, np.int32(IGNORED))
    for at, fits in enumerate(whole.tolist()):
        part = slice(cuts[at], cuts[at + 1])
        yield (flat[part], labels[part]) if fits else None
