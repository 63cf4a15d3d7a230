"""Dropout whose draws are a pure function of (seed, step, module, row, position, feature), never of a global generator.

So the same row is dropped the same way in any micro-batch, beside any other rows, with any padding, on any rank and in
a recomputation. The price is an integer hash of about ten elementwise passes, done in slices so that its int64 working
memory stays small; the backward saves one int64 a row and hashes again instead of keeping a mask.

Legend: B rows, S positions in the row, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.errors import ModelError

WORD = 0xFFFFFFFF
FIRST, SECOND = 0x4BDC9AA5, 0x2729B469
"""Multipliers below 2**31, so that a 32-bit word times one of them never leaves int64."""
GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: spreads small counters before they are mixed."""
SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
"""Elements hashed at once: 2 MiB (fits a CPU core's cache) and 64 MiB of int64."""

OTHER_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def mix(word: int) -> int:
    """A bijection of 32-bit words in which every input bit changes about half of the output bits.

    Source: C. Wellons, hash-prospector (public domain), README, two-round constants [16 4bdc9aa5 15 2729b469 16], exact
    bias 0.1736, the same as its lowbias32.
    """
    word ^= word >> 16
    word = (word * FIRST) & WORD
    word ^= word >> 15
    word = (word * SECOND) & WORD
    return word ^ (word >> 16)


def mix_(words: Tensor) -> Tensor:
    """`mix` of every element of an int64 tensor of 32-bit words, in place."""
    words.bitwise_xor_(words >> 16)
    words.mul_(FIRST).bitwise_and_(WORD)
    words.bitwise_xor_(words >> 15)
    words.mul_(SECOND).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 16)


def _spread_(words: Tensor) -> Tensor:
    """Counters to words that differ in many bits: both 32-bit halves of a counter take part."""
    high = words >> 32
    high.bitwise_and_(WORD)
    words.bitwise_and_(WORD).bitwise_xor_(mix_(high))
    return mix_(words.add_(GOLDEN).bitwise_and_(WORD))


def _fold(word: int, counter: int) -> int:
    """`word` with one more counter mixed in; counters may have 64 bits."""
    for part in (counter & WORD, (counter >> 32) & WORD):
        word = mix(((word + GOLDEN) & WORD) ^ mix((part + GOLDEN) & WORD))
    return word


def key_word(*counters: int) -> int:
    """One 32-bit word that stands for these counters (of up to 64 bits each), in their order."""
    word = 0
    for counter in counters:
        word = _fold(word, counter)
    return word


def row_keys(seed: int, step: int, module: int, row_ids_B: Tensor) -> Tensor:
    """One 32-bit word a row (int64 [B], on the rows' device) that stands for (seed, step, module, row)."""
    return element_words(key_word(seed, step, module), row_ids_B.to(torch.int64, copy=True))


def element_words(word: int, places: Tensor) -> Tensor:
    """One 32-bit word (int64) for each of `places` (int64, overwritten) under a `key_word`."""
    return mix_(_spread_(places).bitwise_xor_(word))


def keep_mask(keys_B: Tensor, positions: range, features: int, dropped: float) -> Tensor:
    """bool [B, len(positions), F]: what is kept. Element (b, s, f) depends on keys_B[b], s, f and `dropped` alone."""
    device = keys_B.device
    positions_S = torch.arange(positions.start, positions.stop, dtype=torch.int64, device=device)
    features_F = torch.arange(features, dtype=torch.int64, device=device)
    # Positions and features are hashed on their own before they meet, so no parts of a mask are shifted copies.
    places_BS = mix_(keys_B[:, None] ^ _spread_(positions_S)[None, :])
    words_BSF = mix_(places_BS[:, :, None] ^ _spread_(features_F)[None, None, :])
    return words_BSF >= round(dropped * 2**32)


