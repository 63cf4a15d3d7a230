"""MLP in tiles: the MLP of a recomputed fast block takes so many tokens at a time, in forward and in backward.

Gate, up, their product and its gradient are the widest of a block that keeps nothing: 57 kB a token and more for 8B. In
tiles they stop growing with the micro-batch and with long rows; what is left is attention's own backward. The price is
thinner matrix products, and weights stored in 4 or 8 bits decoded once a tile. Weight gradients are summed tile by tile.
"""

from __future__ import annotations

from dataclasses import replace

from finetune.memory import activations
from finetune.memory.case import Case, compute_seconds
from finetune.memory.checkpointing import recomputed_bytes
from finetune.memory.step_time import micro_batches, step_seconds
from finetune.memory.storage import Work, place_of

CHOICES = (0, 4096, 1024)
MANY, LEAST = 4, 2
"""Tiles of a micro-batch from which larger ones free little less, and below which even the smallest are not tried."""
THIN = {"cpu": 8.0, "cuda": 64.0}
"""Tokens that a tile costs beyond its own, because its matrix products are thin. Assumed."""
THIN_TRAINED = 64.0
"""The same for what a trained weight adds: its gradient is read and written by each tile. Assumed."""
PASSES = 2 + 2 / 3
"""Matrix products of a tile in forwards: forward, gate and up again, the inputs' gradients."""


def worth_trying(tokens: int) -> int:
    """The one tile that a plan of micro-batches of so many tokens is tried with (0: none), so that plans are found soon."""
    _, *tiles, smallest = CHOICES
    many = [tile for tile in tiles if tokens >= MANY * tile]
    return many[0] if many else smallest if tokens >= LEAST * smallest else 0


def saves(case: Case) -> int:
    """Bytes of a block's backward that never stand together."""
    return _block(case, replace(case.work, tile=0)) - _block(case, case.work)


def _block(case: Case, work: Work) -> int:
    again = recomputed_bytes(case.shape, case.storage, work, True)
    return again + activations.block_workspace(case.shape, case.storage, work)


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds."""
    shape, storage, work = case.shape, case.storage, case.work
    tiles = -(-work.tokens // work.mlp_tokens)
    if tiles == 1:
        return 0.0
    weights = sum(linear.parameters for linear in shape.linears if place_of(linear, shape) in ("mlp_in", "mlp_out"))
    passes, thin = PASSES, THIN[storage.device]
    if storage.trained:
        passes, thin = passes + 1, thin + THIN_TRAINED
    each = compute_seconds(case, passes * 2.0 * thin * weights)
    if storage.coded and case.plan.weights != "streamed":
        each += PASSES * weights / case.speed.decode_weights_per_s
    # The first tile costs what the whole would.
    return micro_batches(case) * (tiles - 1) * shape.blocks * each / step_seconds(case)
