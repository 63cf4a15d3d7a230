"""What the data tests share: writing rows to a file, and preparing them with a recipe of a few keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import Recipe
from finetune.contracts import IGNORED, Row
from finetune.data.dataset import Splits, prepare
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (objects, or lines as they are) as JSON lines; the path as text."""

    def written(rows: list[Any], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / name).write_bytes(("\n".join(lines) + "\n").encode())
        return str(tmp_path / name)

    return written


@pytest.fixture
def prepared(write: Callable[..., str]) -> Callable[..., Splits]:
    """Rows (or a path) prepared with these keys of `data`; `recipe` holds other sections."""

    def run(rows: list[Any] | str, tokenizer: Any = None, recipe: dict[str, Any] | None = None, **data: Any) -> Splits:
        path = rows if isinstance(rows, str) else write(rows)
        strict = data.pop("strict", True)
        whole = Recipe.model_validate(
            {"model": {"path": "builtin:tiny"}, "data": {"path": path, **data}, **(recipe or {})}
        )
        return prepare(whole, tokenizer or tiny_tokenizer(CHATML), strict=strict)

    return run


def learned(row: Row, tokenizer: Any) -> list[str]:
    """The trained tokens of a row, decoded, one text for each run of them."""
    runs: list[list[int]] = []
    before = False
    for token, label in zip(row.input_ids.tolist(), row.labels.tolist(), strict=True):
        if label != IGNORED:
            assert label == token
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = label != IGNORED
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.fixture(name="learned")
def learned_fixture() -> Callable[[Row, Any], list[str]]:
    return learned
