"""Every optimizer row: the bytes it states are the bytes it takes, its arithmetic is its reference's, and it resumes bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from finetune.checkpoint.resume import optimizer_tensors, restore_optimizer
from finetune.config.schema import OptimizerSection
from finetune.errors import CheckpointError, FinetuneError, InputError
from finetune.optim.builders import MUON_MOMENTUM
from finetune.optim.table import OPTIMIZERS, TensorFacts, build, notices, state_bytes
from tests.unit.optim.conftest import SHAPES, measured_bytes, parameters, take_steps

HERE = [name for name in OPTIMIZERS if name != "paged_adamw8bit"]
KEPT = ["fp32", "stochastic", "split", "bf16"]
SECTION = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}


def dtype_of(trained: str) -> torch.dtype:
    return torch.float32 if trained == "fp32" else torch.bfloat16


def stepped(name: str, steps: int, trained: str = "fp32", **section: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    named = parameters(dtype=dtype_of(trained))
    optimizer = build(OptimizerSection(name=name, **section), named, trained=trained, seed=5)
    take_steps(optimizer, named, steps)
    return optimizer, named


def test_table_has_the_promised_rows() -> None:
    assert {name: row.exact for name, row in OPTIMIZERS.items()} == {
        "adamw": True, "adamw8bit": False, "paged_adamw8bit": False, "adamw4bit": False, "adamwfp8": False,
        "adafactor": True, "lion": True, "sgd": True, "muon": True,
    }  # fmt: skip
    assert all(row.name == name and row.note for name, row in OPTIMIZERS.items())


@pytest.mark.parametrize("trained", KEPT)
@pytest.mark.parametrize("name", HERE)
def test_b130_state_bytes_are_the_measured_ones(name: str, trained: str) -> None:
    for section in ({}, {"full_state": ()}):
        if section and "full_state" not in OPTIMIZERS[name].keys:
            continue
        optimizer, _ = stepped(name, 1, trained, **section)
        assert state_bytes(OptimizerSection(name=name, **section), SHAPES, trained=trained) == measured_bytes(optimizer)


def test_paged_state_bytes_are_those_that_are_asked_of_bitsandbytes() -> None:
    """Without a GPU bitsandbytes' paged optimizer falls back to plain tensors of the same sizes."""
    from finetune.optim.builders import is_coded
    from finetune.optim.groups import divide, parameter_groups
    from finetune.optim.paged import PagedAdamW8bit

    named, section = parameters(), OptimizerSection(name="paged_adamw8bit")
    groups = divide(
        parameter_groups(named, 0.0), lambda count, role, _: 8 if is_coded(section, count, role) else 32, "bits"
    )
    optimizer = PagedAdamW8bit(groups)
    take_steps(optimizer, named, 1)
    assert state_bytes(section, SHAPES) == measured_bytes(optimizer)
    with pytest.raises(InputError, match="there is no GPU here"):
        build(section, named)


def test_state_bytes_of_one_tensor() -> None:
    def of(name: str, count: int, **facts: Any) -> int:
        return OPTIMIZERS[name].state_bytes(TensorFacts(count, **facts))

    assert of("adamw", 1000) == 8004
    assert of("adamw", 1000, trained="split") == 8000
    assert of("adamw8bit", 4097) == 4097 * 8
    assert of("adamw8bit", 4097, coded=True) == 4097 * 2 + 17 * 2 * 4
    assert of("adamw4bit", 4097, coded=True) == 2049 * 2 + 65 * 2 * 4
    assert of("adafactor", 6000, shape=(60, 100)) == 4 * 160 + 4
    assert of("muon", 6000, shape=(60, 100)) == 4 * 6000
    assert of("muon", 6000, role="embedding") == 8 * 6000 + 4


def test_b129_embedding_and_head_keep_fp32_moments_unless_told() -> None:
    for name in ("adamw8bit", "adamw4bit", "adamwfp8"):
        for kept, eight in ((("embedding", "head"), 2), (("head",), 3), ((), 4)):
            optimizer, named = stepped(name, 1, full_state=kept)
            kinds = {tensor: optimizer.state[p]["mean"].dtype for tensor, p in named.items()}
            coded = {tensor for tensor, kind in kinds.items() if kind == torch.uint8}
            assert len(coded) == eight
            assert ("model.embed_tokens.weight" in coded) == ("embedding" not in kept)
            assert ("lm_head.weight" in coded) == ("head" not in kept)


