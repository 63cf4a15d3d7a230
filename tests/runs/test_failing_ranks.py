"""When one process of several fails: all end at once, one message says why, and no other blames the program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import store
from finetune.errors import CheckpointError, DataError, DivergedError, LostProcessError, NothingFitsError
from finetune.planner.refusal import PlanRefusedError
from finetune.tasks.text import TextTask
from tests.conftest import changed
from tests.runs.ranks import endings


def raise_at(number: int, error: Exception) -> None:
    """This process's `number`th collation raises."""
    collate, calls = TextTask.collate, []

    def counted(self: TextTask, rows: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return collate(self, rows)

    TextTask.collate = counted


def test_an_error_of_one_rank_ends_all(tiny: dict[str, Any]) -> None:
    started = time.monotonic()
    first, second = endings(tiny, 2, lambda rank: raise_at(6, DataError("a row is bad", "row 3")) if rank else None)
    assert isinstance(first, LostProcessError)
    assert "its own message says why" in str(first)
    assert isinstance(second, DataError)
    assert time.monotonic() - started < 30


def test_b89_out_of_memory_on_one_rank_ends_all_and_the_last_checkpoint_stays(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Case B89: rank 1 runs out of memory in the fourth step of its own; two steps are saved."""
    recipe = changed(tiny, checkpoint__every=1, data__valid_path=None)
    first, second = endings(recipe, 2, lambda rank: raise_at(3, torch.OutOfMemoryError("no room")) if rank else None)
    assert isinstance(first, LostProcessError)
    assert isinstance(second, NothingFitsError)
    assert "step 3 with rows" in str(second)
    assert store.newest(tmp_path / "run/checkpoints")[0].name == "step-0000002"


def test_a_plan_that_is_refused_is_refused_on_every_rank(tiny: dict[str, Any]) -> None:
    """The error crosses between processes whole, so each exits with 3."""
    found = endings(changed(tiny, plan__host_memory="10MiB"), 2)
    assert [type(error) for error in found] == [PlanRefusedError] * 2
    assert found[0].gap == found[1].gap > 0
    assert all(error.everywhere for error in found)


def test_what_cannot_be_written_is_an_error_of_every_rank(tiny: dict[str, Any], tmp_path: Path) -> None:
    """At the rehearsal, in the loop, and at the end."""
    (tmp_path / "file").write_text("")
    found = endings(changed(tiny, run__dir=str(tmp_path / "file" / "run")), 2)
    assert [type(error) for error in found] == [CheckpointError] * 2

    def full(rank: int) -> None:
        def write(*_: Any) -> None:
            raise CheckpointError("not enough disk space")

        store.write = write

    found = endings(changed(tiny, checkpoint__every=3), 2, full)
    assert [str(error) for error in found] == ["not enough disk space"] * 2


def test_a_loss_that_is_no_number_on_one_rank_is_named_on_all(tiny: dict[str, Any]) -> None:
    """Rank 1's loss turns NaN once, so no row can be blamed alone: the rows of that micro-batch are named, no others."""
    seen: list[list[int]] = []

    def poison(rank: int) -> None:
        loss_sum = TextTask.loss_sum

        def poisoned(self: TextTask, model: Any, batch: Any, plan: Any) -> torch.Tensor:
            loss = loss_sum(self, model, batch, plan)
            if torch.is_grad_enabled():
                seen.append(sorted(batch.row_ids.tolist()))
                if len(seen) == 2 and rank == 1:
                    Path("rows").write_text(str(seen[-1]))
                    return loss * float("nan")
            return loss

        TextTask.loss_sum = poisoned

    found = endings(changed(tiny, data__valid_path=None), 2, poison)
    assert [type(error) for error in found] == [DivergedError] * 2
    assert all(f"one of rows {Path('rows').read_text()}" in str(error) for error in found)
