"""What a run shows and leaves for a person: its data, sample answers before and after, and the summary."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetune.checkpoint.folders import write_text
from finetune.data import preflight
from finetune.data.dataset import Splits
from finetune.generate.engine import answer
from finetune.planner.hardware import detect
from finetune.planner.plan import Decision
from finetune.tasks.text import prompt_and_answer
from finetune.telemetry import memory
from finetune.telemetry.log import Log, size
from finetune.train.job import Job

PROMPT_SHOWN = 240
"""Characters of a sample's prompt that are printed; summary.json has all of it."""
PACKAGES = ("finetune", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets")


def show_data(splits: Splits, log: Log) -> None:
    """A line for each split, its warnings, and the first training document with what is trained in bold."""
    for rows in (splits.train, *splits.evaluate.values()):
        log.say(preflight.headline(rows.report))
        for warning in rows.report.warnings:
            log.warn(warning)
    log.say(preflight.sample(splits.train.report))


def samples(job: Job) -> list[dict[str, str]]:
    """Answers to the first held-out documents: {prompt, answer, expected}."""
    sets = list(job.splits.evaluate.values())
    rows = [
        row for row in (sets[0].documents[: job.recipe.evaluate.samples] if sets else []) if prompt_and_answer(row)[0]
    ]
    pairs = [prompt_and_answer(row) for row in rows]
    answers = answer(
        job.model, [prompt for prompt, _ in pairs], job.recipe.generate, job.precision, job.recipe.train.seed
    )
    decode = job.model.tokenizer.decode
    return [
        {
            "prompt": decode(prompt, skip_special_tokens=True),
            "answer": text,
            "expected": decode(wanted, skip_special_tokens=True),
        }
        for (prompt, wanted), text in zip(pairs, answers, strict=True)
    ]


def show_samples(job: Job, after: list[dict[str, str]]) -> None:
    """Prints each sample: the end of the prompt, the answer before and after, and what was expected."""
    for number, (first, last) in enumerate(zip(job.progress.samples_before, after, strict=False), 1):
        prompt = " ".join(first["prompt"].split())
        job.log.heading(f"sample {number}")
        for label, text in (
            ("prompt", f"... {prompt[-PROMPT_SHOWN:]}" if len(prompt) > PROMPT_SHOWN else prompt),
            ("before", first["answer"]),
            ("after", last["answer"]),
            ("expected", last["expected"]),
        ):
            job.log.say(f"  {label:<9}{' '.join(text.split())}")


def summarize(job: Job, decision: Decision, after: list[dict[str, str]], result: Path | None) -> dict[str, Any]:
    """The run in one dictionary, as `summary.json` holds it."""
    progress, device = job.progress, job.world.device
    on_gpu = device.type == "cuda"
    return {
        "recipe": job.recipe.recipe,
        "steps": progress.step,
        "seconds": round(progress.seconds, 3),
        "tokens_per_s": round(progress.tokens / max(progress.seconds, 1e-9), 2),
        "tokens_per_s_planned": float(f"{decision.tokens_per_s:.4g}"),
        "seconds_per_step_planned": float(f"{decision.seconds:.4g}"),
        "loss_first": progress.loss_first,
        "loss_last": progress.loss_last,
        "eval_before": progress.eval_before,
        "eval_after": progress.eval_last,
        "best_step": progress.best_step,
        "peak_gpu_bytes_planned": decision.estimate.step_tensors if on_gpu else 0,
        "peak_gpu_bytes_measured": job.peaks.of("step"),
        "peak_gpu_bytes_by_phase": _by_phase(job, decision) if on_gpu else {},
        "process_gpu_bytes_planned": decision.estimate.step if on_gpu else 0,
        "reserved_gpu_bytes_measured": job.peaks.reserved,
        "host_bytes_planned": decision.estimate.host.total,
        "host_bytes_measured": memory.peak_host_bytes(),
        "out_of_memory": progress.out_of_memory,
        "result": str(result) if result else None,
        "samples_before": progress.samples_before,
        "samples_after": after,
        "versions": versions(),
        "hardware": {
            "device": device.type,
            "name": detect(device.type).name,
            "ranks": job.world.size,
            "rates": decision.rates.as_dict(),
        },
    }


def _by_phase(job: Job, decision: Decision) -> dict[str, Any]:
    """Planned and measured bytes of tensors by phase, and the phases that took more than a step, which are told too."""
    measured, step = job.peaks.all, job.peaks.of("step")
    above = {phase: most for phase, most in measured.items() if most > step}
    for phase, most in above.items():
        job.log.notice(f"{phase} took {size(most)} of the GPU, a step {size(step)}")
    planned = {phase: decision.estimate.tensors(phase) for phase in decision.estimate.phases}
    return {"planned": planned, "measured": measured, "above_step": sorted(above)}


def versions() -> dict[str, str]:
    """Versions of Python and the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
