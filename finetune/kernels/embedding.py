"""Looking rows of an embedding up, with a gradient that takes no memory beside itself.

torch's own backward keeps an fp32 row for every few tokens. Here tokens are sorted, and one program adds up all tokens of
one id, in their order: the same bits each time, and each sum rounded once. Plain on a CPU.

Legend: B rows, S positions, N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def embedding(ids_BS: Tensor, weight_VD: Tensor, padding: int | None = None) -> Tensor:
    """[B, S, D]: the rows of `weight` that the ids name. Differentiable by the weight, once; the row `padding` gets zeros."""
    if weight_VD.is_cuda and weight_VD.requires_grad and weight_VD.dtype != torch.float64:
        return _Embedding.apply(ids_BS, weight_VD, padding)
    return functional.embedding(ids_BS, weight_VD, padding)


def embedding_gradient(grad_ND: Tensor, sorted_N: Tensor, order_N: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, D]: the sums of the gradients of tokens sorted by id (`order_N`: each one's row of `grad_ND`), made in fp32."""
    if grad_ND.is_cuda:
        from finetune.kernels.fused import embedding as fused

        return fused.backward_sorted(grad_ND, sorted_N.contiguous(), order_N.contiguous(), rows, dtype)
    sums_VD = torch.zeros(rows, grad_ND.shape[1])
    return sums_VD.index_add_(0, sorted_N, grad_ND[order_N].float()).to(dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_BS: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids_BS)
        ctx.rows, ctx.dtype, ctx.padding = weight_VD.shape[0], weight_VD.dtype, padding
        return functional.embedding(ids_BS, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[None, Tensor, None]:
        from finetune.kernels.fused import embedding as fused

        (ids_BS,) = ctx.saved_tensors
        grad_ND = grad_BSD.reshape(-1, grad_BSD.shape[-1]).contiguous()
        weight_grad_VD = fused.backward(grad_ND, ids_BS.flatten(), ctx.rows, ctx.dtype)
        if ctx.padding is not None:
            weight_grad_VD[ctx.padding] = 0
        return None, weight_grad_VD, None
