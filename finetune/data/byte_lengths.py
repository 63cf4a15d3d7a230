"""Where tokens stand in a text, by their lengths alone: exact for byte-level tokenizers, and cheaper than offsets.

A byte-level vocabulary writes every byte of a text as one letter of its tokens. When nothing is put in or taken out, the
tokens' bytes behind one another are the text's, so running sums of their lengths are their places. What could take bytes
out is not told by looking (an added token that swallows blanks, a pattern that leaves something away), but by the sum: a
text whose tokens do not come to its own length is measured by the tokenizer's offsets instead. What could put bytes in
(a blank in front, unknown tokens, affixes) is looked for once, and rules the method out. Some tokenizers (Llama 3) cut the
blanks off a token's offsets; theirs are cut here in the same way, so that labels do not depend on how they were found.
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
SPACE = "\u0120"
"""The letter that a byte-level vocabulary writes for a space."""


class ByteLengths:
    """The bytes of each token of one tokenizer. `of` makes it, or says that the method does not hold there.

    `trims`: blanks at each token's start and end that its offsets leave out, and of how many less in a text's first token;
    None where offsets are whole.
    """

    def __init__(self, lengths: np.ndarray, composed: bool, trims: tuple[np.ndarray, np.ndarray, int] | None) -> None:
        self.lengths, self.composed, self.trims = lengths, composed, trims

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
        after = [step for step in _steps(backend.post_processor) if step.get("trim_offsets")]
        if normal not in ([], ["NFC"]) or len(after) > 1 or any(step["type"] != "ByteLevel" for step in after):
            return None
        added = {number: len(token.content.encode()) for number, token in backend.get_added_tokens_decoder().items()}
        tokens = [backend.id_to_token(number) or "" for number in range(max(backend.get_vocab_size(), *added, 0) + 1)]
        lengths = [added.get(number, len(token)) for number, token in enumerate(tokens)]
        trims = None
        if after:
            texts = [token.replace(SPACE, " ") for token in tokens]
            if any(text.strip() != text.strip(" ") for text in texts):
                return None
            start = np.asarray([len(text) - len(text.lstrip(" ")) for text in texts], dtype=np.int64)
            end = np.asarray([len(text) - len(text.rstrip(" ")) for text in texts], dtype=np.int64)
            trims = (start, end, int(bool(after[0].get("add_prefix_space"))))
        return cls(np.asarray(lengths, dtype=np.int64), normal == ["NFC"], trims)

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
    known: ByteLengths, ids: list[list[int]], texts: list[bytes], spans: list[list[tuple[int, int]]]
) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
    """Ids and labels (int32) of each text, the first token never trained; None for a text whose tokens do not add up.

    `spans`: what is learned of each text, in bytes of it. A token is trained when any of its bytes is; all texts are
    worked on at once, as one text.
    """
    counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    cuts = np.concatenate([[0], np.cumsum(counts)])
    flat = np.fromiter((token for each in ids for token in each), dtype=np.int32, count=int(cuts[-1]))
    edges = np.concatenate([[0], np.cumsum(known.lengths[flat])])
    bases = edges[cuts[:-1]]
    whole = edges[cuts[1:]] - bases == np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    heads = cuts[:-1][counts > 0]
    bounds = np.array([(number, *span) for number, own in enumerate(spans) for span in own], dtype=np.int64)
    number, first, last = bounds.reshape(-1, 3).T
    held = whole[number]
    first, last = (bases[number] + first)[held], (bases[number] + last)[held]
    starts, ends = _trimmed(known, flat, edges, heads)
    low = np.searchsorted(ends, first, side="right")
    # A token without width is learned at a span's start too.
    low = np.where(first < last, np.minimum(low, np.searchsorted(starts, first, side="left")), low)
    # A text has no part in the next one's span, though both meet at one byte.
    low = np.maximum(low, cuts[:-1][number[held]])
    change = np.zeros(len(flat) + 1, dtype=np.int64)
    np.add.at(change, low, 1)
    np.add.at(change, np.maximum(low, np.searchsorted(starts, last, side="left")), -1)
    learned = np.cumsum(change[:-1]) > 0
    learned[heads] = False
    labels = np.where(learned, flat, np.int32(IGNORED))
    for at, fits in enumerate(whole.tolist()):
        part = slice(cuts[at], cuts[at + 1])
        yield (flat[part], labels[part]) if fits else None


def _trimmed(
    known: ByteLengths, flat: np.ndarray, edges: np.ndarray, heads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each token as its offsets have them; one of blanks alone reaches from the end of the one before.

    As tokenizers' ByteLevel post-processor cuts them, and tokens._learned reads them. `heads`: each text's first token.
    """
    starts, ends = edges[:-1], edges[1:]
    if known.trims is None:
        return starts, ends
    before, behind, prefix = known.trims
    lead = before[flat]
    lead[heads] = np.maximum(lead[heads] - prefix, 0)
    starts = np.minimum(starts + lead, ends)
    ends = np.maximum(ends - behind[flat], starts)
    previous = np.concatenate([[0], ends[:-1]])
    previous[heads] = edges[heads]
    blank = starts == ends
    starts[blank] = np.minimum(previous[blank], starts[blank])
    return starts, ends
