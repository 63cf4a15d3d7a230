"""House rules on what is shipped: every recipe loads and plans, every template is a template, every key is read."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache

import pytest

from finetune.commands.arguments import known_names
from finetune.config.check import NOT_BUILT
from finetune.config.keys import KEYS, section_of
from finetune.config.load import load_recipe, recipe_names
from finetune.config.schema import Recipe
from finetune.environment import Launch, shipped_folder
from tests.house.source import PACKAGE, ROOT, Module, functions, modules, parameters

RECIPES = (
    "full_llama3",
    "lora_llama3",
    "lora_mistral",
    "lora_qwen",
    "pretrain_text",
    "qlora_llama3",
    "quickstart",
)
TEMPLATES = (
    "alpaca", "chatml", "completion", "gemma", "grammar", "llama3", "messages", "mistral", "qwen", "sharegpt", "summarize",
    "text",
)  # fmt: skip
MACHINES = {"1x24GB,64GB": 1, "1x80GB,128GB": 1, "8x80GB,1TB": 8}


def test_every_shipped_file_is_covered() -> None:
    assert tuple(sorted(path.stem for path in (ROOT / "recipes").rglob("*.yaml"))) == RECIPES
    assert tuple(sorted(path.stem for path in (ROOT / "data_templates").rglob("*.yaml"))) == TEMPLATES
    assert shipped_folder("recipes") == ROOT / "recipes"
    assert shipped_folder("data_templates") == ROOT / "data_templates"


def test_every_name_is_found() -> None:
    assert tuple(recipe_names()) == RECIPES
    assert tuple(sorted(known_names().templates)) == TEMPLATES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_names_no_hardware_and_loads(name: str) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert 15 <= len(text.splitlines()) <= 25
    assert text.startswith("# ")
    assert not re.search(r"^(plan|device|run|resume|recipe)\b", text, re.MULTILINE)
    recipe = load_recipe(path, (), known_names(), Launch())
    assert recipe.recipe == name
    for file in (recipe.data.path, recipe.data.valid_path):
        assert file is None or (ROOT / file).is_file()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_on_pretend_machines(name: str, machine: str) -> None:
    from finetune.models.shapes import shape_for
    from finetune.planner.hardware import parse
    from finetune.planner.plan import decide

    recipe = load_recipe(name, (), known_names(), Launch())
    shape, hardware = shape_for(recipe), parse(machine)
    assert hardware.gpus == MACHINES[machine]

    decision = decide(recipe, shape, hardware, ranks=hardware.gpus, longest_row=recipe.data.max_tokens)
    assert decision.plan.micro_batch >= 1
    assert not decision.budget.lack(decision.estimate)


def _parameters_that_hold_sections(module: Module) -> dict[str, set[str]]:
    """Parameters annotated with a section's class: their names, and the keys under which recipes hold those sections."""
    sections = {field.annotation.__name__: name for name, field in Recipe.model_fields.items() if section_of(field)}
    held: dict[str, set[str]] = {}
    for function in functions(module):
        for one in parameters(function):
            kind = ast.unparse(one.annotation).rpartition(".")[2] if one.annotation else ""
            if kind in sections:
                held.setdefault(one.arg, set()).add(sections[kind])
    return held


@cache
def _reads() -> tuple[set[str], set[tuple[str, str]]]:
    """Attributes read outside config/: their names, and (section that they are read from, name).

    The section is the name in front of the dot, or what a parameter of that name is annotated with.
    """
    leaves: set[str] = set()
    chains: set[tuple[str, str]] = set()
    for module in modules():
        if module.room == "config":
            continue
        held = _parameters_that_hold_sections(module)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                leaves.add(node.attr)
                value = node.value
                owner = (
                    value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
                )
                chains |= {(owner, node.attr), *((section, node.attr) for section in held.get(owner, ()))}
    return leaves, chains


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_every_key_is_read_outside_config(path: tuple[str, ...]) -> None:
    if ".".join(path) in NOT_BUILT:
        return  # refused by name when it is set; the row leaves that table when the choice is built
    if len(KEYS[path].choices) == 1:
        return  # one value leaves nothing to decide
    leaves, chains = _reads()
    alone = sum(other[-1] == path[-1] for other in KEYS) == 1
    if len(path) == 1 or not alone:
        owners = ("recipe", "self.recipe") if len(path) == 1 else (path[0],)
        assert any((owner, path[-1]) in chains for owner in owners), f"nobody reads {'.'.join(path)}"
    else:
        assert path[-1] in leaves, f"nobody reads {'.'.join(path)}"


def test_keys_that_are_refused_as_not_built_are_keys() -> None:
    assert {tuple(name.split(".")) for name in NOT_BUILT} <= set(KEYS)
    assert len(NOT_BUILT) == 4


def test_the_names_of_trackers_are_those_that_are_driven() -> None:
    from finetune.telemetry.metrics import TRACKERS

    assert known_names().trackers == TRACKERS


def test_the_package_lists_every_room() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    rooms = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")}
    assert set(setup["packages"]) == rooms | {"finetune.recipes", "finetune.data_templates"}


def test_warnings_of_our_own_code_are_errors() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "error::Warning:finetune.*" in options["filterwarnings"]
