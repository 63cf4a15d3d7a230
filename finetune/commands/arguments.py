"""What a word was given: its own keys, a recipe with overrides, `--json`; and the steps that words share.

A word says what it takes in a `Takes`; everything else is left to the recipe's loader, so that one message lists the
faults of the command line and of the file together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finetune.config.check import Known
from finetune.config.keys import KEYS, key_of, nearest
from finetune.config.load import load_recipe, override_faults, recipe_differences, recipe_names
from finetune.config.schema import Recipe
from finetune.environment import Launch, user_path
from finetune.errors import ConfigError, Fault, InputError

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Takes:
    """What a word takes: its own keys with their meaning, recipe keys (and `recipe=` itself), `--json`.

    `acts`: the sections and keys of a recipe that change what the word does; others are refused. Empty: all of them.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    recipe: bool = False
    overrides: bool = False
    json: bool = True
    lists_keys: bool = False
    acts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart; `faults` are those that need no recipe to be seen."""

    own: Mapping[str, str]
    source: str | None
    overrides: tuple[str, ...]
    json: bool
    faults: tuple[Fault, ...]

    def need(self, key: str, example: str) -> list[Fault]:
        """A fault when the word's own key was not given."""
        if self.own.get(key):
            return []
        return [Fault(COMMAND_LINE, f"{key}= is missing", f"for example: {example}")]


def read(words: Sequence[str], takes: Takes) -> Arguments:
    """Takes the words of a command line apart. Raises nothing: faults are in the result."""
    own: dict[str, str] = {}
    overrides: list[str] = []
    faults: list[Fault] = []
    as_json = False
    names = {**takes.own, **({"recipe": ""} if takes.recipe else {})}
    for word in words:
        key, equals, value = word.partition("=")
        if word == "--json":
            as_json = True
            if not takes.json:
                faults.append(Fault(COMMAND_LINE, "--json: this word reports nothing", "leave it out"))
        elif equals and key in names:
            if key in own:
                faults.append(Fault(f"{COMMAND_LINE} {key}", "given twice", "keep one"))
            own.setdefault(key, value)
        elif takes.overrides:
            overrides.append(word)
            if takes.acts and key_of(tuple(key.split("."))) and not _among(key, takes.acts):
                what = "has no effect here: the run is finished"
                faults.append(Fault(f"{COMMAND_LINE} {key}", what, f"leave it out; what acts: {', '.join(takes.acts)}"))
        else:
            faults.append(_unknown(word, names))
    return Arguments(own, own.pop("recipe", None) or None, tuple(overrides), as_json, tuple(faults))


def _among(key: str, acts: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in acts)


def _unknown(word: str, names: Mapping[str, str]) -> Fault:
    key = word.partition("=")[0].lstrip("-")
    close = nearest(key, names)
    takes = f"this word takes: {', '.join(f'{name}=' for name in names)}" if names else "this word takes no keys"
    return Fault(COMMAND_LINE, f"{word!r} is not understood", f"did you mean {close}=?" if close else takes)


def known_names() -> Known:
    """The names that recipes may use, from the tables of the rooms that own them."""
    from finetune.data.templates import template_names
    from finetune.optim.schedule import SCHEDULES
    from finetune.optim.table import OPTIMIZERS

    return Known(
        tuple(OPTIMIZERS),
        tuple(SCHEDULES),
        tuple(template_names()),
        optimizer_keys={name: row.keys for name, row in OPTIMIZERS.items()},
        fp32_optimizers=tuple(name for name, row in OPTIMIZERS.items() if row.fp32_only),
    )


def recipe_of(arguments: Arguments, launch: Launch, faults: Sequence[Fault] = ()) -> Recipe:
    """The recipe that a command line names. Raises ConfigError with all faults: those given, the words', the recipe's."""
    if arguments.source is None:
        remedy = f"write recipe=NAME or recipe=FILE. There are: {', '.join(recipe_names())}"
        missing = Fault(COMMAND_LINE, "no recipe is named", remedy)
        raise ConfigError([*arguments.faults, *faults, missing, *override_faults(arguments.overrides)])
    return loaded(arguments.source, arguments, launch, faults)


