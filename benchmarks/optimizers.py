"""Milliseconds and GB/s of one step of every optimizer at 1B parameters, beside torch's fused AdamW and bitsandbytes'.

    python benchmarks/optimizers.py                  # every row, one JSON line each to benchmarks/results/optimizers.jsonl
    python benchmarks/optimizers.py --tiny           # two small matrices, on the CPU if there is no GPU; nothing is written

The tensors are those of a 1B Llama (16 blocks, width 2048, vocabulary 128256). GB/s counts what a step must move: weights and
states read and written, gradients read. A step is timed alone, with gradients in place; the median of several.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

RESULTS = Path(__file__).parent / "results" / "optimizers.jsonl"
WARM, TIMED = 3, 10


@dataclass(frozen=True)
class Line:
    """One measurement. `state` and `peak` are bytes a parameter: what the optimizer keeps, and what a step adds on top."""

    optimizer: str
    trained: str
    parameters: int
    ms: float
    gb_per_s: float
    state: float
    peak: float
    device: str
    torch: str


def shapes(tiny: bool) -> dict[str, tuple[int, ...]]:
    if tiny:
        return {"model.embed_tokens.weight": (320, 64), "layers.0.up_proj.weight": (128, 64), "norm.weight": (64,)}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, 2048), "norm.weight": (2048,)}
    block = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048)}
    block |= {"gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    for number in range(16):
        found |= {f"layers.{number}.{name}_proj.weight": shape for name, shape in block.items()}
        found |= {f"layers.{number}.norm{place}.weight": (2048,) for place in (1, 2)}
    return found


def cases(on_gpu: bool) -> Iterator[tuple[str, str, Callable[[dict[str, nn.Parameter]], Any]]]:
    """(name, how weights are kept, builder)."""
    from finetune.config.schema import OptimizerSection
    from finetune.optim.table import OPTIMIZERS, build

    def ours(name: str, trained: str, **section: Any) -> Callable[[dict[str, nn.Parameter]], Any]:
        return lambda named: build(OptimizerSection(name=name, **section), named, trained=trained)

    import bitsandbytes

    yield "torch AdamW fused", "fp32", lambda named: torch.optim.AdamW(list(named.values()), fused=on_gpu or None)
    yield "torch AdamW fused", "bf16", lambda named: torch.optim.AdamW(list(named.values()), fused=on_gpu or None)
    for trained in ("fp32", "bf16"):
        yield "bitsandbytes AdamW8bit", trained, lambda named: bitsandbytes.optim.AdamW8bit(list(named.values()))
    for name, row in OPTIMIZERS.items():
        for trained in ("fp32", "stochastic", "split", "bf16"):
            if (row.fp32_only and trained != "fp32") or (name == "paged_adamw8bit" and not on_gpu):
                continue
            yield name, trained, ours(name, trained)
            if "full_state" in row.keys and trained == "stochastic":
                yield f"{name} full_state=[]", trained, ours(name, trained, full_state=())


def measure(name: str, trained: str, make: Callable[[dict[str, nn.Parameter]], Any], tiny: bool) -> Line:
    """One case, with tensors of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if trained == "fp32" else torch.bfloat16
    torch.manual_seed(0)
    named = {
        key: nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
        for key, shape in shapes(tiny).items()
    }
    for parameter in named.values():
        parameter.grad = torch.empty_like(parameter).normal_(std=1e-3)
    optimizer = make(named)
    seconds = []
    before, peak = 0, 0
    for step in range(WARM + TIMED):
        if step == WARM and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    elements = sum(parameter.numel() for parameter in named.values())
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    median = statistics.median(seconds[WARM:])
    moved = 3 * elements * dtype.itemsize + 2 * state
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return Line(
        name, trained, elements, round(median * 1e3, 3), round(moved / median / 1e9, 1), round(state / elements, 3),
        round(peak / elements, 3), where, torch.__version__,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small tensors; nothing is written")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or given.tiny):
        raise SystemExit("no GPU: --tiny runs on a CPU")
    for name, trained, make in cases(on_gpu):
        if given.only not in name:
            continue
        line = json.dumps(asdict(measure(name, trained, make, given.tiny)))
        print(line, flush=True)
        if not given.tiny:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
