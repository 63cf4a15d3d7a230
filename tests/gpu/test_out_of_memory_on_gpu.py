"""Memory that really runs out on a GPU: the allocator's cap is lowered in the middle of a run, which goes on with a smaller plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.train import loop, recovery
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column, last_state

pytestmark = pytest.mark.gpu

ROWS, WORDS = 64, 300
FREES = {
    "micro-batch": {"activation_checkpointing": True, "loss_chunk": 0},
    "checkpointing": {"micro_batch": ROWS, "loss_chunk": 0},
    "streamed": {"weights": "streamed", "loss_chunk": 0},
}


@pytest.fixture
def wide(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Rows of a few hundred tokens, 64 a step, so that activations are many times the allocator's pieces."""
    rows = [
        {**row, "output": " ".join([row["output"], *("tree runs",) * (WORDS // 2)])} for row in alpaca_rows(2 * ROWS)
    ]
    path = write_jsonl(tmp_path / "wide.jsonl", rows)
    return changed(
        tiny, device="cuda", model__precision="fp32", data__path=str(path), data__valid_path=None, data__max_tokens=512,
        train__batch=ROWS, train__max_steps=6, plan__fast_block=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def uncapped() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def cap_at(patch: pytest.MonkeyPatch, number: int, share: float) -> None:
    """From step `number` on the allocator may hold what stands between steps and `share` of what a step took beside it. A
    run that is built again lifts the cap."""
    train_step = loop.train_step
    done: list[int] = []

    def capped(job: Any, *rest: Any) -> Any:
        if job.progress.step + 1 == number and not done:
            done.append(1)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            stands = torch.cuda.memory_reserved()
            room = stands + int(share * (peak - torch.cuda.memory_allocated()))
            torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        return train_step(job, *rest)

    patch.setattr(loop, "train_step", capped)


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("frees", FREES)
def test_a_lowered_cap_makes_the_plan_smaller(wide: dict[str, Any], tmp_path: Path, kind: str, frees: str) -> None:
    recipe = changed(method(wide, kind), plan={"fast_block": False, **FREES[frees]})
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    with pytest.MonkeyPatch.context() as patch:
        cap_at(patch, 3, 0.6)
        summary = finetune.run(recipe).summary
    met = summary["out_of_memory"]
    assert met
    assert {each["step"] for each in met} == {3}
    assert all(each["before"] != each["after"] for each in met)
    assert summary["steps"] == 6
    assert column(tmp_path / "run", "step") == [1, 2, 3, 4, 5, 6]
    assert column(tmp_path / "run", "loss") == pytest.approx(column(tmp_path / "straight", "loss"), abs=1e-4)
    one, two = last_state(tmp_path / "run")["trainable"], last_state(tmp_path / "straight")["trainable"]
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=1e-3) for key in two)


def test_a_failed_attempt_leaves_nothing_on_the_gpu(wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated after the attempt was undone is what was before it, but for batches that are made ahead."""
    before: list[int] = []
    after: list[int] = []
    undo = recovery.undo

    def undone(job: Any) -> bool:
        whole = undo(job)
        after.append(torch.cuda.memory_allocated())
        return whole

    cap_at(monkeypatch, 3, 0.6)
    capped = loop.train_step

    def noting(*given: Any) -> Any:
        before.append(torch.cuda.memory_allocated())
        return capped(*given)

    monkeypatch.setattr(loop, "train_step", noting)
    monkeypatch.setattr(recovery, "undo", undone)
    recipe = changed(method(wide, "none"), plan={"fast_block": False, **FREES["micro-batch"]})
    assert finetune.run(recipe).summary["steps"] == 6
    assert after
    assert after[0] <= before[2] + 2**20
