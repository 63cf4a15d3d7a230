"""Every pair of choices that meet in a streamed step, five blocks deep: the bits of the same plan with resident weights.

Each row of the table is one job of four steps; together they hold every pair of values that goes together, which a test counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.contracts import IGNORED, Plan, Row
from finetune.errors import ModelError
from finetune.kernels import norms
from finetune.train import streamed_ends
from finetune.train.step import train_step
from tests.numerics.streamed_jobs import (
    BLOCKS,
    VOCABULARY,
    Outcome,
    assert_same_bits,
    different,
    loaded_job,
    model_folder,
    recipe_of,
    taken,
    tensors_of,
)
from tests.numerics.tiny_jobs import packed_rows

PLAN = Plan("cpu", 2, True, 0)
CLIPS: dict[str, float | None] = {"active": 0.01, "far": 1e6, "none": None}
VALUES: dict[str, tuple[Any, ...]] = {
    "kind": ("full", "lora"),
    "fast": (0, 1),
    "micro": (1, 2, 4),
    "rows": ("padded", "packed"),
    "resident": (0, 1, BLOCKS),
    "slots": (2, 3),
    "offload": (0, 1),
    "optimizer": ("adamw", "adamw8bit", "adamw4bit", "adamwfp8", "lion", "sgd"),
    "clip": tuple(CLIPS),
    "weights": ("fp32", "bf16 fp32", "bf16 stochastic", "bf16 split", "bf16 bf16"),  # precision, model.trained
    "base": ("same", "nf4", "int8", "fp8"),
    "dropout": (0, 0.1),
}
# fmt: off
CASES: tuple[tuple[Any, ...], ...] = (
    ("full", 0, 4, "packed", 0, 3, 1, "adamw", "far", "bf16 stochastic", "same", 0),
    ("full", 0, 1, "packed", 0, 2, 0, "adamw4bit", "active", "bf16 bf16", "same", 0),
    ("full", 0, 4, "padded", 5, 2, 0, "adamw8bit", "far", "bf16 bf16", "same", 0),
    ("full", 0, 2, "padded", 0, 2, 0, "adamw8bit", "active", "bf16 stochastic", "same", 0),
    ("full", 0, 2, "padded", 5, 3, 0, "adamwfp8", "none", "bf16 bf16", "same", 0),
    ("full", 0, 1, "padded", 1, 3, 1, "lion", "far", "bf16 split", "same", 0),
    ("full", 0, 4, "padded", 0, 2, 0, "lion", "none", "bf16 fp32", "same", 0),
    ("full", 0, 2, "padded", 1, 2, 0, "sgd", "far", "bf16 split", "same", 0),
    ("full", 0, 2, "packed", 0, 2, 1, "sgd", "active", "bf16 stochastic", "same", 0),
    ("full", 1, 1, "packed", 1, 3, 1, "adamw", "active", "fp32", "same", 0),
    ("full", 1, 2, "packed", 0, 3, 1, "adamw", "far", "bf16 bf16", "same", 0),
    ("full", 1, 1, "padded", 1, 3, 1, "adamw", "active", "bf16 split", "same", 0),
    ("full", 1, 2, "padded", 5, 3, 0, "adamw4bit", "active", "bf16 split", "same", 0),
    ("full", 1, 2, "packed", 1, 3, 0, "adamw4bit", "active", "bf16 stochastic", "same", 0),
    ("full", 1, 4, "packed", 0, 2, 0, "adamw8bit", "active", "bf16 split", "same", 0),
    ("full", 1, 4, "packed", 0, 3, 1, "adamwfp8", "none", "bf16 split", "same", 0),
    ("full", 1, 4, "packed", 1, 2, 1, "adamwfp8", "far", "bf16 stochastic", "same", 0),
    ("full", 1, 1, "padded", 5, 2, 1, "lion", "none", "bf16 stochastic", "same", 0),
    ("full", 1, 1, "padded", 1, 2, 0, "lion", "active", "bf16 bf16", "same", 0),
    ("full", 1, 4, "packed", 1, 2, 1, "sgd", "none", "bf16 bf16", "same", 0),
    ("lora", 0, 2, "packed", 5, 2, 1, "adamw4bit", "none", "bf16 fp32", "nf4", 0.1),
    ("lora", 0, 2, "packed", 5, 2, 0, "adamw4bit", "far", "bf16 fp32", "int8", 0.1),
    ("lora", 0, 1, "padded", 5, 3, 1, "adamw8bit", "far", "fp32", "int8", 0),
    ("lora", 0, 2, "packed", 1, 3, 1, "adamw8bit", "none", "bf16 fp32", "same", 0.1),
    ("lora", 0, 1, "packed", 1, 2, 1, "adamwfp8", "active", "fp32", "fp8", 0),
    ("lora", 0, 2, "packed", 0, 3, 0, "lion", "active", "bf16 fp32", "fp8", 0.1),
    ("lora", 0, 2, "padded", 1, 3, 0, "sgd", "far", "fp32", "nf4", 0),
    ("lora", 1, 1, "padded", 0, 2, 0, "adamw", "none", "fp32", "nf4", 0.1),
    ("lora", 1, 2, "padded", 5, 3, 0, "adamw", "none", "bf16 fp32", "int8", 0),
    ("lora", 1, 2, "packed", 0, 2, 1, "adamw", "none", "bf16 fp32", "fp8", 0),
    ("lora", 1, 4, "padded", 5, 2, 0, "adamw4bit", "far", "fp32", "fp8", 0.1),
    ("lora", 1, 2, "packed", 0, 2, 0, "adamw8bit", "far", "bf16 fp32", "nf4", 0.1),
    ("lora", 1, 1, "packed", 0, 2, 0, "adamw8bit", "active", "bf16 fp32", "fp8", 0),
    ("lora", 1, 4, "padded", 1, 2, 0, "adamwfp8", "far", "bf16 fp32", "int8", 0.1),
    ("lora", 1, 1, "padded", 0, 2, 1, "adamwfp8", "active", "fp32", "nf4", 0.1),
    ("lora", 1, 4, "packed", 0, 2, 0, "lion", "active", "fp32", "nf4", 0.1),
    ("lora", 1, 4, "packed", 0, 3, 0, "lion", "none", "fp32", "int8", 0),
    ("lora", 1, 1, "packed", 0, 3, 1, "sgd", "active", "bf16 fp32", "int8", 0.1),
    ("lora", 1, 4, "padded", 5, 2, 0, "sgd", "none", "fp32", "fp8", 0),
)
# fmt: on


def goes_together(case: dict[str, Any]) -> bool:
    """Whether the values of some factors may meet: stored weights and dropout need adapters, 16-bit trained weights none."""
    adapters = case.get("kind", "lora") == "lora"
    needs_adapters = case.get("base", "same") != "same" or case.get("dropout", 0) > 0
    narrow = case.get("weights") in ("bf16 stochastic", "bf16 split", "bf16 bf16")
    whole = case.get("kind", "full") == "full"
    return (adapters or not needs_adapters) and (whole or not narrow) and not (needs_adapters and narrow)


def test_the_table_holds_every_pair_that_goes_together() -> None:
    wanted = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(VALUES, 2)
        for first, second in itertools.product(VALUES[one], VALUES[other])
        if goes_together({one: first, other: second})
    }
    found: set[Any] = set()
    for case in CASES:
        assert goes_together(dict(zip(VALUES, case, strict=True)))
        found |= set(itertools.combinations(zip(VALUES, case, strict=True), 2))
    assert wanted - found == set()


def spread(rows: list[Row]) -> list[Row]:
    """The same rows with ids from the whole vocabulary, so that each of its parts is read and labelled."""

    def wide(ids: np.ndarray) -> np.ndarray:
        return np.where(ids == IGNORED, IGNORED, (25 * ids + 7) % VOCABULARY)

    return [replace(row, input_ids=wide(row.input_ids), labels=wide(row.labels)) for row in rows]


def padded_rows(count: int = 16, shortest: int = 6) -> list[Row]:
    """Rows of one document each, of uneven lengths."""
    whole = spread(packed_rows(count, 5))
    lengths = [shortest + (7 * index) % 18 for index in range(count)]
    return [
        replace(row, input_ids=row.input_ids[:n], labels=row.labels[:n], document_lengths=(n,), sources=(row.id,))
        for row, n in zip(whole, lengths, strict=True)
    ]


ROWS: dict[str, Callable[[], list[Row]]] = {"packed": lambda: spread(packed_rows(16)), "padded": padded_rows}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def both(place: Path, case: dict[str, Any]) -> tuple[Outcome, Outcome]:
    precision, _, trained = case["weights"].partition(" ")
    model = {"precision": precision, "base": case["base"], "trained": trained or "fp32"}
    optimizer = {"name": case["optimizer"], "groups": {"*self_attn*": "weight_decay=0.3"}}
    sections: dict[str, Any] = {"model": model, "optimizer": optimizer, "train": {"max_grad_norm": CLIPS[case["clip"]]}}
    sections["data"] = {"pack": case["rows"] == "packed"}
    if case["kind"] == "lora":
        sections["adapter"] = {"dropout": case["dropout"]}
    recipe = recipe_of(place, case["kind"], **sections)
    resident = replace(PLAN, micro_batch=case["micro"], fast_block=bool(case["fast"]))
    streamed = replace(
        resident,
        weights="streamed",
        resident_blocks=case["resident"],
        slots=case["slots"],
        activation_offload=bool(case["offload"]),
    )
    rows = ROWS[case["rows"]]()
    return taken(loaded_job(recipe, resident, rows)), taken(loaded_job(recipe, streamed, rows))


@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_streamed_jobs_give_the_bits_of_resident_ones(untied: Path, case: tuple[Any, ...]) -> None:
    """Losses, gradient norms, every tensor of the model and of the optimizer."""
    resident, streamed = both(untied, dict(zip(VALUES, case, strict=True)))
    assert_same_bits(resident, streamed)
    assert len(set(resident.losses)) == 4


TILED = (
    ("full", "padded", "same", 0.0),
    ("full", "packed", "same", 0.0),
    ("lora", "padded", "same", 0.1),
    ("lora", "padded", "nf4", 0.0),
)


@pytest.mark.parametrize(("kind", "rows", "base", "dropout"), TILED)
def test_an_mlp_in_tiles_trains_alike_resident_and_streamed_and_as_untiled(
    untied: Path, kind: str, rows: str, base: str, dropout: float
) -> None:
    """The same tiles give the same bits wherever the weights live; against whole MLPs sums are reordered."""
    sections: dict[str, Any] = {"model": {"base": base}, "data": {"pack": rows == "packed"}}
    if kind == "lora":
        sections["adapter"] = {"dropout": dropout}
    recipe = recipe_of(untied, kind, **sections)
    whole = replace(PLAN, fast_block=True)
    tiled = replace(whole, mlp_tile=5)
    streamed = replace(tiled, weights="streamed", activation_offload=True)
    outcomes = [taken(loaded_job(recipe, plan, ROWS[rows]())) for plan in (whole, tiled, streamed)]
    assert_same_bits(outcomes[1], outcomes[2])
    assert outcomes[1].losses == pytest.approx(outcomes[0].losses, rel=1e-6)
    assert outcomes[1].norms == pytest.approx(outcomes[0].norms, rel=1e-5)


ENDS = {"embedding_placement": "host", "head_placement": "host"}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tie", ["tied", "untied"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_ends_that_pass_in_parts_train_as_resident_ones(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, tie: str, rows: str
) -> None:
    """Three parts of the vocabulary, several tiles of positions, several groups under a frozen head; fp32 sums in another
    order, so each differs by a few of its 24 bits."""
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 64)
    monkeypatch.setattr(streamed_ends, "TILE", 7)
    monkeypatch.setattr(streamed_ends, "TOGETHER", 30)
    recipe = recipe_of(
        request.getfixturevalue(tie),
        kind,
        train={"max_grad_norm": 1.0},
        optimizer={"epsilon": 1e-2},
        data={"pack": rows == "packed"},
    )
    plan = replace(PLAN, micro_batch=1, fast_block=True)
    resident = taken(loaded_job(recipe, plan, ROWS[rows]()))
    job = loaded_job(recipe, replace(plan, weights="streamed", **ENDS), ROWS[rows]())
    streamed = taken(job)
    assert streamed.losses == pytest.approx(resident.losses, rel=1e-5)
    assert streamed.norms == pytest.approx(resident.norms, rel=1e-5)
    # A frozen embedding of its own is looked up by other means (memory/host_rows) and is no parameter then.
    looked_up = ["base_model.model.model.embed_tokens.weight"] if (kind, tie) == ("lora", "untied") else []
    assert sorted(resident.tensors.keys() ^ streamed.tensors.keys()) == looked_up
    for name, tensor in streamed.tensors.items():
        wanted = resident.tensors[name]
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), msg=name)
    assert job.update.stream is not None
    ends = job.update.stream.ends
    assert ends.head is not None
    assert [part.stop for part in ends.head.tall.parts] == [256, 512, VOCABULARY]
    assert (ends.embedding is not None) == (kind == "full" or tie == "tied")
    assert len(ends.all) == (1 if tie == "tied" or kind == "lora" else 2)
    assert len(ends.head._groups()) > 1 or kind == "full"
    assert sum(len(each.places) for each in ends.head._labelled) > 2 * 7


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_head_that_visits_gives_the_bits_of_one_on_the_device(
    monkeypatch: pytest.MonkeyPatch, untied: Path, kind: str, fast: bool, rows: str, micro: int
) -> None:
    """Its update is made in three parts, and nothing of it is on the device when a block computes."""
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 64)
    recipe = recipe_of(untied, kind, train={"max_grad_norm": 0.05}, data={"pack": rows == "packed"})
    plan = replace(PLAN, micro_batch=micro, loss_chunk=16, fast_block=fast, weights="streamed", activation_offload=True)
    wanted = taken(loaded_job(recipe, plan, ROWS[rows]()))
    job = loaded_job(recipe, replace(plan, head_placement="visit"), ROWS[rows]())
    assert_same_bits(wanted, taken(job))
    assert job.update.stream is not None
    ends = job.update.stream.ends
    assert ends.head is None
    assert ends.visit is not None
    assert len(ends.visit.tall.parts) == 3
    assert job.model.head.weight.data_ptr() == ends.visit.tall.weight_VD.data_ptr()
    assert job.model.head.weight.grad is None


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_head_that_visits_beside_an_embedding_on_the_host(untied: Path, kind: str) -> None:
    """The embedding's sums are in another order where it is trained; the head changes no bit beside it."""
    recipe = recipe_of(untied, kind, train={"max_grad_norm": 1.0}, optimizer={"name": "adamw8bit"})
    plan = replace(PLAN, fast_block=True, weights="streamed", embedding_placement="host")
    wanted = taken(loaded_job(recipe, plan, padded_rows()))
    job = loaded_job(recipe, replace(plan, head_placement="visit"), padded_rows())
    assert_same_bits(wanted, taken(job))
    assert job.update.stream is not None
    assert len(job.update.stream.ends.all) == (2 if kind == "full" else 1)


