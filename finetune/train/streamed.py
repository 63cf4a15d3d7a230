"""The streamed step: every micro-batch goes through a block before the next block is touched.

So the weights of a block come to the device once in forward and once in backward, whatever the number of micro-batches,
and a block's gradient is complete when its backward is over. What a micro-batch is between two blocks (its hidden states,
later their gradient) stays on the device; the inputs of blocks are kept for backward, here or on the host. Operations and
their order within a tensor are those of the resident step with recomputation, so the bits are too.

Legend: B rows, S positions, D hidden width; L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.contracts import Batch, Model
from finetune.memory.streaming.boundaries import Boundaries
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.host_blocks import HostBlocks
from finetune.memory.streaming.lanes import wait
from finetune.memory.streaming.tall import Tall
from finetune.memory.streaming.visit import Visit
from finetune.memory.weight_streaming import AHEAD, BEHIND
from finetune.train.streamed_ends import StreamedEmbedding, StreamedHead


@dataclass(frozen=True)
class Part:
    """One micro-batch on the device, and its embedding's place in the graph where that is trained."""

    batch: Batch
    inputs: Any
    edge: Any


class Streamed:
    """A model's step and updates with its blocks on the host. `layers` runs the model in parts (models/layerwise, or fast).

    `deferred` is None where no block is trained itself (adapters are resident).
    """

    def __init__(
        self, model: Model, layers: Any, host: HostBlocks, deferred: Deferred | None, boundaries: Boundaries, ends: Ends
    ) -> None:
        assert host.slots is not None
        self.ends = ends
        self.model = model
        self.layers = layers
        self.host = host
        self.slots = host.slots
        self.deferred = deferred
        self.boundaries = boundaries
        self._leaving: list[tuple[Any, Tensor]] = []
        self._asked = 0
        self.first = _first_trained(model)

    def step(
        self,
        batches: Sequence[Batch],
        enter: Callable[[Batch], AbstractContextManager[object]],
        loss_of: Callable[[Tensor, Batch], tuple[Tensor, Tensor]],
        factor: float,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; the summed losses of each, detached.

        `enter(batch)` is what one micro-batch's computation runs in (its keyed draws, its ids); `loss_of(hidden, batch)`
        gives (the summed loss, what backward starts from), which is `factor` times it. Gradients are left in `.grad` of
        parameters on the device, and with `deferred` on the host.
        """
        try:
            parts, carry = self._begin(batches, enter)
            self._forward(parts, carry, enter)
            if self.ends.head is not None:
                self._fetch_first(len(parts))
                losses = self.ends.head.run(batches, carry, enter, factor)
            elif self.ends.visit is not None:
                losses = self._head_on_a_visit(self.ends.visit, parts, carry, enter, loss_of)
            else:
                losses = self._head(parts, carry, enter, loss_of)
            self._backward(parts, carry, enter)
            return losses
        finally:
            self._leaving.clear()
            self.boundaries.end()
            if self.ends.visit is not None:
                self.ends.visit.end()

    def _begin(self, batches: Sequence[Batch], enter: Any) -> tuple[list[Part], list[Tensor]]:
        parts, carry = [], []
        count = len(self.model.blocks)
        self.slots.begin([*range(count), *reversed(range(self.first, count))])
        if self.ends.head is not None:
            self.ends.head.begin(batches)
        given = self.ends.embedding.begin(batches) if self.ends.embedding is not None else [None] * len(batches)
        for batch in batches:
            with enter(batch):
                x_BSD, inputs = self.layers.begin(batch, given.pop(0))
            edge = torch.autograd.graph.get_gradient_edge(x_BSD) if x_BSD.requires_grad else None
            parts.append(Part(batch, inputs, edge))
            carry.append(x_BSD.detach().contiguous())
        self.boundaries.begin(carry, range(self.first, count))
        return parts, carry

    def _forward(self, parts: list[Part], carry: list[Tensor], enter: Any) -> None:
        count = len(self.model.blocks)
        for number in range(count):
            with self.slots.using(number):
                self._update(number, ahead=True)
                if number == count - 1 and self.ends.visit is not None and not self.ends.visit.trained:
                    self.slots.lend(number)
                    self.ends.visit.ask()
                with self.layers.turn(number):
                    self._forward_block(number, parts, carry, enter)
        self._let_go(0)
        if self.deferred is not None:
            self.deferred.end()

    def _forward_block(self, number: int, parts: list[Part], carry: list[Tensor], enter: Any) -> None:
        for at, part in enumerate(parts):
            if number >= self.first:
                self._leaving.append((self.boundaries.keep(number, at, carry[at]), carry[at]))
            with enter(part.batch):
                carry[at] = self.layers.forward(number, carry[at], part.inputs).contiguous()
            self._let_go(BEHIND)

    def _let_go(self, left: int) -> None:
        """Frees inputs that were kept, but for the newest `left`: their memory is used again when their way down is over.

        Waiting for each at once would stop the computation behind whatever else is on its way down.
        """
        while len(self._leaving) > left:
            event, _ = self._leaving.pop(0)
            wait(self.slots.device, event)

    def _head(self, parts: list[Part], carry: list[Tensor], enter: Any, loss_of: Any) -> list[Tensor]:
        losses = []
        self._fetch_first(len(parts))
        for at, part in enumerate(parts):
            x_BSD = carry[at].requires_grad_()
            carry[at] = torch.empty(0)
            with enter(part.batch):
                loss, start = loss_of(self.layers.finish(x_BSD, part.batch), part.batch)
                losses.append(loss.detach())
                del loss
                start.backward()
            gradient_BSD = x_BSD.grad
            assert gradient_BSD is not None
            x_BSD.grad = None
            del x_BSD, start
            carry[at] = gradient_BSD
        return losses

    def _head_on_a_visit(
        self, visit: Visit, parts: list[Part], carry: list[Tensor], enter: Any, loss_of: Any
    ) -> list[Tensor]:
        """The head has the room of all slots but the last block's, which comes first in backward."""
        self.slots.lend(len(self.model.blocks) - 1)
        with visit.there():
            losses = self._head(parts, carry, enter, loss_of)
        self.slots.take_back()
        return losses

    def _backward(self, parts: list[Part], carry: list[Tensor], enter: Any) -> None:
        for number in reversed(range(self.first, len(self.model.blocks))):
            with self.slots.using(number):
                with self.layers.turn(number):
                    self._backward_block(number, parts, carry, enter)
                if self.deferred is not None:
                    self.deferred.lower(number)
            if self.ends.visit is not None:
                self.ends.visit.let_go()
        for at, part in enumerate(parts):
            if part.edge is not None:
                torch.autograd.backward([part.edge], [carry[at]])
                carry[at] = torch.empty(0)
        if self._embedding_trained and self.ends.embedding is not None:
            self.ends.embedding.finish(carry)

    def _backward_block(self, number: int, parts: list[Part], carry: list[Tensor], enter: Any) -> None:
        for at, part in enumerate(parts):
            x_BSD = self.boundaries.take(number, at)
            self._fetch_ahead(number, at, len(parts))
            need = number > self.first or part.edge is not None or self._embedding_trained
            with enter(part.batch):
                gradient_BSD = self.layers.backward(number, x_BSD, carry[at], part.inputs, need)
            self.boundaries.give()
            del x_BSD
            carry[at] = torch.empty(0) if gradient_BSD is None else gradient_BSD

    @property
    def _embedding_trained(self) -> bool:
        return self.ends.embedding is not None and self.ends.embedding.trained

    def _fetch_ahead(self, number: int, at: int, parts: int) -> None:
        """Starts to bring up the inputs that come next, up to AHEAD after this one."""
        count = len(self.model.blocks)
        last = min((count - 1 - number) * parts + at + AHEAD, (count - self.first) * parts - 1)
        while self._asked <= last:
            behind, part = divmod(self._asked, parts)
            self.boundaries.fetch(count - 1 - behind, part)
            self._asked += 1

    def _fetch_first(self, parts: int) -> None:
        """Starts to bring up the first inputs of backward."""
        self._asked = 0
        self._fetch_ahead(len(self.model.blocks), parts - 1, parts)

    def _update(self, number: int, ahead: bool) -> None:
        """Makes the pending update of the block that is bound, and asks for the next one's."""
        if self.deferred is None:
            return
        self.deferred.ask(number)
        if ahead and number + 1 < len(self.model.blocks):
            self.deferred.ask(number + 1)
        if self.deferred.apply(number):
            self.slots.lower(number)

    @property
    def elsewhere(self) -> set[nn.Parameter]:
        """Trained parameters whose gradients a step leaves on the host, not in `.grad`."""
        own = self.deferred.parameters if self.deferred is not None else set()
        return own | {tall.parameter for tall in self.ends.trained}

    def norms(self) -> dict[nn.Parameter, Tensor]:
        """The norms of those gradients, after a step."""
        own = dict(self.deferred.norms) if self.deferred is not None else {}
        return own | {tall.parameter: tall.norm() for tall in self.ends.trained}

    def settle(self) -> None:
        """After weights or state on the host were set from outside."""
        if self.deferred is not None:
            self.deferred.settle()
        for tall in self.ends.trained:
            tall.settle()
        self.slots.forget()

    def promise(self, factor: float) -> None:
        """The step is decided: updates are made when their weights are fetched next. See Deferred.promise."""
        if self.deferred is not None:
            self.deferred.promise(factor)
        for tall in self.ends.trained:
            tall.promise(factor)

    def drop(self) -> None:
        """The step's gradients are not used."""
        if self.deferred is not None:
            self.deferred.drop()
        for tall in self.ends.trained:
            tall.drop()

    def recover(self) -> None:
        """After a step that broke off, and once nothing runs on the device any more: its gradients are not used. Updates that
        were promised before it, and that it did not come to, stay pending: those that it made are whole on the host."""
        if self.deferred is not None:
            self.deferred.recover()
        for tall in self.ends.trained:
            tall.recover()
        self.slots.forget()

    @torch.no_grad()
    def flush(self) -> None:
        """Makes every update that is promised; then weights and state on the host are whole and may be read."""
        for tall in self.ends.trained:
            tall.flush()
        if self.deferred is None:
            return
        pending = self.deferred.pending
        if pending:
            self.slots.begin(pending)
            for number in pending:
                with self.slots.using(number):
                    self._update(number, ahead=True)
            self.deferred.end()
        self.slots.settle()
        self.deferred.wait()

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Inside, updates are made and embedding and head are whole on the device, for evaluation and answers."""
        self.flush()
        try:
            for tall in self.ends.all:
                tall.parameter.data = tall.weight_VD.to(self.slots.device)
            yield
        finally:
            for tall in self.ends.all:
                tall.parameter.data = tall.weight_VD


@dataclass(frozen=True)
class Ends:
    """Embedding and head where they are on the host (None: on the device). A head passes in parts, or visits the device."""

    embedding: StreamedEmbedding | None = None
    head: StreamedHead | None = None
    visit: Visit | None = None

    @property
    def all(self) -> list[Tall]:
        """Their matrices, a shared one once."""
        talls = [end.tall for end in (self.embedding, self.head, self.visit) if end is not None]
        return list({id(tall): tall for tall in talls}.values())

    @property
    def trained(self) -> list[Tall]:
        return [tall for tall in self.all if tall.updates is not None]


def _first_trained(model: Model) -> int:
    """The first block that backward has to reach: 0 where something before the blocks is trained."""
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    after = {id(parameter) for parameter in model.head.parameters()}
    norm = getattr(model.backbone, "norm", None)
    after |= {id(parameter) for parameter in norm.parameters()} if norm is not None else set()
    before = [p for p in model.module.parameters() if p.requires_grad and id(p) not in inside | after]
    embedding = model.base.get_input_embeddings().weight
    if before or (embedding.requires_grad and id(embedding) in after):
        return 0
    for number, block in enumerate(model.blocks):
        if any(parameter.requires_grad for parameter in block.parameters()):
            return number
    return len(model.blocks)
