"""Start-up checks of a loaded model on a few tokens: what the toolkit relies on is measured, not taken from names.

Three things would make a result silently wrong: logits that are not head(hidden states), packed documents that see each
other, and random draws that are not keyed. Each is tried once (milliseconds) and refused with the model's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from finetune.contracts import IGNORED, Batch, Model
from finetune.errors import ModelError
from finetune.kernels.logits_change import logits_change
from finetune.models.decoder import hidden_states, learned_positions

LENGTHS = (5, 7)
"""Tokens of the two documents that are tried."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed difference relative to the largest value; a leak or a left-out scale is far larger."""


def verify(model: Model, packed: bool, training: bool) -> None:
    """Raises ModelError when the model breaks one of the promises; leaves it and the random generators as they were."""
    verify_logits(model)
    if packed:
        verify_packing(model)
    if training:
        verify_draws(model)


@torch.no_grad()
def verify_logits(model: Model) -> None:
    """The model's own logits are its head applied to its hidden states, changed as the loss will change them."""
    batch = probe_batch(model, LENGTHS[:1])
    with mode_of(model, training=False):
        own = model.base(input_ids=batch.input_ids, use_cache=False).logits
        ours = model.head(hidden_states(model, batch))
        change = logits_change(model.base.config)
        ours = ours if change is None else change(ours)
    if not bool(own.isfinite().all()):
        raise _fault(model, "gives logits that are not finite numbers", "check its weights, and adapter.alpha")
    if not is_close(own, ours):
        raise _fault(model, "changes its logits after the head in a way that is not known here")


@torch.no_grad()
def verify_packing(model: Model) -> None:
    """Two documents in one row give what each gives alone."""
    together = probe_batch(model, LENGTHS)
    cuts = [slice(0, LENGTHS[0]), slice(LENGTHS[0], sum(LENGTHS))]
    with mode_of(model, training=False):
        try:
            row = hidden_states(model, together)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _fault(model, f"does not take a mask for packed rows ({error})", "set data.pack=false") from error
        for cut in cuts:
            alone = dataclasses.replace(
                together, input_ids=together.input_ids[:, cut], document_ids=None, positions=None
            )
            if not is_close(hidden_states(model, alone), row[:, cut]):
                raise _fault(model, "lets packed documents see each other", "set data.pack=false")


@torch.no_grad()
def verify_draws(model: Model) -> None:
    """With its dropout modules off (they are keyed later), a forward in training mode draws nothing at random."""
    batch = probe_batch(model, LENGTHS[:1])
    device = batch.input_ids.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), mode_of(model, training=True):
        for child in model.module.modules():
            if isinstance(child, nn.Dropout):
                child.eval()
        before = _generator_state(device)
        hidden_states(model, batch)
        drawn = not torch.equal(before, _generator_state(device))
    if drawn:
        raise _fault(
            model,
            "draws at random inside its functions (dropout or routing noise), where draws cannot be keyed by row",
            "copy the model to a folder and set its dropout rates to 0 in config.json",
        )


def check_lengths(model: Model, row: int, document: int) -> list[str]:
    """Notices on documents longer than the model was made for; ModelError where it has no place for such a row.

    `row` and `document`: tokens of the longest of each. Rotary models go on past their length, only worse; a table of
    learned positions ends.
    """
    learned = learned_positions(model)
    if learned is not None and row > learned:
        raise _fault(model, f"has {learned} learned positions; a row has {row} tokens", f"data.max_tokens={learned}")
    made_for = model.shape.positions
    if not made_for or document <= made_for:
        return []
    return [f"the longest document has {document:,} tokens; the model was made for {made_for:,} (its config.json)"]


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def probe_batch(model: Model, lengths: tuple[int, ...], first: int = 3) -> Batch:
    """One row of documents of the given lengths, of ordinary tokens; another `first` gives another row."""
    device, rows = model.device, model.base.get_input_embeddings().weight.shape[0]
    total = sum(lengths)
    tokens_S = (torch.arange(total, device=device) * 7 + first) % rows
    documents_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    positions_S = torch.cat([torch.arange(length) for length in lengths]).to(device)
    several = len(lengths) > 1
    return Batch(
        input_ids=tokens_S[None],
        labels=torch.full_like(tokens_S[None], IGNORED),
        row_ids=torch.zeros(1, dtype=torch.int64, device=device),
        document_ids=documents_S[None] if several else None,
        positions=positions_S[None] if several else None,
        lengths=(total,),
    )


@contextmanager
def mode_of(model: Model, training: bool) -> Iterator[None]:
    """Every module in one mode, each put back into its own afterwards."""
    before = [(child, child.training) for child in model.module.modules()]
    model.module.train(training)
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode


def is_close(first: Tensor, second: Tensor) -> bool:
    """Whether two results of the same operations are the same but for roundings."""
    device = first.device.type
    made_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else first.dtype
    allowed = TOLERANCE.get(made_in, 1e-2) * first.abs().max().clamp_min(1e-6)
    return bool((first.float() - second.float()).abs().max() <= allowed)


def _fault(model: Model, what: str, remedy: str = "use another model") -> ModelError:
    return ModelError(f"{type(model.base).__name__} {what}", where=model.source, remedy=remedy)
