"""A recipe's name, file or dictionary, and `key=value` overrides, to one frozen Recipe, or to every fault at once.

The steps: read each source as a tree of text; take out keys that the schema does not have; merge (OmegaConf, which also
resolves ${...}); let the schema validate; apply the rules over several fields to what is sound. A fault in one step does not
hide those of the next: what is faulty is left at its default, and rules that speak of it are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from finetune import environment
from finetune.config.check import Known, problems
from finetune.config.document import Document, keep_known, read_file, read_mapping, read_words
from finetune.config.keys import KEYS, NOT_BUILT_VALUES, key_of, nearest, show
from finetune.config.schema import Recipe
from finetune.errors import ConfigError, Fault, InputError

Place = tuple[str, ...]
Source = str | Path | Mapping[str, Any]
MODEL = ("model", "path")
OWN_SHARE = 0.05
"""The share of rows held out from data of the command line's, in the place of the recipe's own valid_path."""
STAND_IN = "builtin:tiny"
"""The model path of a recipe that is checked further although it names no model."""


def recipe_folders() -> list[Path]:
    """Where recipes are looked up by name: ./recipes, then the shipped ones."""
    return [Path("recipes"), environment.shipped_folder("recipes")]


def recipe_names() -> list[str]:
    """The names that `recipe=NAME` finds, sorted."""
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path as given (a run's folder counts), ./recipes/NAME.yaml, then the shipped one.

    Raises ConfigError with the nearest name.
    """
    try:
        path = environment.user_path(name, "recipe")
    except InputError as error:
        raise ConfigError([error.fault]) from error
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.name == str(name):
        for folder in recipe_folders():
            named = folder / f"{name}.yaml"
            if named.is_file():
                return named
    names = recipe_names()
    close = nearest(path.stem, names)
    remedy = f"did you mean recipe={close}? " if close else ""
    raise ConfigError([Fault("recipe", f"there is no recipe {str(name)!r}", f"{remedy}There are: {', '.join(names)}")])


def load_recipe(
    source: Source,
    overrides: Sequence[str] = (),
    known: Known | None = None,
    launch: environment.Launch | None = None,
    finished: bool = False,
) -> Recipe:
    """The recipe that `source` and `key=value` overrides make.

    `known` holds the names that tables have (none: names are not checked); `launch` is what the launcher says, read from
    the environment when it is not given. The launcher's choices are checked against the recipe and not put into it:
    `check.resolve_launch` does that. `finished`: the source is a run whose result is only read, so rules about how
    training begins do not hold. Raises ConfigError with all faults.
    """
    base, stem = _read(source)
    words = read_words(overrides)
    whole = bool(base.tree) or not base.faults
    for document in (base, words):
        keep_known(document)
    tree = _merge(base, words)
    if _other_data(base, words):
        tree["data"] = {**tree["data"], "valid_path": None, "valid_share": str(OWN_SHARE)}
    if _no_adapter(base, words):
        tree["adapter"] = {"kind": "none"}
    if stem is not None:
        tree.setdefault("recipe", stem)
    places = {**base.places, **words.places}
    found: list[Fault] = [*base.faults, *words.faults]
    faulty = base.faulty | words.faulty | (set() if whole else {MODEL})
    recipe = _validate(tree, base.name, places, found, faulty)
    if whole:
        launch = environment.launch() if launch is None else launch
        for problem in problems(recipe, known, launch):
            if not any(_inside(key, faulty) for key in problem.keys) and not (finished and problem.training):
                where = " and ".join(_where(tuple(key.split(".")), base.name, places) for key in problem.keys)
                found.append(Fault(where, problem.what, problem.remedy))
    if found:
        raise ConfigError(found)
    return recipe


def _other_data(base: Document, words: Document) -> bool:
    """Whether the words name other data than the recipe and no held-out rows: those of the recipe would not fit them."""
    named = any(("data", key) in words.places for key in ("valid_path", "valid_share"))
    there = ("data", "path") in words.places and ("data", "valid_path") in base.places
    return there and not named and bool(_value(base.tree, ("data", "valid_path")))


def _no_adapter(base: Document, words: Document) -> bool:
    """Whether the words ask for no adapter and the recipe describes one, whose settings then have no object."""
    own = [place for place in words.places if place[0] == "adapter" and place[1:] != ("kind",)]
    described = isinstance(base.tree.get("adapter"), Mapping) and len(base.tree["adapter"]) > 1
    return _value(words.tree, ("adapter", "kind")) == "none" and not own and described


def notes_of_words(source: Source, overrides: Sequence[str]) -> list[str]:
    """What the words decided although they do not say it, one line each."""
    base, words = _read(source)[0], read_words(overrides)
    found = []
    if _no_adapter(base, words):
        aside = ", ".join(f"adapter.{name}" for name in base.tree["adapter"] if name != "kind")
        found.append(f"adapter.kind=none: the recipe's own {aside} are set aside")
    if not _other_data(base, words):
        return found
    kept = _value(base.tree, ("data", "valid_path"))
    return [
        *found,
        f"data.valid_path={kept} belongs to the recipe's own data; {OWN_SHARE:.0%} of the rows of data.path are held out "
        "instead (say data.valid_path=FILE, or data.valid_share=0.1)",
    ]


def _read(source: Source) -> tuple[Document, str | None]:
    """The source's document and the name that it gives to its recipe."""
    if isinstance(source, Mapping):
        return read_mapping(source), None
    try:
        path = find_recipe(source)
    except ConfigError as error:
        return Document(str(source), faults=list(error.faults)), None
    return read_file(path), path.resolve().parent.name or None if path.name == "recipe.yaml" else path.stem


