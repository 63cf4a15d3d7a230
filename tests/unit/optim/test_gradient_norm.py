"""The gradient's norm: fp32 sums whatever the gradients' type, and no fp32 copy of 16-bit gradients."""

from __future__ import annotations

import pytest
import torch

from finetune.kernels.norms import tensor_norms
from finetune.train.step import clip


def test_fp32_norms_are_torchs_to_the_bit() -> None:
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((64, 33), (7,), (128, 128))
    ]
    expected = torch.nn.utils.get_total_norm([gradient.clone() for gradient in gradients])
    assert torch.equal(torch.linalg.vector_norm(tensor_norms(gradients)), expected)


def test_bf16_norms_are_summed_in_fp32() -> None:
    gradients = [torch.full((4096,), 1.0, dtype=torch.bfloat16), torch.full((64, 64), 2.0, dtype=torch.bfloat16)]
    norm = torch.linalg.vector_norm(tensor_norms(gradients))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((4096 + 4 * 4096) ** 0.5, rel=1e-6)
    assert torch.linalg.vector_norm(tensor_norms([])).item() == 0


def test_clipping_scales_16_bit_gradients_in_place() -> None:
    gradients = [torch.full((100,), 3.0, dtype=torch.bfloat16)]
    clip(gradients, 30.0, 1.0)
    assert gradients[0].dtype == torch.bfloat16
    assert gradients[0].float().norm().item() == pytest.approx(1.0, rel=1e-2)
