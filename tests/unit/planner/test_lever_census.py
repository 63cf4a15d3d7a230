"""Every lever alone and every pair of levers: the estimate's bytes of tensors beside counted ones, of one whole step.

A lever alone is counted with transformers' own blocks and with fast ones, for LoRA and for full fine-tuning; these four
take turns with the pairs. What is compared is what comes and goes in a step (weights and state,
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

WITHIN = {"rest": 0.01, "step": 0.03, "evaluate": 0.031, "host": 0.02}
BEYOND = {
    frozenset({("activation_checkpointing", 2), ("activation_offload", True)}): 0.17,
    frozenset({("micro_batch", 1), ("head_placement", "host")}): 0.085,
    frozenset({("resident_blocks", 2), ("head_placement", "visit")}): 0.045,
    frozenset({("mlp_tile", 128), ("activation_offload", True)}): 0.045,
}
"""Pairs whose steps are planned less closely. The first two too high: the block before the last is taken to keep what the last
one does; all positions' tiles are taken to be whole where 508 positions make one of 256 words. The
third too high: where the last block is resident a visiting head has every slot's room. The fourth too low: small
tensors of attention's backward, which tiles leave the widest."""
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
        # A trained one passes in parts, which transformers' own forward cannot be given.
        return streamed and fast
    return True


def alone(settings: list[Setting], streamed: bool) -> Iterator[tuple[str, bool, tuple[Setting, ...]]]:
    for kind, fast in KINDS:
        for chosen in [(), *((one,) for one in settings)]:
            if allowed(kind, fast, chosen, streamed):
                yield kind, fast, chosen


def pairs(settings: list[Setting], streamed: bool) -> Iterator[tuple[str, bool, tuple[Setting, ...]]]:
    """Each pair once: the method and the kind of blocks take turns, as far as they may have it."""
    together = [pair for pair in itertools.combinations(settings, 2) if pair[0][0] != pair[1][0]]
    for number, pair in enumerate(together):
        turns = [KINDS[(number + turn) % len(KINDS)] for turn in range(len(KINDS))]
        may = [(kind, fast) for kind, fast in turns if allowed(kind, fast, pair, streamed)]
        for kind, fast in may[:1]:
            yield kind, fast, pair


def name_of(case: tuple[str, bool, tuple[Setting, ...]]) -> str:
    kind, fast, settings = case
    return "-".join([kind, "fast" if fast else "own", *(f"{field}={value}" for field, value in settings)])


RESIDENT_CASES = [*alone(RESIDENT, False), *pairs(RESIDENT, False)]
STREAMED_CASES = [*alone(STREAMED, True), *pairs(STREAMED, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("llama"))


def hold(found: Found, settings: tuple[Setting, ...]) -> None:
    within = {**WITHIN, "step": BEYOND.get(frozenset(settings), WITHIN["step"])}
    ratios = found.ratios
    assert all(abs(ratio - 1) <= within[name] for name, ratio in ratios.items()), ratios


@pytest.mark.parametrize("case", RESIDENT_CASES, ids=name_of)
def test_a_resident_step_is_as_counted(folder: Path, case: tuple[str, bool, tuple[Setting, ...]]) -> None:
    kind, fast, settings = case
    plan = replace(Plan("cpu", 4, False, 0, fast_block=fast), **dict(settings))
    hold(census(recipe_for(folder, kind, fast), plan, len(settings) < 2), settings)


@pytest.mark.parametrize("case", STREAMED_CASES, ids=name_of)
def test_a_streamed_step_is_as_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, bool, tuple[Setting, ...]]
) -> None:
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 128)
    kind, fast, settings = case
    plan = replace(Plan("cpu", 4, True, 0, fast_block=fast, weights="streamed"), **dict(settings))
    hold(census(recipe_for(folder, kind, fast), plan, len(settings) < 2), settings)


def test_every_row_of_the_table_is_in_the_census() -> None:
    """A new lever has to be counted, alone and beside every other."""
    assert {field for field, _ in RESIDENT} == {lever.field for lever in LEVERS.values()} | {"micro_batch"}
    of_streaming = {"resident_blocks", "slots", "head_placement", "embedding_placement", "activation_offload"}
    assert {field for field, _ in STREAMED} == of_streaming | {"micro_batch", "loss_chunk", "mlp_tile"}
    for settings, cases in ((RESIDENT, RESIDENT_CASES), (STREAMED, STREAMED_CASES)):
        seen = {frozenset(chosen) for _, _, chosen in cases}
        assert all(frozenset({one}) in seen for one in settings if one[0] != "mlp_tile" or settings is STREAMED)
        missing = [
            (one, other)
            for one, other in itertools.combinations(settings, 2)
            if one[0] != other[0] and frozenset({one, other}) not in seen
        ]
        # A tile is for blocks that are run again, which all of a streamed step are; one update is of one micro-batch.
        assert all(
            "mlp_tile" in dict(pair) or {"optimizer_in_backward", "micro_batch"} <= dict(pair).keys()
            for pair in missing
        )
