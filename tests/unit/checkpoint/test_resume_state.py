"""Parameters, optimizer state and random generators come back such that the next step has the same bits."""

import json
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.checkpoint import store
from finetune.checkpoint.resume import (
    optimizer_tensors,
    random_state,
    restore_optimizer,
    restore_parameters,
    restore_random,
)
from finetune.config.schema import OptimizerSection
from finetune.errors import CheckpointError, FinetuneError
from finetune.optim.table import OPTIMIZERS, build

EVERYWHERE = [name for name in OPTIMIZERS if name != "paged_adamw8bit"]
"""Optimizers that run on a CPU too; tests/gpu holds the paged one to the same."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def named_parameters(seed: int = 0, device: str = "cpu") -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed_tokens.weight": (64, 128), "q.weight": (96, 64), "norm.weight": (64,), "k.lora_A.weight": (4, 32)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(device)) for name, shape in shapes.items()}


def take_steps(optimizer, named, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()


def save_and_restore(folder, optimizer, named, section, device: str = "cpu"):
    tensors, facts = optimizer_tensors(optimizer, named)
    path = store.write(folder, 4, {"trainable": named, "optimizer": tensors}, {"optimizer": facts})
    read, read_facts = store.read(path)
    fresh = named_parameters(seed=99, device=device)
    again = build(section, fresh)
    restore_parameters(fresh, read["trainable"])
    restore_optimizer(again, fresh, read["optimizer"], read_facts["optimizer"])
    return again, fresh


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_b82_four_steps_saved_and_four_more_equal_eight(tmp_path, name, device):
    section = OptimizerSection(name=name, weight_decay=0.1)
    straight = named_parameters(device=device)
    whole = build(section, straight)
    take_steps(whole, straight, range(8))
    named = named_parameters(device=device)
    first = build(section, named)
    take_steps(first, named, range(4))
    again, fresh = save_and_restore(tmp_path, first, named, section, device)
    take_steps(again, fresh, range(4, 8))
    for parameter in straight:
        assert torch.equal(fresh[parameter], straight[parameter]), parameter
        saved, live = again.state[fresh[parameter]], whole.state[straight[parameter]]
        assert set(saved) == set(live)
        for key, value in live.items():
            assert type(saved[key]) is type(value)
            assert getattr(saved[key], "device", None) == getattr(value, "device", None)
            assert torch.equal(saved[key], value) if isinstance(value, torch.Tensor) else saved[key] == value
    # Restoring copied: the first optimizer's state is its own still.
    take_steps(first, named, range(4, 8))
    assert all(torch.equal(named[parameter], straight[parameter]) for parameter in straight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_run_of_the_gpu_goes_on_on_the_cpu(tmp_path, name):
    section = OptimizerSection(name=name)
    named = named_parameters(device="cuda")
    first = build(section, named)
    take_steps(first, named, range(4))
    again, fresh = save_and_restore(tmp_path, first, named, section, "cpu")
    take_steps(first, named, range(4, 8))
    take_steps(again, fresh, range(4, 8))
    assert all(torch.allclose(fresh[key], named[key].cpu(), atol=1e-3) for key in named)


def test_b82_fused_adamw_resumes_with_the_same_bits():
    results = []
    for interrupted in (False, True):
        named = named_parameters()
        optimizer = torch.optim.AdamW(named.values(), fused=True)
        take_steps(optimizer, named, range(4))
        if interrupted:
            tensors, facts = optimizer_tensors(optimizer, named)
            optimizer = torch.optim.AdamW(named.values(), fused=True)
            restore_optimizer(optimizer, named, tensors, json.loads(json.dumps(facts)))
        take_steps(optimizer, named, range(4, 8))
        results.append(named)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_code_tables_of_the_8_bit_state_are_stored_and_restored_once(tmp_path):
    import bitsandbytes

    named = {f"{i}.weight": nn.Parameter(torch.ones(64, 64)) for i in range(3)}
    optimizer = bitsandbytes.optim.AdamW8bit(list(named.values()))
    take_steps(optimizer, named, range(1))
    tensors, facts = optimizer_tensors(optimizer, named)
    path = store.write(tmp_path, 1, {"optimizer": tensors}, facts)
    again = bitsandbytes.optim.AdamW8bit(list(named.values()))
    restore_optimizer(again, named, store.read(path)[0]["optimizer"], facts)
    tables = [again.state[parameter]["qmap1"] for parameter in named.values()]
    assert tables[0] is tables[1] is tables[2]
    assert facts["scalars"]["0.weight"] == {"step": 1}


def test_a_parameter_without_a_step_yet_has_no_state_after_either():
    named = named_parameters()
    optimizer = build(OptimizerSection(), named)
    named["q.weight"].grad = torch.ones(96, 64)
    optimizer.step()
    tensors, facts = optimizer_tensors(optimizer, named)
    assert sorted(tensors) == ["q.weight/exp_avg", "q.weight/exp_avg_sq", "q.weight/step"]
    again = build(OptimizerSection(), named)
    restore_optimizer(again, named, tensors, facts)
    assert [name for name, parameter in named.items() if parameter in again.state] == ["q.weight"]


def test_another_optimizer_is_refused_by_name():
    named = named_parameters()
    tensors, facts = optimizer_tensors(build(OptimizerSection(name="adamw8bit"), named), named)
    with pytest.raises(CheckpointError, match="holds the state of Coded, this run uses AdamW"):
        restore_optimizer(build(OptimizerSection(), named), named, tensors, facts)


def test_an_optimizer_over_other_parameters_is_our_fault():
    named = named_parameters()
    with pytest.raises(FinetuneError, match="3 of the 3"):
        optimizer_tensors(build(OptimizerSection(), named), dict(list(named.items())[:3]))


CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def adapted(rank: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj"), embedding: bool = True):
    torch.manual_seed(0)
    config = LoraConfig(
        r=rank,
        target_modules=list(targets),
        modules_to_save=["embed_tokens"] if embedding else None,
        init_lora_weights=False,
    )
    module = get_peft_model(LlamaForCausalLM(CONFIG), config)
    return module, {name: p for name, p in module.named_parameters() if p.requires_grad}


def train(module, optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()


def saved_run(folder):
    module, named = adapted()
    optimizer = build(OptimizerSection(lr=1e-2), named)
    train(module, optimizer, range(3))
    tensors, facts = optimizer_tensors(optimizer, named)
    return module, optimizer, named, store.write(folder, 3, {"trainable": named, "optimizer": tensors}, facts)


def test_b80_lora_with_a_trained_embedding_goes_on_exactly(tmp_path):
    module, optimizer, named, path = saved_run(tmp_path)
    train(module, optimizer, range(3, 6))
    groups, facts = store.read(path)
    other, fresh = adapted()
    again = build(OptimizerSection(lr=1e-2), fresh)
    restore_parameters(fresh, groups["trainable"])
    restore_optimizer(again, fresh, groups["optimizer"], facts)
    train(other, again, range(3, 6))
    assert any("embed_tokens.modules_to_save" in name for name in named)
    assert all(torch.equal(fresh[name], named[name]) for name in named)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"rank": 8},
            ["of another shape or type (4)", "q_proj.lora_A.default.weight: saved 4x16 float32, now 8x16 float32"],
        ),
        (
            {"targets": ("q_proj", "o_proj")},
            ["missing in the checkpoint (2)", "o_proj.lora_A", "not trained now (2)", "v_proj.lora_A"],
        ),
        ({"embedding": False}, ["not trained now (1)", "embed_tokens.modules_to_save.default.weight"]),
    ],
    ids=["rank", "targets", "embedding"],
)
def test_b80_other_parameters_are_listed_and_nothing_changes(tmp_path, options, words):
    path = saved_run(tmp_path)[-1]
    groups, facts = store.read(path)
    _, fresh = adapted(**options)
    before = {name: parameter.detach().clone() for name, parameter in fresh.items()}
    optimizer = build(OptimizerSection(), fresh)
    remedy = "adapter.rank: 4 in the checkpoint, 8 now"
    for restore in (
        lambda: restore_parameters(fresh, groups["trainable"], remedy),
        lambda: restore_optimizer(optimizer, fresh, groups["optimizer"], facts, remedy),
    ):
        with pytest.raises(CheckpointError) as caught:
            restore()
        for word in [*words, remedy]:
            assert word in str(caught.value)
    assert all(torch.equal(fresh[name], before[name]) for name in fresh)
    assert len(optimizer.state) == 0


def test_another_type_is_refused_not_cast():
    parameter = {"a": nn.Parameter(torch.zeros(2))}
    with pytest.raises(CheckpointError, match="a: saved 2 bfloat16, now 2 float32"):
        restore_parameters(parameter, {"a": torch.ones(2, dtype=torch.bfloat16)})


def draws() -> list:
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.rand(2).tolist(),
        np.random.randn(1).tolist(),
        random.random(),
        random.gauss(0, 1),
    ]


def test_b72_generators_go_on_where_they_were(tmp_path):
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    draws()
    tensors, facts = random_state()
    path = store.write(tmp_path, 1, {"random": tensors}, {"random": facts})
    expected = [draws(), draws()]
    groups, read = store.read(path)
    assert restore_random(groups["random"], read["random"]) == []
    assert [draws(), draws()] == expected


def test_b72_states_of_gpus_that_are_not_here_are_told():
    tensors, facts = random_state()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    extra = {**tensors, **{f"cuda.{i}": torch.zeros(16, dtype=torch.uint8) for i in range(count, count + 2)}}
    if count == 0:
        assert restore_random(extra, facts) == [
            "the checkpoint has random states of 2 GPUs, this machine has 0: the others start anew"
        ]
