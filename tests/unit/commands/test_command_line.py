"""The command line: words, help, exit codes, and messages without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import finetune
from finetune.__main__ import main
from finetune.commands.table import COMMANDS, Command, word_module
from finetune.config.keys import KEYS
from finetune.config.load import recipe_names
from finetune.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BUILT = ("train", "plan", "data", "export", "generate", "evaluate", "bench", "runs", "recipes", "templates")
NOT_BUILT = ("doctor", "profile", "report", "launch")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_of_words() -> None:
    assert tuple(word for word, row in COMMANDS.items() if row.module) == BUILT
    assert tuple(word for word, row in COMMANDS.items() if not row.module) == NOT_BUILT
    assert len(COMMANDS) == 14


def test_the_overview_names_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word, row in COMMANDS.items():
        assert f"  {word} " in text
        assert row.summary in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"finetune {finetune.__version__}\n"


@pytest.mark.parametrize("word", BUILT)
def test_each_word_has_help_with_examples(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"finetune {word}")
    examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert 2 <= len(examples) <= 3
    assert all("finetune" in example for example in examples)
    for key in word_module(COMMANDS[word]).TAKES.own:
        assert f"  {key}=" in out
    assert max(map(len, out.splitlines())) <= 200


def test_help_of_train_lists_every_key_with_its_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    with_word = capsys.readouterr().out
    assert main(["recipe=quickstart", "--help"]) == 0
    assert capsys.readouterr().out == with_word
    assert len(KEYS) == 108
    for key in KEYS.values():
        assert f"  {key.name}" in with_word
        assert key.doc
        assert key.doc in with_word
    assert "optimizer.lr                    The peak learning rate." in with_word
    assert "(a number above 0; default 0.0002)" in with_word


@pytest.mark.parametrize("word", NOT_BUILT)
def test_words_that_are_not_built_say_so(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "kind=slurm"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", f"`finetune {word}` is not built yet in this version")
    assert main([word, "--help"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evalute", "run=x"], "did you mean `finetune evaluate`?"),
        (["quickstart"], "to run the recipe of that name: finetune recipe=quickstart"),
        (["xyzzy"], "the words are: train plan data"),
        ([], "no recipe is named"),
        (["train.max_steps=3"], "no recipe is named"),
        (["recipes", "--jsn"], "'--jsn' is not understood"),
        (["recipes", "x=1"], "this word takes no keys"),
        (["train", "recipe=quickstart", "--json"], "--json: this word reports nothing"),
        (["train", "recipe=quickstart", "recipe=quickstart"], "command line recipe: given twice"),
        (["recipe=quikstart"], "did you mean recipe=quickstart?"),
        (["plan", "recipe=quickstart", "train.bach=2"], "did you mean train.batch?"),
        (["data", "recipe=quickstart", "--train.batch=2"], "keys have no dashes: write train.batch=VALUE"),
        (["export", "run=nowhere", "to=merge"], "did you mean to=merged?"),
        (["export", "run=nowhere", "to=hub"], "repo= is missing"),
        (["export", "run=nowhere", "to=gguf"], "to=gguf is not built yet"),
        (["export", "run=nowhere", "too=hub"], "did you mean to=?"),
        (["generate", "run=nowhere"], "prompt= is missing"),
        (["evaluate", "train.bach=3"], "run= is missing"),
        (["runs", "diff=a"], "does not name two runs"),
    ],
)
def test_wrong_input_is_a_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_b63_faults_of_words_and_recipe_come_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["recipe=quickstart", "num-epochs=3", "optimizer.lr=fast", "model.rank=8", "data.template=grammer"]) == 2
    )
    err = capsys.readouterr().err
    assert err.startswith("4 faults in the recipe:\n")
    for part in ("num-epochs: there is no key", "optimizer.lr: 'fast' is not a number", "did you mean grammar?"):
        assert part in err
    assert main([]) == 2
    assert ", ".join(recipe_names()) in capsys.readouterr().err


def test_export_lists_all_that_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "to=hubb", "bogus=1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("3 faults")
    assert "did you mean to=hub?" in err
    assert "run= is missing" in err


def test_one_rank_alone_prints_what_all_ranks_see(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["recipe=quickstart", "train.bach=2"]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", lines)
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        ("errors.NothingFitsError('3 GiB lack')", 3, "3 GiB lack\n"),
        ("errors.StoppedError('stopped at step 3')", 4, "stopped at step 3\n"),
        (
            "errors.DataError('a bad row', 'x.jsonl line 2', 'mend it')",
            2,
            "x.jsonl line 2: a bad row\n    -> mend it\n",
        ),
        ("KeyboardInterrupt()", 130, "interrupted (Ctrl-C)\n"),
        ("KeyboardInterrupt('while it was loaded')", 130, "interrupted (Ctrl-C) while it was loaded\n"),
        ("BrokenPipeError()", 141, ""),
    ],
)
def test_exit_codes(
    raised: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = f"word_that_ends_{code}_{len(raised)}"
    (tmp_path / f"{name}.py").write_text(f"from finetune import errors\ndef main(arguments):\n    raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "doctor", Command("a word that fails", name))
    if code == 141:
        monkeypatch.setattr("finetune.__main__._close_stdout", lambda: None)
    assert main(["doctor"]) == code
    assert capfd.readouterr().err == message


def test_a_fault_of_ours_shows_its_traceback_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "word_with_a_fault.py").write_text("def main(arguments):\n    return 1 // 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "doctor", Command("a word that fails", "word_with_a_fault"))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert f"This is a fault in finetune {finetune.__version__}, not in your input." in err


def test_recipes_and_templates_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == recipe_names()
    methods = {row["name"]: row["method"] for row in rows}
    assert (methods["quickstart"], methods["qlora_llama3"], methods["full_llama3"]) == ("lora", "qlora", "full")
    assert all(row["about"].endswith(".") for row in rows)
    assert main(["templates", "--json"]) == 0
    assert "grammar" in [row["name"] for row in json.loads(capsys.readouterr().out)]
    for word in ("recipes", "templates"):
        assert main([word]) == 0
        assert ("quickstart" if word == "recipes" else "grammar") in capsys.readouterr().out


def test_run_from_python_raises_what_the_command_line_prints() -> None:
    with pytest.raises(ConfigError) as raised:
        finetune.run({"model": {"path": "builtin:tiny"}, "train": {"batch": 0}}, "optimizer.lrr=1", "data.path=x")
    assert [fault.where for fault in raised.value.faults] == [
        "command line optimizer.lrr",
        "the given dictionary train.batch",
    ]
    assert finetune.Result.__name__ == "Result"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = finetune.nothing


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    words = [sys.executable, "-m", "finetune", "train", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, error) == (141, "")


def test_accelerate_launch_behaves_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "finetune", "recipes", "--json"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert main(["recipes", "--json"]) == 0
    assert [row["name"] for row in json.loads(done.stdout)] == [
        row["name"] for row in json.loads(capsys.readouterr().out)
    ]


LONG = "a" * 300


@pytest.mark.parametrize("path", [LONG, "~nobodyhere/x", "loop/x"])
@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("data", "recipe={}"),
        ("data", "recipe=job.yaml model.path=./{}"),
        ("data", "recipe=job.yaml data.path={}.jsonl"),
        ("data", "recipe=job.yaml data.template=./{}.yaml"),
        ("train", "recipe=job.yaml run.dir={}"),
        ("train", "recipe=job.yaml resume={}"),
        ("generate", "run={} prompt=x"),
        ("runs", "path={}"),
        ("runs", "diff={},b"),
    ],
)
def test_a_path_that_cannot_be_looked_up_is_wrong_input(
    word: str, keys: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("loop").symlink_to("loop")
    Path("job.yaml").write_text("{model: {path: builtin:tiny}, data: {path: x.jsonl}, train: {batch: 1}}")
    keys = keys.replace("./{}", "{}") if path.startswith("~") else keys
    assert main([word, *(key.format(path) for key in keys.split())]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_what_does_not_act_on_a_finished_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "run=x", "prompt=y", "train.batch=3", "adapter.path=z", "run.dir=w", "generate.max_tokens=4"]
    assert main(words) == 2
    err = capsys.readouterr().err
    for key in ("train.batch", "adapter.path", "run.dir"):
        assert f"command line {key}: has no effect here: the run is finished" in err
    assert "command line generate" not in err
    assert main(["evaluate", "run=x", "train.batch=3", "data.valid_path=v", "evaluate.sets.a=b"]) == 2
    err = capsys.readouterr().err
    assert err.count("has no effect here") == 1


def test_a_hub_export_takes_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run=x", "to=hub", "repo=a/b", "path=out"]) == 2
    assert "to=hub writes none" in capsys.readouterr().err
