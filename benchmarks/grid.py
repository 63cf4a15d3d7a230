"""The planner against the GPU: models x methods x lengths x budgets, nothing pinned, planned beside measured.

    python benchmarks/grid.py --minutes 8          # what is not yet in benchmarks/results/grid.jsonl, the allocator capped
    python benchmarks/grid.py --minutes 8 --neighbours    # also plans beside the chosen one: one choice pinned otherwise
    python benchmarks/grid.py --summary            # the table of what is there
    python benchmarks/grid.py --quick              # a smoke test for a CPU: builtin:tiny, printed

Cells of one model, method and length whose plan is the same under several budgets are run once, under the smallest of them,
and written for each (`same_as`). A cell that the planner refuses has the reason. One in which memory ran out counts as
out of memory, also where the run went on with a smaller plan. Cells share a process as those of frontier_run.py do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
from frontier_run import GIB, HOST_LEFT_GIB, LEFT_GIB, made_with, release, rows_file
from rehearsal import watched

RESULTS = Path(__file__).parent / "results" / "grid.jsonl"
MODELS = ("builtin:llama3-1b-random", "builtin:llama3-8b-random")
METHODS = ("lora", "qlora", "full")
LENGTHS = (512, 2048, 8192, 32768)
BUDGETS = (6, 12, 24, 48, 80, 130)
KEY = ("model", "method", "length", "budget")
STEPS, WARM = 4, 2


def ordered(
    models: tuple[str, ...] = MODELS, lengths: tuple[int, ...] = LENGTHS, budgets: tuple[int, ...] = BUDGETS
) -> list[dict[str, Any]]:
    """Every cell once, so that any first part of them is spread over models, methods, lengths and budgets."""
    every = [
        (a, b, c, d)
        for a in range(len(models))
        for b in range(3)
        for c in range(len(lengths))
        for d in range(len(budgets))
    ]
    every.sort(
        key=lambda at: ((at[3] + 2 * at[2] + at[1] + 3 * at[0]) % len(budgets), (at[2] + at[1]) % len(lengths), at)
    )
    return [dict(zip(KEY, (models[a], METHODS[b], lengths[c], budgets[d]), strict=True)) for a, b, c, d in every]


def key(cell: dict[str, Any]) -> str:
    return json.dumps([cell[name] for name in KEY])


def lines_of(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]


def present(out: Path | None) -> set[str]:
    return {key(line) for line in lines_of(out) if "neighbour" not in line}


def recipe_of(cell: dict[str, Any], place: Path, tokens: int, pins: dict[str, Any]) -> dict[str, Any]:
    full, rows = cell["method"] == "full", max(1, tokens // cell["length"])
    return {
        "recipe": "grid",
        "model": {"path": cell["model"], "base": "nf4" if cell["method"] == "qlora" else "same"}
        | ({"trained": "stochastic"} if full else {}),
        "adapter": {"kind": "none"} if full else {"kind": "lora", "rank": 16, "alpha": 16, "targets": "all-linear"},
        "data": {
            "path": str(rows_file(place, 2 * rows, cell["length"])), "template": "text",
            "max_tokens": cell["length"], "on_long": "truncate",
        },
        "optimizer": {"lr": 1e-5, "name": "adamw8bit"} if full else {"lr": 1e-4, "name": "adamw"},
        "schedule": {"name": "constant"},
        "train": {"batch": rows, "max_steps": STEPS, "max_grad_norm": 1.0},
        "evaluate": {"samples": 0},
        "plan": {_budget_key(): f"{cell['budget']}GiB", **pins},
        "run": {"dir": str(place / f"run-{os.getpid()}-{time.monotonic_ns()}"), "keep": False},
    }  # fmt: skip


def _budget_key() -> str:
    import torch

    return "gpu_memory" if torch.cuda.is_available() else "host_memory"


def decided(recipe: dict[str, Any], length: int) -> Any:
    """The planner's decision; raises PlanRefusedError."""
    import torch

    from finetune.commands.arguments import known_names
    from finetune.config.load import load_recipe
    from finetune.environment import Launch
    from finetune.models.shapes import shape_for
    from finetune.planner.hardware import detect
    from finetune.planner.machine_rates import with_rates
    from finetune.planner.plan import decide

    loaded = load_recipe(recipe, (), known_names(), Launch())
    hardware = with_rates(detect("cuda" if torch.cuda.is_available() else "cpu"), lambda note: None)
    return decide(loaded, shape_for(loaded), hardware, 1, length)


