"""The estimate of full fine-tuning with 16-bit weights, and of the optimizers' updates, against counted bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from finetune.config.schema import OptimizerSection, Recipe
from finetune.contracts import Plan
from finetune.kernels.adamw import SLICE_ELEMENTS
from finetune.memory import checkpointing
from finetune.models.shapes import shape_of
from finetune.optim.table import CPU_SLICE, GPU_SLICE, OPTIMIZERS, build, tensor_bytes
from finetune.planner.estimate import Facts, estimate
from finetune.planner.space import update_bytes
from tests.unit.planner.live_bytes import LiveBytes
from tests.unit.planner.test_estimate_counts import LENGTH, ROWS, config_of, moving, run_step


def recipe_of(trained: str, name: str = "adamw") -> Recipe:
    model = {"path": "x", "trained": trained, "precision": "bf16"}
    return Recipe.model_validate({"model": model, "optimizer": {"name": name}})


@pytest.mark.parametrize("trained", ["stochastic", "split"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("chunk", [0, 128])
@pytest.mark.parametrize(("rows", "vocabulary", "tied"), [(8, 512, False), (16, 512, False), (8, 4096, True)])
def test_the_widest_moment_of_a_step_is_as_counted(
    trained: str, checkpoint: bool, chunk: int, rows: int, vocabulary: int, tied: bool
) -> None:
    config = config_of(vocabulary, tied)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
    checkpointing.apply(model, checkpoint)
    recipe, plan = recipe_of(trained), Plan("cpu", ROWS, checkpoint, chunk)
    optimizer = build(recipe.optimizer, dict(model.named_parameters()), trained=trained)
    data = torch.randint(0, vocabulary, (rows, LENGTH))
    run_step(model, model, optimizer, data, plan, "fp32")  # no autocast: every weight is bf16
    with LiveBytes() as step:
        run_step(model, model, optimizer, data, plan, "fp32")

    def states(elements: int, role: str) -> int:
        return tensor_bytes(recipe.optimizer, trained, elements, role)

    found = estimate(shape_of(config), recipe, plan, Facts(LENGTH, "bf16", states, rows, update_bytes(recipe)))
    split_update = trained == "split" and vocabulary == 4096 and checkpoint and chunk
    # The update's temporaries are those of stochastic rounding; a split weight's are fewer.
    assert moving(found, "step") == pytest.approx(step.peak, rel=0.4 if split_update else 0.05)
    state = sum(
        v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    )
    assert found.phases["step"].causes["optimizer"] == state
    assert found.phases["step"].causes["weights"] == sum(p.numel() * 2 for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "paged_adamw8bit"])
@pytest.mark.parametrize("trained", ["fp32", "stochastic", "split", "bf16"])
def test_an_updates_temporaries_are_within_the_rows(name: str, trained: str) -> None:
    dtype = torch.float32 if trained == "fp32" else torch.bfloat16
    parameter = torch.nn.Parameter(torch.randn(1024, 512).to(dtype))
    optimizer = build(OptimizerSection(name=name), {"up_proj.weight": parameter}, trained=trained)
    parameter.grad = torch.randn(1024, 512).to(dtype)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    stated = update_bytes(recipe_of(trained, name))(parameter.numel(), "cpu")
    assert live.peak <= stated * 1.05
    assert stated <= 4 * live.peak + 7 * 2**20


def test_slices_of_the_table_are_the_kernels() -> None:
    assert {"cpu": CPU_SLICE, "cuda": GPU_SLICE} == SLICE_ELEMENTS


def test_a_decision_travels_between_processes() -> None:
    """Rank 0 decides for all: everything in a decision can be pickled."""
    import pickle

    from finetune.models.shapes import SHAPES
    from finetune.planner.hardware import parse
    from finetune.planner.plan import decide

    recipe = recipe_of("split", "adamw8bit").model_copy(
        update={"train": Recipe.model_validate({"model": {"path": "x"}, "train": {"batch": 4}}).train}
    )
    decision = decide(recipe, SHAPES["tiny"], parse("1x24GB,64GB"), 2, 128)
    again = pickle.loads(pickle.dumps(decision))
    assert (
        again.facts.state_bytes(10_000, "block")
        == decision.facts.state_bytes(10_000, "block")
        == 2 * 10_000 + 320 + 20_000
    )
    assert again.facts.update_bytes(10_000, "cpu") == 40 * 10_000
