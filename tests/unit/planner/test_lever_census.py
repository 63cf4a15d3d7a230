"""Every lever alone and every pair of levers: the estimate's bytes of tensors beside counted ones, of one whole step.

A lever alone is counted with transformers' own blocks and with fast ones, for LoRA and for full fine-tuning; a pair for both
methods, on one of the two kinds of blocks in turn. What is compared is what comes and goes in a step (weights and state,
which stand, are held exactly besides), an evaluation, and the pages of the host.

Within 3%: rows lack the logits of their last token, and a norm's forward and some small tensors are not in the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.contracts import Plan
from finetune.kernels import norms
from finetune.memory.table import LEVERS
from tests.unit.planner.census import Found, census, folder_of, recipe_for

WITHIN = {"rest": 0.004, "step": 0.03, "evaluate": 0.03, "host": 0.005}
Setting = tuple[str, Any]
RESIDENT: list[Setting] = [
    ("activation_checkpointing", True),
    ("activation_checkpointing", 2),
    ("activation_checkpointing", "selective"),
    ("loss_chunk", 128),
    ("mlp_tile", 128),
    ("activation_offload", True),
    ("optimizer_in_backward", True),
    ("optimizer_placement", "host"),
    ("embedding_placement", "host"),
    ("micro_batch", 2),
]
STREAMED: list[Setting] = [
    ("micro_batch", 1),
    ("loss_chunk", 128),
    ("mlp_tile", 128),
    ("activation_offload", True),
    ("resident_blocks", 2),
    ("slots", 3),
    ("head_placement", "visit"),
    ("head_placement", "host"),
    ("embedding_placement", "host"),
]
KINDS = [("full", False), ("lora", False), ("full", True), ("lora", True)]


def allowed(kind: str, fast: bool, settings: tuple[Setting, ...], streamed: bool) -> bool:
    """What a plan may have: see tests/numerics/test_lever_pairs and planner/pins."""
    given = dict(settings)
    if "mlp_tile" in given and not (fast and (streamed or given.get("activation_checkpointing") is True)):
        return False
    if fast and given.get("activation_checkpointing") == "selective":
        return False
    if "optimizer_in_backward" in given and "micro_batch" in given:
        return False
    if "embedding_placement" in given and kind == "full":
        return streamed
    return True


def alone(settings: list[Setting], streamed: bool) -> Iterator[tuple[str, bool, tuple[Setting, ...]]]:
    for kind, fast in KINDS:
        for chosen in [(), *((one,) for one in settings)]:
            if allowed(kind, fast, chosen, streamed):
                yield kind, fast, chosen


def pairs(settings: list[Setting], streamed: bool) -> Iterator[tuple[str, bool, tuple[Setting, ...]]]:
    """Each pair for both methods, on the kind of blocks whose turn it is where both may have it."""
    together = [pair for pair in itertools.combinations(settings, 2) if pair[0][0] != pair[1][0]]
    for number, pair in enumerate(together):
        for turn, kind in enumerate(("full", "lora")):
            wanted = bool((number + turn) % 2)
            for fast in (wanted, not wanted):
                if allowed(kind, fast, pair, streamed):
                    yield kind, fast, pair
                    break


def name_of(case: tuple[str, bool, tuple[Setting, ...]]) -> str:
    kind, fast, settings = case
    return "-".join([kind, "fast" if fast else "own", *(f"{field}={value}" for field, value in settings)])


RESIDENT_CASES = [*alone(RESIDENT, False), *pairs(RESIDENT, False)]
STREAMED_CASES = [*alone(STREAMED, True), *pairs(STREAMED, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("llama"))


def hold(found: Found, beyond: dict[str, float] | None = None) -> None:
    within = {**WITHIN, **(beyond or {})}
    ratios = found.ratios
    assert all(abs(ratio - 1) <= within[name] for name, ratio in ratios.items()), ratios


@pytest.mark.parametrize("case", RESIDENT_CASES, ids=name_of)
def test_a_resident_step_is_as_counted(folder: Path, case: tuple[str, bool, tuple[Setting, ...]]) -> None:
    kind, fast, settings = case
    plan = replace(Plan("cpu", 4, False, 0, fast_block=fast), **dict(settings))
    hold(census(recipe_for(folder, kind, fast), plan, len(settings) < 2))


@pytest.mark.parametrize("case", STREAMED_CASES, ids=name_of)
def test_a_streamed_step_is_as_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, bool, tuple[Setting, ...]]
) -> None:
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 128)
    kind, fast, settings = case
    plan = replace(Plan("cpu", 4, True, 0, fast_block=fast, weights="streamed"), **dict(settings))
    hold(census(recipe_for(folder, kind, fast), plan, len(settings) < 2))


def test_every_row_of_the_table_is_in_the_census() -> None:
    """A new lever has to be counted, alone and beside every other."""
    assert {field for field, _ in RESIDENT} == {lever.field for lever in LEVERS.values()} | {"micro_batch"}
    of_streaming = {"resident_blocks", "slots", "head_placement", "embedding_placement", "activation_offload"}
    assert {field for field, _ in STREAMED} == of_streaming | {"micro_batch", "loss_chunk", "mlp_tile"}
    print(len(RESIDENT_CASES), len(STREAMED_CASES))
