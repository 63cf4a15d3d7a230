"""Levers on a CUDA device: the same bits, less memory on the device, pages of exactly the planned size, and no waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import finetune
from finetune.contracts import Batch, Plan
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.memory import checkpointing
from finetune.memory.host_embedding import place_on_host
from finetune.memory.host_optimizer import HostStates
from finetune.memory.offload import Offload
from finetune.models import decoder
from finetune.models.fast import backbone
from finetune.models.shapes import shape_of
from tests.conftest import changed, method
from tests.numerics.test_lever_pairs import ALONE, PAIRS, PLAIN, allowed
from tests.numerics.tiny_jobs import adapted, base
from tests.runs.history import column, same_bits
from tests.runs.test_resume import interrupted

pytestmark = pytest.mark.gpu
ROWS, LENGTH = 4, 8192
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}


def device() -> torch.device:
    return torch.device("cuda", 0)


def three_steps(module: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """Weights after three steps of AdamW under the levers of memory/, in fp32 with deterministic attention."""
    module = module.to(device()).train()
    key = DrawKey(0)
    key_dropouts(module, key)
    inside: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    given = place_on_host(inside, device()) if plan.embedding_placement == "host" else None
    lever = Offload(module, device()) if plan.activation_offload else None
    checkpointing.apply(module, plan.activation_checkpointing, lever)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, fused=True)
    states = HostStates(optimizer, device(), 2**16) if plan.optimizer_placement == "host" else None
    for step in range(3):
        ids = torch.randint(0, 96, (ROWS, 64), generator=torch.Generator().manual_seed(step))
        key.set(step, torch.arange(ROWS, device=device()))
        on_device = ids.to(device())
        with given.given(ids) if given else torch.enable_grad():
            inside(input_ids=on_device, labels=on_device, use_cache=False).loss.backward()
        (states or optimizer).step()
        optimizer.zero_grad(set_to_none=True)
    if states is not None:
        states.wait()
    torch.cuda.synchronize()
    after = {name: p.detach().cpu() for name, p in named.items()}
    return after | {f"{n}/{k}": v.cpu() for n, p in named.items() for k, v in optimizer.state[p].items()}


@pytest.mark.parametrize("settings", [s for s in ALONE + PAIRS if "loss_chunk" not in dict(s)], ids=str)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_levers_change_no_bit_on_a_gpu(kind: str, settings: tuple[tuple[str, Any], ...]) -> None:
    if not allowed(kind, settings) or "optimizer_in_backward" in dict(settings):
        return  # updates in backward are in the test of whole runs
    make = base if kind == "full" else adapted
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = three_steps(make(), PLAIN)
        found = three_steps(make(), replace(PLAIN, **dict(settings)))
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_whole_runs_with_every_lever_end_with_the_same_bits(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    plain = changed(method(tiny, kind), device="cuda", model__precision="fp32", train__max_grad_norm=None)
    plain = changed(plain, plan={"loss_chunk": 0, "micro_batch": 4, "activation_checkpointing": False})
    finetune.run(changed(plain, run__dir=str(tmp_path / "plain")))
    pins = {"activation_checkpointing": True, "activation_offload": True, "optimizer_placement": "host"}
    pins |= {"optimizer_in_backward": True} | ({"embedding_placement": "host"} if kind == "lora" else {})
    interrupted(changed(plain, plan={**plain["plan"], **pins}), tmp_path / "levers", 3)
    assert same_bits(tmp_path / "plain", tmp_path / "levers")
    assert column(tmp_path / "levers", "grad_norm") == column(tmp_path / "plain", "grad_norm")


def peak_of(mode: Any, offloaded: bool) -> tuple[int, Offload | None]:
    """Peak bytes of the third forward and backward, in which nothing may wait for the device."""
    module = base(**WIDE).to(device(), torch.bfloat16).train()
    model = decoder.assemble(module, None, shape_of(module.config), "test")
    # transformers' own forward asks the device whether positions begin anew; fast blocks do not.
    model.fast = backbone.install(model, "auto", torch.bfloat16)
    lever = Offload(module, device()) if offloaded else None
    checkpointing.apply(module, mode, lever)
    ids = torch.randint(0, 96, (ROWS, LENGTH), device=device())
    batch = Batch(ids, ids, torch.arange(ROWS, device=device()), None, None, (LENGTH,) * ROWS)
    hidden = torch.ones((), device=device())
    for turn in range(3):
        if turn == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error")
        try:
            (decoder.hidden_states(model, batch).float().mean() * hidden).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), lever


@pytest.mark.parametrize("mode", [False, True], ids=["kept", "checkpointed"])
def test_offload_frees_the_device_without_waiting(mode: bool) -> None:
    plain, _ = peak_of(mode, offloaded=False)
    less, lever = peak_of(mode, offloaded=True)
    assert lever is not None
    assert lever.parked == 0
    if mode:
        assert lever.pool.bytes == 7 * ROWS * LENGTH * 512 * 2
    assert plain - less > 0.4 * lever.pool.bytes


def test_pages_are_registered_and_exactly_as_large_as_asked() -> None:
    from finetune.memory.host import host_pages

    pages = host_pages(3_000_001, device())
    assert pages.is_pinned()
    assert pages.numel() == 3_000_001


def test_b125_fp16_trains_on_a_gpu(tiny: dict[str, Any], tmp_path: Path) -> None:
    for precision in ("fp32", "fp16", "tf32"):
        recipe = changed(tiny, device="cuda", optimizer__lr=1e-3, model__precision=precision)
        finetune.run(changed(recipe, run__dir=str(tmp_path / precision)))
    for precision in ("fp16", "tf32"):
        assert column(tmp_path / precision, "loss") == pytest.approx(column(tmp_path / "fp32", "loss"), abs=3e-2)
    assert torch.get_float32_matmul_precision() == "highest"
