"""What is done with a finished run: export it, ask it, evaluate it. Each loads the run's own result and changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import export as exports
from finetune.checkpoint import verify
from finetune.config.load import load_recipe
from finetune.config.schema import AdapterSection, Recipe
from finetune.contracts import Model
from finetune.data.opening import open_data
from finetune.data.own_chat import prepare_tokenizer
from finetune.data.preflight import DataReport
from finetune.data.rendering import Renderer
from finetune.data.templates import load_template
from finetune.environment import hub_offline
from finetune.errors import InputError, NotBuiltError
from finetune.generate.engine import answer
from finetune.generate.evaluate import Evaluator
from finetune.generate.scores import check_scores, scores
from finetune.kernels.precision import DTYPES
from finetune.machine.collectives import World
from finetune.models.adapter_folder import as_planned
from finetune.models.load import load_base, load_model, load_tokenizer
from finetune.models.new_tokens import tokens_of
from finetune.models.shapes import shape_for
from finetune.planner.budget import precision_of
from finetune.planner.hardware import detect
from finetune.planner.plan import decide
from finetune.tasks.text import TextTask
from finetune.train.folder import result_place
from finetune.train.start import choose_device

KINDS = ("adapter", "merged", "hub")
LATER_KINDS = ("fp8", "w8a8", "int4", "gguf")


def finished_recipe(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a finished run with its result as the adapter or the model to load."""
    if not (run / "recipe.yaml").exists():
        raise InputError(
            "this is no run folder: recipe.yaml is missing", str(run), "run=runs/NAME-TIME; `finetune runs` lists them"
        )
    recipe = load_recipe(run / "recipe.yaml", overrides, finished=True)
    result = result_place(recipe, run)
    if not result.exists() and not recipe.run.keep:
        raise InputError("this was a trial (run.keep=false), which keeps no result", str(run), "run.keep=true")
    if not result.exists():
        raise InputError("this run has no result yet", str(run), "go on with it: resume=auto run.dir=" + str(run))
    if recipe.adapter.kind == "none":
        for key in ("model.path", "model.revision"):
            if any(word.startswith(f"{key}=") for word in overrides):
                raise InputError("this run trained every parameter: its result is the model", key, "leave it out")
        changes = {"model": recipe.model.model_copy(update={"path": str(result), "revision": None})}
    else:
        # The folder decides the rest: an adapter may be written otherwise than the recipe began it.
        kept = {"kind": recipe.adapter.kind, "dropout": recipe.adapter.dropout, "path": str(result)}
        changes = {"adapter": AdapterSection(**kept)}
    return recipe.model_copy(update=changes)


def _load(recipe: Recipe) -> tuple[Model, str, torch.device]:
    device = torch.device(choose_device(recipe))
    precision = precision_of(recipe, detect(device.type))
    tokenizer = prepare_tokenizer(load_tokenizer(recipe.model), recipe.data)
    model = load_model(recipe, device, precision, tokenizer=tokenizer, training=False)
    return model, precision, device


def export(run: Path, to: str, path: Path | None, repo: str | None) -> dict[str, Any]:
    """Writes a run's result for other tools and reloads it with the tool that will read it.

    to: adapter (peft files), merged (a transformers folder), hub (the adapter or model folder, to `repo`). Returns
    {kind, path, largest_logit_difference}.
    """
    if to in LATER_KINDS:
        raise NotBuiltError(f"export to={to}", "to=adapter, to=merged or to=hub")
    if to not in KINDS:
        raise InputError(f"unknown export {to!r}", "to=", f"one of {', '.join(KINDS)}")
    recipe = finished_recipe(run)
    if to == "hub":
        return _push(run, recipe, repo)
    if to == "adapter" and recipe.adapter.kind == "none":
        raise InputError("a full fine-tune has no adapter", "to=adapter", "to=merged")
    model, precision, device = _load(recipe)
    target = path or run / "exports" / to
    if to == "adapter":
        exports.export_adapter(model, target, tokens_of(recipe.model))
        difference = verify.verify_adapter(target, model, load_base(recipe, device, precision))
    else:
        exports.export_merged(model, target, DTYPES[precision] if recipe.adapter.kind == "none" else None)
        difference = verify.verify_merged(target, model)
    return {"kind": to, "path": str(target), "largest_logit_difference": difference}


def _push(run: Path, recipe: Recipe, repo: str | None) -> dict[str, Any]:
    """Uploads the run's result folder to a hub repository, made private when it is new."""
    if not repo:
        raise InputError("which repository?", "to=hub", "repo=NAME/REPOSITORY")
    if hub_offline():
        raise InputError(
            "the hub is switched off by HF_HUB_OFFLINE", "to=hub", "unset it, or export to a folder with path="
        )
    from huggingface_hub import HfApi

    folder = result_place(recipe, run)
    try:
        api = HfApi()
        api.create_repo(repo, exist_ok=True, private=True)
        address = api.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message=f"{recipe.recipe}, by finetune"
        )
    except Exception as error:
        # The hub's client lets its transport's own errors through, and those differ from version to version.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"the upload failed: {reason}", f"repo={repo}", "check the network and `hf auth login`"
        ) from error
    return {"kind": "hub", "path": str(address), "largest_logit_difference": None}


def generate(run: Path, prompts: Sequence[str], overrides: Sequence[str] = ()) -> list[str]:
    """An answer to each prompt, put through the template that the run was trained with."""
    recipe = finished_recipe(run, overrides)
    tokenizer = load_tokenizer(recipe.model)
    renderer = Renderer(load_template(recipe.data.template).mapped(recipe.data.columns), tokenizer)
    ids = [
        tokenizer(renderer.prompt(prompt, recipe.data.system), add_special_tokens=False)["input_ids"]
        for prompt in prompts
    ]
    model, precision, _ = _load(recipe)
    return answer(model, ids, recipe.generate, precision, recipe.train.seed)


def evaluate(
    run: Path, overrides: Sequence[str] = (), seen: Callable[[DataReport], None] = lambda report: None
) -> dict[str, Any]:
    """The evaluation figures of a finished run on its held-out sets (or those that the overrides name).

    `seen` is given the report of each set before it is measured.
    """
    recipe = finished_recipe(run, overrides)
    check_scores(recipe.evaluate.scores)
    tokenizer = load_tokenizer(recipe.model)
    splits = open_data(recipe, tokenizer)
    if not splits.evaluate:
        raise InputError("there are no held-out rows", str(run), "data.valid_path=FILE or evaluate.sets.NAME=FILE")
    for rows in splits.evaluate.values():
        seen(rows.report)
    model, precision, device = _load(recipe)
    longest = max(int(rows.lengths.max()) for rows in splits.evaluate.values())
    plan = decide(as_planned(recipe), shape_for(recipe), detect(device.type), ranks=1, longest_row=longest).plan
    world = World(0, 1, device)
    evaluator = Evaluator(TextTask(tokenizer.pad_token_id), model, plan, world, precision, lambda: None)
    return {**evaluator.losses(splits.evaluate), **scores(model, splits.evaluate, recipe, precision, world)}
