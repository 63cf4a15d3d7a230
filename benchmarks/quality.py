"""What fine-tuning SmolLM2-135M-Instruct does to its answers: LoRA, full fine-tuning and QLoRA side by side on three jobs.

    FINETUNE_SHARED_DATA=folder python benchmarks/quality.py        # every cell; JSON lines to benchmarks/results/quality.jsonl
    FINETUNE_SHARED_DATA=folder python benchmarks/quality.py --job grammar --method lora     # one cell, printed
    FINETUNE_SHARED_DATA=folder python benchmarks/quality.py --model builtin:tiny --steps 4 --answers 4    # a smoke test

The folder holds grammar-synth, instruct-human and summ-debian, each with train.jsonl and valid.jsonl. Held-out loss before
and after, exact match and ROUGE-L of greedy answers to the first held-out rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cells

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
JOBS: dict[str, tuple[str, str, int]] = {
    "grammar": ("grammar-synth", "grammar", 64),
    "instruct": ("instruct-human", "alpaca", 160),
    "summarize": ("summ-debian", "summarize", 64),
}
"""Job: its folder, its template, and the longest answer in tokens."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"kind": "lora", "rank": 16, "alpha": 32}, "optimizer": {"lr": 5e-4}},
    "full": {"adapter": {"kind": "none"}, "optimizer": {"lr": 5e-5}},
    "qlora": {"adapter": {"kind": "lora", "rank": 16, "alpha": 32}, "base": "nf4", "optimizer": {"lr": 5e-4}},
}


def recipe_of(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    folder, template, longest = JOBS[cell.job]
    method = METHODS[cell.method]
    data = Path(os.environ["FINETUNE_SHARED_DATA"]) / folder
    return {
        "recipe": f"quality-{cell.job}-{cell.method}",
        "model": {"path": cell.model, "base": method.get("base", "same")},
        "adapter": method["adapter"],
        "data": {
            "path": str(data / "train.jsonl"), "valid_path": str(data / "valid.jsonl"), "template": template,
            "max_tokens": 768,
        },
        "optimizer": method["optimizer"],
        "schedule": {"name": "cosine", "warmup": 0.05},
        "train": {"batch": 16, "max_steps": cell.steps, "seed": cell.seed},
        "evaluate": {"samples": 0, "scores": ["exact_match", "rouge_l"], "answers": cell.answers},
        "generate": {"max_tokens": longest},
        "run": {"dir": tempfile.mkdtemp(dir=place), "keep": False},
    }  # fmt: skip


def measure(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    import finetune

    summary = finetune.run(recipe_of(cell, place)).summary
    return {
        "job": cell.job, "method": cell.method, "model": cell.model, "steps": cell.steps, "seed": cell.seed,
        "answers": cell.answers, "before": summary["eval_before"], "after": summary["eval_after"],
        "hardware": summary["hardware"], "versions": summary["versions"],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if "FINETUNE_SHARED_DATA" not in os.environ:
        parser.error("set FINETUNE_SHARED_DATA to the folder with the data sets")
    if arguments.job and arguments.method:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(measure(arguments, Path(place))), flush=True)
        return 0
    rest = [
        part for name in ("model", "steps", "answers", "seed") for part in (f"--{name}", str(getattr(arguments, name)))
    ]
    commands = [
        (f"{job} {method}", [__file__, "--job", job, "--method", method, *rest])
        for job in ([arguments.job] if arguments.job else JOBS)
        for method in ([arguments.method] if arguments.method else METHODS)
    ]
    return cells.every(commands, '{"job"', arguments.out)


if __name__ == "__main__":
    sys.exit(main())
