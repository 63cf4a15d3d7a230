"""The ladder: the 8B shape from the plain loop to the smallest plan, one lever more at each rung.

    python benchmarks/ladder.py                    # every rung; JSON lines to benchmarks/results/ladder.jsonl
    python benchmarks/ladder.py --rung 3           # one rung, printed
    python benchmarks/ladder.py --shape tiny --steps 4    # a smoke test for a CPU

4 rows of 2,048 tokens a step, everything else as in benchmarks/peers.py. Each rung is a process of its own. A rung's
losses are those of the rung before it, within roundings, unless its name says that the mathematics changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import cells
import peers

RESULTS = Path(__file__).parent / "results" / "ladder.jsonl"
WHOLE = ["micro_batch=4", "optimizer_placement=device", "embedding_placement=device"]
KEPT = ["loss_chunk=0", "activation_checkpointing=false", "activation_offload=false", *WHOLE]
CHUNKED = ["fast_block=true", "loss_chunk=1024"]
AGAIN = [*CHUNKED, "activation_checkpointing=true"]
ONE_ROW = [*AGAIN, "micro_batch=1", "optimizer_placement=device"]
PARKED = [*ONE_ROW, "activation_offload=true"]
LORA = [
    ("transformers' own blocks, whole logits", "lora", ["fast_block=false", *KEPT]),
    ("+ fast block", "lora", ["fast_block=true", *KEPT]),
    ("+ chunked loss", "lora", [*CHUNKED, *KEPT[1:]]),
    ("+ activation checkpointing", "lora", [*AGAIN, "activation_offload=false", *WHOLE]),
    ("+ micro-batch 1", "lora", [*ONE_ROW, "activation_offload=false", "embedding_placement=device"]),
    ("+ activations offloaded", "lora", [*PARKED, "embedding_placement=device"]),
    ("+ embedding on the host", "lora", [*PARKED, "embedding_placement=host"]),
    ("+ base in NF4 (other mathematics)", "qlora", [*PARKED, "embedding_placement=host"]),
]
HOSTED = [*AGAIN, "optimizer_placement=host"]
FULL = [
    ("full: bf16 weights, 8-bit AdamW", "full", [*AGAIN, "activation_offload=false", *WHOLE]),
    ("full: + optimizer state on the host", "full", [*HOSTED, "activation_offload=false", "micro_batch=4"]),
    ("full: + activations offloaded, micro-batch 1", "full", [*HOSTED, "activation_offload=true", "micro_batch=1"]),
]
RUNGS = LORA + FULL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", type=int, choices=range(len(RUNGS)))
    parser.add_argument("--rungs", default=f"0-{len(RUNGS) - 1}")
    parser.add_argument("--shape", choices=peers.SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "finetune-peers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.place.mkdir(parents=True, exist_ok=True)
    if arguments.rung is not None:
        name, method, pins = RUNGS[arguments.rung]
        cell = argparse.Namespace(tool="ours", method=method, shape=arguments.shape, steps=arguments.steps, plan=pins)
        print(json.dumps({"rung": name, **peers.measure(cell, arguments.place)}), flush=True)
        return 0
    first, last = (int(part) for part in arguments.rungs.split("-"))
    rest = ["--shape", arguments.shape, "--steps", str(arguments.steps), "--place", str(arguments.place)]
    commands = [(RUNGS[rung][0], [__file__, "--rung", str(rung), *rest]) for rung in range(first, last + 1)]
    return cells.every(commands, '{"rung"', arguments.out)


if __name__ == "__main__":
    sys.exit(main())
