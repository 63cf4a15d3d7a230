"""The table of words. A word without a module is designed and not built yet."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

DEFAULT = "train"


@dataclass(frozen=True)
class Command:
    """A word: what it does, its module, and whether every rank of a launch runs it (else the first alone reports)."""

    summary: str
    module: str | None
    every_rank: bool = False


COMMANDS: dict[str, Command] = {
    "train": Command("fine-tune a model (the default word)", "finetune.commands.train", every_rank=True),
    "plan": Command("show how a recipe would run and what it would take; nothing runs", "finetune.commands.plan"),
    "data": Command("read, render and count a recipe's data, and report what is odd", "finetune.commands.data"),
    "export": Command("write a run's adapter or merged model", "finetune.commands.export", every_rank=True),
    "generate": Command("answer a prompt with a finished run", "finetune.commands.generate", every_rank=True),
    "evaluate": Command("measure a finished run on held-out rows", "finetune.commands.evaluate", every_rank=True),
    "bench": Command("measure how fast this machine is, for the planner", "finetune.commands.bench"),
    "doctor": Command("check this machine", None),
    "profile": Command("show where a step's time goes", None),
    "report": Command("write a page about a run", None),
    "runs": Command("list runs, or compare two", "finetune.commands.runs"),
    "launch": Command("write a job file for a cluster", None),
    "recipes": Command("list the recipes", "finetune.commands.recipes"),
    "templates": Command("list the data templates", "finetune.commands.templates"),
}


def word_module(command: Command) -> ModuleType:
    """The word's module, imported when it is used."""
    assert command.module is not None
    return importlib.import_module(command.module)


def overview() -> str:
    """What `finetune --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {word:<{width}}{c.summary}{'' if c.module else ' (not built yet)'}" for word, c in COMMANDS.items()]
    return "\n".join(
        [
            "finetune [WORD] key=value ... [--json] [--help]",
            "",
            "Fine-tune LLaMA-class models inside whatever memory you have.",
            "",
            *lines,
            "",
            "Examples:",
            "  finetune recipe=quickstart",
            "  finetune plan recipe=lora_llama3 hardware=1x24GB,64GB",
            "  accelerate launch -m finetune recipe=lora_qwen data.path=my.jsonl data.template=alpaca",
            "",
            "finetune WORD --help tells more; finetune train --help lists every key of a recipe.",
            "Exit codes: 0 done, 2 the input is wrong, 3 nothing fits, 4 stopped by a signal after saving,",
            "130 interrupted by Ctrl-C at once (the first one saves: 4), 141 the reader of the output left, 1 a fault of ours.",
        ]
    )
