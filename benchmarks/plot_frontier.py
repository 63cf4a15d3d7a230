"""Draws benchmarks/results/frontier.jsonl: peak memory against tokens a second, a panel a method, a line a number of tokens a step.

    python benchmarks/plot_frontier.py                       # to docs/pictures/frontier.png
    python benchmarks/plot_frontier.py --micro 8k --slots 3 --out elsewhere.png

A line joins the streamed runs of one number of tokens a step by their resident blocks, fewest first; a diamond is the run
with resident weights; squares are other tools, of benchmarks/results/peers.jsonl (8,192 tokens a step). Of cells measured
more than once the last counts. It needs matplotlib: pip install -e ".[plots]".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import frontier

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "pictures" / "frontier.png"
TITLES = {"lora": "LoRA, bf16 base", "full": "full, 8-bit AdamW", "qlora": "QLoRA, NF4 base"}
PEERS = {"liger": "HF + Liger", "unsloth": "Unsloth"}
BLUES = ("#9ecae1", "#6baed6", "#3d8dc4", "#1c64a8", "#08306b")
"""Fewer tokens a step are lighter."""
BACKED = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
INK, PALE = "#222222", "#777777"


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def chosen(
    lines: list[dict[str, Any]], micro: int, slots: int, label: str | None, placed: tuple[str, str] = ("host", "host")
) -> list[dict[str, Any]]:
    """The last line of each cell with this micro-batch, so many slots and these placements (of boundaries, of embedding and
    head), measured on a GPU."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        streamed = (line["slots"], line["place"], line["ends"]) == (slots, *placed)
        fits = line["micro"] == min(micro, line["tokens"]) and (line["blocks"] is None or streamed)
        if fits and line["peak_gib"] is not None and label in (None, line["label"]):
            last[line["method"], line["tokens"], line["blocks"]] = line
    return list(last.values())


def curves(lines: list[dict[str, Any]], method: str) -> dict[int, list[dict[str, Any]]]:
    """By tokens a step: the streamed runs of a method, fewest resident blocks first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: (line["tokens"], line["blocks"] or 0)):
        if line["method"] == method and line["blocks"] is not None:
            found.setdefault(line["tokens"], []).append(line)
    return found


def draw(lines: list[dict[str, Any]], peers: list[dict[str, Any]], out: Path) -> None:
    """Writes the PNG. `lines`: of `chosen`; `peers`: of peers.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [method for method in TITLES if any(line["method"] == method for line in lines)]
    figure, axes = pyplot.subplots(
        1, len(methods), figsize=(4.6 * len(methods), 4.6), squeeze=False, layout="constrained"
    )
    counts = sorted({line["tokens"] for line in lines})
    colours = dict(zip(counts, BLUES[-len(counts) :], strict=False))
    for axis, method in zip(axes[0], methods, strict=True):
        _panel(axis, method, lines, [peer for peer in peers if peer["method"] == method], colours)
    axes[0][0].set_ylabel("tokens a second", color=INK)
    gpus = ", ".join(sorted({line["gpu"] for line in lines}))
    models = ", ".join(sorted({line["model"].removeprefix("builtin:") for line in lines}))
    figure.suptitle(f"{models}, sequence {lines[0]['length']:,}, one {gpus}", color=INK, fontsize=11)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, method: str, lines: list[dict[str, Any]], peers: list[dict[str, Any]], colours: Any) -> None:
    for tokens, runs in curves(lines, method).items():
        places = [(run["peak_gib"], run["tokens_per_s"]) for run in runs]
        axis.plot(*zip(*places, strict=True), "-o", color=colours[tokens], markersize=5, linewidth=1.6, zorder=3)
        axis.annotate(
            f"{tokens // 1024}k" if tokens >= 1024 else str(tokens), places[0], (-6, 0), textcoords="offset points",
            ha="right", va="center", color=colours[tokens], fontsize=9,
        )  # fmt: skip
        for run, place in zip(runs, places, strict=True):
            if tokens == max(colours) and run["blocks"]:
                axis.annotate(str(run["blocks"]), place, (0, 6), textcoords="offset points", ha="center", fontsize=7)
    for line in lines:
        if line["method"] == method and line["blocks"] is None:
            place = (line["peak_gib"], line["tokens_per_s"])
            axis.plot(*place, "D", color="white", markeredgecolor=colours[line["tokens"]], markersize=7, zorder=4)
    for peer in peers:
        if peer["tool"] in PEERS and peer["peak_gib"] is not None:
            axis.plot(peer["peak_gib"], peer["tokens_per_s"], "s", color="#d95f02", markersize=7, zorder=4)
            axis.annotate(
                PEERS[peer["tool"]], (peer["peak_gib"], peer["tokens_per_s"]), (7, 0), textcoords="offset points",
                ha="left", va="center", color="#d95f02", fontsize=8, zorder=5, bbox=BACKED,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    ticks = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    peaks = [line["peak_gib"] for line in lines if line["method"] == method] + [
        peer["peak_gib"] for peer in peers if peer["tool"] in PEERS and peer["peak_gib"] is not None
    ]
    axis.set_xlim(min(peaks) / 1.35, max(peaks) * 1.9)
    axis.set_ylim(bottom=0)
    axis.margins(y=0.12)
    axis.set_title(TITLES[method], color=INK, fontsize=11)
    axis.set_xlabel("peak GPU memory, GiB (allocated)", color=INK)
    axis.grid(color="#e6e6e6", linewidth=0.8)
    axis.tick_params(colors=PALE)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _legend(axis)


def _legend(axis: Any) -> None:
    axis.plot([], [], "-o", color=BLUES[3], markersize=5, label="streamed, by resident blocks")
    axis.plot([], [], "D", color="white", markeredgecolor=BLUES[3], markersize=7, label="resident weights")
    axis.plot([], [], "s", color="#d95f02", markersize=7, label="other tools, 8k tokens a step")
    axis.legend(loc="lower right", fontsize=8, frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=frontier.RESULTS)
    parser.add_argument("--peers", type=Path, default=HERE / "results" / "peers.jsonl")
    parser.add_argument("--micro", type=frontier.size, default=4096)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--place", choices=("host", "device"), default="host")
    parser.add_argument("--ends", choices=("host", "device"), default="host")
    parser.add_argument("--label", help="only lines of this label; default: of any")
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    placed = (arguments.place, arguments.ends)
    lines = chosen(read(arguments.results), arguments.micro, arguments.slots, arguments.label, placed)
    if not lines:
        print(f"{arguments.results} has no cell on a GPU with this micro-batch and so many slots", file=sys.stderr)
        return 2
    try:
        draw(lines, read(arguments.peers), arguments.out)
    except ModuleNotFoundError as missing:
        print(f'{missing}: pip install -e ".[plots]"', file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
