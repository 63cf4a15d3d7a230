"""House rules on the README: its map is the tree, and its words are the command line's."""

from __future__ import annotations

import re
import subprocess

from finetune.commands.table import COMMANDS
from finetune.config.load import load_recipe, recipe_names
from finetune.environment import Launch
from tests.house.source import PACKAGE, ROOT

README = ROOT / "README.md"
UNMAPPED = {"build", "dist", "runs", "out", "shared"}


def blocks() -> list[str]:
    """The fenced blocks of the README."""
    return re.findall(r"^```[^\n]*\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def tree_block() -> str:
    """The block that lists the tree: the one that has both finetune/ and recipes/ as folders."""
    found = [block for block in blocks() if re.search(r"\bfinetune/\s", block) and re.search(r"\brecipes/\s", block)]
    assert len(found) == 1, "the README wants one fenced listing of the tree"
    return found[0]


def listed() -> list[str]:
    """Paths of the listing. A line is `NAME  what it is`, indented under its folder; tree characters are passed over."""
    paths: list[str] = []
    trail: list[tuple[int, str]] = []
    for line in tree_block().splitlines():
        bare = re.sub(r"[│├└─|`]", " ", line)
        names = re.match(r"\s*(\S+)", bare)
        if names is None:
            continue
        depth = len(bare) - len(bare.lstrip())
        trail = [(at, name) for at, name in trail if at < depth]
        path = "/".join([name.strip("/") for _, name in trail] + [names[1].strip("/")])
        if names[1].endswith("/"):
            trail.append((depth, names[1]))
        paths.append(path)
    return [path for path in paths if path not in ("finetune/finetune", ".")]


def tracked_folders() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    return {line.split("/")[0] for line in done.stdout.splitlines() if "/" in line and not line.startswith(".")}


def test_every_path_of_the_map_exists() -> None:
    assert len(listed()) > 15
    assert [path for path in listed() if not (ROOT / path).exists()] == []


def test_every_folder_is_on_the_map() -> None:
    rooms = {f"finetune/{path.name}" for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert sorted((tracked_folders() - UNMAPPED | rooms) - set(listed())) == []


def commands() -> list[list[str]]:
    """`finetune` command lines of the README's fenced and indented blocks, as their words."""
    indented = re.findall(r"^ {4,}(\S.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    text = "\n".join([*blocks(), *indented]).replace("\\\n", " ")
    lines = re.findall(r"(?:^|&&\s*|-m )finetune((?: [^\n#&|]+)?)", text, re.MULTILINE)
    return [line.split() for line in lines if "=" in line or line.strip().split(" ")[0] in COMMANDS]


def test_the_readmes_commands_are_words_recipes_and_keys_that_exist() -> None:
    assert len(commands()) >= 3
    for words in commands():
        if words and "=" not in words[0] and not words[0].startswith("-"):
            assert words[0] in COMMANDS, words
        recipe = next((word.partition("=")[2] for word in words if word.startswith("recipe=")), None)
        if recipe is None or "/" in recipe:
            continue
        assert recipe in recipe_names(), words
        own = ("recipe=", "hardware=", "picture=", "run=")
        overrides = [word for word in words if "=" in word and not word.startswith(own)]
        load_recipe(recipe, overrides, None, Launch())


def test_the_readme_has_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert "pip install -e . && accelerate launch -m finetune recipe=quickstart" in text
    assert re.search(r"pip install -e [\"']\.\[dev\][\"'] && scripts/test", text)
