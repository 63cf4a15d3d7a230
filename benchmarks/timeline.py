"""One steady streamed step as the GPU saw it: which stream computed and which copied, when. A picture, and its shares in JSON.

    python benchmarks/timeline.py                                  # LoRA, 8B, 32k tokens a step; needs a GPU
    python benchmarks/timeline.py --method full --tokens 16k
    python benchmarks/timeline.py --spans timeline.json.gz         # draws again what was recorded, anywhere

A trial of benchmarks/frontier.py runs for a few steps; torch's profiler records one of the later ones, on the GPU alone.
The trace names streams by numbers. So before the step each lane of the streamed step copies a few bytes of a length that
nothing else copies, which tells whose number is whose. Kept are the name, stream, start, length and bytes of every kernel and
copy, so the picture can be drawn where there is no GPU (--spans). The profiler's own file stays in --folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import frontier
import frontier_run

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "pictures" / "streaming-timeline.png"
MARK = 1_000_016
"""Bytes of the first lane's mark; the next ones' are MARK_STEP more each."""
MARK_STEP = 16
ROWS = (
    "compute", "weights up", "weights down", "gradients and state up", "gradients and state down", "boundaries up",
    "boundaries down", "embedding and head up", "embedding and head down", "other copies",
)  # fmt: skip
OWNERS = {"boundaries": "boundaries", "deferred": "gradients and state", "ends": "embedding and head"}
"""By a part of the lane's path: what it carries; every other lane carries weights of blocks."""
COLOURS = {
    "compute": "#444444",
    "weights": "#1c64a8",
    "gradients": "#2a8f6d",
    "boundaries": "#d95f02",
    "embedding": "#7b5ea7",
    "other": "#999999",
}


@dataclass(frozen=True)
class Span:
    """Something on the GPU: `row` of ROWS, `start` and `length` in seconds from the step's start, `bytes` of a copy."""

    row: str
    start: float
    length: float
    bytes: int = 0


# -- from the profiler's trace ----------------------------------------------------------------------------------------


def lanes_of(root: object) -> dict[str, Any]:
    """Every Lane that hangs on `root` by attributes of this project's objects or in lists of theirs: its path, and the lane."""
    from finetune.memory.streaming.lanes import Lane

    found: dict[str, Any] = {}
    seen: set[int] = set()

    def visit(value: object, path: str) -> None:
        if isinstance(value, Lane):
            if id(value) not in seen:
                found[path] = value
            seen.add(id(value))
            return
        several = isinstance(value, list | tuple | dict)
        ours = type(value).__module__.startswith(("finetune.memory", "finetune.train"))
        if id(value) in seen or not (ours or several) or path.count(".") > 4:
            return
        seen.add(id(value))
        inside = value if several else getattr(value, "__dict__", {})
        for name, inner in inside.items() if isinstance(inside, dict) else enumerate(inside):
            visit(inner, f"{path}.{name}" if path else str(name))

    visit(root, "")
    return found


def row_of(path: str, name: str) -> str:
    """The row of a copy by its lane's path (empty: no lane) and the trace's name of it."""
    up = "HtoD" in name
    if not path or not (up or "DtoH" in name):
        return "other copies"
    owner = next((owner for part, owner in OWNERS.items() if part in path.split(".")), "weights")
    return f"{owner} {'up' if up else 'down'}"


def spans_of(events: Iterable[dict[str, Any]], marks: dict[int, str]) -> list[Span]:
    """The step's spans, in order of time. `events`: traceEvents of a chrome trace (microseconds); `marks`: by the bytes of
    its mark, each lane's path. What comes before the last mark is left out."""
    on_gpu = [event for event in events if event.get("ph") == "X" and event.get("cat") in KINDS]
    lane_of_stream: dict[Any, str] = {}
    begins = min((event["ts"] for event in on_gpu), default=0.0)
    for event in on_gpu:
        path = marks.get(_bytes(event)) if event["cat"] == "gpu_memcpy" else None
        if path is not None:
            lane_of_stream[_stream(event)] = path
            begins = max(begins, event["ts"] + event["dur"])
    missing = sorted(set(marks.values()) - set(lane_of_stream.values()))
    if missing:
        # The rest is still worth having; copies of these are shown under another lane or as others.
        print(f"the trace has no stream of its own for {', '.join(missing)}", file=sys.stderr)
    kept = sorted((event for event in on_gpu if event["ts"] >= begins), key=lambda event: event["ts"])
    if not kept:
        raise SystemExit("the trace has nothing on the GPU after the marks")
    starts = kept[0]["ts"]
    spans = []
    for event in kept:
        copy = event["cat"] == "gpu_memcpy" and "DtoD" not in event["name"]
        row = row_of(lane_of_stream.get(_stream(event), ""), event["name"]) if copy else "compute"
        spans.append(
            Span(
                row, round((event["ts"] - starts) / 1e6, 8), round(event["dur"] / 1e6, 9), _bytes(event) if copy else 0
            )
        )
    return spans


KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _bytes(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("bytes", 0))


def shares(spans: list[Span]) -> dict[str, Any]:
    """How long the step was and, by row, the share of it that the row was busy, its GB, and GB/s while busy."""
    ends = max(span.start + span.length for span in spans)
    rows = {}
    for row in ROWS:
        mine = [span for span in spans if span.row == row]
        busy = sum(stop - start for start, stop in joined(mine, 0.0))
        octets = sum(span.bytes for span in mine)
        if mine:
            rows[row] = {"busy": round(busy / ends, 4)}
            if octets:
                rows[row] |= {"gb": round(octets / 1e9, 3), "gb_per_s": round(octets / 1e9 / busy, 1) if busy else None}
    return {"seconds": round(ends, 4), "rows": rows}


def joined(spans: list[Span], gap: float) -> list[tuple[float, float]]:
    """(start, end) of the spans, those that overlap or stand closer than `gap` as one."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, stop = span.start, span.start + span.length
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


# -- recording --------------------------------------------------------------------------------------------------------


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a trial and records its last step: {spans, cell, versions and so on}."""
    import torch

    import finetune
    from finetune.train import loop
    from finetune.train.finish import versions

    place = arguments.folder
    place.mkdir(parents=True, exist_ok=True)
    cell = frontier_run.Cell(
        arguments.method, arguments.tokens, arguments.blocks, min(arguments.micro, arguments.tokens), arguments.slots,
        arguments.place, arguments.ends, arguments.model, arguments.length, tuple(arguments.pin),
    )  # fmt: skip
    steps = 4
    rows = frontier_run.rows_file(place, cell.tokens // cell.length * steps, cell.length)
    own, spans = loop.train_step, []

    def traced(job: Any, *rest: Any) -> Any:
        step = job.progress.step + 1
        if step < steps - 1:
            return own(job, *rest)
        # The step before the last is recorded too and thrown away: the profiler's first use is slow.
        made, result = _profiled(lambda: own(job, *rest), job.update.stream, place)
        spans[:] = made
        return result

    # The loop finds its step by the module's name for it.
    loop.train_step = traced
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            finetune.run(frontier_run.recipe_of(cell, rows, Path(folder) / "run", steps))
    finally:
        loop.train_step = own
    return {
        "cell": asdict(cell),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        **shares(spans),
        "spans": [list(asdict(span).values()) for span in spans],
    }


def _profiled(step: Any, stream: Any, place: Path) -> tuple[list[Span], Any]:
    """The spans of a step, and its result."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    lanes = lanes_of(stream)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        marks = _mark(lanes)
        torch.cuda.synchronize()
        result = step()
        torch.cuda.synchronize()
    path = place / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return spans_of(trace["traceEvents"], marks), result


def _mark(lanes: dict[str, Any]) -> dict[int, str]:
    """Lets each lane copy from the host a number of bytes that is its own."""
    import torch

    marks: dict[int, str] = {}
    source = torch.empty(MARK + MARK_STEP * len(lanes), dtype=torch.uint8, pin_memory=True)
    for path, lane in lanes.items():
        count = MARK + MARK_STEP * len(marks)
        target = torch.empty(count, dtype=torch.uint8, device=lane.device)
        torch.cuda.synchronize()
        lane.copy(target, source[:count])
        torch.cuda.synchronize()
        marks[count] = path
    return marks


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(recorded: dict[str, Any], windows: list[tuple[float, float]], out: Path) -> None:
    """Writes the PNG: the whole step, and below it each of `windows` (parts of the step, 0 to 1)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = [Span(*values) for values in recorded["spans"]]
    whole = max(span.start + span.length for span in spans)
    rows = [row for row in ROWS if any(span.row == row for span in spans)]
    parts = [(0.0, 1.0), *windows]
    height = 0.32 * len(rows) + 0.75
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(11, 0.5 + height * len(parts)), squeeze=False, layout="constrained"
    )
    for at, (axis, (first, last)) in enumerate(zip(axes[:, 0], parts, strict=True)):
        _panel(axis, spans, rows, (first * whole, last * whole))
        if at == 0:
            for start, stop in windows:
                axis.axvspan(1e3 * start * whole, 1e3 * stop * whole, color="#f2e6a0", alpha=0.6, zorder=0, linewidth=0)
        axis.set_title("the whole step" if at == 0 else f"{first:.0%} to {last:.0%} of it", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("milliseconds", fontsize=9)
    figure.suptitle(_title(recorded), fontsize=10, x=0.01, ha="left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _title(recorded: dict[str, Any]) -> str:
    cell, rows = recorded["cell"], recorded["rows"]
    busy = rows.get("compute", {}).get("busy", 0.0)
    return (
        f"{cell['model'].removeprefix('builtin:')}, {cell['method']}, {cell['tokens']:,} tokens a step in micro-batches of "
        f"{cell['micro']:,}, {cell['slots']} slots, {recorded['gpu']}: {recorded['seconds']:.2f} s, "
        f"compute busy {busy:.1%}"
    )


def _panel(axis: Any, spans: list[Span], rows: list[str], window: tuple[float, float]) -> None:
    first, last = window
    gap = (last - first) / 3000
    for height, row in enumerate(reversed(rows)):
        mine = [span for span in spans if span.row == row and span.start < last and span.start + span.length > first]
        bars = [(1e3 * start, 1e3 * (stop - start)) for start, stop in joined(mine, gap)]
        colour = COLOURS[row.split(" ")[0]]
        axis.broken_barh(bars, (height - 0.38, 0.76), facecolors=colour, linewidth=0, snap=False)
    axis.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    axis.set_xlim(1e3 * first, 1e3 * last)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def window(text: str) -> tuple[float, float]:
    """0.2:0.3 is the part of the step from a fifth of it to three tenths."""
    first, last = (float(part) for part in text.split(":"))
    if not 0 <= first < last <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no part of a step, such as 0.6:0.66")
    return first, last


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=frontier.METHODS, default="lora")
    parser.add_argument("--tokens", type=frontier.size, default=32768, help="tokens a step")
    parser.add_argument("--micro", type=frontier.size, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--blocks", type=int, default=0, help="resident blocks")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument(
        "--place", choices=("host", "device"), default="host", help="where the inputs of blocks are kept"
    )
    parser.add_argument("--ends", choices=("host", "device"), default="host", help="where embedding and head are")
    parser.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help="plan.KEY=VALUE")
    parser.add_argument("--model", default="builtin:llama3-8b-random", help="model.path")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument(
        "--zoom", type=window, action="append", help="a part of the step to be drawn large, as 0.6:0.66"
    )
    parser.add_argument("--spans", type=Path, help="a file of an earlier recording to draw")
    parser.add_argument("--keep", type=Path, help="where the recording goes; default: beside the picture")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finetune-frontier")
    parser.add_argument("--out", type=Path, default=PICTURE)
    return parser.parse_args(given)


def main() -> int:
    arguments = arguments_of()
    if arguments.spans is not None:
        recorded = json.loads(gzip.decompress(arguments.spans.read_bytes()))
    else:
        import torch

        if not torch.cuda.is_available():
            print("a timeline is of a GPU, and there is none here; --spans FILE draws a recording", file=sys.stderr)
            return 2
        recorded = record(arguments)
        keep = arguments.keep or arguments.out.with_suffix(".json.gz")
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_bytes(gzip.compress(json.dumps(recorded).encode()))
        print(keep)
    print(json.dumps({name: value for name, value in recorded.items() if name != "spans"}))
    try:
        draw(recorded, arguments.zoom or [(0.15, 0.18), (0.6, 0.66)], arguments.out)
    except ModuleNotFoundError as missing:
        print(f'{missing}: pip install -e ".[plots]"; the recording can be drawn elsewhere', file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
