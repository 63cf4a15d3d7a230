"""House rules on files and functions: their size, their names, their first line."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, ROOT, Module, functions, modules, parameters

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
PARAMETERS = 6
VERSIONS = {"v2"}
"""Says nothing in a file's name; a function may read the second version of somebody's format."""
FORBIDDEN = VERSIONS | {"utils", "util", "common", "misc", "manager", "helper", "helpers"}

every_module = pytest.mark.parametrize("module", modules(), ids=repr)


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def tracked() -> list[Path]:
    """Files of the project: those that git knows or would add."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    return [path for folder in ("finetune", "tests", "recipes") for path in (ROOT / folder).rglob("*.*")]


def test_there_is_source_to_look_at() -> None:
    assert len(modules()) > 20
    assert {"config", "commands"} <= {module.room for module in modules()}


def test_no_file_is_longer_than_400_lines() -> None:
    code = [path for path in tracked() if path.suffix in (".py", ".sh", ".yaml") or "scripts" in path.parts]
    assert len(code) > 40
    long = {
        str(p.relative_to(ROOT)): n for p in code if (n := len(p.read_text("utf-8").splitlines())) > LINES_OF_A_FILE
    }
    assert long == {}


@every_module
def test_a_file_opens_with_what_it_is(module: Module) -> None:
    first = (ast.get_docstring(module.tree) or "").split("\n")[0]
    assert first, f"{module.path} has no docstring"
    assert len(first) > 15


@every_module
def test_functions_are_short_and_take_few_parameters(module: Module) -> None:
    wrong = []
    for function in functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > LINES_OF_A_FUNCTION:
            wrong.append(f"{function.name} (line {function.lineno}) has {length} lines")
        if len(parameters(function)) > PARAMETERS:
            wrong.append(f"{function.name} (line {function.lineno}) has {len(parameters(function))} parameters")
    assert wrong == []


@every_module
def test_functions_are_annotated(module: Module) -> None:
    wrong = []
    for function in functions(module):
        if function.returns is None:
            wrong.append(f"{function.name} (line {function.lineno}) says no result")
        wrong += [f"{function.name}({one.arg})" for one in parameters(function) if one.annotation is None]
    assert wrong == []


def test_no_name_says_nothing() -> None:
    wrong = []
    for path in PACKAGE.rglob("*"):
        if path.suffix in ("", ".py") and words(path.stem) & FORBIDDEN:
            wrong.append(str(path.relative_to(ROOT)))
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and words(node.name) & FORBIDDEN - VERSIONS:
                wrong.append(f"{module.name}.{node.name}")
    assert wrong == []


@every_module
def test_no_state_of_a_module_is_changed_while_running(module: Module) -> None:
    found = [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Global)]
    assert found == []


def test_words_of_a_name() -> None:
    assert words("load_recipe") == {"load", "recipe"}
    assert words("TrainManager") == {"train", "manager"}
    assert words("my_utils_v2") == {"my", "utils", "v2"}
