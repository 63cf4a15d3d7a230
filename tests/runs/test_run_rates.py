"""The rates that a run is planned with: kept in its folder, taken again when it goes on, the same on all ranks."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetune
from finetune.errors import StoppedError
from finetune.machine import rates_cache
from finetune.machine.rates import CPU, Rates
from finetune.planner.hardware import detect
from finetune.planner.machine_rates import rates_folder
from tests.conftest import changed
from tests.runs.history import same_bits
from tests.runs.ranks import endings
from tests.runs.test_resume import stop_at

FAST = replace(CPU, source="measured", name="fast", launch_s=1e-7, fp32_operations_per_s=1e12)
SLOW = replace(CPU, source="measured", name="slow", launch_s=1e-2, fp32_operations_per_s=1e12)


def keep(rates: Rates) -> None:
    rates_cache.write(rates_folder(), rates_cache.this_machine("", detect("cpu").cores), rates)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def stopped(recipe: dict[str, Any]) -> None:
    """Runs until SIGTERM after step 3."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(StoppedError):
            finetune.run(recipe)


def plan_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "plan.yaml").read_text())
    return found


def test_a_resumed_run_keeps_its_rates_and_so_its_plan(cached: Path, tiny: dict[str, Any]) -> None:
    keep(FAST)
    recipe = changed(tiny, run__dir=str(cached / "stopped"), train__batch=8)
    stopped(recipe)
    before = plan_of(cached / "stopped")
    assert before["rates"] == FAST.as_dict()
    assert before["machine"] == "this CPU"
    keep(SLOW)
    finetune.run(recipe, "resume=auto")
    after = plan_of(cached / "stopped")
    # Free memory, which the reasons tell, is another.
    del before["reasons"], after["reasons"]
    assert after == before
    summary = json.loads((cached / "stopped" / "summary.json").read_text())
    assert summary["hardware"]["rates"] == FAST.as_dict()
    assert summary["tokens_per_s_planned"] > 0
    assert summary["seconds_per_step_planned"] > 0
    # A new run is planned with the machine's own, and differently: launches that take long ask for large micro-batches.
    finetune.run(changed(recipe, run__dir=str(cached / "new")))
    assert plan_of(cached / "new")["rates"] == SLOW.as_dict()
    assert plan_of(cached / "new")["micro_batch"] > before["micro_batch"]
    keep(FAST)
    finetune.run(changed(recipe, run__dir=str(cached / "straight")))
    assert same_bits(cached / "straight", cached / "stopped")


def test_a_run_without_readable_rates_takes_the_machines(
    cached: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = changed(tiny, run__dir=str(cached / "run"))
    for text, words in (
        ("{", "the run's rates cannot be read"),
        ("machine: NVIDIA Z1\nrates: {}\n", "the run was planned for NVIDIA Z1; this is this CPU"),
        ("machine: this CPU\nrates: {}\n", "the run's rates cannot be read"),
        ("micro_batch: 4\n", ""),
    ):
        stopped(recipe)
        (cached / "run" / "plan.yaml").write_text(text)
        capsys.readouterr()
        finetune.run(recipe, "resume=auto")
        output = capsys.readouterr()
        assert words in " ".join((output.out + output.err).split())
        assert plan_of(cached / "run")["rates"] == CPU.as_dict()
        shutil.rmtree(cached / "run")


def test_all_ranks_plan_from_the_first_ones_rates(cached: Path, tiny: dict[str, Any]) -> None:
    """Each rank has a cache of its own, as on hosts of a cluster: the plan is the one of rank 0's rates."""

    def before(rank: int) -> None:
        os.environ["FINETUNE_CACHE"] = str(cached / f"cache-{rank}")
        keep((FAST, SLOW)[rank])

    got = endings(changed(tiny, run__dir=str(cached / "run"), train__batch=8), 2, before)
    assert [summary["hardware"]["rates"]["name"] for summary in got] == ["fast", "fast"]
    assert plan_of(cached / "run")["rates"] == FAST.as_dict()