def test_a_head_that_is_also_the_embedding_does_not_visit(tied: Path) -> None:
    recipe, plan = recipe_of(tied, "full"), replace(PLAN, fast_block=True, weights="streamed", head_placement="visit")
    with pytest.raises(ModelError, match="is the embedding's matrix"):
        loaded_job(recipe, plan, padded_rows())


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_visit_that_breaks_inside_an_update_leaves_the_rest_to_the_next(
    monkeypatch: pytest.MonkeyPatch, untied: Path, at: int
) -> None:
    """Three parts of the head: the step that failed in one is made again with the same rows."""
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 64)
    recipe = recipe_of(untied, "full", optimizer={"name": "adamw"}, train={"max_grad_norm": 0.5})
    plan = replace(PLAN, weights="streamed", head_placement="visit")
    wanted = taken(loaded_job(recipe, plan, padded_rows()), 3)
    job = loaded_job(recipe, plan, padded_rows())
    losses = taken(job, 1).losses
    losses.append(train_step(job, range(4, 8), 10).loss)
    job.progress.step += 1
    assert job.update.stream is not None
    visit = job.update.stream.ends.visit
    assert visit is not None
    plain = visit.tall.updates
    visit.tall.updates = Breaking(plain, at)
    with pytest.raises(MemoryError):
        train_step(job, range(8, 12), 10)
    assert job.model.head.weight.data_ptr() == visit.tall.weight_VD.data_ptr()
    visit.tall.updates = plain
    losses.append(train_step(job, range(8, 12), 10).loss)
    job.update.wait()
    assert losses == wanted.losses
    assert different(tensors_of(job), wanted.tensors) == []