def test_b129_the_list_is_shown() -> None:
    (shown,) = notices(OptimizerSection(name="adamw8bit"), parameters())
    assert shown.startswith("adamw8bit: 4 of 6 tensors keep fp32 state: model.embed_tokens.weight, lm_head.weight")
    (shown,) = notices(OptimizerSection(name="adamw8bit", full_state=()), parameters())
    assert "2 of 6" in shown
    (shown,) = notices(OptimizerSection(name="muon"), parameters())
    assert shown.startswith("muon: 3 of 6 tensors are updated by AdamW: model.embed_tokens.weight, lm_head.weight")
    assert notices(OptimizerSection(), parameters()) == []


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit", "adamwfp8"])
def test_b130_small_and_fp32_state_tensors_follow_adamw(name: str) -> None:
    _, ours = stepped(name, 10, **SECTION)
    _, plain = stepped("adamw", 10, **SECTION)
    for tensor in ours:
        exact = ours[tensor].numel() < 4096 or "embed" in tensor or "lm_head" in tensor
        assert torch.allclose(ours[tensor], plain[tensor], rtol=1e-6, atol=1e-6) == exact, tensor


def test_b130_rank_4_on_width_32_steps_and_reports_its_state() -> None:
    shapes = {"q.lora_A.default.weight": (4, 32), "q.lora_B.default.weight": (32, 4)}
    named = parameters(shapes)
    optimizer = build(OptimizerSection(name="adamw8bit"), named)
    take_steps(optimizer, named, 3)
    assert state_bytes(OptimizerSection(name="adamw8bit"), shapes) == 2 * 128 * 8 == measured_bytes(optimizer)


