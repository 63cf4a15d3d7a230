"""The gate of a LLaMA MLP, silu(gate) * up, and its backward in place; plain and fused.

Backward takes three tensors and leaves three in their place, so the widest moment of an MLP holds no more than those.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional

SLICE_ELEMENTS = 2**18
"""Elements whose backward is made at once without a GPU's kernel: the operations' own temporaries stay this small."""


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up by plain operations."""
    return functional.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for contiguous tensors of one shape and dtype. Not differentiable by itself: see `swiglu_backward_`."""
    if gate.is_cuda:
        from finetune.kernels.fused import swiglu as fused

        return fused.forward(gate, up)
    return functional.silu(gate).mul_(up)


def swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of the product: (the product, gate's gradient, up's gradient), which take the arguments' memory."""
    if gate.is_cuda:
        from finetune.kernels.fused import swiglu as fused

        fused.backward_(grad, gate, up)
        for changed in (grad, gate, up):
            # A second backward over the same saved tensors must fail, not compute with what stands here now.
            increment_version(changed)
        return grad, gate, up
    for parts in zip(*(tensor.view(-1).split(SLICE_ELEMENTS) for tensor in (grad, gate, up)), strict=True):
        _backward_(*parts)
    return grad, gate, up


def _backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    wide = gate if gate.dtype.itemsize >= 4 else gate.float()
    share, active = wide.sigmoid(), functional.silu(gate)
    slope = share * (1 + wide * (1 - share))
    gate_grad = (grad * up * slope).to(gate.dtype)
    up_grad = grad * active
    grad.copy_(active * up)
    gate.copy_(gate_grad)
    up.copy_(up_grad)
