"""Cells of the frontier measured in this process: one run a family, its steps cut to each cell's number of tokens in turn.

A family is cells that differ in tokens a step alone. Making and pinning an 8B model takes longer than measuring it, so one
`finetune.run` with the largest step serves them all: a smaller step gets the first micro-batches of it, and
the peak is counted anew where the number changes. Of each number the first steps are not timed: two where it is larger than
those before (they pin the host's memory), else one. `setup_s` is all that is not a step: loading, pinning, compiling.

Families share a process, so they share imports, the CUDA context and compiled kernels, and nothing else: before a family all
of the last one is collected, cuBLAS's workspaces are dropped and the allocator's cache is given back. What is still allocated
then stands in the line (`left_gib`); above LEFT_GIB, or with more than HOST_LEFT_GIB on the host, the process ends and the
rest runs in a new one.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TIMED = {4096: 10, 8192: 8, 16384: 6, 32768: 4}
"""Timed steps by tokens a step; above, 3."""
LEFT_GIB = 0.25
HOST_LEFT_GIB = 8.0
GIB = 2.0**30


@dataclass(frozen=True)
class Cell:
    """One measurement. `blocks`: resident ones of a streamed run; None: all weights are resident. `micro`, `tokens`,
    `length`: in tokens. `pins`: plan.KEY=VALUE beyond those that every cell has."""

    method: str
    tokens: int
    blocks: int | None
    micro: int
    slots: int
    place: str
    ends: str
    model: str
    length: int
    pins: tuple[str, ...] = ()
    label: str = ""


def recipe_of(cell: Cell, rows: Path, folder: Path, steps: int) -> dict[str, Any]:
    """The recipe of a trial of `steps` steps."""
    full, streamed = cell.method == "full", cell.blocks is not None
    plan: dict[str, Any] = {
        "micro_batch": cell.micro // cell.length,
        "activation_checkpointing": True,
        "activation_offload": streamed and cell.place == "host",
        "loss_chunk": min(1024, cell.length),
        "optimizer_in_backward": False,
        "optimizer_placement": "device",
        "embedding_placement": cell.ends if streamed else "device",
        "fast_block": True,
        "mlp_tile": 0,
        "probe": False,
        "weights": "streamed" if streamed else "resident",
    }
    if streamed:
        plan |= {"resident_blocks": cell.blocks, "slots": cell.slots, "head_placement": cell.ends}
    plan |= dict(pin.split("=", 1) for pin in cell.pins)
    adapter = {"kind": "none"} if full else {"kind": "lora", "rank": 16, "alpha": 16, "targets": "all-linear"}
    return {
        "recipe": "frontier",
        "model": {
            "path": cell.model,
            "base": "nf4" if cell.method == "qlora" else "same",
            **({"trained": "stochastic", "precision": "bf16"} if full else {}),
        },
        "adapter": adapter,
        "data": {"path": str(rows), "template": "text", "max_tokens": cell.length, "on_long": "truncate"},
        "optimizer": {"lr": 1e-5, "name": "adamw8bit"} if full else {"lr": 1e-4, "name": "adamw"},
        "schedule": {"name": "constant"},
        "train": {"batch": cell.tokens // cell.length, "max_steps": steps, "max_grad_norm": 1.0},
        "evaluate": {"samples": 0},
        "plan": plan,
        "run": {"dir": str(folder), "keep": False},
    }


def rows_file(place: Path, count: int, length: int) -> Path:
    """Rows of random letters, a tokens' number too long for sure, so that each is cut to `length` by any tokenizer."""
    import numpy as np

    path = place / f"rows-{count}-{length}.jsonl"
    if path.exists():
        return path
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    drawn = np.random.default_rng(0).integers(0, len(letters), (count, 4 * length))
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text("".join(json.dumps({"text": "".join(letters[row])}) + "\n" for row in drawn), encoding="utf-8")
    aside.rename(path)
    return path


@dataclass(frozen=True)
class Stretch:
    """The steps of one cell in its family's run: `first` to `last` (excluded), the first `warm` of them not timed."""

    cell: Cell
    first: int
    last: int
    warm: int


def stretches(family: list[Cell], timed: int | None) -> list[Stretch]:
    """The cells' steps, one cell after the other."""
    found: list[Stretch] = []
    for cell in family:
        warm = 1 if any(before.cell.tokens >= cell.tokens for before in found) else 2
        first = found[-1].last if found else 0
        count = timed or TIMED.get(cell.tokens, 3 if cell.tokens > 32768 else 10)
        found.append(Stretch(cell, first, first + warm + count, warm))
    return found


