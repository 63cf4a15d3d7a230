"""`finetune export`: a run's result in a form that other tools load."""

from __future__ import annotations

from finetune.commands.arguments import COMMAND_LINE, Takes, read, run_of
from finetune.commands.screen import show, show_json, table
from finetune.config.keys import nearest
from finetune.environment import user_path
from finetune.errors import Fault

HELP = """
Writes what a run has learned as an adapter (peft's files), as a merged model (a transformers folder with its tokenizer),
or to a model hub. What was written is loaded again and its logits compared before it is called done.

Examples:
  finetune export run=runs/x to=merged path=out/
  finetune export run=runs/x to=adapter path=adapter/
  finetune export run=runs/x to=hub repo=name/model
"""
KINDS = ("adapter", "merged", "hub")
NOT_BUILT = ("fp8", "w8a8", "int4", "gguf")
TAKES = Takes(
    own={
        "run": "a run's folder, or its name in runs/",
        "to": "adapter, merged or hub",
        "path": "the folder to write (not for hub)",
        "repo": "the hub repository, OWNER/NAME (for hub)",
    }
)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    kind, path, repo = (given.own.get(key) or "" for key in ("to", "path", "repo"))
    faults = given.need("to", "to=merged")
    if kind in NOT_BUILT:
        faults.append(
            Fault(f"{COMMAND_LINE} to", f"to={kind} is not built yet in this version", f"one of {', '.join(KINDS)}")
        )
    elif kind and kind not in KINDS:
        close = nearest(kind, KINDS)
        remedy = f"did you mean to={close}?" if close else f"one of {', '.join(KINDS)}"
        faults.append(Fault(f"{COMMAND_LINE} to", f"there is no export {kind!r}", remedy))
    if kind == "hub":
        faults += given.need("repo", "repo=name/model")
        if path:
            faults.append(
                Fault(f"{COMMAND_LINE} path", "path= is a folder here, and to=hub writes none", "leave it out")
            )
    elif kind in KINDS and repo:
        faults.append(Fault(f"{COMMAND_LINE} repo", f"repo= is for to=hub, not for to={kind}", "leave it out"))
    run = run_of(given, faults, "run=runs/x")
    from finetune.train.after import export

    facts = export(run, kind, user_path(path, f"{COMMAND_LINE} path") if path else None, repo or None)
    if given.json:
        show_json(facts)
    else:
        show(table(("export", ""), list(facts.items())))
    return 0
