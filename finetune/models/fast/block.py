"""A decoder layer of the LLaMA family (Llama, Mistral, Qwen2, Qwen3, SmolLM) through fused operations.

It holds the original layer's own submodules under their names, so weights, adapters, saving and export see no change.
Training runs through `forward`; anything else (a cache, another mask) goes to the original layer, which shares the same
submodules. Recomputation for backward is the block's own: it stops before the down projection, whose output no gradient
needs, and so costs a quarter less than running the layer again.

Legend: B rows, S positions, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import gated_mlp as mlp
from finetune.kernels import mlp_tiles
from finetune.kernels.adapted_linear import Leaf, adapted_linears
from finetune.kernels.gated_mlp import MlpLeaves, gated_mlp
from finetune.kernels.rms_norm import add_rms_norm, rms_norm
from finetune.kernels.rotary import rotary_
from finetune.models.fast.attention import Look, attend
from finetune.models.fast.projections import decoded_once, leaf, plain


@dataclass(frozen=True)
class Inputs:
    """What every block of a forward shares: rotary tables [1 or B, S, width of a head], attention, the compute dtype."""

    cos: Tensor
    sin: Tensor
    look: Look
    dtype: torch.dtype


class FastBlock(nn.Module):
    """The fused form of one decoder layer. `recompute`: keep only the input and run again for backward.

    `mlp_tile`: tokens that the MLP takes at a time where none of its activations are kept; 0: all.

    `gradient_checkpointing` and the function beside it are what transformers' layers have: with the first, the second
    runs the block, so that what it keeps can be sent elsewhere.
    """

    recomputes_itself = True
    gradient_checkpointing = False

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.training = layer.training
        # Outside the module tree: its submodules are already this one's.
        self._layer = (layer,)
        self.recompute = False
        self.mlp_tile = 0
        self.decoded: dict[nn.Module, Tensor] = {}
        self._gradient_checkpointing_func: Callable[..., Tensor] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[B, S, D] to [B, S, D]: by fused operations when given `inputs`, else whatever the original layer returns."""
        inputs: Inputs | None = kwargs.pop("inputs", None)
        if inputs is None:
            return self._layer[0](hidden_states, *args, **kwargs)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            assert self._gradient_checkpointing_func is not None
            return self._gradient_checkpointing_func(partial(self._run, inputs), hidden_states)
        return self._run(inputs, hidden_states)

    def _run(self, inputs: Inputs, x_BSD: Tensor) -> Tensor:
        leaves = _Leaves.of(self, inputs.dtype)
        if self.recompute and self.training and torch.is_grad_enabled():
            return _Recomputed.apply(x_BSD, self, inputs, leaves, *leaves.tensors())
        return self.whole(x_BSD, inputs, leaves)

    @contextmanager
    def decoding_once(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside, weights stored in 4 or 8 bits are decoded once and kept, for many batches one after the other."""
        linears = [getattr(self.self_attn, name) for name in ATTENTION] + [getattr(self.mlp, name) for name in MLP]
        with torch.no_grad():
            self.decoded = decoded_once(linears, dtype)
        try:
            yield
        finally:
            self.decoded = {}

    def whole_of(self, x_BSD: Tensor, inputs: Inputs) -> Tensor:
        """The block with its weights as they are now."""
        return self.whole(x_BSD, inputs, _Leaves.of(self, inputs.dtype))

    def whole(self, x_BSD: Tensor, inputs: Inputs, leaves: _Leaves) -> Tensor:
        """The block, differentiable by what its parts keep."""
        h_BSD, normed_BSD = self.upper(x_BSD, inputs, leaves)
        if self.mlp_tile and not torch.is_grad_enabled():
            # Both are this block's own, and nothing keeps them.
            return h_BSD.add_(mlp_tiles.forward_(normed_BSD, leaves.mlp, self.mlp_tile))
        return h_BSD + gated_mlp(normed_BSD, leaves.mlp)

    def upper(self, x_BSD: Tensor, inputs: Inputs, leaves: _Leaves) -> tuple[Tensor, Tensor]:
        """The attention half: (the residual stream after it, its norm, which the MLP reads)."""
        attention: Any = self.self_attn
        normed_BSD = rms_norm(x_BSD, leaves.norms[0], leaves.epsilons[0], inputs.dtype)
        q_BSE, k_BSE, v_BSE = adapted_linears(normed_BSD, leaves.attention[:3])
        del normed_BSD
        width = attention.head_dim
        q_BSE, k_BSE = self._head_norm(q_BSE, "q_norm"), self._head_norm(k_BSE, "k_norm")
        q_BSE = rotary_(q_BSE, q_BSE.shape[-1] // width, inputs.cos, inputs.sin)
        k_BSE = rotary_(k_BSE, k_BSE.shape[-1] // width, inputs.cos, inputs.sin)
        q_BSHD, k_BSGD, v_BSGD = (part.unflatten(-1, (-1, width)) for part in (q_BSE, k_BSE, v_BSE))
        del q_BSE, k_BSE, v_BSE
        seen_BSHD = attend(q_BSHD, k_BSGD, v_BSGD, inputs.look, window_of(attention), attention.scaling)
        del q_BSHD, k_BSGD, v_BSGD
        (out_BSD,) = adapted_linears(seen_BSHD.flatten(-2), leaves.attention[3:])
        del seen_BSHD
        return add_rms_norm(x_BSD, out_BSD, leaves.norms[1], leaves.epsilons[1], inputs.dtype)

    @torch.no_grad()
    def gradients(self, x_BSD: Tensor, grad_BSD: Tensor, inputs: Inputs, need_input: bool) -> Tensor | None:
        """Runs the block again from its input and adds the gradients of its trained tensors to their `.grad`.

        Returns the input's gradient where it is needed. What autograd does for a block that recomputes itself, without
        the forward that came before it.
        """
        leaves = _Leaves.of(self, inputs.dtype)
        tensors = leaves.tensors()
        needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
        x_BSD = x_BSD.detach().requires_grad_(need_input)
        dx_BSD, *found = _run_back(self, x_BSD, grad_BSD, inputs, leaves, needed)
        for tensor, gradient in zip(tensors, found, strict=True):
            if tensor is not None and gradient is not None:
                _accumulate(tensor, gradient)
        return dx_BSD

    def _head_norm(self, x_BSE: Tensor, name: str) -> Tensor:
        norm: Any = getattr(self.self_attn, name, None)
        if norm is None:
            return x_BSE
        heads = x_BSE.unflatten(-1, (-1, norm.weight.shape[0]))
        return rms_norm(heads, norm.weight, norm.variance_epsilon, x_BSE.dtype).flatten(-2)


@dataclass(frozen=True)
class _Leaves:
    """A block's weights as they act in one forward."""

    norms: tuple[Tensor, ...]
    epsilons: tuple[float, ...]
    head_norms: tuple[Tensor, ...]
    attention: tuple[Leaf, ...]
    mlp: MlpLeaves

    @staticmethod
    def of(block: FastBlock, dtype: torch.dtype) -> _Leaves:
        attention, gated = block.self_attn, block.mlp
        norms: tuple[Any, ...] = (block.input_layernorm, block.post_attention_layernorm)
        return _Leaves(
            tuple(norm.weight for norm in norms),
            tuple(norm.variance_epsilon for norm in norms),
            tuple(getattr(attention, name).weight for name in HEAD_NORMS if hasattr(attention, name)),
            tuple(leaf(getattr(attention, name), dtype, block.decoded) for name in ATTENTION),
            MlpLeaves(*(leaf(getattr(gated, name), dtype, block.decoded) for name in MLP)),
        )

    def upper_tensors(self) -> tuple[Tensor | None, ...]:
        """Those that the attention half reads."""
        return (*self.norms, *self.head_norms, *(tensor for each in self.attention for tensor in each.tensors()))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.upper_tensors(), *self.mlp.tensors())


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = ("modeling_llama", "modeling_mistral", "modeling_qwen2", "modeling_qwen3")
"""Files of transformers whose decoder layers are of this form."""
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")


