"""What answers to held-out prompts are worth: the model answers, and each answer is held to the one in the row.

A score is a mean over documents, 0 to 1. Only documents with a prompt count; each rank answers its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.config.schema import Recipe
from finetune.contracts import Model
from finetune.data.dataset import RowSet
from finetune.errors import InputError
from finetune.generate.engine import answer
from finetune.machine.collectives import World
from finetune.tasks.text import prompt_and_answer

TOGETHER = 16
"""Prompts that are answered at a time."""

Score = Callable[[str, str], float]


@dataclass(frozen=True)
class ScoreRow:
    """A score by name: `make` gives the function of (wanted, answer); it may import what it needs."""

    name: str
    make: Callable[[], Score]
    note: str


def _exact() -> Score:
    return lambda wanted, given: float(" ".join(wanted.split()) == " ".join(given.split()))


def _rouge_l() -> Score:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "rouge_l needs the package rouge-score", "evaluate.scores", "pip install rouge-score"
        ) from None
    scorer: Any = RougeScorer(["rougeL"], use_stemmer=False)
    return lambda wanted, given: float(scorer.score(wanted, given)["rougeL"].fmeasure)


SCORES: dict[str, ScoreRow] = {
    "exact_match": ScoreRow("exact_match", _exact, "the answer is the wanted text, spaces aside"),
    "rouge_l": ScoreRow("rouge_l", _rouge_l, "F measure of the longest common subsequence of words (rouge-score)"),
}


def check_scores(names: tuple[str, ...]) -> dict[str, Score]:
    """The functions of these scores. InputError for a name that there is not, or one whose package is missing."""
    unknown = [name for name in names if name not in SCORES]
    if unknown:
        raise InputError(f"there is no score {unknown[0]!r}", "evaluate.scores", f"one of {', '.join(SCORES)}")
    return {name: SCORES[name].make() for name in names}


def scores(model: Model, sets: dict[str, RowSet], recipe: Recipe, precision: str, world: World) -> dict[str, float]:
    """Each score of `evaluate.scores` on the first `evaluate.answers` documents of each set, named as losses are."""
    functions = check_scores(recipe.evaluate.scores)
    found: dict[str, float] = {}
    for name, rows in sets.items() if functions else ():
        documents = [rows.documents[at] for at in range(min(recipe.evaluate.answers, len(rows.documents)))]
        pairs = [pair for pair in map(prompt_and_answer, documents) if pair[0]][world.rank :: world.size]
        sums = dict.fromkeys(functions, 0.0)
        for first in range(0, len(pairs), TOGETHER):
            part = pairs[first : first + TOGETHER]
            texts = answer(model, [prompt for prompt, _ in part], recipe.generate, precision, recipe.train.seed)
            for (_, wanted), text in zip(part, texts, strict=True):
                expected = model.tokenizer.decode(wanted, skip_special_tokens=True).strip()
                for score, function in functions.items():
                    sums[score] += function(expected, text)
        *totals, count = world.sum([*sums.values(), len(pairs)])
        prefix = "" if name == "valid" else f"{name}/"
        found |= {f"{prefix}{score}": total / max(count, 1) for score, total in zip(sums, totals, strict=True)}
    return found
