"""NF4 bases on a CPU: what is quantised, what keeps its precision, and that the adapter learns."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from finetune.errors import ModelError
from finetune.kernels.stored_linear import StoredLinear
from finetune.memory.storage import storage_of, weight_bytes
from finetune.models.decoder import hidden_states
from finetune.models.load import load_model
from finetune.models.quantized import dequantised, is_linear
from finetune.models.shapes import shape_for

NF4 = {"model": {"base": "nf4"}, "adapter": {"kind": "lora", "rank": 4}}


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_blocks_are_nf4_and_the_rest_keeps_its_precision(tiny, recipe, shape, precision, dtype):
    model = load_model(recipe(tiny, **NF4), "cpu", precision, shape=shape)
    packed = [child for child in model.module.modules() if isinstance(child, Linear4bit)]
    assert len(packed) == 14
    for child in packed:
        assert child.weight.quant_state.quant_type == "nf4"
        assert child.weight.quant_state.nested
        assert child.compute_dtype == dtype
    norms = [p for name, p in model.module.named_parameters() if "norm" in name]
    assert {p.dtype for p in [*norms, model.head.weight, model.base.get_input_embeddings().weight]} == {dtype}
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    assert len(model.trainable()) == 28
    short = str(dtype).removeprefix("torch.")
    assert any("14 linear layers" in n and f"lm_head ({short})" in n for n in model.notices)


def test_the_adapter_learns_over_a_quantised_base(tiny, recipe, shape, make_batch):
    model = load_model(recipe(tiny, data={"pack": True}, **NF4), "cpu", "fp32", shape=shape)
    frozen = {name: p.clone() for name, p in model.module.named_parameters() if not p.requires_grad}
    batch = make_batch([[[1, 2, 3, 4, 5], [9, 8, 7, 6]]])
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2)
    losses = []
    for _ in range(8):
        logits = model.head(hidden_states(model, batch))[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(p, frozen[name]) for name, p in model.module.named_parameters() if name in frozen)


def test_an_evaluation_before_training_changes_neither_weights_nor_gradients(tiny, recipe, shape, make_batch):
    """On a CPU with AVX512-BF16 bitsandbytes would repack the layers in the evaluation and lose their backward."""
    batch = make_batch([[[1, 2, 3, 4, 5, 9, 8, 7, 6]]])
    results = []
    for evaluated in (False, True):
        model = load_model(recipe(tiny, **NF4), "cpu", "fp32", shape=shape)
        if evaluated:
            with torch.no_grad():
                hidden_states(model, batch)
        model.module.train()
        hidden = hidden_states(model, batch)
        hidden.square().sum().backward()
        results.append((hidden.detach(), [p.grad for p in model.trainable().values()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    whole = load_model(recipe(tiny, adapter=NF4["adapter"]), "cpu", "fp32", shape=shape)
    hidden_states(whole, batch).square().sum().backward()
    for (name, parameter), gradient in zip(whole.trainable().items(), results[0][1], strict=True):
        if "lora_B" in name:
            cosine = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.9, name


def test_quantised_weights_are_close_to_the_originals(tiny, recipe, shape, make_batch):
    batch = make_batch([[[1, 2, 3, 4, 5, 100, 90]]])
    whole = hidden_states(load_model(recipe(tiny), "cpu", "fp32", shape=shape), batch)
    packed = hidden_states(load_model(recipe(tiny, **NF4), "cpu", "fp32", shape=shape), batch)
    relative = ((whole - packed).norm() / whole.norm()).item()
    assert 0 < relative < 0.15


def test_full_training_of_a_quantised_base_is_refused(tiny, recipe, shape):
    with pytest.raises(ModelError, match=r"trains every parameter(.|\n)*adapter\.kind=lora"):
        load_model(recipe(tiny, model={"base": "nf4"}), "cpu", "fp32", shape=shape)


def test_checkpoints_stored_quantised_are_used_or_refused_by_name(tiny, recipe, shape, tmp_path):
    model = load_model(recipe(tiny, **NF4), "cpu", "fp32", shape=shape)
    model.module.unload().save_pretrained(tmp_path / "nf4")
    model.tokenizer.save_pretrained(tmp_path / "nf4")
    again = load_model(recipe(tmp_path / "nf4", **NF4), "cpu", "fp32", shape=shape)
    assert any("stored quantised already (nf4" in notice for notice in again.notices)
    with pytest.raises(ModelError, match=r"set model\.base=nf4"):
        load_model(recipe(tmp_path / "nf4", adapter={"kind": "lora"}), "cpu", "fp32", shape=shape)
    config = tmp_path / "nf4" / "config.json"
    config.write_text(config.read_text().replace('"bitsandbytes"', '"gptq"'))
    with pytest.raises(ModelError, match=r"stored quantised \(gptq\)"):
        load_model(recipe(tmp_path / "nf4", **NF4), "cpu", "fp32", shape=shape)


def stored(kind, **more):
    return {"model": {"base": kind}, "adapter": {"kind": "lora", "rank": 4, **more}}


@pytest.mark.parametrize("path", ["tiny", "builtin:tiny-random"])
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("fp8", 0.04)])
def test_8_bit_bases_store_the_blocks_and_say_their_error(tiny, recipe, path, kind, error):
    path = tiny if path == "tiny" else path
    model = load_model(recipe(path, **stored(kind)), "cpu", "bf16")
    layers = [child for child in model.module.modules() if isinstance(child, StoredLinear)]
    assert len(layers) == 14
    assert {child.kind for child in layers} == {kind}
    said = next(notice for notice in model.notices if f"stored in {kind}" in notice)
    assert "lm_head (bfloat16)" in said
    percent = float(said.split("weights by ")[1].split("%")[0])
    assert 0 < percent < 100 * error
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    assert {p.dtype for n, p in model.module.named_parameters() if "lora" not in n} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_gradients_over_an_8_bit_base_are_those_over_its_decoded_weights(tiny, recipe, shape, make_batch, kind):
    batch = make_batch([[[1, 2, 3, 4, 5, 9, 8, 7, 6]]])
    packed = load_model(recipe(tiny, **stored(kind)), "cpu", "fp32", shape=shape)
    plain = load_model(recipe(tiny, adapter={"kind": "lora", "rank": 4}), "cpu", "fp32", shape=shape)
    with torch.no_grad():
        for name, child in packed.module.named_modules():
            if isinstance(child, StoredLinear):
                plain.module.get_submodule(name).weight.copy_(dequantised(child))
    found = []
    for model in (packed, plain):
        hidden_states(model, batch).square().sum().backward()
        found.append({name: p.grad for name, p in model.trainable().items()})
    assert len(found[0]) == 28
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-5, atol=1e-6)


def test_dequantised_gives_the_weight_of_every_kind(tiny, recipe, shape):
    plain = load_model(recipe(tiny, adapter={"kind": "lora"}), "cpu", "fp32", shape=shape)
    for base, worst in (("same", 0.0), ("nf4", 0.2), ("int8", 0.01), ("fp8", 0.04)):
        model = load_model(recipe(tiny, model={"base": base}, adapter={"kind": "lora"}), "cpu", "fp32", shape=shape)
        for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
            layer, wanted = (m.base.get_submodule(name).get_base_layer() for m in (model, plain))
            assert is_linear(layer)
            weight = dequantised(layer)
            assert (weight.shape, weight.dtype) == (wanted.weight.shape, torch.float32)
            assert (weight - wanted.weight).norm() <= worst * wanted.weight.norm()
    assert not is_linear(torch.nn.Embedding(3, 4))
    with pytest.raises(ModelError, match="Embedding is no linear layer"):
        dequantised(torch.nn.Embedding(3, 4))


@pytest.mark.parametrize(
    ("base", "double"), [("same", True), ("nf4", True), ("nf4", False), ("int8", True), ("fp8", True)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_of_each_base_are_those_of_the_plan(recipe, base, double, precision):
    made = recipe("builtin:tiny-random", model={"base": base, "double_quant": double}, adapter={"kind": "lora"})
    model = load_model(made, "cpu", precision)
    held = {}
    for child in model.module.modules():
        for tensor in [
            *child.parameters(recurse=False),
            *(b for n, b in child.named_buffers(recurse=False) if "freq" not in n),
        ]:
            held[id(tensor)] = tensor.numel() * tensor.element_size()
        state = getattr(getattr(child, "weight", None), "quant_state", None)
        if state is not None:
            parts = [state.absmax, state.code]
            parts += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
            held |= {id(part): part.numel() * part.element_size() for part in parts}
    planned = weight_bytes(shape_for(made), storage_of(shape_for(made), made, precision))
    # The 4-bit layers round their last block of scales up.
    assert abs(planned - sum(held.values())) <= (14 * 8 if base == "nf4" else 0)


def test_nf4_without_double_quantisation(tiny, recipe, shape):
    model = load_model(
        recipe(tiny, model={"base": "nf4", "double_quant": False}, adapter={"kind": "lora"}), "cpu", "fp32", shape=shape
    )
    packed = [child for child in model.module.modules() if isinstance(child, Linear4bit)]
    assert len(packed) == 14
    assert not any(child.weight.quant_state.nested for child in packed)
    assert any("NF4 without double quantisation" in notice for notice in model.notices)
