"""A backbone of fast blocks: embedding, blocks, final norm, without the model class's own forward.

The model class makes masks for every backend it may meet; here attention gets the documents themselves. Generation and
anything with a cache still runs the model class, through the same submodules.

Legend: B rows, S positions, D hidden width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.contracts import Batch, Model
from finetune.errors import ModelError
from finetune.kernels.embedding import embedding
from finetune.kernels.rms_norm import rms_norm
from finetune.models.fast.attention import Documents, Look, documents_of, varlen_function
from finetune.models.fast.block import FastBlock, Inputs, fits, window_of
from finetune.models.masks import document_mask


@dataclass(frozen=True)
class FastForward:
    """How a model's fast blocks run: the compute dtype, the attention kernel's name, and whether packed rows go through
    variable-length attention (else a mask)."""

    dtype: torch.dtype
    attention: str
    varlen: bool


def why_not(model: Model) -> str | None:
    """Why this model cannot run as fast blocks, or None."""
    backbone: Any = model.backbone
    named = [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(backbone, name)]
    if named:
        return f"{type(backbone).__name__} has no {named[0]}"
    for block in model.blocks:
        if not isinstance(block, FastBlock) and not fits(block):
            return f"{type(block).__name__} is not of the fast block's form here"
    return None


def install(model: Model, attention: str, dtype: torch.dtype, mlp_tile: int = 0) -> FastForward:
    """Puts a FastBlock in the place of every block, whose MLPs take `mlp_tile` tokens at a time (0: all) where they keep
    nothing. ModelError where `why_not` has a reason."""
    reason = why_not(model)
    if reason is not None:
        raise ModelError(reason, where="plan.fast_block", remedy="plan.fast_block=auto or false")
    layers: Any = model.backbone.layers
    for number, layer in enumerate(layers):
        if not isinstance(layer, FastBlock):
            layers[number] = FastBlock(layer)
        layers[number].mlp_tile = mlp_tile
    model.blocks = list(layers)
    on_gpu = model.device.type == "cuda"
    varlen = on_gpu and dtype != torch.float32 and varlen_function() is not None
    return FastForward(dtype, attention, varlen)


def hidden_states(model: Model, batch: Batch, fast: FastForward) -> Tensor:
    """[B, S, D], the head's input, as `models/decoder.hidden_states` promises it."""
    layers = FastLayers(model, fast)
    with torch.autocast(batch.input_ids.device.type, enabled=False):
        x_BSD, inputs = layers.begin(batch)
        for block in model.blocks:
            x_BSD = block(x_BSD, inputs=inputs)
        return layers.finish(x_BSD, batch)


class FastLayers:
    """The forward in its parts, for whoever runs one block for many batches: embedding, block by block, final norm."""

    def __init__(self, model: Model, fast: FastForward) -> None:
        self.model = model
        self.fast = fast
        self._backbone: Any = model.backbone

    def begin(self, batch: Batch, embedded_BSD: Tensor | None = None) -> tuple[Tensor, Inputs]:
        """[B, S, D], the first block's input (looked up, unless it is given), and what every block gets of this batch
        beside it."""
        return self._embed(batch) if embedded_BSD is None else embedded_BSD, self._inputs(batch)

    def _embed(self, batch: Batch) -> Tensor:
        table: Any = self._backbone.embed_tokens
        plain = type(table) is nn.Embedding and table.max_norm is None
        ids_BS = batch.input_ids
        return embedding(ids_BS, table.weight, table.padding_idx) if plain else table(ids_BS)

    def _inputs(self, batch: Batch) -> Inputs:
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)[None]
        # The tables only ask what is given them for its device and type.
        like = torch.empty(0, dtype=self.fast.dtype, device=batch.input_ids.device)
        cos, sin = self._backbone.rotary_emb(like, position_ids=positions)
        return Inputs(cos, sin, _look(self.model, batch, self.fast), self.fast.dtype)

    def turn(self, number: int) -> AbstractContextManager[None]:
        """What one block's forward or backward of all batches runs in: its weights are decoded once."""
        block: Any = self.model.blocks[number]
        within: AbstractContextManager[None] = block.decoding_once(self.fast.dtype)
        return within

    def forward(self, number: int, x_BSD: Tensor, inputs: Inputs) -> Tensor:
        """One block, nothing kept."""
        with torch.no_grad():
            block: Any = self.model.blocks[number]
            out_BSD: Tensor = block.whole_of(x_BSD, inputs)
            return out_BSD

    def backward(self, number: int, x_BSD: Tensor, grad_BSD: Tensor, inputs: Inputs, need_input: bool) -> Tensor | None:
        """One block again, and the gradient of its input; gradients of its trained tensors are added to theirs."""
        block: Any = self.model.blocks[number]
        gradient: Tensor | None = block.gradients(x_BSD, grad_BSD, inputs, need_input)
        return gradient

    def finish(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """The final norm, differentiable."""
        norm = self._backbone.norm
        return rms_norm(x_BSD, norm.weight, norm.variance_epsilon)


def _look(model: Model, batch: Batch, fast: FastForward) -> Look:
    if batch.document_ids is None:
        return Look(fast.attention)
    if fast.varlen:
        return Look(fast.attention, documents=_documents(batch))
    windows = {window_of(block.self_attn) for block in model.blocks}
    return Look(fast.attention, masks={window: document_mask(batch.document_ids, window) for window in windows})


def _documents(batch: Batch) -> Documents:
    assert batch.document_ids is not None
    return documents_of(batch.document_ids)
