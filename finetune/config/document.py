"""Recipe text to a tree of text: YAML files and `key=value` words, with the place that every key came from.

No scalar is interpreted here: `012`, `no`, `12:30` and `2e-5` reach the schema as they were typed, and the type of the
field decides. So YAML's version does not matter, quotes make no difference, and a file and the command line read alike.
Duplicate keys, YAML tags and merge keys are refused rather than resolved by some rule nobody remembers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.config.keys import SECTIONS, key_of, suggest
from finetune.errors import Fault

Place = tuple[str, ...]
PLAIN = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
MOST_NODES = 20_000
COMMAND_LINE = "command line"


@dataclass
class Document:
    """One source of settings: the tree, where each key stands, what is wrong so far and at which keys."""

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[Place, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    faulty: set[Place] = field(default_factory=set)

    def fault(self, path: Place, what: str, remedy: str = "") -> None:
        self.faulty.add(path)
        place = self.places.get(path, self.name)
        self.faults.append(Fault(f"{place} {'.'.join(path)}".strip(), what, remedy))


class _Reader:
    """Walks YAML nodes into a Document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0
        self.open: list[int] = []

    def line(self, node: yaml.Node) -> str:
        return f"{self.document.name}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, path: Place) -> Any:
        self.nodes += 1
        if id(node) in self.open or self.nodes > MOST_NODES:
            self.document.faults.append(Fault(self.line(node), "an alias that repeats without end", "write it out"))
            return ""
        if node.tag not in PLAIN:
            what = f"the YAML tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not read"
            self.document.faults.append(Fault(self.line(node), what, "leave it out: the key's type decides"))
            return ""
        self.open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, path) for item in node.value]
            return node.value
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Place) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.document.faults.append(Fault(self.line(key), "a key that is not a word", "write KEY: VALUE"))
                continue
            inner = (*path, key.value)
            if key.value in tree:
                what = f"given twice; the first is {self.document.places[inner]}"
                self.document.faults.append(Fault(f"{self.line(key)} {'.'.join(inner)}", what, "keep one"))
                continue
            self.document.places[inner] = self.line(key)
            tree[key.value] = self.read(value, inner)
        return tree


def read_file(path: Path) -> Document:
    """A YAML file. Faults of its form are in the document, with their line; nothing is raised."""
    document = Document(str(path))
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        document.faults.append(Fault(place, f"not YAML: {error.problem or error.context}", "correct this line"))
        return document
    except RecursionError:
        document.faults.append(Fault(str(path), "YAML nested too deeply", "see recipes/"))
        return document
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        document.faults.append(Fault(str(path), f"not YAML text: {error}", "save the file as UTF-8 YAML"))
        return document
    except OSError as error:
        document.faults.append(Fault(str(path), f"cannot be read: {error.strerror}", "check the path and its rights"))
        return document
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        document.faults.append(Fault(f"{path}:1", "not a recipe: sections of KEY: VALUE are wanted", "see recipes/"))
        return document
    document.tree = _Reader(document).read(node, ())
    return document


def read_mapping(values: Mapping[str, Any]) -> Document:
    """A recipe as a Python dictionary; values keep their own types."""
    document = Document("the given dictionary")

    def copy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): copy(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy(inner) for inner in value]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    document.tree = copy(values)
    return document


def read_words(words: Sequence[str]) -> Document:
    """`key=value` words of the command line. A key may come once; an empty value is null."""
    document = Document(COMMAND_LINE)
    for word in words:
        name, equals, value = word.partition("=")
        path = tuple(name.split("."))
        if not equals or not name or name.startswith("-"):
            document.faults.append(Fault(COMMAND_LINE, f"{word!r} is not understood", _remedy_of_word(name)))
            continue
        if path in document.places:
            document.fault(path, "given twice", "keep one")
            continue
        if not _put(document.tree, path, value):
            document.fault(path, "given as a value and as a section", "keep one")
            continue
        document.places[path] = COMMAND_LINE
    return document


def _remedy_of_word(word: str) -> str:
    bare = word.lstrip("-")
    if not word.startswith("-"):
        return f"write KEY=VALUE, for example recipe={word or 'NAME'}"
    if not bare:
        return "write KEY=VALUE"
    path = tuple(bare.replace("-", "_").split("."))
    if key_of(path):
        return f"keys have no dashes: write {'.'.join(path)}=VALUE"
    return f"write KEY=VALUE, without dashes; {suggest(tuple(bare.split('.')))}"


def _put(tree: dict[str, Any], path: Place, value: str) -> bool:
    """Sets one value in a nested dictionary; False when a section and a value would share a place."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return False
    if path[-1] in tree:
        return False
    tree[path[-1]] = value
    return True


def keep_known(document: Document) -> None:
    """Takes out what the schema has no place for, with a fault each, so that the rest can still be checked."""

    def section(tree: dict[str, Any], path: Place) -> dict[str, Any]:
        kept = {}
        for name, value in tree.items():
            inner = (*path, name)
            if len(inner) == 1 and name in SECTIONS:
                if isinstance(value, dict):
                    kept[name] = section(value, inner)
                elif value not in (None, ""):
                    what = f"{value!r} is given where a section is wanted"
                    document.fault(inner, what, f"write {name}.KEY=VALUE, or a section of KEY: VALUE in a file")
            elif _accepts(document, inner, value):
                kept[name] = value
        return kept

    document.tree = section(document.tree, ())


def _accepts(document: Document, path: Place, value: Any) -> bool:
    key = key_of(path)
    if key is None:
        place = f"in the section {'.'.join(path[:-1])}" if len(path) > 1 else "at the top"
        document.fault(path, f"there is no key {path[-1]!r} {place}", suggest(path))
        return False
    if isinstance(value, dict) and not (key.pairs and ".".join(path) == key.name):
        document.fault(path, f"a section is given where {key.wants} is wanted", f"write {'.'.join(path)}=VALUE")
        return False
    return True