def apply_mask(x_BSF: Tensor, keys_B: Tensor, dropped: float, first: int = 0) -> Tensor:
    """x times mask over (1 - dropped), made slice by slice along the positions; on a GPU in one pass, the same bits.

    x may be a part of its rows, from position `first` on.
    """
    if x_BSF.is_cuda and x_BSF.is_contiguous() and x_BSF.dtype != torch.float64 and x_BSF.numel() > 0:
        from finetune.kernels.fused import keyed_dropout as fused

        return fused.apply_mask(x_BSF, keys_B, dropped, first)
    rows, length, features = x_BSF.shape
    scale = 1.0 / (1.0 - dropped)
    out_BSF = torch.empty_like(x_BSF)
    together = max(1, SLICE_ELEMENTS.get(x_BSF.device.type, 2**20) // max(1, rows * features))
    for start in range(0, length, together):
        part = slice(start, min(start + together, length))
        mask = keep_mask(keys_B, range(first + part.start, first + part.stop), features, dropped)
        # Selected, not multiplied: a dropped infinity or NaN must not come back as NaN.
        out_BSF[:, part] = torch.where(mask, x_BSF[:, part] * scale, 0.0)
    return out_BSF


class _KeyedDropout(torch.autograd.Function):
    """The same mask in both directions; only the rows' keys are kept between them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_BSF: Tensor, keys_B: Tensor, dropped: float) -> Tensor:
        ctx.save_for_backward(keys_B)
        ctx.dropped = dropped
        return apply_mask(x_BSF, keys_B, dropped)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient_BSF: Tensor) -> tuple[Tensor, None, None]:
        (keys_B,) = ctx.saved_tensors
        return apply_mask(gradient_BSF, keys_B, ctx.dropped), None, None


class DrawKey:
    """What all keyed draws of a model share: the recipe's seed, the optimizer step, and the rows of the micro-batch.

    The loop calls `set` before each micro-batch's forward and leaves it until that micro-batch's backward is over,
    since recomputation asks for it again. `row_ids_B` is int64 [B] on the model's device; nothing here waits for a GPU.
    """

    def __init__(self, seed: int, step: int = 0, row_ids_B: Tensor | None = None) -> None:
        self.seed = seed
        self.step = step
        self.row_ids_B = row_ids_B

    def set(self, step: int, row_ids_B: Tensor) -> None:
        self.step = step
        self.row_ids_B = row_ids_B


class KeyedDropout(nn.Module):
    """nn.Dropout with keyed draws, for input [B, S, F]. The identity in eval mode."""

    def __init__(self, p: float, key: DrawKey, index: int, name: str = "") -> None:
        super().__init__()
        self.p = p
        self.key = key
        self.index = index
        self.name = name

    def forward(self, x_BSF: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSF
        rows = self.key.row_ids_B
        if x_BSF.dim() != 3:
            raise ModelError(
                f"dropout needs an input [rows, positions, features] to draw by row; this one is {list(x_BSF.shape)}",
                where=self.name,
                remedy="set this dropout to 0 in the model's config, or adapter.dropout=0",
            )
        if rows is None or rows.shape[0] != x_BSF.shape[0]:
            have = "no rows" if rows is None else f"{rows.shape[0]} rows"
            raise RuntimeError(
                f"{self.name}: a batch of {x_BSF.shape[0]} rows, but the draw key has {have}: set it first"
            )
        keys_B = row_keys(self.key.seed, self.key.step, self.index, rows)
        return _KeyedDropout.apply(x_BSF, keys_B, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, index={self.index}"


def key_dropouts(module: nn.Module, key: DrawKey) -> int:
    """Puts a KeyedDropout in the place of every nn.Dropout with p > 0 (peft's too) and returns how many there were.

    A module's index is its place among the dropouts sorted by name, so it is the same on every rank and in every run.
    Repeating the call gives the same indices with the new key. Dropouts of other kinds (whole channels, alpha) with
    p > 0 are refused by name.
    """
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, child in sorted(module.named_modules(remove_duplicate=False), key=lambda pair: pair[0]):
        if isinstance(child, KeyedDropout) or (type(child) is nn.Dropout and child.p > 0):
            found.setdefault(id(child), (child, []))[1].append(name)
        elif isinstance(child, OTHER_DROPOUTS) and child.p > 0:
            raise ModelError(
                f"{type(child).__name__} with p={child.p} has no keyed form", name, "set it to 0 in the config"
            )
    for index, (child, names) in enumerate(found.values()):
        if not child.p < 1:
            raise ModelError(f"dropout with p={child.p} keeps nothing", names[0], "use a rate below 1")
        keyed = KeyedDropout(child.p, key, index, names[0])
        keyed.train(child.training)
        for name in names:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, keyed)
    return len(found)