class _Recomputed(torch.autograd.Function):
    """The block with its input alone kept. `tensors` are those of `leaves`, so that autograd hands out their gradients."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, block: FastBlock, inputs: Inputs, leaves: _Leaves, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSD)
        ctx.block, ctx.inputs, ctx.leaves = block, inputs, leaves
        return block.whole(x_BSD, inputs, leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
        needed = ctx.needs_input_grad[4:]
        dx, *found = _run_back(ctx.block, x_BSD, grad_BSD, ctx.inputs, ctx.leaves, needed)
        return dx, None, None, None, *found


def _run_back(
    block: FastBlock, x_BSD: Tensor, grad_BSD: Tensor, inputs: Inputs, leaves: _Leaves, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of the input (where it requires one) and of the leaves' tensors that are `needed`, from the input alone."""
    upper = leaves.upper_tensors()
    need_upper, need_mlp = needed[: len(upper)], needed[len(upper) :]
    with torch.enable_grad():
        h_BSD, normed_BSD = block.upper(x_BSD, inputs, leaves)
    read_BSD = normed_BSD.detach()
    need = (h_BSD.requires_grad, *need_mlp)
    if block.mlp_tile:
        # The gradient takes the memory of what was read: backward of a norm does not look at its output.
        slope_BSD, found = mlp_tiles.backward_(grad_BSD, read_BSD, leaves.mlp, need, block.mlp_tile)
    else:
        half = mlp.first_half(read_BSD, leaves.mlp)
        slope_BSD, found = mlp.back(grad_BSD.to(inputs.dtype), read_BSD, half, leaves.mlp, need)
        del half
    del read_BSD
    sources = [x_BSD if x_BSD.requires_grad else None]
    sources += [tensor if need else None for tensor, need in zip(upper, need_upper, strict=True)]
    wanted = [tensor for tensor in sources if tensor is not None]
    own = iter(torch.autograd.grad((h_BSD, normed_BSD), wanted, (grad_BSD, slope_BSD)) if wanted else ())
    dx, *rest = (None if tensor is None else next(own) for tensor in sources)
    return dx, *rest, *found


def _accumulate(tensor: Tensor, gradient: Tensor) -> None:
    """As autograd does: the first gradient is taken, the others are added to it."""
    if tensor.grad is None:
        tensor.grad = gradient.to(tensor.dtype)
    else:
        tensor.grad += gradient


def window_of(attention: Any) -> int | None:
    """The sliding window of an attention module (None: it sees all)."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None)


def fits(layer: nn.Module) -> bool:
    """Whether `FastBlock` computes what this decoder layer does."""
    name = type(layer).__module__
    if name.rpartition(".")[2] not in FAMILIES or not name.startswith("transformers.models."):
        return False
    attention: Any = layer.self_attn
    config = attention.config
    linears = [getattr(attention, each) for each in ATTENTION] + [getattr(layer.mlp, each) for each in MLP]
    return config.hidden_act == "silu" and attention.attention_dropout == 0 and all(plain(each) for each in linears)
