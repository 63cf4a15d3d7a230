"""What the launcher says and what the recipe says: one follows the other, or the run stops (case B65)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune import environment
from finetune.config.check import resolve_launch
from finetune.config.load import load_recipe
from finetune.config.schema import Recipe
from finetune.environment import Launch, launch
from finetune.errors import ConfigError, Fault, InputError

BASE: dict[str, Any] = {
    "model": {"path": "builtin:tiny"},
    "data": {"path": "x.jsonl", "max_tokens": 128},
    "train": {"batch": 32},
}
ALWAYS = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}
"""What `accelerate launch` exports at its defaults."""


def load(started: Launch, *words: str) -> Recipe:
    return resolve_launch(load_recipe(BASE, words, None, started), started)


def only(started: Launch, *words: str) -> Fault:
    with pytest.raises(ConfigError) as raised:
        load(started, *words)
    assert len(raised.value.faults) == 1
    return raised.value.faults[0]


def by_accelerate(**variables: str) -> Launch:
    return launch({**ALWAYS, **variables})


@pytest.mark.parametrize(
    ("asked", "own", "wanted"),
    [
        ("no", None, "auto"),
        ("no", "bf16", "bf16"),
        ("no", "fp32", "fp32"),
        ("bf16", None, "bf16"),
        ("bf16", "bf16", "bf16"),
        ("fp16", None, "fp16"),
        ("fp16", "fp16", "fp16"),
        ("no", "tf32", "tf32"),
    ],
)
def test_b65_an_unset_precision_follows_the_launcher(asked: str, own: str | None, wanted: str) -> None:
    words = [f"model.precision={own}"] if own else []
    assert load(by_accelerate(ACCELERATE_MIXED_PRECISION=asked), *words).model.precision == wanted


def test_b65_a_conflict_of_precision_stops_with_both_values_and_their_places(tmp_path: Path) -> None:
    fault = only(by_accelerate(ACCELERATE_MIXED_PRECISION="bf16"), "model.precision=fp32")
    assert fault.where == "command line model.precision"
    assert fault.what == "the recipe says fp32, the launcher's --mixed_precision bf16 says bf16"
    settings = tmp_path / "accelerate" / "default_config.yaml"
    settings.parent.mkdir()
    settings.write_text("mixed_precision: bf16\n")
    started = by_accelerate(ACCELERATE_MIXED_PRECISION="bf16", HF_HOME=str(tmp_path))
    assert str(settings) in only(started, "model.precision=fp32").what


@pytest.mark.parametrize("own", ["auto", "bf16", "fp32"])
def test_b65_fp8_of_the_launcher_is_refused_by_name(own: str) -> None:
    fault = only(by_accelerate(ACCELERATE_MIXED_PRECISION="fp8"), f"model.precision={own}")
    assert fault.what.startswith("fp8 is asked for by the launcher's --mixed_precision fp8")
    assert fault.remedy == "launch with --mixed_precision bf16, fp16 or no"


def test_b65_fp16_of_the_launcher_against_another_precision_stops_with_both_values() -> None:
    fault = only(by_accelerate(ACCELERATE_MIXED_PRECISION="fp16"), "model.precision=bf16")
    assert fault.what == "the recipe says bf16, the launcher's --mixed_precision fp16 says fp16"


@pytest.mark.parametrize(("steps", "world", "rows"), [(4, 1, 8), (4, 2, 4), (3, 2, 6), (64, 1, 1)])
def test_b65_accumulation_steps_of_the_launcher_pin_the_micro_batch(steps: int, world: int, rows: int) -> None:
    started = by_accelerate(ACCELERATE_GRADIENT_ACCUMULATION_STEPS=str(steps), WORLD_SIZE=str(world))
    assert load(started).plan.micro_batch == rows
    assert load(started, f"plan.micro_batch={rows}").plan.micro_batch == rows
    again = resolve_launch(load(started), started)
    assert again == load(started)


def test_b65_one_accumulation_step_is_the_default_and_changes_nothing() -> None:
    started = by_accelerate(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="1")
    assert started.accumulation is None
    assert load(started).plan.micro_batch == "auto"


def test_b65_conflicts_of_accumulation_stop_with_both_values() -> None:
    started = by_accelerate(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    fault = only(started, "plan.micro_batch=3")
    assert fault.where == "command line plan.micro_batch"
    assert fault.what.startswith("the recipe says 3; the launcher's --gradient_accumulation_steps 4 makes it 8 ")
    fault = only(started, "train.batch=null", "train.batch_tokens=4096")
    assert fault.where == "command line train.batch_tokens"
    assert "--gradient_accumulation_steps 4 cuts it by rows" in fault.what


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "--use_fsdp: sharding (plan.shard, plan.tensor, plan.context) is not built yet",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "--use_deepspeed: this program does its own"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "--use_parallelism_config: sharding"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "--use_megatron_lm: this program"),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            "--dynamo_backend inductor: compiling (plan.compile) is not built yet",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun (OMPI_COMM_WORLD_SIZE=2): processes of mpirun"),
    ],
)
def test_flags_of_the_launcher_that_are_not_followed_stop_the_run(variables: dict[str, str], what: str) -> None:
    assert only(by_accelerate(**variables)).what.startswith(f"the launcher's {what}")


def test_the_launchers_ranks_and_device() -> None:
    started = by_accelerate(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_PORT="29500", ACCELERATE_USE_CPU="True")
    assert (started.rank, started.local_rank, started.world, started.use_cpu) == (3, 1, 4, True)
    assert not started.one_of_several
    assert load(started).device == "cpu"
    assert load(started, "plan.data=4").plan.data == 4
    assert "pinned to 2 processes, and the launcher started 4" in only(started, "plan.data=2").what
    assert only(started, "device=cuda").what == "the recipe says cuda, the launcher's --cpu says cpu"
    assert launch({}) == Launch()


def test_a_launcher_that_starts_one_process_of_several_is_noticed() -> None:
    # `accelerate launch --cpu --num_processes 2` exports a port for processes that it never starts.
    assert by_accelerate(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="True").one_of_several
    assert not by_accelerate().one_of_several
    assert not launch({"MASTER_PORT": "29500"}).one_of_several


@pytest.mark.parametrize(
    "variables", [{"RANK": "x"}, {"WORLD_SIZE": "0"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"}]
)
def test_ranks_that_make_no_sense_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(InputError, match="unset"):
        launch(variables)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FINETUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / ".cache" / "finetune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert environment.cache_folder() == tmp_path / "x" / "finetune"
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own"))
    assert environment.cache_folder() == tmp_path / "own"


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.hub_offline() is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert environment.hub_offline() is True
