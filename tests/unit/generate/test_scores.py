"""Scores of answers: their values, their names, and a whole run that reports them before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.errors import InputError
from finetune.generate.scores import SCORES, check_scores
from finetune.train.after import evaluate
from tests.conftest import changed


@pytest.mark.parametrize(
    ("name", "wanted", "given", "score"),
    [
        ("exact_match", "a  b\n", "a b", 1.0),
        ("exact_match", "a b", "A b", 0.0),
        ("exact_match", "", "", 1.0),
        ("rouge_l", "the cat sat on the mat", "the cat on a mat", 2 * 0.8 * (4 / 6) / (0.8 + 4 / 6)),
        ("rouge_l", "the cat", "", 0.0),
    ],
)
def test_values(name: str, wanted: str, given: str, score: float) -> None:
    assert check_scores((name,))[name](wanted, given) == pytest.approx(score)


def test_an_unknown_score_is_refused_before_anything_runs(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no score 'bleu'"):
        finetune.run(changed(tiny, evaluate__scores=["bleu"], run__dir=str(tmp_path / "run")))


def test_a_run_reports_scores_before_and_after_and_evaluate_gives_the_same(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"evaluate__scores": list(SCORES), "evaluate__answers": 2, "generate__max_tokens": 4}
    run = finetune.run(changed(tiny, **settings, run__dir=str(tmp_path / "run")))
    for when in ("eval_before", "eval_after"):
        assert set(SCORES) <= set(run.summary[when])
        assert all(0 <= run.summary[when][name] <= 1 for name in SCORES)
    again = evaluate(run.dir)
    assert {name: again[name] for name in SCORES} == {name: run.summary["eval_after"][name] for name in SCORES}
