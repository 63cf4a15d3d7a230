"""Rules of a recipe about its method: the adapter, the stored base, and the chosen part of the model."""

from __future__ import annotations

from finetune.config.keys import show
from finetune.config.problems import Problem, Problems
from finetune.config.schema import Recipe

ADAPTER_ALONE = ("rank", "alpha", "dropout", "targets", "scaling", "init", "ranks", "alphas", "modules_to_save")
"""Keys that say nothing without an adapter."""


def _adapter_init(recipe: Recipe) -> Problems:
    """pissa and olora begin by taking the adapter out of the base's own weights."""
    adapter = recipe.adapter
    if adapter.init != "default" and adapter.path is not None:
        what = f"adapter.init={adapter.init} makes a new adapter, and one is to be gone on from"
        yield Problem(("adapter.init", "adapter.path"), what, "write adapter.init=default, or change the other")
    if adapter.init not in ("pissa", "olora"):
        return
    for key, clashes, why in (
        ("model.base", recipe.model.base != "same", "takes the adapter out of the base, which quantisation would blur"),
        ("adapter.kind", adapter.kind == "dora", "changes the base, whose norms dora keeps"),
    ):
        if clashes:
            what = f"adapter.init={adapter.init} {why}"
            yield Problem(("adapter.init", key), what, "write adapter.init=default, or change the other", training=True)


def adapter(recipe: Recipe) -> Problems:
    adapter = recipe.adapter
    if adapter.kind != "none":
        if not adapter.targets:
            yield Problem(("adapter.targets",), "no layer is named", "name layers, or write all-linear")
        yield from _adapter_init(recipe)
        for name in ("last_blocks", "modules", "freeze"):
            if getattr(recipe.train, name):
                what = f"train.{name} chooses among the model's own parameters, and adapter.kind={adapter.kind} freezes all"
                remedy = (
                    f"write adapter.kind=none, or leave train.{name} out (adapter.modules_to_save trains whole layers)"
                )
                yield Problem((f"train.{name}", "adapter.kind"), what, remedy)
        return
    if recipe.model.base != "same":
        bits = "4" if recipe.model.base == "nf4" else "8"
        what = f"a base in {bits} bits cannot be trained itself, and there is no adapter"
        remedy = "write adapter.kind=lora (QLoRA), or model.base=same"
        yield Problem(("model.base", "adapter.kind"), what, remedy, training=True)
    if adapter.path is not None:
        what = f"an adapter is to be gone on from ({adapter.path}), and adapter.kind is none"
        yield Problem(("adapter.path", "adapter.kind"), what, "write adapter.kind=lora, or leave adapter.path out")
    for name in ADAPTER_ALONE:
        value = getattr(adapter, name)
        if value != type(adapter).model_fields[name].default:
            what = f"adapter.{name} is {show(value)}, and adapter.kind is none: the whole model would be trained"
            remedy = f"write adapter.kind=lora, or leave adapter.{name} out"
            yield Problem((f"adapter.{name}", "adapter.kind"), what, remedy)


def base(recipe: Recipe) -> Problems:
    if not recipe.model.double_quant and recipe.model.base != "nf4":
        what = f"model.double_quant=false is about the scales of nf4, and model.base is {recipe.model.base}"
        yield Problem(("model.double_quant", "model.base"), what, "write model.base=nf4, or leave it out")
