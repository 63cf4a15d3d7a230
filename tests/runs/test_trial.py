"""A trial (run.keep=false) trains as any run does and leaves figures, but neither checkpoints nor a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetune
from tests.conftest import changed
from tests.runs.history import column


def test_a_trial_leaves_figures_alone(tiny: dict[str, Any], tmp_path: Path) -> None:
    kept = finetune.run(changed(tiny, run__dir=str(tmp_path / "kept")))
    trial = finetune.run(changed(tiny, run__dir=str(tmp_path / "trial"), run__keep=False, checkpoint__every=1))
    assert trial.result is None
    assert trial.summary["result"] is None
    assert column(trial.dir, "loss") == column(kept.dir, "loss")
    assert not list(trial.dir.glob("checkpoints/*"))
    assert not (trial.dir / "adapter").exists()
    assert (trial.dir / "summary.json").exists()
