"""The bytes planned today for every line of the benchmarks that was measured on a GPU, beside the peak of its tensors.

Recorded plans were made by the code of their day; here each is planned anew, so that a formula that is mended for one case
cannot leave the measured ones behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from finetune.config.schema import Recipe
from finetune.contracts import Plan
from finetune.memory.case import Case
from finetune.planner.estimate import estimate_case
from tests.unit.planner import test_seconds
from tests.unit.planner.test_seconds import BENCHMARKS, case_of_recipe, lines

GIB = 2.0**30
WITHIN = 0.03
BEYOND = {
    f"llama3-8b full {tokens} streamed, ends on the host": ratio
    for tokens, ratio in ((65536, 0.877), (32768, 0.929), (16384, 0.962))
}
"""Lines that the estimate does not reach, with planned / measured: of these names the first ones, which are older than the
change that gave the first hidden states of each micro-batch memory of their own. As views they all stood until the last was
gone: one more tensor of all hidden states. Lines of the same names that were measured later are within the bound."""
TEXT = {"template": "text", "on_long": "split", "pack": True}


def rehearsals() -> Iterator[tuple[str, Case, float]]:
    """The parts of each rehearsal, under the plan that it ran with."""
    for line in lines("rehearsal"):
        full = line["method"] == "full"
        recipe = Recipe.model_validate(
            {
                "model": {"path": line["model"], **({"trained": "stochastic"} if full else {})},
                "adapter": {"kind": "none"} if full else {"kind": "lora", "rank": 16, "alpha": 16},
                "data": {**TEXT, "max_tokens": line["length"]},
                "optimizer": {"name": "adamw8bit" if full else "adamw"},
                "train": {"batch": line["rows"]},
            }
        )
        for number, part in enumerate(line["parts"]):
            plan = {field: part["plan"][field] for field in Plan.__dataclass_fields__ if field in part["plan"]}
            pinned = recipe.plan.model_copy(update={k: v for k, v in plan.items() if hasattr(recipe.plan, k)})
            case = case_of_recipe(recipe.model_copy(update={"plan": pinned}))
            yield f"rehearsal {line['method']} {line['budget']}, part {number + 1}", case, part["peak_gib"]


def measured() -> Iterator[tuple[str, Case, float]]:
    """Name, case and measured peak in GiB of every line."""
    peaks: list[dict[str, Any]] = [*lines("ladder"), *(line for line in lines("peers") if line["tool"] == "ours")]
    for (name, case, _), line in zip(test_seconds.frontier(), lines("frontier"), strict=True):
        yield name, case, line["peak_gib"]
    for (name, case, _), line in zip(test_seconds.ladder(), peaks, strict=True):
        yield name, case, line["peak_gib"]
    yield from rehearsals()


def test_planned_bytes_of_every_measured_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    ratios = [(name, estimate_case(case, False).step_tensors / GIB / peak) for name, case, peak in measured()]
    assert len(ratios) >= 20 + 11 + 5 + 3
    beyond = {name: round(ratio, 3) for name, ratio in ratios if abs(ratio - 1) > WITHIN}
    assert beyond == BEYOND, "\n".join(f"{name:<60}{ratio:.3f}" for name, ratio in ratios)
    errors = sorted(abs(ratio - 1) for _, ratio in ratios)
    assert errors[len(errors) // 2] < 0.01