def reference(name: str, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The plain optimizer that a row is held to, over the same groups."""
    decayed = [p for n, p in named.items() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in named.items() if p.dim() != 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)


@pytest.mark.parametrize(
    ("name", "near"), [("adamw", 0.0), ("adafactor", 0.0), ("adamw8bit", 0.04), ("adamwfp8", 0.06), ("adamw4bit", 0.35)]
)
def test_ten_steps_agree_with_the_reference(name: str, near: float) -> None:
    options = SECTION if name != "adafactor" else {"lr": 1e-2, "weight_decay": 0.1}
    _, ours = stepped(name, 10, **options)
    plain, first = parameters(), parameters()
    take_steps(reference(name, plain), plain, 10)
    for tensor in ours:
        moved = (plain[tensor] - first[tensor]).norm().item()
        assert (ours[tensor] - plain[tensor]).norm().item() <= near * moved, tensor


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    _, ours = stepped("muon", 10, **SECTION)
    plain = parameters()
    matrices = {n: p for n, p in plain.items() if p.dim() == 2 and "embed" not in n and "head" not in n}
    rest = {n: p for n, p in plain.items() if n not in matrices}
    options = {"momentum": MUON_MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(list(matrices.values()), lr=1e-2, weight_decay=0.1, **options)
    groups = [
        {"params": [rest["lm_head.weight"]], "weight_decay": 0.1},
        {"params": [p for n, p in rest.items() if n != "lm_head.weight"], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for step in range(10):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in plain.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        muon.step()
        adamw.step()
    assert all(torch.equal(ours[tensor], plain[tensor]) for tensor in ours)


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_lion_and_sgd_are_their_formulas(name: str) -> None:
    _, ours = stepped(name, 10, lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.95)
    plain = {tensor: p.detach().double() for tensor, p in parameters().items()}
    means = {tensor: torch.zeros_like(p) for tensor, p in plain.items()}
    for step in range(10):
        generator = torch.Generator().manual_seed(100 + step)
        for tensor, shape in SHAPES.items():
            slope = torch.randn(shape, generator=generator).double()
            decay = 0.999 if len(shape) == 2 and "embed" not in tensor else 1.0
            if name == "lion":
                plain[tensor] = plain[tensor] * decay - 1e-2 * (0.8 * means[tensor] + 0.2 * slope).sign()
                means[tensor] = 0.95 * means[tensor] + 0.05 * slope
            else:
                means[tensor] = 0.8 * means[tensor] + slope
                plain[tensor] = plain[tensor] * decay - 1e-2 * means[tensor]
    assert all(torch.allclose(ours[tensor].double(), plain[tensor], rtol=1e-4, atol=1e-6) for tensor in ours)


@pytest.mark.parametrize("trained", KEPT)
@pytest.mark.parametrize("name", HERE)
def test_saved_and_resumed_mid_run_gives_the_same_bits(name: str, trained: str) -> None:
    straight, whole = stepped(name, 6, trained, lr=1e-3)
    first, named = stepped(name, 3, trained, lr=1e-3)
    tensors, facts = optimizer_tensors(first, named)
    saved = {key: value.clone() for key, value in tensors.items()}
    facts = json.loads(json.dumps(facts))
    again = parameters(seed=1, dtype=dtype_of(trained))
    with torch.no_grad():
        for tensor, parameter in again.items():
            parameter.copy_(named[tensor])
    resumed = build(OptimizerSection(name=name, lr=1e-3), again, trained=trained, seed=5)
    restore_optimizer(resumed, again, saved, facts)
    torch.manual_seed(77)
    take_steps(resumed, again, range(3, 6))
    assert all(torch.equal(whole[tensor], again[tensor]) for tensor in whole)
    end, _ = optimizer_tensors(resumed, again)
    expected, _ = optimizer_tensors(straight, whole)
    assert end.keys() == expected.keys()
    assert all(torch.equal(end[key], expected[key]) for key in end)


def test_another_optimizers_state_is_refused() -> None:
    first, named = stepped("adamw8bit", 1)
    tensors, facts = optimizer_tensors(first, named)
    with pytest.raises(CheckpointError, match="holds the state of Coded, this run uses AdamW"):
        restore_optimizer(build(OptimizerSection(), named), named, tensors, facts)


@pytest.mark.parametrize("name", HERE)
def test_16_bit_weights_that_keep_their_rest_follow_fp32_weights(name: str) -> None:
    """From the same bf16 start and with bf16 gradients, split weights and their rest are the fp32 weights."""
    from finetune.kernels.stochastic_rounding import join

    optimizer, narrow = stepped(name, 4, "split", lr=1e-3)
    wide = {tensor: nn.Parameter(p.detach().float()) for tensor, p in parameters(dtype=torch.bfloat16).items()}
    exact = build(OptimizerSection(name=name, lr=1e-3), wide)
    for step in range(4):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in wide.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().float()
        exact.step()
    for tensor, parameter in narrow.items():
        rest = optimizer.state[parameter]["correction"]
        joined = join(parameter.detach().reshape(-1), rest).view(parameter.shape)
        if name in ("adamw", "muon"):  # torch's own AdamW on one side, ours on the other
            assert torch.allclose(joined, wide[tensor], rtol=2e-6, atol=1e-7), tensor
        else:
            assert torch.equal(joined, wide[tensor]), tensor


def test_b127_stochastic_weights_do_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(1)
    _, one = stepped("adamw", 3, "stochastic")
    torch.manual_seed(2)
    _, two = stepped("adamw", 3, "stochastic")
    assert all(torch.equal(one[tensor], two[tensor]) for tensor in one)


def test_adamw_equals_torch_with_the_sections_options() -> None:
    _, named = stepped("adamw", 3, **SECTION)
    plain = parameters()
    take_steps(reference("adamw", plain), plain, 3)
    assert all(torch.equal(named[name], plain[name]) for name in named)


def test_rate_of_every_group_is_the_sections_and_can_be_set() -> None:
    named = parameters()
    optimizer = build(OptimizerSection(name="adamw8bit", lr=0.5), named)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * 3
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(optimizer, named, 1)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_b127_sixteen_bit_parameters_are_refused_unless_asked_for() -> None:
    named = {"a.weight": nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))}
    with pytest.raises(FinetuneError, match=r"1 trained parameters are not float32: a.weight \(torch.bfloat16\)"):
        build(OptimizerSection(), named)
    with pytest.raises(FinetuneError, match="not bfloat16"):
        build(OptimizerSection(), parameters(), trained="split")
    with pytest.raises(InputError, match="trains fp32 weights only"):
        build(OptimizerSection(name="paged_adamw8bit"), named, trained="split")


def test_nothing_to_train_and_unknown_names_are_input_errors() -> None:
    with pytest.raises(InputError, match="nothing to train"):
        build(OptimizerSection(), {})
    with pytest.raises(InputError, match="one of adamw, adamw8bit, paged_adamw8bit"):
        build(OptimizerSection(name="adamw16"), parameters())
    with pytest.raises(InputError, match="no trained parameter is one"):
        build(OptimizerSection(name="muon"), parameters({"norm.weight": (8,)}))
