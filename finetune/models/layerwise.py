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
from finetune.models.verify import LENGTHS, is_close, mode_of, probe_batch

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
            raise _too_much(self.model.blocks[number])
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
def check(model: Model, layers: Layers, packed: bool) -> None:
    """ModelError unless blocks run one at a time give what the model's own forward gives.

    Two rows go through block by block, and then every block runs once more, last first and with nothing that an earlier one
    may have left behind, as in backward: a state that blocks share shows in one or the other. Leaves the model as it was.
    """
    batches = [probe_batch(model, LENGTHS if packed else LENGTHS[:1], first) for first in (3, 5)]
    with mode_of(model, training=False):
        own = [_whole(model, layers, batch) for batch in batches]
        try:
            ours, apart = _one_by_one(model, layers, batches)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise _shared(model, f": {str(error).splitlines()[0]}" if str(error) else "") from error
    if not apart or not all(is_close(first, second) for first, second in zip(own, ours, strict=True)):
        raise _shared(model)


def _whole(model: Model, layers: Layers, batch: Batch) -> Tensor:
    """The model's own forward; ModelError where a block returns more than a tensor."""
    kinds: list[type] = []
    hooks = [block.register_forward_hook(lambda _, given, out: kinds.append(type(out))) for block in model.blocks]
    try:
        with layers.context():
            out_BSD = hidden_states(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(issubclass(kind, Tensor) for kind in kinds):
        raise _too_much(model.blocks[0])
    return out_BSD


def _one_by_one(model: Model, layers: Layers, batches: list[Batch]) -> tuple[list[Tensor], bool]:
    """What comes out when all batches go through a block before the next, and whether each block gives the same alone."""
    begun = [layers.begin(batch) for batch in batches]
    kept = [[x_BSD for x_BSD, _ in begun]]
    for number in range(len(model.blocks)):
        pairs = zip(kept[-1], begun, strict=True)
        kept.append([layers.forward(number, x_BSD, inputs) for x_BSD, (_, inputs) in pairs])
    fresh = [layers.begin(batch)[1] for batch in batches]
    apart = True
    for number in reversed(range(len(model.blocks))):
        for x_BSD, out_BSD, inputs in zip(kept[number], kept[number + 1], fresh, strict=True):
            apart = apart and is_close(layers.forward(number, x_BSD, inputs), out_BSD)
    return [layers.finish(x_BSD, batch) for x_BSD, batch in zip(kept[-1], batches, strict=True)], apart


def _shared(model: Model, why: str = "") -> ModelError:
    return ModelError(
        f"the blocks of {type(model.base).__name__} share more than their input (caches, states of other blocks), so they "
        f"cannot be run one at a time{why}",
        "plan.weights",
        "plan.weights=resident",
    )


def _too_much(block: nn.Module) -> ModelError:
    return ModelError(
        f"{type(block).__name__} returns more than its hidden states", "plan.weights", "plan.weights=resident"
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
