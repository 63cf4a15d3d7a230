"""The line between memory and speed: this toolkit with resident and with streamed weights, by tokens a step.

    python benchmarks/frontier.py --minutes 9                  # what is not yet in benchmarks/results/frontier.jsonl
    python benchmarks/frontier.py --methods lora --tokens 32k,16k --blocks resident,0    # some cells
    python benchmarks/frontier.py --methods full --slots 3 --micro 8k --pin loss_chunk=512
    python benchmarks/frontier.py --quick                      # a smoke test for a CPU: builtin:tiny, printed

The 8B shape with random weights, unpacked rows of 2,048 tokens, all full. `lora`: rank 16 on all linear layers, bf16 base;
`qlora`: the same over NF4; `full`: every parameter in bf16, rounded stochastically, 8-bit AdamW, embedding and head with
32-bit state, the global norm clipped at 1. `--blocks resident` keeps the weights on the GPU and recomputes every block, as a
streamed step does; a number streams all but so many blocks. `--place` says where a streamed step keeps the inputs of blocks, `--ends` where its embedding and
head are.

Cells of a method run one after the other in one process, each a whole `finetune.run` of its own, so they share imports,
the CUDA context and compiled kernels, and nothing else: before a cell everything of the last one is collected and the
allocator's cache is given back; what is still allocated then stands in the line (`left_gib`). Above LEFT_GIB, or with more than
HOST_LEFT_GIB on the host, the process ends and the rest runs in a new one. The peak is counted from the first step on (the run resets the counter). Steps are
timed apart from set-up: `seconds` lists every step, the rate is the median of those after the first two, which also
pin the host's memory; `setup_s` is all the rest of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cells

RESULTS = Path(__file__).parent / "results" / "frontier.jsonl"
METHODS = ("lora", "full", "qlora")
WARM = 2
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

    @property
    def name(self) -> str:
        where = "resident" if self.blocks is None else f"streamed, {self.blocks} blocks resident"
        return f"{self.method} {self.tokens} tokens a step, {where}, micro-batch {self.micro}"


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


def measure(cell: Cell, place: Path, steps: int) -> dict[str, Any]:
    """Runs one cell in this process and gives its line."""
    import torch

    import finetune
    from finetune.train.finish import versions

    left = release()
    rows = rows_file(place, cell.tokens // cell.length * steps, cell.length)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        recipe = recipe_of(cell, rows, Path(folder) / "run", steps)
        started = time.perf_counter()
        run = finetune.run(recipe)
        wall = time.perf_counter() - started
        lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        summary = run.summary
    made = [line for line in lines if "loss" in line]
    if any(line["tokens"] != cell.tokens for line in made):
        raise RuntimeError(
            f"a step had {[line['tokens'] for line in made]} tokens, not {cell.tokens}: the rows are short"
        )
    seconds = [line["seconds"] for line in made]
    median = statistics.median(seconds[WARM:])
    on_gpu = torch.cuda.is_available()

    def gib(octets: float | None) -> float | None:
        return round(octets / GIB, 3) if octets and on_gpu else None

    return {
        **asdict(cell),
        "tokens_per_s": round(cell.tokens / median),
        "seconds_per_step": round(median, 4),
        "planned_gib": gib(summary["peak_gpu_bytes_planned"]),
        "peak_gib": gib(summary["peak_gpu_bytes_measured"]),
        "reserved_gib": gib(summary["reserved_gpu_bytes_measured"]),
        "host_planned_gib": round(summary["host_bytes_planned"] / GIB, 3),
        "host_gib": round(max(line["host_bytes"] for line in made) / GIB, 3),
        "left_gib": round(left / GIB, 4),
        "data_wait": round(statistics.median(line["data_wait"] for line in made[WARM:]), 5),
        "setup_s": round(wall - sum(seconds), 2),
        "seconds": [round(value, 4) for value in seconds],
        "loss_first": made[0]["loss"],
        "loss_last": made[-1]["loss"],
        "grad_norm_last": made[-1]["grad_norm"],
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
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


def child(wanted: list[Cell], place: Path, timed: int | None) -> int:
    """Measures the cells one after the other; for each a line that it begins and a line of figures. Returns 3 to be
    started again for the rest."""
    from finetune.telemetry import memory

    for at, cell in enumerate(wanted):
        print(f"begin {at}", flush=True)
        fault = ""
        try:
            print(json.dumps(measure(cell, place, steps_of(cell, timed))), flush=True)
        except Exception as error:
            # Kept as text: the error's frames hold the run's tensors.
            fault = f"{type(error).__name__}: {error}"
        if fault:
            print(f"failed {at} {fault.splitlines()[0][:600]}", flush=True)
        if at + 1 < len(wanted) and (release() / GIB > LEFT_GIB or memory.host_bytes() / GIB > HOST_LEFT_GIB):
            return 3
    return 0


def steps_of(cell: Cell, timed: int | None) -> int:
    return WARM + (timed or TIMED.get(cell.tokens, 3 if cell.tokens > 32768 else 10))


def size(text: str) -> int:
    """32k is 32,768."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def chosen(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells asked for, method by method, in the order in which values are given."""
    tokens, micros = ([size(one) for one in text.split(",")] for text in (arguments.tokens, arguments.micro))
    blocks = [None if one == "resident" else int(one) for one in arguments.blocks.split(",")]
    slots = [int(one) for one in arguments.slots.split(",")]
    seen = set()
    for method, count, micro, resident, slot in itertools.product(
        arguments.methods.split(","), tokens, micros, blocks, slots
    ):
        cell = Cell(
            method, count, resident, min(micro, count), slots[0] if resident is None else slot,
            arguments.place, arguments.ends, arguments.model, arguments.length, tuple(arguments.pin), arguments.label,
        )  # fmt: skip
        if count % arguments.length or cell.micro % arguments.length:
            raise SystemExit(f"--tokens and --micro are whole rows of {arguments.length} tokens: {cell.name}")
        if cell not in seen:
            seen.add(cell)
            yield cell


