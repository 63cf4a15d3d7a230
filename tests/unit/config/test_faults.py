"""Keys that do not exist, keys that are missing, choices that contradict: all in one message (cases B63 and B64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.config.check import TRACKERS, Known, check
from finetune.config.keys import ELSEWHERE, KEYS, SECTIONS
from finetune.config.load import (
    find_recipe,
    load_recipe,
    recipe_differences,
    save_recipe,
)
from finetune.config.schema import Recipe
from finetune.environment import Launch, shipped_folder
from finetune.errors import ConfigError, Fault

BASE: dict[str, Any] = {"model": {"path": "builtin:tiny"}, "data": {"path": "x.jsonl"}, "train": {"batch": 4}}
KNOWN = Known(("adamw", "adamw8bit"), ("constant", "linear", "cosine"), ("alpaca", "grammar", "messages"))


def load(*words: str, base: dict[str, Any] | Path = BASE) -> Recipe:
    return load_recipe(base, words, KNOWN, Launch())


def faults(*words: str, base: dict[str, Any] | Path = BASE) -> list[Fault]:
    with pytest.raises(ConfigError) as raised:
        load(*words, base=base)
    return list(raised.value.faults)


def only(*words: str) -> Fault:
    found = faults(*words)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("key", "place", "remedy"),
    [
        ("learning_rat", "at the top", "did you mean optimizer.lr (learning_rate elsewhere)?"),
        ("learning_rate", "at the top", "it is called optimizer.lr here"),
        ("optimizer.learning_rate", "in the section optimizer", "it is called optimizer.lr here"),
        ("num-epochs", "at the top", "it is called train.epochs here"),
        ("train.num-epochs", "in the section train", "it is called train.epochs here"),
        ("train.max-steps", "in the section train", "write train.max_steps"),
        ("model.rank", "in the section model", "it belongs in the section adapter: adapter.rank"),
        ("rank", "at the top", "it belongs in the section adapter: adapter.rank"),
        ("train.lr", "in the section train", "it belongs in the section optimizer: optimizer.lr"),
        ("train.optimizer", "in the section train", "optimizer is a section of its own, at the top"),
        ("train.resume", "in the section train", "it belongs at the top, outside every section: resume"),
        ("train.bach", "in the section train", "did you mean train.batch?"),
        ("data.max_token", "in the section data", "did you mean data.max_tokens?"),
        ("optimiser", "at the top", "did you mean optimizer?"),
        ("max_tokens", "at the top", "keys of that name are data.max_tokens, generate.max_tokens"),
        (
            "model.fp8_compute",
            "in the section model",
            "model.fp8_compute is not built yet in this version; leave it out",
        ),
        ("prompt", "at the top", "it is a key of the command line's generate, and no part of a recipe"),
        ("qwertyuiop", "at the top", "no key is near; `finetune train --help` lists them all"),
    ],
)
def test_b63_a_key_that_does_not_exist_is_named_with_its_place_and_remedy(
    tmp_path: Path, key: str, place: str, remedy: str
) -> None:
    fault = only(f"{key}=8")
    name = key.rpartition(".")[2]
    assert (fault.where, fault.what, fault.remedy) == (
        f"command line {key}",
        f"there is no key {name!r} {place}",
        remedy,
    )


def test_b63_all_faults_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "learning_rat: 1e-4\n"
        "num-epochs: 3\n"
        "model:\n"
        "  path: builtin:tiny\n"
        "  rank: 8\n"
        "data: {path: x.jsonl, valid_path: v.jsonl, valid_share: 0.1}\n"
        "optimizer:\n"
        "  lr: fast\n"
        "  name: adamv\n"
        "train:\n"
        "  batch: 4\n"
        "  seed: 1\n"
        "  seed: 2\n"
    )
    found = faults("train.batch_tokens=4096", "adapter.pats=x", "--oops", base=path)
    where = [fault.where.replace(str(path), "job.yaml") for fault in found]
    assert where == [
        "job.yaml:13 train.seed",
        "job.yaml:1 learning_rat",
        "job.yaml:2 num-epochs",
        "job.yaml:5 model.rank",
        "command line",
        "command line adapter.pats",
        "job.yaml:8 optimizer.lr",
        "job.yaml:11 train.batch and command line train.batch_tokens",
        "job.yaml:6 data.valid_path and job.yaml:6 data.valid_share",
        "job.yaml:9 optimizer.name",
    ]
    assert all(fault.remedy for fault in found)
    with pytest.raises(ConfigError, match=r"^10 faults in the recipe:\n") as raised:
        load("train.batch_tokens=4096", "adapter.pats=x", "--oops", base=path)
    assert raised.value.exit_code == 2


def test_faults_of_the_command_line_are_listed_even_when_the_recipe_is_not_found() -> None:
    with pytest.raises(ConfigError) as raised:
        load_recipe("quikstart", ("train.lr=3", "train.batch=x"), KNOWN, Launch())
    first, second, third = raised.value.faults
    assert first.what == "there is no recipe 'quikstart'"
    assert "did you mean recipe=quickstart?" in first.remedy
    assert (second.where, third.where) == ("command line train.lr", "command line train.batch")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("model: [unclosed\n", 2, "not YAML"),
        ("- a\n- b\n", 1, "not a recipe"),
        ("model: {path: x}\nmodel: {path: y}\n", 2, "given twice; the first is"),
        ("model:\n  path: !!python/name:os.system x\n", 2, "the YAML tag"),
        ("model: &a\n  path: *a\n", 1, "repeats without end"),
        ("model: {path: x}\n---\nmodel: {path: y}\n", 2, "not YAML"),
        ("model: {path: x}\n? [a, b]\n: 3\n", 2, "a key that is not a word"),
        ("base: &b {batch: 4}\nmodel: {path: x}\ntrain: {<<: *b}\n", 1, "there is no key 'base'"),
    ],
)
def test_a_file_that_is_no_recipe_is_named_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    found = faults(base=path)
    assert any(f.where.startswith(f"{path}:{line}") and what in f.what for f in found), found


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"model: \xff\xfe\n")
    assert "not YAML text" in faults(base=path)[0].what


def test_a_missing_value_is_named() -> None:
    found = faults(base={})
    assert [(f.where, f.what) for f in found] == [
        ("the given dictionary model.path", "is missing"),
        ("the given dictionary train.batch", "nothing says how much data makes one step"),
        ("the given dictionary data.path", "no data are named"),
    ]


def test_words_that_are_not_key_and_value() -> None:
    assert only("quickstart").remedy == "write KEY=VALUE, for example recipe=quickstart"
    assert only("--train.max-steps").remedy == "keys have no dashes: write train.max_steps=VALUE"
    assert "it is called optimizer.lr here" in only("--learning-rate").remedy
    assert only("train.seed=1", "train.seed=2").what == "given twice"
    assert only("data=x").what == "'x' is given where a section is wanted"
    assert only("data.pack.deep=1").what == "a section is given where true or false is wanted"
    assert only("train.optimizer.lr=1").remedy == "optimizer is a section of its own, at the top"
    assert [fault.what for fault in faults("train=", "train.seed=1")] == ["given as a value and as a section"]


CONTRADICTIONS = [
    (("train.batch_tokens=4096",), "train.batch", "both are given: 4 rows and 4096 tokens"),
    (("train.batch=null",), "train.batch", "nothing says how much data makes one step"),
    (("train.batch=null", "train.batch_tokens=512"), "train.batch_tokens", "cannot hold one row of 2048"),
    (("model.base=nf4",), "model.base", "a base in 4 bits cannot be trained itself"),
    (("adapter.path=x",), "adapter.path", "adapter.kind is none"),
    (("adapter.rank=8",), "adapter.rank", "the whole model would be trained"),
    (("adapter.kind=lora", "adapter.targets="), "adapter.targets", "no layer is named"),
    (("data.path=null",), "data.path", "no data are named"),
    (("data.valid_path=v", "data.valid_share=0.1"), "data.valid_path", "held-out rows are given"),
    (("evaluate.sets.valid=v",), "evaluate.sets.valid", "is the name of the rows of data.valid_path"),
    (("evaluate.every=5",), "evaluate.every", "no held-out rows"),
    (
        ("evaluate.every=5", "data.valid_path=v", "checkpoint.keep_best=accuracy"),
        "checkpoint.keep_best",
        "no evaluation set",
    ),
    (("data.valid_path=v", "checkpoint.keep_best=eval_loss"), "checkpoint.keep_best", "nothing is evaluated between"),
    (("data.valid_path=v", "train.stop_after=2"), "train.stop_after", "none is asked for"),
    (("evaluate.sets.a=b", "evaluate.every=5", "train.stop_after=2"), "train.stop_after", "there are no held-out rows"),
    (("evaluate.max_rows=5",), "evaluate.max_rows", "no held-out rows"),
    (("model.base=int8",), "model.base", "a base in 8 bits cannot be trained"),
    (("adapter.kind=lora", "model.double_quant=no"), "model.double_quant", "about the scales of nf4"),
    (("adapter.scaling=rslora",), "adapter.scaling", "the whole model would be trained"),
    (("adapter.ranks.q_proj=4",), "adapter.ranks", "the whole model would be trained"),
    (("adapter.modules_to_save=norm",), "adapter.modules_to_save", "the whole model would be trained"),
    (("adapter.kind=lora", "adapter.init=pissa", "model.base=nf4"), "adapter.init", "which quantisation would blur"),
    (("adapter.kind=dora", "adapter.init=olora"), "adapter.init", "whose norms dora keeps"),
    (("adapter.kind=lora", "adapter.init=pissa", "adapter.path=a"), "adapter.init", "one is to be gone on from"),
    (("adapter.kind=lora", "adapter.init=gaussian", "adapter.path=a"), "adapter.init", "one is to be gone on from"),
    (
        ("adapter.kind=lora", "adapter.alphas.q_proj=0"),
        "adapter.alphas.q_proj",
        "is not a number above 0",
    ),
    (("adapter.kind=lora", "train.last_blocks=2"), "train.last_blocks", "freezes all"),
    (("adapter.kind=dora", "train.freeze=norm"), "train.freeze", "freezes all"),
    (("schedule.name=constant", "schedule.final=0.1"), "schedule.final", "and to stay constant"),
    (("plan.optimizer_in_backward=true",), "plan.optimizer_in_backward", "it is clipped at 1"),
    (
        ("plan.optimizer_in_backward=true", "train.max_grad_norm=none", "model.precision=fp16"),
        "plan.optimizer_in_backward",
        "fp16 skips steps whose gradient overflows",
    ),
    (
        ("plan.weights=resident", "plan.embedding_placement=host"),
        "plan.embedding_placement",
        "only streamed weights train an embedding that is on the host",
    ),
    (("plan.compile=yes",), "plan.compile", "not built yet"),
    (("plan.shard=2",), "plan.shard", "not built yet"),
    (("plan.tensor=2",), "plan.tensor", "not built yet"),
    (("plan.context=2",), "plan.context", "not built yet"),
    (("plan.data=2",), "plan.data", "pinned to 2 processes, and the launcher started 1"),
    (("optimizer.name=adamv",), "optimizer.name", "there is no optimizer 'adamv'"),
    (("schedule.name=cosin",), "schedule.name", "there is no schedule 'cosin'"),
    (("data.template=grammer",), "data.template", "there is no template 'grammer'"),
    (("run.trackers=wandb,tensorbord",), "run.trackers", "there is no tracker 'tensorbord'"),
]


@pytest.mark.parametrize(
    ("words", "key", "what"), CONTRADICTIONS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_choices_that_contradict_stop_with_a_remedy(words: tuple[str, ...], key: str, what: str) -> None:
    fault = only(*words) if "train.batch=null" not in words or len(words) > 1 else only("train.batch=null")
    assert fault.where.split(" and ")[0].endswith(f" {key}")
    assert what in fault.what
    assert fault.remedy


def test_choices_that_go_together() -> None:
    assert load("plan.weights=resident", "plan.shard=1", "plan.compile=no", "plan.data=1").plan.shard == 1
    assert load("data.template=./grammer.yaml").data.template == "./grammer.yaml"
    held_out = ("data.valid_share=0.1", "evaluate.every=5", "evaluate.sets.hard=h.jsonl")
    assert load(*held_out, "checkpoint.keep_best=hard/eval_loss").checkpoint.keep_best == "hard/eval_loss"
    assert load(*held_out, "checkpoint.keep_best=eval_loss", "train.stop_after=2").train.stop_after == 2
    assert load("adapter.kind=lora", "model.base=nf4").model.base == "nf4"


def test_check_gives_the_keys_alone() -> None:
    recipe = load().model_copy(update={"resume": "auto"})
    assert check(recipe, KNOWN, Launch()) == []
    both = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batch_tokens": 4096})})
    assert [fault.where for fault in check(both, KNOWN, Launch())] == ["train.batch, train.batch_tokens"]


def test_values_that_the_design_has_and_this_version_lacks() -> None:
    for word in ("task=recommender", "task=vision"):
        assert only(word).what == f"'{word.partition('=')[2]}' is not built yet in this version"
    assert only("plan.weights=stremed").remedy == "did you mean streamed?"


EVERY_KEY: dict[str, str] = {
    "recipe": "mine", "task": "text", "device": "cpu", "resume": "auto",
    "model.path": "builtin:tiny", "model.revision": "main", "model.precision": "fp32", "model.base": "nf4",
    "model.double_quant": "no", "model.new_tokens": "['<a>', '<b c>']", "model.new_tokens_path": "t.txt", "model.layers": "2",
    "model.trained": "fp32", "model.attention": "eager", "model.trust_remote_code": "yes",
    "adapter.kind": "lora", "adapter.rank": "8", "adapter.alpha": "16", "adapter.dropout": "0.1",
    "adapter.scaling": "rslora", "adapter.init": "gaussian", "adapter.ranks": "{q_proj: 4, 'layers.1.mlp.*': 8}",
    "adapter.alphas": "{q_proj: 8.5}", "adapter.modules_to_save": "[lm_head]",
    "adapter.targets": "[q_proj, v_proj]", "adapter.path": "~",
    "data.path": "x.jsonl", "data.split": "test", "data.valid_path": "v.jsonl", "data.valid_share": "0",
    "data.template": "alpaca", "data.columns": "{instruction: question, output: answer}", "data.max_tokens": "128",
    "data.system": "Be brief.", "data.roles": "{caller: user}",
    "data.on_long": "drop", "data.on_bad_row": "skip", "data.pack": "yes", "data.train_on": "last", "data.max_rows": "9",
    "data.mixture": "{}", "data.weights": "{}", "data.on_exhausted": "stop", "data.streaming": "no",
    "data.shuffle_buffer": "4096", "data.workers": "2", "data.cache": "no",
    "optimizer.name": "adamw8bit", "optimizer.lr": "1e-5", "optimizer.weight_decay": "0.1", "optimizer.beta1": "0.8",
    "optimizer.beta2": "0.95", "optimizer.epsilon": "1e-6", "optimizer.full_state": "head", "optimizer.scale_lr": "sqrt",
    "optimizer.base_batch": "8", "optimizer.groups": "{'*.layers.0.*': lr_factor=0.5 weight_decay=0}",
    "schedule.name": "linear", "schedule.decay": "0.1", "schedule.warmup": "0.1", "schedule.final": "0.2",
    "train.batch": "3", "train.batch_tokens": "~", "train.max_steps": "5", "train.epochs": "1.5",
    "train.last_blocks": "~", "train.modules": "[]", "train.freeze": "~",
    "train.max_grad_norm": "~", "train.seed": "7", "train.stop_after": "2",
    "evaluate.every": "2", "evaluate.sets": "{hard: h.jsonl, 'a.b': c.jsonl}", "evaluate.max_rows": "5", "evaluate.samples": "0",
    "evaluate.scores": "exact_match", "evaluate.answers": "7",
    "checkpoint.every": "4", "checkpoint.keep": "1", "checkpoint.keep_best": "hard/eval_loss",
    "generate.max_tokens": "9", "generate.temperature": "0.5",
    "plan.gpu_memory": "8GiB", "plan.host_memory": "24GB", "plan.exact": "bitwise", "plan.micro_batch": "2",
    "plan.activation_checkpointing": "no", "plan.loss_chunk": "64", "plan.mlp_tile": "0", "plan.weights": "resident",
    "plan.resident_blocks": "auto", "plan.slots": "auto", "plan.activation_offload": "no", "plan.optimizer_placement": "device",
    "plan.optimizer_in_backward": "no", "plan.embedding_placement": "device", "plan.head_placement": "device", "plan.probe": "no",
    "plan.compile": "no", "plan.data": "1", "plan.shard": "1", "plan.tensor": "1", "plan.context": "1",
    "plan.fast_block": "no", "plan.attention": "auto",
    "run.dir": "runs/${recipe}", "run.trackers": "wandb", "run.keep": "true",
}  # fmt: skip
"""Every key of the schema, away from its default where it can be."""


def test_b64_every_key_given_is_in_the_resolved_recipe_and_survives_being_saved(tmp_path: Path) -> None:
    assert set(EVERY_KEY) == {key.name for key in KEYS.values()}
    sections: dict[str, list[str]] = {}
    for name, text in EVERY_KEY.items():
        section, _, leaf = name.rpartition(".")
        sections.setdefault(section, []).append(f"{leaf}: {text}")
    text = "\n".join(sections.pop("")) + "\n"
    text += "".join(f"{section}:\n" + "".join(f"  {line}\n" for line in lines) for section, lines in sections.items())
    (tmp_path / "every.yaml").write_text(text)
    recipe = load(base=tmp_path / "every.yaml")
    assert recipe.data.columns == {"instruction": "question", "output": "answer"}
    assert recipe.evaluate.sets == {"hard": "h.jsonl", "a.b": "c.jsonl"}
    assert recipe.adapter.ranks == {"q_proj": 4, "layers.1.mlp.*": 8}
    assert recipe.model.new_tokens == ("<a>", "<b c>")
    assert (recipe.data.workers, recipe.data.cache) == (2, False)
    assert recipe.run.dir == "runs/mine"
    defaults = load()
    changed = {key for key, _, _ in recipe_differences(recipe, defaults)}
    at_default = {"task", "model.path", "data.path", "data.valid_share", "train.batch_tokens", "plan.resident_blocks"}
    at_default |= {"plan.slots"}
    at_default |= {"train.last_blocks", "train.modules", "train.freeze"}  # they do not go with an adapter
    at_default |= {f"data.{name}" for name in ("mixture", "weights", "on_exhausted", "streaming", "shuffle_buffer")}
    at_default |= {"model.trained", "schedule.decay", "plan.attention", "run.keep", "adapter.path"}
    assert changed == set(EVERY_KEY) - at_default

    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load(base=tmp_path / "recipe.yaml") == recipe
    assert load(base=tmp_path) == recipe


@pytest.mark.parametrize("mode", ["alpaca", "grammar", "messages"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_b64_data_keys_are_kept_in_every_mode(tmp_path: Path, mode: str, kind: str) -> None:
    words = ["data.columns.input=question", "data.columns.x=y", "data.on_long=drop", "data.train_on=last"]
    recipe = load(*words, f"data.template={mode}", f"adapter.kind={kind}")
    assert recipe.data.columns == {"input": "question", "x": "y"}
    save_recipe(recipe, tmp_path / "recipe.yaml")
    again = load(base=tmp_path / "recipe.yaml")
    assert again == recipe
    assert recipe_differences(again, recipe) == []


@pytest.mark.parametrize(
    "text", ["a${b}", r"c:\${x}", r"\\${x}", "012", "no", "null", "1e-4", "${", "ü: # x", "a\nb", " s "]
)
def test_b64_text_is_saved_and_read_back_as_it_is(tmp_path: Path, text: str) -> None:
    recipe = load()
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": {"input": text}})})
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load(base=tmp_path / "recipe.yaml").data.columns == {"input": text}


def test_differences_are_named_by_key_with_both_values() -> None:
    found = recipe_differences(load(), load("optimizer.lr=1e-5", "data.max_tokens=64", "resume=auto"))
    assert found == [("data.max_tokens", 2048, 64), ("optimizer.lr", 2e-4, 1e-5), ("resume", None, "auto")]


def test_recipes_are_looked_up_as_a_path_then_here_then_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shipped_folder("recipes") / "quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart") == shipped.resolve()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text("model: {path: here}\n")
    assert find_recipe("quickstart") == Path("recipes/quickstart.yaml")
    (tmp_path / "mine.yaml").write_text("model: {path: builtin:tiny}\ndata: {path: x}\ntrain: {batch: 1}\n")
    assert load(base=Path("mine.yaml")).recipe == "mine"
    with pytest.raises(ConfigError):
        find_recipe("recipes/../../quickstart")


def test_the_names_of_other_tools_lead_to_keys_that_exist() -> None:
    known = {key.name for key in KEYS.values()} | set(SECTIONS)
    assert set(ELSEWHERE.values()) <= known
    assert KNOWN.trackers == TRACKERS
    assert not {name for name in ELSEWHERE if (name,) in KEYS}


@pytest.mark.parametrize(
    ("run", "word", "what"),
    [
        (("adapter.kind=lora", "adapter.init=pissa"), "model.base=nf4", "which quantisation would blur"),
        ((), "model.base=int8", "cannot be trained itself"),
        (("model.precision=bf16", "model.trained=split"), "model.precision=fp32", "products are to be made in fp32"),
    ],
)
def test_a_finished_run_is_not_held_to_what_only_training_needs(
    tmp_path: Path, run: tuple[str, ...], word: str, what: str
) -> None:
    save_recipe(load(*run), tmp_path / "recipe.yaml")
    assert what in faults(word, base=tmp_path / "recipe.yaml")[0].what
    key, value = word.split("=")
    read = load_recipe(tmp_path / "recipe.yaml", [word], KNOWN, Launch(), finished=True)
    assert getattr(read.model, key.removeprefix("model.")) == value
    # Everything else still holds.
    with pytest.raises(ConfigError, match="double_quant"):
        load_recipe(tmp_path / "recipe.yaml", ["model.double_quant=false"], KNOWN, Launch(), finished=True)