def ran(recipe: dict[str, Any], decision: Any) -> dict[str, Any]:
    """What a run was planned to take and took."""
    import finetune

    left, most = release(), dict[str, int]()
    started = time.perf_counter()
    with watched(most):
        summary = finetune.run(recipe).summary
    steps = [json.loads(line) for line in (Path(recipe["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()]
    seconds = [step["seconds"] for step in steps if "loss" in step]
    return {
        "planned_bytes": summary["peak_gpu_bytes_planned"],
        "peak_bytes": summary["peak_gpu_bytes_measured"],
        "reserved_bytes": summary.get("reserved_gpu_bytes_measured"),
        "process_bytes": most.get("gpu", 0),
        "planned_process_bytes": decision.estimate.peak,
        "planned_seconds": decision.seconds,
        "seconds_per_step": statistics.median(seconds[WARM:]),
        "seconds": seconds,
        "out_of_memory": summary["out_of_memory"],
        "left_gib": round(left / GIB, 4),
        "wall_s": round(time.perf_counter() - started, 2),
    }


def measure(
    cell: dict[str, Any], place: Path, others: list[dict[str, Any]], tokens: int, neighbours: bool
) -> list[Any]:
    """Lines of a cell, and of those of `others` (which differ in budget alone) whose plan is the same."""
    from finetune.planner.refusal import PlanRefusedError
    from finetune.planner.report import plan_dict

    try:
        plan = plan_dict(decided(recipe_of(cell, place, tokens, {}), cell["length"]).plan)
    except PlanRefusedError as error:
        return [cell | {"refused": error.fault.what, "smallest_bytes": error.estimate.peak} | made_with()]
    same = [cell]
    for other in others:
        try:
            if plan_dict(decided(recipe_of(other, place, tokens, {}), other["length"]).plan) == plan:
                same.append(other)
        except PlanRefusedError:
            continue
    same.sort(key=lambda each: each["budget"])
    first, recipe = same[0], recipe_of(same[0], place, tokens, {})
    found = {"plan": plan} | _tried(recipe, first["length"]) | made_with()
    lines = [each | found | ({} if each is first else {"same_as": first["budget"]}) for each in same]
    for name, value in _beside(plan) if neighbours else ():
        pinned = recipe_of(first, place, tokens, {name: value})
        lines.append(first | {"neighbour": {name: value}} | _tried(pinned, first["length"]) | made_with())
    return lines


def _tried(recipe: dict[str, Any], length: int) -> dict[str, Any]:
    """A run's figures, or why there are none; only what the user's input cannot cure is raised."""
    from finetune.errors import InputError
    from finetune.planner.refusal import PlanRefusedError

    try:
        return ran(recipe, decided(recipe, length))
    except (InputError, PlanRefusedError) as error:
        return {"failed": error.fault.what}
    except Exception as error:
        if "out of memory" not in str(error).lower():
            raise
        return {"out_of_memory": [str(error).splitlines()[0]]}


def _beside(plan: dict[str, Any]) -> list[tuple[str, Any]]:
    """One choice of a plan made otherwise; the planner makes the rest anew."""
    micro = plan["micro_batch"]
    found: list[tuple[str, Any]] = [("micro_batch", 2 * micro)]
    found += [("micro_batch", micro // 2)] if micro > 1 else []
    found.append(("activation_checkpointing", not plan["activation_checkpointing"]))
    found.append(("weights", "resident" if plan["weights"] == "streamed" else "streamed"))
    return found


def child(wanted: list[dict[str, Any]], place: Path, tokens: int, neighbours: bool, out: Path | None) -> int:
    """Measures in turn, as benchmarks/cells.in_turn asks; returns 3 to be started again for the rest."""
    from finetune.telemetry import memory

    done = present(out)
    for at, cell in enumerate(wanted):
        print(f"begin {at}", flush=True)
        said = f"done {at}"
        if key(cell) not in done:
            others = [
                each for each in wanted
                if key(each) not in done and each != cell and all(each[name] == cell[name] for name in KEY[:3])
            ]  # fmt: skip
            try:
                for line in measure(cell, place, others, tokens, neighbours):
                    done.add(key(line))
                    print(json.dumps(line), flush=True)
            except Exception as error:
                # Kept as text: the error's frames hold the run's tensors.
                said = f"failed {at} {type(error).__name__}: {error}".splitlines()[0][:600]
        print(said, flush=True)
        if at + 1 < len(wanted) and (release() / GIB > LEFT_GIB or memory.host_bytes() / GIB > HOST_LEFT_GIB):
            return 3
    return 0


def summary(lines: list[dict[str, Any]]) -> str:
    """By method: cells, refused, out of memory, and the median and worst error of peak and of seconds, in per cent."""
    rows = [
        "| method | cells | refused | failed | out of memory | peak, median | worst | seconds, median | worst |",
        "|---" * 9 + "|",
    ]
    for method in METHODS:
        mine = [line for line in lines if line["method"] == method and "neighbour" not in line]
        once = [
            line for line in mine if "same_as" not in line and "seconds_per_step" in line and not line["out_of_memory"]
        ]
        counts = [
            len(mine),
            *(sum(bool(line.get(word)) for line in mine) for word in ("refused", "failed", "out_of_memory")),
        ]
        shown = [_errors(once, "planned_bytes", "peak_bytes"), _errors(once, "planned_seconds", "seconds_per_step")]
        rows.append(
            f"| {method} | " + " | ".join([*map(str, counts), *(text for pair in shown for text in pair)]) + " |"
        )
    return "\n".join(rows)


def _errors(lines: list[dict[str, Any]], planned: str, measured: str) -> tuple[str, str]:
    errors = [abs(line[planned] / line[measured] - 1) for line in lines if line[measured]]
    return (f"{statistics.median(errors):.1%}", f"{max(errors):.1%}") if errors else ("", "")


def main(given: list[str] | None = None, tell: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=600.0, help="of all cells together")
    parser.add_argument("--seconds", type=float, default=120.0, help="the most of a cell, set-up included")
    parser.add_argument("--tokens", type=int, default=32768, help="of a step; at least one row")
    parser.add_argument("--neighbours", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--quick", action="store_true", help="builtin:tiny, three cells, printed and not written")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finetune-grid")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    if asked.summary:
        tell(summary(lines_of(asked.out)))
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    tokens, out = (128, None) if asked.quick else (asked.tokens, asked.out)
    if asked.cells:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        return child(json.loads(asked.cells), asked.folder, tokens, asked.neighbours, out)
    wanted = ordered(("builtin:tiny",), (64,), (8,)) if asked.quick else ordered()
    done = present(out)
    named = [(" ".join(map(str, cell.values())), cell) for cell in wanted if key(cell) not in done]
    flags = ["--quick"] * asked.quick + ["--neighbours"] * asked.neighbours
    command = [__file__, "--folder", str(asked.folder), "--tokens", str(asked.tokens), "--out", str(asked.out), *flags]
    limits = cells.Limits(asked.seconds, time.monotonic() + 60 * asked.minutes)
    return 1 if cells.in_turn(command, named, limits, '{"model"', out) else 0


if __name__ == "__main__":
    sys.exit(main())
