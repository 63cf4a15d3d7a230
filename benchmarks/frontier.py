"""The line between memory and speed: this toolkit with resident and with streamed weights, by tokens a step.

    python benchmarks/frontier.py --minutes 9                  # what is not yet in benchmarks/results/frontier.jsonl
    python benchmarks/frontier.py --methods lora --tokens 32k,16k --blocks resident,0    # some cells
    python benchmarks/frontier.py --methods full --slots 3 --micro 8k --pin loss_chunk=512
    python benchmarks/frontier.py --quick                      # a smoke test for a CPU: builtin:tiny, printed

The 8B shape with random weights, unpacked rows of 2,048 tokens, all full. `lora`: rank 16 on all linear layers, bf16 base;
`qlora`: the same over NF4; `full`: every parameter in bf16, rounded stochastically, 8-bit AdamW, embedding and head with
32-bit state, the global norm clipped at 1. `--blocks resident` keeps the weights on the GPU and recomputes every block, as a
streamed step does; a number streams all but so many blocks. `--place` says where a streamed step keeps the inputs of
blocks, `--ends` where its embedding and head are; `--pin head_placement=visit` lets the head visit the GPU (streamed cells alone).

Cells that differ in tokens a step alone share one run, and those of a method a process: frontier_run.py says how they are
kept apart. A line has every step's seconds, the rate by the median of the timed ones, set-up apart, and planned beside
measured peak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cells
from frontier_run import Cell, child

RESULTS = Path(__file__).parent / "results" / "frontier.jsonl"
METHODS = ("lora", "full", "qlora")


def size(text: str) -> int:
    """32k is 32,768."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def chosen(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells asked for, method by method, in the order in which values are given."""
    tokens, micros = ([size(one) for one in text.split(",")] for text in (arguments.tokens, arguments.micro))
    blocks = [None if one == "resident" else int(one) for one in arguments.blocks.split(",")]
    slots = [int(one) for one in arguments.slots.split(",")]
    # A head that is resident with its blocks has one place.
    kept = [pin for pin in arguments.pin if not pin.startswith("head_placement=")]
    seen = set()
    for method, count, micro, resident, slot in itertools.product(
        arguments.methods.split(","), tokens, micros, blocks, slots
    ):
        cell = Cell(
            method, count, resident, min(micro, count), slots[0] if resident is None else slot,
            arguments.place, arguments.ends, arguments.model, arguments.length, tuple(kept if resident is None else arguments.pin), arguments.label,
        )  # fmt: skip
        if count % arguments.length or cell.micro % arguments.length:
            raise SystemExit(f"--tokens and --micro are whole rows of {arguments.length} tokens: {name_of([cell])}")
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


def families(wanted: list[Cell]) -> list[list[Cell]]:
    """Cells that differ in tokens a step alone, together."""
    found: dict[Cell, list[Cell]] = {}
    for cell in wanted:
        found.setdefault(replace(cell, tokens=0), []).append(cell)
    return list(found.values())


def name_of(family: list[Cell]) -> str:
    cell = family[0]
    where = "resident" if cell.blocks is None else f"streamed, {cell.blocks} blocks resident"
    counts = ", ".join(str(each.tokens) for each in family)
    return f"{cell.method}, {where}, micro-batch {cell.micro}, {cell.slots} slots, {counts} tokens a step"


def every_cell(arguments: argparse.Namespace) -> int:
    """Runs what is not there yet, a method after the other, until the time is over; returns how many families failed."""
    done = set() if arguments.again else present(arguments.out)
    left = [cell for cell in chosen(arguments) if key(asdict(cell)) not in done]
    print(f"{len(left)} cells to measure", flush=True)
    ends = time.monotonic() + 60 * arguments.minutes
    failed = 0
    together = families(left)
    for method in dict.fromkeys(family[0].method for family in together):
        mine = [
            (name_of(family), [asdict(cell) for cell in family]) for family in together if family[0].method == method
        ]
        rest = ["--folder", str(arguments.folder)]
        if arguments.timed:
            rest += ["--timed", str(arguments.timed)]
        limits = cells.Limits(arguments.seconds, ends)
        failed += cells.in_turn([__file__, *rest], mine, limits, '{"method"', arguments.out)
    return failed


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", default="64k,32k,16k,8k,4k", help="tokens a step")
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
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="the most of cells that share a run, set-up included"
    )
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
    wanted = [[Cell(**{**one, "pins": tuple(one["pins"])}) for one in family] for family in json.loads(arguments.cells)]
    with contextlib.suppress(KeyboardInterrupt):
        return child(wanted, arguments.folder, arguments.timed)
    return 130


if __name__ == "__main__":
    sys.exit(main())
