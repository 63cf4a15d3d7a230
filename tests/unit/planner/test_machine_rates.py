"""Which rates a plan's seconds come from: kept ones, a known card's, assumed ones; and that the same rates give the same plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from finetune.errors import InputError
from finetune.machine import rates_cache
from finetune.machine.rates import ASSUMED, CPU, ROWS
from finetune.models.shapes import SHAPES
from finetune.planner.hardware import GIB, PRESETS, Hardware, detect, parse
from finetune.planner.machine_rates import measure, rates_folder, with_rates
from finetune.planner.plan import decide
from finetune.planner.report import rates_in_words
from tests.unit.planner.test_decide import recipe

KNOWN = Hardware("cuda", "NVIDIA H200", 1, 100 * GIB, 100 * GIB, 16, rates=ROWS["h200-141"])
UNKNOWN = Hardware("cuda", "NVIDIA Z1", 1, 100 * GIB, 100 * GIB, 16)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def test_kept_rates_are_taken_before_all_others() -> None:
    for hardware in (KNOWN, UNKNOWN, detect("cpu")):
        gpu = hardware.name if hardware.device == "cuda" else ""
        assert with_rates(hardware, pytest.fail, measures=gpu != "NVIDIA Z1") == hardware
        own = replace(hardware.rates or CPU, source="measured", launch_s=1.25e-5)
        rates_cache.write(rates_folder(), rates_cache.this_machine(gpu, hardware.cores), own)
        assert with_rates(hardware, pytest.fail, measures=True).rates == own


def test_a_damaged_file_is_said_and_not_used() -> None:
    hardware = detect("cpu")
    rates = measure(hardware, lambda line: None)
    machine = rates_cache.this_machine("", hardware.cores)
    path = rates_folder() / machine.file
    assert with_rates(hardware, pytest.fail).rates == rates
    path.write_text("{")
    said: list[str] = []
    assert with_rates(hardware, said.append, measures=True).rates == CPU
    assert len(said) == 1
    assert "damaged" in said[0]
    assert "`finetune bench` measures anew" in said[0]
    # Measured anew, it is whole again.
    again = measure(hardware, said.append, "why")
    assert said[1].startswith("why; measured this machine's rates in ")
    assert with_rates(hardware, pytest.fail).rates == again


def test_rates_that_cannot_be_kept_are_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    said: list[str] = []
    assert measure(detect("cpu"), said.append).source == "measured"
    assert "could not be kept" in said[0]


def test_pretend_machines_carry_rates() -> None:
    for name, machine in PRESETS.items():
        assert machine.rates == ROWS[name]
        assert parse(name).rates == ROWS[name]
    assert parse("8xh100-80").rates == ROWS["h100-80"]
    assert parse("1x24GB,64GB").rates == ASSUMED["cuda"]
    assert parse("0,32GB").rates == CPU
    assert rates_in_words(ASSUMED["cuda"]) == "the data sheet of a100-80, a middle one: the GPU is not known by name"
    assert "assumed of any CPU" in rates_in_words(CPU)
    assert "measured on this machine (x)" in rates_in_words(replace(CPU, source="measured", name="x"))


def test_the_same_rates_give_the_same_plan_and_other_rates_other_seconds() -> None:
    shape, job = SHAPES["llama3-8b"], recipe()
    decisions = [decide(job, shape, replace(KNOWN, rates=ROWS[name]), 1, 2048) for name in ("h200-141", "a100-80")]
    again = decide(job, shape, KNOWN, 1, 2048)
    assert (again.plan, again.seconds, again.alternatives) == (
        decisions[0].plan,
        decisions[0].seconds,
        decisions[0].alternatives,
    )
    assert decisions[0].rates == ROWS["h200-141"]
    assert decisions[1].seconds > 2 * decisions[0].seconds
    assert decide(job, shape, UNKNOWN, 1, 2048).rates == ASSUMED["cuda"]


def test_a_cpu_run_on_a_gpus_machine_is_timed_as_a_cpu() -> None:
    forced = type(recipe()).model_validate({**recipe().model_dump(), "device": "cpu"})
    decision = decide(forced, SHAPES["smollm2-135m"], KNOWN, 1, 512)
    assert decision.rates == CPU
    with pytest.raises(InputError):
        decide(type(recipe()).model_validate({**recipe().model_dump(), "device": "cuda"}), SHAPES["tiny"], parse("cpu"))
