"""Values reach the schema as text and the field's type decides, in files and on the command line alike (case B61)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.config.load import load_recipe
from finetune.config.schema import Recipe
from finetune.environment import Launch
from finetune.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "builtin:tiny"}, "data": {"path": "x.jsonl"}, "train": {"batch": 4}}


def value(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for part in key.split("."):
        found = getattr(found, part)
    return found


def from_words(*words: str) -> Recipe:
    return load_recipe(BASE, words, None, Launch())


LORA = {"adapter.targets": ("adapter.kind=lora",)}
"""What must be given beside a key for it to be of use."""


def from_file(tmp_path: Path, key: str, text: str) -> Recipe:
    section, _, leaf = key.partition(".")
    lines: dict[str, list[str]] = {"model": ["path: builtin:tiny"], "data": ["path: x.jsonl"], "train": ["batch: 4"]}
    if key == "train.batch":
        lines["train"] = []
    lines.setdefault(section, []).append(f"{leaf}: {text}")
    path = tmp_path / "job.yaml"
    path.write_text("".join(f"{name}:\n  " + "\n  ".join(inner) + "\n" for name, inner in lines.items()))
    return load_recipe(path, LORA.get(key, ()), None, Launch())


SAME_IN_BOTH = [
    ("optimizer.lr", "2e-5", 2e-5),
    ("optimizer.lr", "1e-4", 1e-4),
    ("optimizer.lr", "1E-4", 1e-4),
    ("optimizer.lr", "5e5", 5e5),
    ("optimizer.lr", ".5", 0.5),
    ("optimizer.lr", "012", 12.0),
    ("train.batch", "012", 12),
    ("train.batch", "0x10", 16),
    ("train.batch", "0o14", 12),
    ("train.batch", "2e3", 2000),
    ("train.batch", "+7", 7),
    ("data.pack", "no", False),
    ("data.pack", "No", False),
    ("data.pack", "off", False),
    ("data.pack", "true", True),
    ("data.pack", "yes", True),
    ("train.max_grad_norm", "null", None),
    ("train.max_grad_norm", "~", None),
    ("train.max_grad_norm", "", None),
    ("train.max_grad_norm", "none", None),
    ("train.max_grad_norm", "0.5", 0.5),
    ("data.valid_path", "null", None),
    ("run.dir", "012", "012"),
    ("run.dir", "no", "no"),
    ("run.dir", "12:30", "12:30"),
    ("run.dir", "1e-4", "1e-4"),
    ("run.dir", "2026-11-30", "2026-11-30"),
    ("data.template", "no", "no"),
    ("data.template", "null", "null"),
    ("data.template", "~", "~"),
    ("data.split", "0x10", "0x10"),
    ("plan.micro_batch", "auto", "auto"),
    ("plan.micro_batch", "010", 10),
    ("plan.loss_chunk", "0", 0),
    ("plan.activation_checkpointing", "no", False),
    ("plan.activation_checkpointing", "auto", "auto"),
    ("plan.activation_checkpointing", "selective", "selective"),
    ("plan.activation_checkpointing", "4", 4),
    ("plan.activation_offload", "1", True),
    ("plan.gpu_memory", "8GiB", 8 * 2**30),
    ("plan.gpu_memory", "24GB", 24 * 10**9),
    ("plan.gpu_memory", "1.5 MiB", 3 * 2**19),
    ("plan.gpu_memory", "1000000", 1_000_000),
    ("adapter.targets", "[q_proj, v_proj]", ("q_proj", "v_proj")),
    ("run.trackers", "[]", ()),
    ("run.trackers", "null", ()),
]


@pytest.mark.parametrize(("key", "text", "wanted"), SAME_IN_BOTH)
def test_b61_a_value_means_the_same_in_a_file_and_on_the_command_line(
    tmp_path: Path, key: str, text: str, wanted: Any
) -> None:
    by_word = value(from_words(f"{key}={text}", *LORA.get(key, ())), key)
    by_file = value(from_file(tmp_path, key, text), key)
    assert (by_word, type(by_word)) == (wanted, type(wanted))
    assert (by_file, type(by_file)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("optimizer.lr", "fast"),
        ("optimizer.lr", "12:30"),
        ("optimizer.lr", "nan"),
        ("optimizer.lr", "inf"),
        ("optimizer.lr", "-1"),
        ("optimizer.lr", "0"),
        ("optimizer.lr", "1_000"),
        ("optimizer.lr", "true"),
        ("train.batch", "3.5"),
        ("train.batch", "0"),
        ("train.batch", "1_000"),
        ("train.batch", "12:30"),
        ("train.batch", "no"),
        ("data.pack", "maybe"),
        ("data.pack", "12"),
        ("adapter.dropout", "1"),
        ("plan.gpu_memory", "8 furlongs"),
        ("plan.gpu_memory", "-8GiB"),
        ("plan.gpu_memory", "0"),
        ("plan.micro_batch", "many"),
        ("adapter.targets", "[q_proj"),
    ],
)
def test_b61_a_value_of_the_wrong_kind_is_refused_with_its_key_and_what_is_wanted(
    tmp_path: Path, key: str, text: str
) -> None:
    with pytest.raises(ConfigError) as by_word:
        from_words(f"{key}={text}")
    fault = by_word.value.faults[0]
    assert fault.where == f"command line {key}"
    assert fault.what.startswith(f"'{text}' is not ")
    assert fault.remedy
    with pytest.raises(ConfigError) as by_file:
        from_file(tmp_path, key, f"'{text}'")
    assert by_file.value.faults[0].where.endswith(f" {key}")
    assert "job.yaml:" in by_file.value.faults[0].where
    assert by_file.value.faults[0].what == fault.what


def test_lists_from_the_command_line() -> None:
    for text in ("q_proj,v_proj", "[q_proj,v_proj]", "[ q_proj , v_proj ]", "['q_proj', \"v_proj\"]"):
        assert from_words(f"adapter.targets={text}", "adapter.kind=lora").adapter.targets == ("q_proj", "v_proj")
    assert from_words("run.trackers=wandb").run.trackers == ("wandb",)


def test_native_values_of_a_dictionary_work_and_a_truth_value_is_no_number() -> None:
    recipe = load_recipe(
        {
            "model": {"path": Path("models") / "x", "trust_remote_code": False},
            "data": {"path": "x.jsonl", "columns": {"input": "question"}},
            "adapter": {"kind": "lora", "targets": ("q_proj",)},
            "optimizer": {"lr": 2e-5},
            "train": {"batch": 12, "max_grad_norm": None},
        },
        (),
        None,
        Launch(),
    )
    assert recipe.model.path == "models/x"
    assert (recipe.optimizer.lr, recipe.train.batch, recipe.train.max_grad_norm) == (2e-5, 12, None)
    assert (recipe.adapter.targets, recipe.data.columns) == (("q_proj",), {"input": "question"})
    for section, key, given in (("train", "batch", True), ("optimizer", "lr", False), ("plan", "micro_batch", True)):
        with pytest.raises(ConfigError, match=f"{section}.{key}.*\\(bool\\) is not"):
            load_recipe({**BASE, section: {key: given}}, (), None, Launch())
    with pytest.raises(ConfigError, match=r"run.dir: 12 \(int\) is not text"):
        load_recipe({**BASE, "run": {"dir": 12}}, (), None, Launch())
    with pytest.raises(ConfigError, match="cannot be a setting"):
        load_recipe({**BASE, "run": {"dir": object()}}, (), None, Launch())


def test_references_are_resolved_and_those_that_fail_are_faults() -> None:
    recipe = from_words("train.seed=012", "run.dir=runs/${train.seed}-${data.path}")
    assert (recipe.run.dir, recipe.train.seed) == ("runs/012-x.jsonl", 12)
    assert from_words("plan.micro_batch=${train.batch}").plan.micro_batch == 4
    assert from_words(r"run.dir=a\${b}").run.dir == "a${b}"
    for text, reason in (("${nope}", "nope"), ("${a", "cannot be resolved"), ("???", "no value is given")):
        with pytest.raises(ConfigError, match=reason) as raised:
            from_words(f"run.dir={text}")
        assert [fault.where for fault in raised.value.faults] == ["command line run.dir"]


def test_an_empty_value_is_null_where_a_key_may_be_unset_and_a_fault_elsewhere() -> None:
    assert from_words("train.batch=", "train.batch_tokens=4096").train.batch is None
    assert from_words("data.columns=").data.columns == {}
    for key in ("optimizer.lr", "data.template", "model.path", "data.pack"):
        with pytest.raises(ConfigError, match=f"command line {key}: no value is given"):
            from_words(f"{key}=")


@pytest.mark.parametrize(
    ("key", "text", "what"),
    [
        ("train.seed", "9223372036854775808", "is not a whole number from 0 to below 2^63"),
        ("generate.temperature", "1e-40", "is not 0, or a number of at least 1e-6"),
        ("run.dir", "a\0b", "is not text"),
        ("run.dir", "a\udcff", "is not text"),
    ],
)
def test_values_that_would_fail_later_are_refused_at_once(key: str, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_words(f"{key}={text}")
    assert [fault.where for fault in raised.value.faults] == [f"command line {key}"]
    assert what in raised.value.faults[0].what


def test_the_ends_of_what_is_taken() -> None:
    assert from_words("train.seed=9223372036854775807").train.seed == 2**63 - 1
    assert from_words("generate.temperature=0", "train.seed=0").generate.temperature == 0
    assert from_words("generate.temperature=1e-6").generate.temperature == 1e-6
    assert from_words("plan.gpu_memory=0.1GiB").plan.gpu_memory == 107374182
    digits = "9" * 400
    assert from_words(f"plan.gpu_memory={digits}GiB").plan.gpu_memory == int(digits) * 2**30


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "a\\b", "..", "a.", ""])
def test_a_recipes_name_is_no_way_out_of_the_folder_of_runs(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_recipe({**BASE, "recipe": name}, (), None, Launch())
    assert [fault.where for fault in raised.value.faults] == ["the given dictionary recipe"]


def test_yaml_without_end_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="YAML nested too deeply"):
        load_recipe(tmp_path / "deep.yaml", (), None, Launch())


def test_a_recipe_yaml_is_called_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "recipe.yaml").write_text("{model: {path: m}, data: {path: d}, train: {batch: 1}}")
    monkeypatch.chdir(tmp_path / "job")
    for source in ("recipe.yaml", tmp_path / "job", "../job/recipe.yaml"):
        assert load_recipe(source, (), None, Launch()).recipe == "job"
