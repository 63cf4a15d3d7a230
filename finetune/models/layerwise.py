"""Any transformers decoder run one block at a time, through its own forward and its own blocks.

Whoever takes all micro-batches through a block before the next block needs the model in three parts: what comes before
the first block, each block, what comes after the last. No part is written anew for an architecture. The model's own
forward runs once with stand-ins in the blocks' places, which note what each block is given; and once more with a stand-in
that hands in the last block's output. Whether that is all the blocks share is measured (`check`), not taken from names.

Legend: B rows, S positions, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from finetune.contracts import Batch, Model
from finetune.errors import ModelError
from finetune.models.decoder import hidden_states, packed_masks

Given = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""What each block is called with beside its input."""


class _StandIn(nn.Module):
    """Notes what its block is given and passes its input on, or `out` where there is one."""

    def __init__(self, block: Any, notes: Given, out: Tensor | None) -> None:
        super().__init__()
        self.notes, self.out = notes, out
        # Model classes choose a mask by the type that a layer names.
        for name in ("attention_type", "layer_type"):
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.notes.append((args, kwargs))
        return hidden_states if self.out is None else self.out


class Layers:
    """The forward of `model` in its parts. `context` is what each part runs in (autocast, or nothing)."""

    def __init__(self, model: Model, context: Callable[[], AbstractContextManager[object]]) -> None:
        self.model = model
        self.context = context

    def begin(self, batch: Batch, embedded_BSD: Tensor | None = None) -> tuple[Tensor, Any]:
        """[B, S, D], the first block's input, and what every block gets of this batch beside it. The model class looks its
        embedding up by itself, so none can be given."""
        assert embedded_BSD is None
        notes: Given = []
        seen: list[Tensor] = []
        with self.context(), self._stand_ins(notes, None, seen):
            masks = self._masks(batch)
            self._run(batch, masks)
        made = _listed(masks)
        # Masks are made again at each use: one for every micro-batch would stand for the whole step.
        return seen[0], (batch, [(_without(args, made), _without(kwargs, made)) for args, kwargs in notes])

    def turn(self, number: int) -> AbstractContextManager[None]:
        """What one block's forward or backward of all batches runs in."""
        return nullcontext()

    def forward(self, number: int, x_BSD: Tensor, inputs: Any) -> Tensor:
        """One block, nothing kept."""
        with torch.no_grad(), self.context():
            return self._call(number, x_BSD, inputs)

    def backward(self, number: int, x_BSD: Tensor, grad_BSD: Tensor, inputs: Any, need_input: bool) -> Tensor | None:
        """One block again, and the gradient of its input; gradients of its trained tensors are added to theirs."""
        trained = [parameter for parameter in self.model.blocks[number].parameters() if parameter.requires_grad]
        with torch.enable_grad():
            x_BSD = x_BSD.detach().requires_grad_(need_input)
            with self.context():
                out_BSD = self._call(number, x_BSD, inputs)
            wanted = [*([x_BSD] if need_input else []), *trained]
            found = list(torch.autograd.grad(out_BSD, wanted, grad_BSD.to(out_BSD.dtype), allow_unused=True))
        dx_BSD = found.pop(0) if need_input else None
        for parameter, gradient in zip(trained, found, strict=True):
            if gradient is None:
                continue
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return dx_BSD

    def finish(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """What comes after the last block, differentiable: the head's input."""
        with self._stand_ins([], x_BSD, []):
            return self._run(batch, self._masks(batch))

    def _call(self, number: int, x_BSD: Tensor, inputs: Any) -> Tensor:
        batch, notes = inputs
        args, kwargs = notes[number]
        made = _listed(self._masks(batch))
        out = self.model.blocks[number](x_BSD, *_with(args, made), **_with(kwargs, made))
        if not isinstance(out, Tensor):
            raise ModelError(
                f"{type(self.model.blocks[number]).__name__} returns more than its hidden states",
                "plan.weights",
                "plan.weights=resident",
            )
        return out

    def _masks(self, batch: Batch) -> Any:
        return None if batch.document_ids is None else packed_masks(self.model, batch.document_ids)

    def _run(self, batch: Batch, masks: Any) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False, "return_dict": True}
        if batch.document_ids is not None:
            arguments |= {"attention_mask": masks, "position_ids": batch.positions}
        out: Tensor = self.model.backbone(**arguments).last_hidden_state
        return out

    @contextmanager
    def _stand_ins(self, notes: Given, out: Tensor | None, seen: list[Tensor]) -> Iterator[None]:
        holder = _holder(self.model)
        blocks = list(holder)
        try:
            for number, block in enumerate(blocks):
                holder[number] = _StandIn(block, notes, out if number == len(blocks) - 1 else None)
            handle = holder[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            yield
            handle.remove()
        finally:
            for number, block in enumerate(blocks):
                holder[number] = block


@torch.no_grad()
def check(model: Model, layers: Any, batch: Batch) -> None:
    """ModelError unless blocks run one at a time give what the model's own forward gives."""
    own_BSD = hidden_states(model, batch)
    x_BSD, inputs = layers.begin(batch)
    for number in range(len(model.blocks)):
        x_BSD = layers.forward(number, x_BSD, inputs)
    ours_BSD = layers.finish(x_BSD, batch)
    if not torch.allclose(own_BSD.float(), ours_BSD.float(), rtol=1e-2, atol=1e-2 * float(own_BSD.abs().max())):
        raise ModelError(
            f"the blocks of {type(model.base).__name__} share more than their input (caches, states of other blocks), so "
            "they cannot be run one at a time",
            "plan.weights",
            "plan.weights=resident",
        )


def _holder(model: Model) -> Any:
    """The list of the backbone that the blocks are in."""
    for child in model.backbone.modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(model.blocks) and child[0] is model.blocks[0]:
            return child
    raise ModelError(f"{type(model.base).__name__} has no list of its blocks", "plan.weights", "plan.weights=resident")


class _Made:
    """The place of a mask that is made again at each use."""

    def __init__(self, number: int) -> None:
        self.number = number


def _listed(masks: Any) -> list[Tensor]:
    if masks is None:
        return []
    return [masks] if isinstance(masks, Tensor) else list(masks.values())


def _without(given: Any, masks: list[Tensor]) -> Any:
    """`given` with a token in the place of each of the masks."""

    def marked(value: Any) -> Any:
        return next((_Made(number) for number, mask in enumerate(masks) if value is mask), value)

    if isinstance(given, dict):
        return {name: marked(value) for name, value in given.items()}
    return tuple(marked(value) for value in given)


def _with(given: Any, masks: list[Tensor]) -> Any:
    def filled(value: Any) -> Any:
        return masks[value.number] if isinstance(value, _Made) else value

    if isinstance(given, dict):
        return {name: filled(value) for name, value in given.items()}
    return tuple(filled(value) for value in given)
