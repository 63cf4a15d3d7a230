"""Every fused kernel against its plain reference in fp32, on the GPU, at a real block's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finetune.errors import ModelError
from finetune.kernels.adapted_linear import Adapter, Leaf, adapted_linears, adapted_linears_reference
from finetune.kernels.determinism import deterministic
from finetune.kernels.embedding import embedding
from finetune.kernels.keyed_dropout import apply_mask, keep_mask, row_keys
from finetune.kernels.linear_cross_entropy import linear_cross_entropy_reference, linear_cross_entropy_sum
from finetune.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from finetune.kernels.rotary import rotary_, rotary_reference
from finetune.kernels.swiglu import swiglu, swiglu_backward_, swiglu_reference
from finetune.models.fast.attention import Documents, Look, attend, varlen_function

pytestmark = pytest.mark.gpu
HALF = 2**-8
"""Half a step of bf16."""


def close(found: Tensor, wanted: Tensor, steps: float = 2.0) -> None:
    """Within so many half steps of bf16, counted at the largest value."""
    difference = float((found.float() - wanted.float()).abs().max())
    assert difference <= steps * HALF * float(wanted.float().abs().max()), difference


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("shape", [(4, 2048, 4096), (3, 7, 576), (5, 33, 16, 128), (2, 3, 14336)])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_rms_norm(shape: tuple[int, ...], stream: torch.dtype) -> None:
    x, added, gain = normal(*shape).to(stream), normal(*shape, seed=1), normal(shape[-1], seed=2) + 1
    grads = normal(*shape, seed=3), normal(*shape, seed=4)
    ours = [t.detach().clone().requires_grad_() for t in (x, added, gain)]
    summed, out = add_rms_norm(*ours, 1e-5, torch.bfloat16)
    torch.autograd.backward((summed, out), (grads[0].to(stream), grads[1]))
    plain = [t.detach().float().requires_grad_() for t in (x, added, gain)]
    total = plain[0] + plain[1]
    wanted = rms_norm_reference(total, plain[2], 1e-5)
    torch.autograd.backward((total, wanted), tuple(g.float() for g in grads))
    close(summed, total)
    close(out, wanted)
    for mine, theirs in zip(ours, plain, strict=True):
        close(mine.grad, theirs.grad, 3.0)
    close(rms_norm(x, gain, 1e-5, torch.bfloat16), rms_norm_reference(x.float(), gain.float(), 1e-5))


def test_swiglu_and_its_backward_in_place() -> None:
    gate, up, grad = normal(8192, 14336), normal(8192, 14336, seed=1), normal(8192, 14336, seed=2)
    wide = [t.float().requires_grad_() for t in (gate, up)]
    wanted = swiglu_reference(*wide)
    wanted.backward(grad.float())
    close(swiglu(gate, up), wanted)
    product, gate_grad, up_grad = swiglu_backward_(grad, gate, up)
    close(product, wanted)
    close(gate_grad, wide[0].grad)
    close(up_grad, wide[1].grad)


def test_swiglu_backward_twice_is_refused() -> None:
    gate = normal(4, 8).requires_grad_()
    kept = gate * 1.0
    out = kept.exp()
    swiglu_backward_(normal(4, 8), out.detach(), normal(4, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(("heads", "width"), [(32, 128), (8, 128), (9, 64), (3, 96)])
@pytest.mark.parametrize("rows", [1, 4])
def test_rotary(heads: int, width: int, rows: int) -> None:
    x = normal(4, 515, heads * width)
    angles = torch.rand(rows, 515, width // 2, device="cuda") * 100
    cos, sin = (torch.cat((t, t), -1).bfloat16() for t in (angles.cos(), angles.sin()))
    plain = x.float().requires_grad_()
    wanted = rotary_reference(plain.view(4, 515, heads, width), cos.float(), sin.float())
    grad = normal(4, 515, heads * width, seed=5)
    wanted.backward(grad.float().view(wanted.shape))
    own = x.clone().requires_grad_()
    out = rotary_(own * 1.0, heads, cos, sin)
    out.backward(grad)
    close(out.view(wanted.shape), wanted)
    close(own.grad, plain.grad)


def adapted(weight: Tensor, seed: int, wide: bool) -> Leaf:
    """A leaf with its own adapter; `wide`: everything in fp32."""
    outputs = weight.shape[0]
    a = (normal(16, 4096, seed=10 + seed).float() / 64).requires_grad_()
    b = (normal(outputs, 16, seed=20 + seed).float() / 4).requires_grad_()
    own = weight.float() if wide else weight
    return Leaf(frozen=lambda: own, adapter=Adapter(a, b, 2.0))


def test_adapted_linears() -> None:
    x = normal(4, 512, 4096).requires_grad_()
    weights = [normal(outputs, 4096, seed=n) / 64 for n, outputs in enumerate((4096, 1024, 1024))]
    leaves, plain = ([adapted(weight, n, wide) for n, weight in enumerate(weights)] for wide in (False, True))
    grads = [normal(4, 512, len(weight), seed=30) for weight in weights]
    wide = x.detach().float().requires_grad_()
    wanted = adapted_linears_reference(wide, plain)
    torch.autograd.backward(wanted, [g.float() for g in grads])
    found = adapted_linears(x, leaves)
    torch.autograd.backward(found, grads)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    close(x.grad, wide.grad, 3.0)
    for leaf, other in zip(leaves, plain, strict=True):
        assert leaf.adapter.a.grad.dtype == torch.float32
        close(leaf.adapter.a.grad, other.adapter.a.grad, 3.0)
        close(leaf.adapter.b.grad, other.adapter.b.grad, 3.0)


@pytest.mark.parametrize(("backend", "window"), [("auto", None), ("auto", 100), ("flash", None)])
def test_packed_attention_is_each_document_alone(backend: str, window: int | None) -> None:
    assert varlen_function() is not None
    lengths = [300, 17, 1, 706]
    q, k, v = (normal(1, 1024, heads, 64, seed=heads).requires_grad_() for heads in (8, 2, 2))
    v = normal(1, 1024, 2, 64, seed=9).requires_grad_()
    starts = torch.tensor([0, 300, 317, 318, 1024], dtype=torch.int32, device="cuda")
    packed = attend(q, k, v, Look(backend, documents=Documents(starts, 706)), window, 0.125)
    grad = normal(1, 1024, 8, 64, seed=7)
    found = torch.autograd.grad(packed, (q, k, v), grad)
    parts = [
        attend(*each, Look(backend), window, 0.125)
        for each in zip(*(t.split(lengths, 1) for t in (q, k, v)), strict=True)
    ]
    alone = torch.cat(parts, 1)
    wanted = torch.autograd.grad(alone, (q, k, v), grad)
    close(packed, alone)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs, 3.0)


@pytest.mark.parametrize("vocabulary", [128256, 1000, 49152])
@pytest.mark.parametrize("weighted", [False, True])
def test_chunked_loss(vocabulary: int, weighted: bool) -> None:
    hidden = normal(700, 256).requires_grad_()
    head = (normal(vocabulary, 256, seed=1) / 4).requires_grad_()
    labels = torch.randint(0, vocabulary, (700,), device="cuda")
    labels[::7] = -100
    weights = torch.rand(700, device="cuda") if weighted else None
    loss = linear_cross_entropy_sum(hidden, head, labels, weights_N=weights, chunk=256)
    loss.backward()
    # The plain form rounds its logits to bf16 too; against logits in fp32 that alone would be the error.
    plain = [t.detach().clone().requires_grad_() for t in (hidden, head)]
    wanted = linear_cross_entropy_reference(*plain, labels, weights_N=weights)
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    close(hidden.grad, plain[0].grad, 4.0)
    close(head.grad, plain[1].grad, 4.0)


@pytest.mark.parametrize("documents", [None, (0, 700, 2048, 4096, 4100, 8192)])
def test_deterministic_attention_gives_the_same_bits_again(documents: tuple[int, ...] | None) -> None:
    q, k, v = (normal(4, 2048, heads, 128, seed=heads + 1).requires_grad_() for heads in (32, 8, 8))
    grad = normal(4, 2048, 32, 128, seed=7)
    packed = documents and Documents(torch.tensor(documents, dtype=torch.int32, device="cuda"), 4092)
    with deterministic(True):
        look = Look("deterministic", packed)
        runs = [torch.autograd.grad(attend(q, k, v, look, None, 0.1), (q, k, v), grad) for _ in range(8)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))
    usual = torch.autograd.grad(attend(q, k, v, Look("auto", packed), None, 0.1), (q, k, v), grad)
    for one, other in zip(runs[0], usual, strict=True):
        close(one, other, 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropped", [0.1, 0.999, 1e-6])
def test_keyed_dropout_drops_what_the_plain_form_drops(dtype: torch.dtype, dropped: float) -> None:
    x = normal(3, 130, 5000).to(dtype)
    keys = row_keys(2**40 + 3, 17, 5, torch.tensor([4, 2**33 + 1, 0], device="cuda"))
    wanted = torch.where(keep_mask(keys, range(130), 5000, dropped), x * (1.0 / (1.0 - dropped)), 0.0)
    assert torch.equal(apply_mask(x, keys, dropped), wanted)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(14336, 4096), (192, 64)])
def test_four_bit_weights_are_decoded_to_the_librarys_bits(shape: tuple[int, int], nested: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from finetune.kernels.fused.four_bit import decoded

    weight = normal(*shape) * 0.02
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    assert torch.equal(decoded(packed, state, torch.bfloat16), dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [7, 128256])
def test_embedding_gradient(dtype: torch.dtype, vocabulary: int) -> None:
    ids = torch.randint(0, vocabulary, (4, 513), device="cuda")
    ids[0, :300] = 3
    weight = normal(vocabulary, 576).to(dtype).requires_grad_()
    grad = normal(4, 513, 576, seed=2).to(dtype)
    out = embedding(ids, weight)
    out.backward(grad)
    wanted = torch.zeros(vocabulary, 576, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, ids.flatten(), grad.double().flatten(0, 1))
    assert torch.equal(out, weight[ids])
    close(weight.grad, wanted)
    again = torch.autograd.grad(embedding(ids, weight), weight, grad)[0]
    assert torch.equal(again, weight.grad)


def test_a_named_kernel_that_cannot_run_is_refused_by_name() -> None:
    q = torch.randn(1, 64, 4, 64, device="cuda")
    with pytest.raises(ModelError, match="the flash kernel of attention cannot run"):
        attend(q, q, q, Look("flash"), None, 0.1)
