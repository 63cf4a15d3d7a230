"""The line of plans as a picture: memory to the right, speed upwards, the chosen plan and the budget marked."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import InputError
from finetune.planner.plan import Decision

GIB = 2**30


def check_picture(path: str) -> None:
    """Raises InputError where a picture could not be written to `path`: no PNG, no such folder, or no matplotlib."""
    from importlib.util import find_spec

    if Path(path).suffix.lower() != ".png":
        raise InputError(f"{path} is no PNG", "picture", "give a path that ends in .png")
    if not Path(path).parent.is_dir():
        raise InputError(f"there is no folder {Path(path).parent}", "picture", "make it, or give another path")
    if find_spec("matplotlib") is None:
        raise InputError("a picture needs matplotlib", "picture", 'pip install "finetune[plots]"')


def points_of(decision: Decision) -> list[tuple[float, float]]:
    """(GiB, tokens a second) of the plans that no other beats, smallest first."""
    return [(each.bytes / GIB, decision.step_tokens / each.seconds) for each in decision.alternatives]


def draw(decision: Decision, title: str, path: str) -> None:
    """Writes the picture to `path`, a PNG; call check_picture first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    memory, speed = zip(*points_of(decision), strict=True)
    axes.step(memory, speed, where="post", marker="o", markersize=3, label="the fastest plan of each size")
    axes.plot([decision.estimate.peak / GIB], [decision.tokens_per_s], "D", color="tab:red", label="chosen")
    axes.axvline(decision.budget.device_bytes / GIB, color="grey", linestyle="--", label="budget")
    axes.set(xlabel="GiB a process", ylabel="tokens/s, predicted", title=title, ylim=(0, None))
    axes.set_xscale("log")
    axes.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", "picture", "give another path") from None
