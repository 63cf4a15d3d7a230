"""The grid of the planner: the order of cells, cells that share a plan, the table, and a smoke run."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_every_cell_is_there_once_and_the_first_are_spread(script: Any) -> None:
    grid = script("grid")
    found = grid.ordered()
    assert len({grid.key(cell) for cell in found}) == len(found) == 2 * 3 * 4 * 6
    first = found[:24]
    assert [len({cell[name] for cell in first}) for name in grid.KEY] == [2, 3, 4, 6]


def test_the_table_leaves_out_neighbours_and_counts_a_shared_run_once(script: Any) -> None:
    grid = script("grid")
    cell = {"model": "m", "method": "lora", "length": 512, "budget": 6}
    run = {
        "planned_bytes": 110,
        "peak_bytes": 100,
        "planned_seconds": 0.9,
        "seconds_per_step": 1.0,
        "out_of_memory": [],
    }
    lines = [
        cell | run,
        cell | run | {"budget": 12, "same_as": 6},
        cell | run | {"neighbour": {"micro_batch": 1}, "planned_bytes": 500},
        cell | run | {"budget": 24, "planned_bytes": 102},
        cell | run | {"budget": 48, "planned_bytes": 900, "out_of_memory": [{"step": 1}]},
        cell | {"budget": 80, "refused": "nothing fits"},
    ]
    assert grid.summary(lines).splitlines()[2] == "| lora | 5 | 1 | 0 | 1 | 6.0% | 10.0% | 10.0% | 10.0% |"


def test_cells_with_one_plan_are_run_once_under_the_smallest_budget(script: Any, tmp_path: Any) -> None:
    grid = script("grid")
    cells = [{"model": "builtin:tiny", "method": "lora", "length": 64, "budget": budget} for budget in (12, 8)]
    large, small = sorted(grid.measure(cells[0], tmp_path, cells[1:], 128, False), key=lambda line: -line["budget"])
    assert (large["budget"], large["same_as"]) == (12, 8)
    assert (small["budget"], "same_as" in small) == (8, False)
    assert large["seconds"] == small["seconds"]
    assert len(small["seconds"]) == grid.STEPS
    assert small["out_of_memory"] == []


def test_quick_measures_every_method(script: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    grid = script("grid")
    assert grid.main(["--quick", "--folder", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["method"] for line in lines] == ["lora", "qlora", "full"]
    assert all(line["planned_seconds"] > 0 and line["seconds_per_step"] > 0 for line in lines)
