"""A GPU whose memory shrinks in the middle of a run: the allocator's cap is lowered, and the run goes on with a smaller plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.train import loop
from tests.conftest import changed

pytestmark = pytest.mark.gpu


def test_a_cap_lowered_in_the_run_shrinks_the_plan(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 3 the cap is set halfway between what stands and what a step took at its widest, so the plan really fails."""
    recipe = changed(
        tiny, device="cuda", train__batch=16, checkpoint__every=1, plan__probe=False, model__precision="fp32"
    )
    straight = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    real = loop.train_step

    def train_step(job: Any, *rest: Any) -> Any:
        if job.progress.step == 2 and not job.progress.out_of_memory:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            stands, widest = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
            cap = stands + max(0, widest - stands) // 2
            torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
        return real(job, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)
    try:
        run = finetune.run(recipe)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.summary["steps"] == 8
    assert {met["step"] for met in run.summary["out_of_memory"]} == {3}
    assert run.summary["loss_last"] == pytest.approx(straight.summary["loss_last"], rel=1e-3)