def loaded(source: str | Path, arguments: Arguments, launch: Launch, faults: Sequence[Fault]) -> Recipe:
    """The recipe of a file with the command line's overrides; `faults` and the arguments' own join those of the recipe."""
    found = [*arguments.faults, *faults]
    try:
        recipe = load_recipe(source, arguments.overrides, known_names(), launch)
    except ConfigError as error:
        raise ConfigError([*found, *error.faults]) from None
    if found:
        raise ConfigError(found)
    return recipe


def find_run(name: str, root: Path = Path("runs")) -> Path | Fault:
    """A run's folder: a path as given, or a name in `runs/`. A fault when there is none."""
    where = f"{COMMAND_LINE} run"
    try:
        places = (user_path(name, where), user_path(root / name, where))
    except InputError as error:
        return error.fault
    for path in places:
        if (path / "recipe.yaml").is_file():
            return path
    there = [path.parent.name for path in root.glob("*/recipe.yaml")]
    close = nearest(Path(name).name, there)
    remedy = f"did you mean run={root / close}?" if close else "`finetune runs` lists the runs of a folder"
    return Fault(where, f"{name!r} is not a run's folder: it has no recipe.yaml", remedy)


def run_of(arguments: Arguments, faults: Sequence[Fault], example: str) -> Path:
    """The folder that `run=` names. Raises ConfigError with this fault and those found before."""
    found = [*arguments.faults, *faults, *arguments.need("run", example)]
    if arguments.own.get("run"):
        run = find_run(arguments.own["run"])
        if isinstance(run, Fault):
            found.append(run)
        elif not found:
            return run
    raise ConfigError([*found, *override_faults(arguments.overrides)])


def notes_of_launch(before: Recipe, after: Recipe, launch: Launch) -> list[str]:
    """What the launcher decided where the recipe left a choice open, one line each."""
    notes = [f"{key}={value}, as the launcher says" for key, _, value in recipe_differences(before, after)]
    if launch.one_of_several:
        notes.append(
            "the launcher was asked for several processes and started one (accelerate does so without GPUs); "
            "for several on a CPU: torchrun --nproc_per_node 2 -m finetune ..."
        )
    return notes


def tell(notes: Sequence[str], launch: Launch) -> None:
    """Prints notes on standard error, by the first rank alone."""
    for note in notes if launch.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)


def help_text(word: str, about: str, takes: Takes) -> str:
    """What `finetune WORD --help` prints."""
    usage = [f"finetune {word}", *(["recipe=NAME"] if takes.recipe else []), *(f"[{key}=...]" for key in takes.own)]
    usage += ["[key=value ...]"] if takes.overrides else []
    usage += ["[--json]"] if takes.json else []
    lines = [" ".join(usage), "", about.strip()]
    if takes.own:
        width = max(map(len, takes.own)) + 3
        lines += ["", "Keys:", *(f"  {key + '=':<{width}}{meaning}" for key, meaning in takes.own.items())]
    if takes.lists_keys:
        lines += ["", "Keys of a recipe (what each takes; its default):", *_recipe_keys()]
    elif takes.acts:
        lines += ["", f"Keys of a recipe that act here (`finetune train --help` tells more): {', '.join(takes.acts)}."]
    elif takes.overrides:
        lines += ["", "Any key of a recipe can be given too: `finetune train --help` lists them."]
    return "\n".join(lines)


def _recipe_keys() -> list[str]:
    lines = []
    section = ""
    for path, key in KEYS.items():
        if len(path) > 1 and path[0] != section:
            section = path[0]
            lines.append("")
        entry = f"{key.name}.NAME" if key.pairs else key.name
        wants = key.wants.removeprefix("a section of ")
        lines.append(f"  {entry:<32}{key.doc}")
        lines.append(f"  {'':<32}({wants}; default {key.default})")
    return lines