def key(line: dict[str, Any]) -> str:
    """What makes two measurements the same cell; of a resident one slots and placements say nothing."""
    fields = {name: line[name] for name in Cell.__dataclass_fields__}
    if fields["blocks"] is None:
        fields |= {"slots": 0, "place": "", "ends": ""}
    return json.dumps(fields, sort_keys=True)


def present(out: Path | None) -> set[str]:
    if out is None or not out.exists():
        return set()
    return {key(json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()}


def every_cell(arguments: argparse.Namespace) -> int:
    """Runs what is not there yet, a family of processes a method, until the time is over; returns how many failed."""
    done = set() if arguments.again else present(arguments.out)
    left = [cell for cell in chosen(arguments) if key(asdict(cell)) not in done]
    print(f"{len(left)} cells to measure", flush=True)
    ends = time.monotonic() + 60 * arguments.minutes
    failed = 0
    for method in dict.fromkeys(cell.method for cell in left):
        mine = [(cell.name, asdict(cell)) for cell in left if cell.method == method]
        rest = ["--folder", str(arguments.folder)]
        if arguments.timed:
            rest += ["--timed", str(arguments.timed)]
        limits = cells.Limits(arguments.cell_seconds, ends)
        failed += cells.in_turn([__file__, *rest], mine, limits, '{"method"', arguments.out)
    return failed


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", default="32k,16k,64k,8k,4k", help="tokens a step")
    parser.add_argument(
        "--blocks", default="resident,0,16,8,24,32", help="resident blocks of a streamed run, or `resident`"
    )
    parser.add_argument("--micro", default="4k", help="tokens of a micro-batch")
    parser.add_argument("--slots", default="2")
    parser.add_argument(
        "--place", choices=("host", "device"), default="host", help="where the inputs of blocks are kept"
    )
    parser.add_argument(
        "--ends", choices=("host", "device"), default="host", help="where embedding and head are, streamed"
    )
    parser.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help="plan.KEY=VALUE of every cell")
    parser.add_argument("--model", default="builtin:llama3-8b-random", help="model.path")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--timed", type=int, help="timed steps of a cell")
    parser.add_argument("--label", default="", help="a word in the line; cells of another label are other cells")
    parser.add_argument("--again", action="store_true", help="measure also what is present")
    parser.add_argument("--minutes", type=float, default=600.0, help="of all cells together")
    parser.add_argument("--cell-seconds", type=float, default=240.0, help="the most of one cell, set-up included")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finetune-frontier")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="builtin:tiny, a few cells, printed and not written")
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.quick:
        parser.set_defaults(model="builtin:tiny", length=64, tokens="256,128", micro="128", blocks="resident,0,1,2")
        parser.set_defaults(timed=2, out=None)
    return parser.parse_args(given)


def main() -> int:
    arguments = arguments_of()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.cells is None:
        return 1 if every_cell(arguments) else 0
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    wanted = [Cell(**{**one, "pins": tuple(one["pins"])}) for one in json.loads(arguments.cells)]
    with contextlib.suppress(KeyboardInterrupt):
        return child(wanted, arguments.folder, arguments.timed)
    return 130


if __name__ == "__main__":
    sys.exit(main())
