"""Faults in the middle of a step: functions of ours that raise out of memory once, and the runs that meet them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.checkpoint import store
from finetune.models.fast.backbone import FastLayers
from finetune.models.layerwise import Layers
from finetune.optim.slices import Slicing
from finetune.train import loop, step
from tests.conftest import changed, method


class Faults:
    """Raises `error` once in each of `at` (numbers of steps), after `count` calls of the replaced function in that step."""

    def __init__(
        self, patch: pytest.MonkeyPatch, at: list[int], error: Callable[[], BaseException], count: int
    ) -> None:
        self.at, self.error, self.count = list(at), error, count
        self.step, self.calls, self.fired = 0, 0, 0
        self.gradients: list[weakref.ref] = []
        train_step = loop.train_step

        def noted(job: Any, *rest: Any) -> Any:
            self.step, self.calls = job.progress.step + 1, 0
            assert all(reference() is None for reference in self.gradients)
            assert all(p.grad is None for p in job.model.trainable().values())
            self.job = weakref.ref(job)
            return train_step(job, *rest)

        patch.setattr(loop, "train_step", noted)

    def after(self, owner: Any, name: str, patch: pytest.MonkeyPatch) -> Faults:
        """Faults come after the function's work is done."""
        function = getattr(owner, name)

        def faulty(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            self.calls += 1
            if self.step in self.at and self.calls == self.count:
                self.at.remove(self.step)
                job = self.job()
                self.fired += 1
                self.gradients = [weakref.ref(p.grad) for p in job.model.trainable().values() if p.grad is not None]
                raise self.error()
            return result

        patch.setattr(owner, name, faulty)
        return self


def full() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def kinds(tiny: dict[str, Any], kind: str) -> tuple[dict[str, Any], Any, str, int]:
    """A recipe, and the function (after how many calls) in which memory runs out."""
    tiny = changed(tiny, data__valid_path=None, train__batch=8, train__max_steps=9)
    lora = changed(method(tiny, "lora"), adapter__dropout=0.5)
    whole = method(tiny, "none")
    streamed = changed(whole, plan__weights="streamed")
    ends = {"weights": "streamed", "fast_block": True, "embedding_placement": "host", "head_placement": "host"}
    return {
        "lora": (lora, step, "backward", 1),
        "full": (whole, step, "backward", 1),
        "packed": (changed(lora, data__pack=True, data__max_tokens=256), step, "backward", 1),
        "rebuilt": (changed(lora, plan__micro_batch=4), step, "backward", 2),
        "eight bits": (changed(whole, plan__micro_batch=4, optimizer__name="adamw8bit"), step, "backward", 2),
        "streamed": (streamed, Layers, "backward", 1),
        "streamed forward": (streamed, Layers, "forward", 1),
        "streamed update": (streamed, Slicing, "update", 2),
        "streamed lora": (changed(lora, plan__weights="streamed"), Layers, "backward", 2),
        "streamed visit": (changed(streamed, plan__head_placement="visit"), Layers, "backward", 1),
        "streamed visit forward": (changed(streamed, plan__head_placement="visit"), Layers, "forward", 1),
        "streamed ends": (changed(whole, plan=ends), FastLayers, "backward", 2),
        "streamed ends update": (changed(whole, plan=ends), Slicing, "update", 1),
        "streamed ends forward": (changed(whole, plan=ends), FastLayers, "forward", 1),
    }[kind]


def lora(tiny: dict[str, Any], **dotted: Any) -> dict[str, Any]:
    return changed(kinds(tiny, "lora")[0], **dotted)


def faulty(
    recipe: dict[str, Any], at: list[int], error: Callable[[], BaseException], *more: str, count: int = 1
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, at, error, count).after(step, "backward", patch)
        return finetune.run(recipe, *more)


def newest(folder: Path) -> str:
    path, notices = store.newest(folder / "checkpoints")
    assert path is not None
    assert not notices
    assert not [each.name for each in (folder / "checkpoints").iterdir() if each.name.startswith(".")]
    return path.name