class Breaking:
    """An optimizer's slices whose update number `at` fails once its tensor is written."""

    def __init__(self, updates: Any, at: int) -> None:
        self.updates, self.left = updates, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.updates, name)

    def update(self, parameter: Any, hyper: Any, part: Any) -> None:
        self.updates.update(parameter, hyper, part)
        self.left -= 1
        if self.left == 0:
            raise MemoryError("in the middle of a flush")


@pytest.mark.parametrize("resident", [0, 2, BLOCKS])
@pytest.mark.parametrize("at", [1, 4, 9, 10, 31, 45])
def test_a_flush_that_breaks_inside_a_block_is_finished_by_the_next_with_the_same_bits(
    untied: Path, at: int, resident: int
) -> None:
    """Nine tensors a block: at its first, in its midst, at its last, in later blocks, at the very last."""
    recipe = recipe_of(untied, "full", optimizer={"name": "adamw8bit"}, train={"max_grad_norm": 0.5})
    plan = replace(PLAN, fast_block=True, weights="streamed", resident_blocks=resident)
    wanted = taken(loaded_job(recipe, plan, padded_rows()), 3)
    job = loaded_job(recipe, plan, padded_rows())
    losses = taken(job, 2).losses
    losses.append(train_step(job, range(8, 12), 10).loss)
    stream = job.update.stream
    assert stream is not None
    assert stream.deferred is not None
    plain = stream.deferred.updates
    stream.deferred.updates = Breaking(plain, at)
    with pytest.raises(MemoryError):
        job.update.wait()
    assert stream.deferred.pending == list(range((at - 1) // 9, BLOCKS))
    stream.deferred.updates = plain
    job.update.wait()
    assert stream.deferred.pending == []
    assert losses == wanted.losses
    assert different(tensors_of(job), wanted.tensors) == []


def test_a_forward_that_breaks_inside_an_update_leaves_the_rest_to_the_next(untied: Path) -> None:
    """The step that failed is made again with the same rows: as if nothing had happened."""
    recipe = recipe_of(untied, "full", optimizer={"name": "adamw"}, train={"max_grad_norm": 0.5})
    plan = replace(PLAN, weights="streamed", activation_offload=True)
    wanted = taken(loaded_job(recipe, plan, padded_rows()), 3)
    job = loaded_job(recipe, plan, padded_rows())
    losses = taken(job, 1).losses
    losses.append(train_step(job, range(4, 8), 10).loss)
    job.progress.step += 1
    stream = job.update.stream
    assert stream is not None
    assert stream.deferred is not None
    plain = stream.deferred.updates
    stream.deferred.updates = Breaking(plain, 14)
    with pytest.raises(MemoryError):
        train_step(job, range(8, 12), 10)
    stream.deferred.updates = plain
    losses.append(train_step(job, range(8, 12), 10).loss)
    job.update.wait()
    assert losses == wanted.losses
    assert different(tensors_of(job), wanted.tensors) == []
