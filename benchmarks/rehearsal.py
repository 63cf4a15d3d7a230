"""A run under a budget, rehearsed on whatever GPU is here: the planner chooses, the allocator is capped, and the run must end.

    python benchmarks/rehearsal.py lora 4GiB                       # 200 steps of an 8B shape on real text, in two parts
    python benchmarks/rehearsal.py full 6GiB --parts 1
    python benchmarks/rehearsal.py qlora 4GiB --model builtin:llama3-70b-random --steps 20
    python benchmarks/rehearsal.py lora 4GiB --model builtin:tiny --steps 4 --length 64    # a smoke test, also on a CPU

Nothing of the plan is pinned. The text is one of examples/, packed; the weights are random, so the loss falls from
ln(vocabulary). `full` trains every parameter in bf16, rounded stochastically, with 8-bit AdamW. With several parts the run is
stopped in between, saved, and resumed by a new process. A line has the budget, what the plan said, and what was seen: the
peak of tensors, of the allocator, and of the whole process as the driver counts it (sampled; on a GPU that nobody else uses).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frontier_run import GIB, made_with

RESULTS = Path(__file__).parent / "results" / "rehearsal.jsonl"
EXAMPLES = Path(__file__).parent.parent / "examples"


def recipe_of(arguments: argparse.Namespace, folder: Path, steps: int) -> dict[str, Any]:
    full = arguments.method == "full"
    model = {"path": arguments.model, "base": "nf4" if arguments.method == "qlora" else "same"}
    return {
        "recipe": f"rehearsal-{arguments.method}",
        "model": model | ({"trained": "stochastic"} if full else {}),
        "adapter": {"kind": "none"} if full else {"kind": "lora", "rank": 16, "alpha": 16, "targets": "all-linear"},
        "data": {
            "path": str(EXAMPLES / "text-austen" / "train.jsonl"),
            "valid_path": str(EXAMPLES / "text-austen" / "valid.jsonl"),
            "template": "text",
            "max_tokens": arguments.length,
            "on_long": "split",
            "pack": True,
        },
        "optimizer": {"lr": 1e-5, "name": "adamw8bit"} if full else {"lr": 1e-4, "name": "adamw"},
        "train": {"batch": arguments.rows, "max_steps": steps, "max_grad_norm": 1.0},
        "evaluate": {"samples": 0},
        "checkpoint": {"keep": 1},
        "plan": {"gpu_memory": arguments.budget, **dict(pin.split("=", 1) for pin in arguments.pin)},
        "run": {"dir": str(folder), "keep": arguments.parts > 1},
    }


@contextmanager
def watched(most: dict[str, int]) -> Iterator[None]:
    """Inside, the most bytes of the GPU in use, and of this process on the host, go to `most`."""
    import torch

    from finetune.telemetry import memory

    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                free, whole = torch.cuda.mem_get_info()
                most["gpu"] = max(most.get("gpu", 0), whole - free)
            most["host"] = max(most.get("host", 0), memory.host_bytes())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def part(arguments: argparse.Namespace, folder: Path, until: int) -> None:
    """Runs to step `until` in this process, and prints what was seen as a line of JSON."""
    import finetune

    most: dict[str, int] = {}
    recipe = recipe_of(arguments, folder, until)
    if (folder / "checkpoints").exists():
        recipe["resume"] = "auto"
    with watched(most):
        result = finetune.run(recipe)
    summary = result.summary
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(
        json.dumps(
            {
                "planned_gib": round(summary["peak_gpu_bytes_planned"] / GIB, 3),
                "peak_gib": round(summary["peak_gpu_bytes_measured"] / GIB, 3),
                "reserved_gib": round(summary["reserved_gpu_bytes_measured"] / GIB, 3),
                "phases_gib": {
                    name: {phase: round(most / GIB, 3) for phase, most in peaks.items()}
                    for name, peaks in summary["peak_gpu_bytes_by_phase"].items()
                    if name != "above_step"
                },
                "process_gib": round(most.get("gpu", 0) / GIB, 3),
                "host_planned_gib": round(summary["host_bytes_planned"] / GIB, 3),
                "host_gib": round(most["host"] / GIB, 3),
                "steps": sum("loss" in step for step in steps),
                "tokens_per_s": round(summary["tokens_per_s"]),
                "losses": [round(step["loss"], 4) for step in steps if "loss" in step][:: max(1, until // 10)],
                "eval": [summary["eval_before"], summary["eval_after"]],
                "plan": summary.get("plan") or _plan(folder),
            }
        ),
        flush=True,
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _plan(folder: Path) -> dict[str, Any]:
    import yaml

    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    return {name: value for name, value in plan.items() if name != "reasons"}


def every_part(arguments: argparse.Namespace) -> int:
    """Each part in a process of its own; one line for all of them."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder, seen = Path(place) / "run", []
        for number in range(1, arguments.parts + 1):
            until = arguments.steps * number // arguments.parts
            command = [sys.executable, *sys.argv, "--until", str(until), "--run", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"part {number} ended with {done.returncode}", flush=True)
                return done.returncode
            seen.append(json.loads(done.stdout.splitlines()[-1]))
    line = {
        "method": arguments.method, "model": arguments.model, "budget": arguments.budget, "rows": arguments.rows,
        "length": arguments.length, "pins": arguments.pin, "parts": seen, **made_with(),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if arguments.out is not None and _device() == "cuda":
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("lora", "qlora", "full"))
    parser.add_argument("budget", help="plan.gpu_memory, such as 4GiB")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", type=int, default=2, help="processes, each of which resumes the one before")
    parser.add_argument("--rows", type=int, default=2, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--model", default="builtin:llama3-8b-random")
    parser.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help="plan.KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.until is None:
        return every_part(arguments)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    part(arguments, arguments.run, arguments.until)
    return 0


if __name__ == "__main__":
    sys.exit(main())