def _where(path: Place, name: str, places: Mapping[Place, str]) -> str:
    """Where a key stands: its file and line, the command line, or (unset) the source that lacks it."""
    given = next((places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in places), name)
    return f"{given} {'.'.join(path)}"


def _inside(key: str, faulty: set[Place]) -> bool:
    path = tuple(key.split("."))
    return any(path == place[: len(path)] or place == path[: len(place)] for place in faulty)


def _leaves(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    else:
        yield path, tree


def _merge(base: Document, words: Document) -> dict[str, Any]:
    """Both trees as one, the command line last, with every ${...} resolved. A reference that fails is a fault."""
    merged = OmegaConf.merge(OmegaConf.create({}), _config(base), _config(words))
    tree: Any = OmegaConf.to_container(merged, resolve=False)
    for path, value in list(_leaves(tree)):
        if not _refers(value):
            continue
        node: Any = merged
        try:
            for part in path:
                node = node[part]
            _set(tree, path, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        except OmegaConfBaseException as error:
            _refuse(words if path in words.places else base, path, value, error)
            _drop(tree, path)
    return tree


def _config(document: Document) -> Any:
    """The document's tree for OmegaConf; a Python value that is no setting (an object, a set) is a fault."""
    for path, value in list(_leaves(document.tree)):
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            _refuse(document, path, value, error)
            _drop(document.tree, path)
    return OmegaConf.create(document.tree)


def _refuse(document: Document, path: Place, value: Any, error: OmegaConfBaseException) -> None:
    reason = str(error).splitlines()[0]
    if value == "???":
        document.fault(path, "no value is given (???)", "write the value")
    elif _refers(value):
        document.fault(path, f"{show(value)} cannot be resolved: {reason}", r"write ${section.key}, or \${ for text")
    else:
        document.fault(path, f"{value!r} cannot be a setting: {reason}", "give text, a number or a list")


def _refers(value: Any) -> bool:
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and ("${" in value or value == "???")


def _set(tree: dict[str, Any], path: Place, value: Any) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = value


def _drop(tree: dict[str, Any], path: Place) -> None:
    for part in path[:-1]:
        tree = tree.get(part, {})
    tree.pop(path[-1], None)


def _validate(
    tree: dict[str, Any], name: str, places: Mapping[Place, str], found: list[Fault], faulty: set[Place]
) -> Recipe:
    """The recipe with faulty fields at their defaults; their faults go to `found` and their places to `faulty`."""
    if "path" not in tree.get("model", {}):
        if not faulty & {MODEL, MODEL[:1]}:
            found.append(Fault(f"{name} model.path", "is missing", f"give model.path=VALUE. {KEYS[MODEL].doc}"))
        faulty.add(MODEL)
        tree.setdefault("model", {})["path"] = STAND_IN
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        for entry in error.errors():
            path = _place(entry["loc"])
            if path not in faulty:
                faulty.add(path)
                found.append(_fault(path, _value(tree, path), _where(path, name, places)))
    for path in faulty:
        _drop(tree, path)
    if MODEL in faulty:
        tree.setdefault("model", {})["path"] = STAND_IN
    return Recipe.model_validate(tree)


def _place(location: tuple[int | str, ...]) -> Place:
    """The schema's key in pydantic's location, which goes on with list positions and branches of a union."""
    path = tuple(str(part) for part in location)
    for length in range(len(path), 0, -1):
        if key_of(path[:length]) is not None:
            return path[:length]
    return path[:1]


def _value(tree: Any, path: Place) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _fault(path: Place, value: Any, where: str) -> Fault:
    """The message for one value that its field does not take."""
    key = key_of(path)
    assert key is not None
    wants, give = key.wants, f"give {key.wants} (default {key.default})"
    if key.name != ".".join(path):
        wants = wants.removeprefix("a section of NAME: ")
        wants = f"a {wants}" if "number" in wants else wants
        give = f"give {wants}"
    if value is None or value == "":
        return Fault(where, "no value is given", give)
    shown = f"{value!r}" if isinstance(value, str) else f"{show(value)} ({type(value).__name__})"
    if str(value) in NOT_BUILT_VALUES.get(key.name, ()):
        return Fault(where, f"{shown} is not built yet in this version", f"give {key.wants}")
    close = nearest(str(value), key.choices) if key.choices else None
    remedy = f"did you mean {close}?" if close else give
    return Fault(where, f"{shown} is not {wants}", remedy)


def override_faults(overrides: Sequence[str]) -> list[Fault]:
    """What can be said against overrides when there is no recipe to apply them to."""
    words = read_words(overrides)
    keep_known(words)
    return words.faults


def _plain(value: Any) -> Any:
    """A field's value for YAML; ${ in text is escaped, so that it is read back as text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes every field, defaults too. `load_recipe(path)` gives an equal Recipe."""
    text = yaml.safe_dump(_plain(recipe.model_dump()), sort_keys=False, allow_unicode=True, width=120)
    path.write_text(text, encoding="utf-8")


def recipe_differences(a: Recipe, b: Recipe) -> list[tuple[str, object, object]]:
    """Dotted keys whose values differ, in the schema's order, with both values."""
    found: list[tuple[str, object, object]] = []
    for path, key in KEYS.items():
        left: Any = a
        right: Any = b
        for part in path:
            left, right = getattr(left, part), getattr(right, part)
        if left != right:
            found.append((key.name, left, right))
    return found
