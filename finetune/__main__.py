"""The command line: `finetune [WORD] key=value ...`, the same through `python -m finetune` and `accelerate launch -m finetune`.

It finds the word, runs it, and turns what is raised into a message and an exit code: 0 done, 2 the input is wrong,
3 nothing fits, 4 stopped by a signal after saving, 130 interrupted at once by Ctrl-C, 141 the reader of our output left,
1 a fault of ours (the only one that shows a traceback).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from finetune import __version__, environment
from finetune.commands import arguments as reading
from finetune.commands.table import COMMANDS, DEFAULT, overview, word_module
from finetune.config.keys import nearest
from finetune.config.load import recipe_names
from finetune.errors import ConfigError, Fault, FinetuneError, NotBuiltError

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Raises nothing."""
    given = list(sys.argv[1:] if words is None else words)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except FinetuneError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"interrupted (Ctrl-C) {error}".strip(), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    except Exception:
        traceback.print_exc()
        print(
            f"\nThis is a fault in finetune {__version__}, not in your input. Please report the lines above.",
            file=sys.stderr,
        )
        return 1


def _run(given: list[str]) -> int:
    if given and given[0] in ("--help", "-h", "help"):
        print(overview())
        return 0
    if given and given[0] == "--version":
        print(f"finetune {__version__}")
        return 0
    named = bool(given) and "=" not in given[0] and not given[0].startswith("-")
    word, rest = (given[0], given[1:]) if named else (DEFAULT, given)
    if word not in COMMANDS:
        raise ConfigError([_unknown_word(word)])
    command = COMMANDS[word]
    asks_help = any(part in ("--help", "-h") for part in rest)
    if command.module is None:
        if not asks_help:
            raise NotBuiltError(f"`finetune {word}`", "`finetune --help` lists what is built")
        print(f"finetune {word}: {command.summary}\n\nNot built yet in this version.")
        return 0
    if not command.every_rank and environment.launch().rank > 0:
        return 0
    from finetune.telemetry.log import quiet_libraries

    quiet_libraries()
    module = word_module(command)
    if asks_help:
        print(reading.help_text(word, module.HELP, module.TAKES))
        return 0
    return int(module.main(rest))


def _unknown_word(word: str) -> Fault:
    close = nearest(word, COMMANDS)
    if word in recipe_names():
        remedy = f"to run the recipe of that name: finetune recipe={word}"
    elif close:
        remedy = f"did you mean `finetune {close}`?"
    else:
        remedy = f"the words are: {' '.join(COMMANDS)}"
    return Fault("command line", f"there is no word {word!r}", remedy)


def _print_error(error: FinetuneError) -> None:
    """The message alone. What every rank raises alike, one rank prints."""
    try:
        launch = environment.launch()
    except FinetuneError:
        launch = environment.Launch()
    if launch.rank > 0 and error.everywhere:
        return
    rank = f"rank {launch.rank}: " if launch.rank > 0 else ""
    print(f"{rank}{error}", file=sys.stderr)


def _close_stdout() -> None:
    """Lets the interpreter's own last flush go nowhere, once the reader of our output has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
