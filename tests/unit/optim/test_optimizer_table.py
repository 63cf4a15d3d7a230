"""Every optimizer row: the bytes it states are the bytes it takes, and its arithmetic is AdamW's."""

import pytest
import torch
from torch import nn

from finetune.config.schema import OptimizerSection
from finetune.errors import FinetuneError, InputError
from finetune.optim.table import OPTIMIZERS, build, full_precision_names, state_bytes

SHAPES = {
    "model.embed_tokens.weight": (64, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.self_attn.odd.weight": (61, 101),
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 32),
    "model.layers.0.input_layernorm.weight": (128,),
    "lm_head.weight": (64, 128),
}


def parameters(shapes=SHAPES, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for name, shape in shapes.items()}


def take_steps(optimizer, named, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def measured_bytes(optimizer) -> int:
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())


def test_table_has_the_promised_rows():
    assert {name: row.exact for name, row in OPTIMIZERS.items()} == {"adamw": True, "adamw8bit": False}
    assert all(row.name == name and row.note for name, row in OPTIMIZERS.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_b130_state_bytes_are_the_measured_ones(name):
    named = parameters()
    optimizer = build(OptimizerSection(name=name), named)
    take_steps(optimizer, named, 1)
    assert state_bytes(name, {n: p.numel() for n, p in named.items()}) == measured_bytes(optimizer)


def test_state_bytes_of_one_tensor():
    assert OPTIMIZERS["adamw"].state_bytes(1000) == 8004
    assert OPTIMIZERS["adamw8bit"].state_bytes(4095) == 4095 * 8
    assert OPTIMIZERS["adamw8bit"].state_bytes(4096) == 4096 * 2 + 16 * 2 * 4
    assert OPTIMIZERS["adamw8bit"].state_bytes(4097) == 4097 * 2 + 17 * 2 * 4
    assert OPTIMIZERS["adamw8bit"].state_bytes(4096, "embedding") == 4096 * 8


def test_b129_embedding_and_head_keep_32_bit_moments():
    named = parameters()
    optimizer = build(OptimizerSection(name="adamw8bit"), named)
    take_steps(optimizer, named, 1)
    kinds = {name: optimizer.state[parameter]["state1"].dtype for name, parameter in named.items()}
    eight = {name for name, kind in kinds.items() if kind == torch.uint8}
    assert eight == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.odd.weight"}
    assert set(full_precision_names("adamw8bit", {n: p.numel() for n, p in named.items()})) == set(named) - eight


def test_b129_choice_of_bits_stays_in_this_optimizer():
    import bitsandbytes

    named = parameters()
    build(OptimizerSection(name="adamw8bit"), named)
    other = bitsandbytes.optim.AdamW8bit(list(named.values()))
    take_steps(other, named, 1)
    assert other.state[named["lm_head.weight"]]["state1"].dtype == torch.uint8


def test_b130_small_and_32_bit_tensors_follow_adamw():
    section = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}
    ours, plain = parameters(), parameters()
    take_steps(build(OptimizerSection(name="adamw8bit", **section), ours), ours, 5)
    take_steps(build(OptimizerSection(name="adamw", **section), plain), plain, 5)
    for name in ours:
        exact = ours[name].numel() < 4096 or "embed" in name or "lm_head" in name
        close = torch.allclose(ours[name], plain[name], rtol=1e-6, atol=1e-6)
        assert close == exact, name


def test_b130_rank_4_on_width_32_steps_and_reports_its_state():
    named = parameters({"q.lora_A.default.weight": (4, 32), "q.lora_B.default.weight": (32, 4)})
    optimizer = build(OptimizerSection(name="adamw8bit"), named)
    take_steps(optimizer, named, 3)
    assert (
        state_bytes("adamw8bit", {n: p.numel() for n, p in named.items()}) == 2 * 128 * 8 == measured_bytes(optimizer)
    )


def test_adamw_equals_torch_with_the_sections_options():
    section = OptimizerSection(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6)
    named, plain = parameters(), parameters()
    decayed = [p for n, p in plain.items() if p.dim() == 2 and "embed" not in n]
    kept = [p for n, p in plain.items() if p.dim() != 2 or "embed" in n]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    take_steps(build(section, named), named, 3)
    take_steps(reference, plain, 3)
    assert all(torch.equal(named[name], plain[name]) for name in named)


def test_rate_of_every_group_is_the_sections_and_can_be_set():
    named = parameters()
    optimizer = build(OptimizerSection(name="adamw8bit", lr=0.5), named)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * 4
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(optimizer, named, 1)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_b127_sixteen_bit_parameters_are_refused():
    named = {"a.weight": nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))}
    with pytest.raises(FinetuneError, match=r"1 trained parameters are not fp32: a.weight \(torch.bfloat16\)"):
        build(OptimizerSection(), named)


def test_nothing_to_train_and_unknown_names_are_input_errors():
    with pytest.raises(InputError, match="nothing to train"):
        build(OptimizerSection(), {})
    with pytest.raises(InputError, match="one of adamw, adamw8bit"):
        build(OptimizerSection(name="adamw16"), parameters())
