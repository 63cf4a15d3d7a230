"""A recipe's data, ready to train on: read, rendered, tokenised, cut to length, packed, checked and reported.

Evaluation rows go the same way as training rows: same template, same mask rule, packed too. What is dropped or cut is
counted with its reason; a fault that the recipe does not allow to skip stops before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from finetune.config.schema import Recipe
from finetune.data.mixture import load_mixture
from finetune.data.preflight import check
from finetune.data.preparation import Preparation, Tell, silent
from finetune.data.rendering import Renderer
from finetune.data.rows import RowSet, Splits
from finetune.data.sources import Records, load_records
from finetune.data.templates import load_template
from finetune.environment import user_path
from finetune.errors import ConfigError, DataError, Fault

__all__ = ["RowSet", "Splits", "prepare"]

HELD_OUT_STREAM = 0x5EED
"""Keeps the draw of held-out rows apart from the draws of the epochs' orders."""


def prepare(recipe: Recipe, tokenizer: Any, strict: bool = True, tell: Tell = silent) -> Splits:
    """All splits of a recipe. `strict=False` leaves out the last check (preflight.check), to show a report.

    Raises DataError for files, rows or templates that cannot be trained on, ConfigError for keys that contradict.
    """
    splits = make_splits(recipe, tokenizer, tell)
    if strict:
        for rows in (splits.train, *splits.evaluate.values()):
            check(rows.report)
    return splits


def make_splits(recipe: Recipe, tokenizer: Any, tell: Tell = silent) -> Splits:
    """`prepare` without the last check. `tell` hears now and then how far it is."""
    data = recipe.data
    renderer = renderer_of(recipe, tokenizer)
    records = load_mixture(data) if data.mixture else load_records(data.path, data)
    held_out = _held_out(len(records), data.valid_share, recipe.train.seed)
    first = Preparation("train", records, renderer, data)
    train = first.run(np.setdiff1d(np.arange(len(records)), held_out), tell)
    sets = {"valid": (records, held_out[: recipe.evaluate.max_rows])} if len(held_out) else {}
    return Splits(train, evaluation_sets(recipe, renderer, first.digests, sets, tell))


def renderer_of(recipe: Recipe, tokenizer: Any) -> Renderer:
    """The recipe's template bound to the tokenizer. ConfigError for keys that contradict the template or the data."""
    template = load_template(recipe.data.template).mapped(recipe.data.columns)
    _check_keys(recipe, template.kind)
    return Renderer(template, tokenizer, recipe.data.train_on)


def evaluation_sets(
    recipe: Recipe,
    renderer: Renderer,
    known: frozenset[bytes] | set[bytes],
    held_out: Mapping[str, tuple[Records, np.ndarray]],
    tell: Tell,
) -> dict[str, RowSet]:
    """The evaluation rows by name: those held out of the training file, then those of files of their own."""
    sets, limited = dict(held_out), recipe.data.model_copy(update={"max_rows": recipe.evaluate.max_rows})
    for name, path in evaluation_paths(recipe).items():
        found = load_records(path, limited)
        sets[name] = (found, np.arange(len(found)))
    return {
        name: Preparation(name, found, renderer, recipe.data, known).run(rows, tell)
        for name, (found, rows) in sets.items()
    }


def evaluation_paths(recipe: Recipe) -> dict[str, str]:
    """The files of held-out rows by name."""
    valid = {"valid": recipe.data.valid_path} if recipe.data.valid_path else {}
    return {**valid, **recipe.evaluate.sets}


def _check_keys(recipe: Recipe, kind: str) -> None:
    """Settings that contradict the kind of template or of data, all at once (config/check has those that need neither)."""
    data, faults = recipe.data, []
    if (
        data.split != type(data).model_fields["split"].default
        and data.path
        and user_path(data.path, "data.path").exists()
    ):
        what = f"data.split={data.split} is for hub data sets, and {data.path} is a file"
        faults.append(Fault("data.split", what, "leave it out, or give the file that holds that split"))
    if kind == "text" and data.train_on == "last":
        faults.append(Fault("data.train_on", "plain documents have no turns", "data.train_on=all"))
    if kind != "text" and data.on_long == "split":
        what = "only plain documents (template text) can be split; an answer without its prompt teaches nothing"
        faults.append(Fault("data.on_long", what, "data.on_long=truncate or drop"))
    if faults:
        raise ConfigError(faults)


def _held_out(rows: int, share: float, seed: int) -> np.ndarray:
    """Positions of held-out rows, ascending: that share of the rows, at least one, never all."""
    if not share:
        return np.zeros(0, dtype=np.int64)
    if rows < 2:
        what = "data.valid_share cannot be taken from a single row"
        raise DataError(what, where="data.valid_share", remedy="give data.valid_path, or more rows")
    count = min(max(1, round(share * rows)), rows - 1)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, HELD_OUT_STREAM])))
    return np.sort(generator.permutation(rows)[:count])