@contextmanager
def cut_steps(parts: list[Stretch], reserved: list[int], between: Callable[[], None]) -> Iterator[None]:
    """Inside, the loop's steps are cut to their cell's tokens; of each step the most bytes reserved since its cell began
    go to `reserved`. `between` is called before the first step of each cell."""
    import torch

    from finetune.train import loop

    own, on_gpu = loop.train_step, torch.cuda.is_available()

    def cut(job: Any, rows: list[int], steps: int, loaded: Any) -> Any:
        part = next(part for part in parts if part.first <= job.progress.step < part.last)
        if job.progress.step == part.first:
            between()
        if job.progress.step == part.first and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        count = part.cell.tokens // part.cell.length
        result = own(job, rows[:count], steps, first_rows(loaded, count, part.cell.micro // part.cell.length))
        reserved.append(torch.cuda.max_memory_reserved() if on_gpu else 0)
        return result

    # The loop finds its step by the module's name for it.
    loop.train_step = cut
    try:
        yield
    finally:
        loop.train_step = own


def first_rows(loaded: Any, count: int, micro: int) -> Any:
    """A step of the first `count` rows of a loaded one whose rows are all full."""
    whole = len(loaded.rows)
    return replace(
        loaded, rows=loaded.rows[:count], batches=loaded.batches[: count // micro],
        trained=loaded.trained * count // whole, tokens=loaded.tokens * count // whole,
    )  # fmt: skip


def measure(family: list[Cell], place: Path, timed: int | None, emit: Callable[[dict[str, Any]], None]) -> None:
    """Runs a family in this process; each cell's line goes to `emit` as soon as its steps are over."""
    import finetune

    left, parts = release(), stretches(family, timed)
    largest = max(family, key=lambda cell: cell.tokens)
    rows = rows_file(place, 2 * largest.tokens // largest.length, largest.length)
    planned = {cell.tokens: planned_of(cell, rows) for cell in family}
    reserved: list[int] = []
    waiting = list(parts)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=place) as folder:
        recipe = recipe_of(largest, rows, Path(folder) / "run", parts[-1].last)
        metrics = Path(folder) / "run" / "metrics.jsonl"

        def tell() -> None:
            wall = time.perf_counter() - started
            lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            steps = [line for line in lines if "loss" in line]
            shared = {
                "family": [cell.tokens for cell in family],
                "setup_s": round(wall - sum(line["seconds"] for line in steps), 2),
                "left_gib": round(left / GIB, 4),
            }
            while waiting and waiting[0].last <= len(steps):
                part = waiting.pop(0)
                mine = steps[part.first : part.last]
                emit(line_of(part, mine, reserved[part.last - 1], planned[part.cell.tokens]) | shared | made_with())

        with cut_steps(parts, reserved, tell):
            finetune.run(recipe)
        tell()


def planned_of(cell: Cell, rows: Path) -> tuple[int, int]:
    """(device bytes of tensors, host bytes) that the planner expects of a cell."""
    from finetune.commands.arguments import known_names
    from finetune.config.load import load_recipe
    from finetune.environment import Launch
    from finetune.models.shapes import shape_for
    from finetune.planner.hardware import detect
    from finetune.planner.plan import decide

    recipe = load_recipe(recipe_of(cell, rows, rows.parent / "planned", 1), (), known_names(), Launch())
    import torch

    hardware = detect("cuda" if torch.cuda.is_available() else "cpu")
    estimate = decide(recipe, shape_for(recipe), hardware, 1, cell.length).estimate
    return estimate.step_tensors, estimate.host.total


def line_of(part: Stretch, steps: list[dict[str, Any]], reserved: int, planned: tuple[int, int]) -> dict[str, Any]:
    """What is known of a cell from the metrics of its steps."""
    cell, timed = part.cell, steps[part.warm :]
    if any(step["tokens"] != cell.tokens for step in steps):
        raise RuntimeError(
            f"a step had {[step['tokens'] for step in steps]} tokens, not {cell.tokens}: the rows are short"
        )
    peak = steps[-1]["peak_gpu_bytes"]
    median = statistics.median(step["seconds"] for step in timed)

    def gib(octets: int) -> float | None:
        return round(octets / GIB, 3) if peak else None

    return {
        **asdict(cell),
        "tokens_per_s": round(cell.tokens / median),
        "seconds_per_step": round(median, 4),
        "planned_gib": gib(planned[0]),
        "peak_gib": gib(peak),
        "reserved_gib": gib(reserved),
        "host_planned_gib": round(planned[1] / GIB, 3),
        "host_gib": round(max(step["host_bytes"] for step in steps) / GIB, 3),
        "data_wait": round(statistics.median(step["data_wait"] for step in timed), 5),
        "warm": part.warm,
        "seconds": [round(step["seconds"], 4) for step in steps],
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "grad_norm_last": steps[-1]["grad_norm"],
    }


def made_with() -> dict[str, Any]:
    import torch

    from finetune.train.finish import versions

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "versions": versions(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def release() -> float:
    """Frees what the last run left (it has cycles), gives the allocator's cache back; the bytes that are still allocated."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()  # torch keeps them for the process; the next run takes its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def child(families: list[list[Cell]], place: Path, timed: int | None) -> int:
    """Measures families one after the other. Prints what benchmarks/cells.in_turn asks for; returns 3 to be started again
    for the rest."""
    from finetune.telemetry import memory

    for at, family in enumerate(families):
        print(f"begin {at}", flush=True)
        said = f"done {at}"
        try:
            measure(family, place, timed, lambda line: print(json.dumps(line), flush=True))
        except Exception as error:
            # Kept as text: the error's frames hold the run's tensors.
            said = f"failed {at} {type(error).__name__}: {error}".splitlines()[0][:600]
        print(said, flush=True)
        if at + 1 < len(families) and (release() / GIB > LEFT_GIB or memory.host_bytes() / GIB > HOST_LEFT_GIB):
            return 3
    return 0
