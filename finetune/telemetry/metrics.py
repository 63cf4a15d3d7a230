"""`metrics.jsonl`, a line a step and a line an evaluation, and the trackers of accelerate beside it.

A resumed run first drops the lines after its checkpoint, so the file always tells one history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, InputError

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Names that run.trackers may hold; each is a package that accelerate drives."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a tracker whose package is not installed, before anything is loaded."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the tracker package {', '.join(missing)} is not installed",
            "run.trackers",
            f'pip install "finetune[trackers]", or pip install {" ".join(missing)}',
        )


class Metrics:
    """Appends lines to `metrics.jsonl` and hands the numbers to the trackers. Only rank 0 makes one.

    `step` is the last step of the history that goes on; None where it begins.
    """

    def __init__(
        self, folder: Path, trackers: Sequence[str], name: str, settings: Mapping[str, Any], step: int | None
    ) -> None:
        self.path = folder / "metrics.jsonl"
        try:
            _keep_until(self.path, step)
            # Not buffered: what a full disk refuses must not come back as an error when the file is closed.
            self.file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        self.accelerator = None
        if trackers:
            from accelerate import Accelerator

            self.accelerator = Accelerator(log_with=list(trackers), project_dir=str(folder))
            self.accelerator.init_trackers(name, config=_flat(settings))

    def write(self, line: Mapping[str, Any]) -> None:
        """One line; numbers that are not finite are written as null, since JSON has none. CheckpointError on a full disk."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }
        data = json.dumps(clean).encode() + b"\n"
        try:
            while data:
                data = data[self.file.write(data) or 0 :]
        except OSError as error:
            raise self._unwritable(error) from error
        if self.accelerator is not None:
            numbers = {key: value for key, value in clean.items() if key != "step" and isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=int(line["step"]))

    def _unwritable(self, error: OSError) -> CheckpointError:
        remedy = "free some space or mend it; resume=auto goes on from the last checkpoint"
        return CheckpointError(f"the metrics cannot be written: {error.strerror or error}", str(self.path), remedy)

    def close(self) -> None:
        self.file.close()
        if self.accelerator is not None:
            self.accelerator.end_training()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut off by a crash is left out."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").split("\n"):
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def _keep_until(path: Path, step: int | None) -> None:
    """Drops the lines of steps after `step`, which the resumed run writes again; None drops all of them."""
    if not path.exists():
        return
    kept = [] if step is None else [line for line in read(path) if line["step"] <= step]
    aside = path.with_suffix(".jsonl.new")
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    aside.replace(path)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with plain values, which every tracker accepts."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
