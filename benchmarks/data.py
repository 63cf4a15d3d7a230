"""Data preparation: tokens/s, how full packed rows are, and how long a second start takes, a line for each set.

    FINETUNE_DATA_SETS=FOLDER python benchmarks/data.py          # every FOLDER/*/train.jsonl whose template is told below
    python benchmarks/data.py --sets FOLDER --model builtin:smollm2-135m --workers 0 2 --repeat 20
    python benchmarks/data.py --pack 1000000                     # packing alone, of so many random lengths
    python benchmarks/data.py --sets FOLDER --label before       # lines named so, added to benchmarks/results/data.jsonl

`tokens_per_s` is by the clock; `tokens_per_s_of_two_free_cores` by the processor time that was used, so other work on the
machine does not lower it. Both are of rendering, tokenising, masking, packing and counting together, the file's
reading and the cache's writing included. Each set is read `--repeat` times over as one file, since the sets are small. Nothing here is a timed test.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.schema import Recipe
from finetune.data.dataset import prepare
from finetune.data.opening import open_data
from finetune.data.packing import pack_rows
from finetune.data.workers import usable_cores
from finetune.models.load import load_tokenizer

COLUMNS = {
    "messages": ("messages", {}),
    "instruction": ("alpaca", {}),
    "target": ("grammar", {}),
    "summary": ("summarize", {}),
    "text": ("text", {"train_on": "all", "on_long": "split"}),
}
"""A column that a set has: its template and further keys."""
LENGTH = 2048
RESULTS = Path(__file__).parent / "results" / "data.jsonl"


def recipe_of(file: Path, model: str, **data: Any) -> Recipe | None:
    """A recipe that packs the file; None for a file of no known columns."""
    first = json.loads(file.read_text(encoding="utf-8").partition("\n")[0])
    known = next((value for column, value in COLUMNS.items() if column in first), None)
    if known is None:
        return None
    values = {"path": str(file), "template": known[0], "max_tokens": LENGTH, "pack": True, **known[1], **data}
    return Recipe.model_validate({"model": {"path": model}, "data": values})


def cpu_seconds() -> float:
    """Processor time of this process, its threads and its ended children: what a busy machine does not change much."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(file: Path, model: str, workers: int, repeat: int, place: Path) -> dict[str, Any] | None:
    """One set: figures of the file as it is, and rates of it repeated."""
    small = recipe_of(file, model, workers=workers)
    if small is None:
        return None
    tokenizer = load_tokenizer(small.model)
    report = prepare(small, tokenizer).train.report
    large = place / f"{file.parent.name}.jsonl"
    text = file.read_text(encoding="utf-8").rstrip("\n") + "\n"
    large.write_text(text * repeat, encoding="utf-8")
    recipe = recipe_of(large, model, workers=workers)
    assert recipe is not None
    started, worked = time.perf_counter(), cpu_seconds()
    whole = open_data(recipe, tokenizer).train.report
    first, cpu = time.perf_counter() - started, cpu_seconds() - worked
    started = time.perf_counter()
    open_data(recipe, tokenizer)
    second = time.perf_counter() - started
    return {
        "set": file.parent.name, "documents": report.documents, "tokens": report.tokens,
        "packed_rows": report.rows, "fewest_possible": -(-report.tokens // LENGTH), "full": round(report.efficiency, 4), "workers": workers,
        "cores": len(usable_cores()), "tokens_timed": whole.tokens, "full_timed": round(whole.efficiency, 4),
        "seconds": round(first, 2), "tokens_per_s": round(whole.tokens / first),
        "tokens_per_s_of_two_free_cores": round(2 * whole.tokens / cpu), "second_start_s": round(second, 3),
        "first_to_second": round(first / second, 1),
    }  # fmt: skip


def measure_packing(count: int) -> dict[str, Any]:
    """Random lengths of three kinds: even, short, and a long tail."""
    draw, found = np.random.default_rng(0), {}
    kinds = {
        "even": draw.integers(1, LENGTH + 1, count),
        "short": draw.integers(20, 400, count),
        "tail": np.clip(draw.lognormal(5.5, 1, count), 1, LENGTH).astype(np.int64),
    }
    for name, lengths in kinds.items():
        started = time.perf_counter()
        _, cuts = pack_rows(lengths, LENGTH)
        seconds = time.perf_counter() - started
        found[name] = {"seconds": round(seconds, 3), "full": round(int(lengths.sum()) / ((len(cuts) - 1) * LENGTH), 4)}
    return {"documents": count, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=os.environ.get("FINETUNE_DATA_SETS"))
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--pack", type=int)
    parser.add_argument("--label", help="keep the lines in benchmarks/results/data.jsonl under this name")
    given = parser.parse_args()
    if given.pack:
        print(json.dumps(measure_packing(given.pack)))
        return
    if not given.sets:
        parser.error("name the folder of sets: --sets FOLDER, or FINETUNE_DATA_SETS")
    for file in sorted(Path(given.sets).glob("*/train.jsonl")):
        for workers in given.workers:
            with tempfile.TemporaryDirectory() as place:
                line = measure(file, given.model, workers, given.repeat, Path(place))
            if line:
                print(json.dumps(line), flush=True)
            if line and given.label:
                with RESULTS.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps({"label": given.label, **line}) + "\n")


if __name__ == "__main__":
    main()
