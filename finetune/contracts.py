"""The nouns that cross rooms: Shape, Bytes, Plan, Row, Batch, Model, StepResult, Task.

They are values: made once, frozen, handed down. This file imports no torch, so the planner and the command line stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

IGNORED = -100
"""The label of a token that is not trained on."""


@dataclass(frozen=True)
class LinearShape:
    """One linear layer of a block: its dotted name inside the block and its two widths."""

    name: str
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """The counts of a decoder that the planner needs; no tensors.

    `block_extra` are a block's parameters outside its linears (norms, biases); `extra` those outside blocks,
    embedding and head (the final norm). `changed_logits`: the model caps or scales its logits after the head. `family` is
    transformers' model type, empty where it is not known.
    """

    name: str
    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    linears: tuple[LinearShape, ...]
    block_extra: int
    extra: int
    changed_logits: bool = False
    family: str = ""

    @property
    def linear_parameters(self) -> int:
        """Parameters of one block's linears."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def block_parameters(self) -> int:
        return self.linear_parameters + self.block_extra

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection; 0 when it is the embedding."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.blocks * self.block_parameters + self.embedding_parameters + self.head_parameters + self.extra


@dataclass(frozen=True)
class Bytes:
    """Bytes by cause; values add cause by cause."""

    causes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.causes.values())

    def __add__(self, other: Bytes) -> Bytes:
        causes = dict(self.causes)
        for name, count in other.causes.items():
            causes[name] = causes.get(name, 0) + count
        return Bytes(causes)


@dataclass(frozen=True)
class Plan:
    """How a recipe runs on this machine. Nothing in it changes the mathematics.

    `micro_batch` is rows a forward pass on one rank; `activation_checkpointing` N (2 and more) keeps the activations of
    every N-th block, `selective` those of attention's output; `loss_chunk` is positions whose logits exist at once (0: all);
    `mlp_tile` tokens whose MLP a recomputing fast block runs at once (0: all);
    `ranks` is the number of data-parallel processes; `attention` the kernel of fast blocks. With `weights` streamed,
    `resident_blocks` keep theirs on the device and the others take turns in `slots`. `head_placement` visit: the head lives
    on the host and is whole on the device while losses are made; host: it passes in parts.
    """

    device: str
    micro_batch: int
    activation_checkpointing: bool | int | Literal["selective"]
    loss_chunk: int
    mlp_tile: int = 0
    fast_block: bool = False
    attention: str = "auto"
    activation_offload: bool = False
    optimizer_in_backward: bool = False
    optimizer_placement: Literal["device", "host"] = "device"
    embedding_placement: Literal["device", "host"] = "device"
    head_placement: Literal["device", "visit", "host"] = "device"
    weights: str = "resident"
    resident_blocks: int = 0
    slots: int = 2
    ranks: int = 1
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One training row: one document, or several packed. `labels[t]` is `input_ids[t]` where that token is trained, else IGNORED.

    The first token of every document is never trained. `document_lengths` sum to the row's length. `sources` are the
    positions in the data file(s) of the documents (0-based, after loading), for messages.
    """

    id: int
    input_ids: np.ndarray
    labels: np.ndarray
    document_lengths: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length: B rows, S positions.

    input_ids, labels: int64 [B, S]; labels stand on the token itself (the loss shifts). row_ids: int64 [B].
    document_ids, positions: int64 [B, S], or None when every row is one document (then causal order alone isolates the padding).
    Padding counts as a document of its own; positions restart at each document. `host_ids` are the input_ids of a batch on
    a device as they are on the host.
    """

    input_ids: Tensor
    labels: Tensor
    row_ids: Tensor
    document_ids: Tensor | None
    positions: Tensor | None
    lengths: tuple[int, ...]
    host_ids: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.row_ids.to(device, non_blocking=True),
            move(self.document_ids),
            move(self.positions),
            self.lengths,
            self.input_ids if self.input_ids.device.type == "cpu" else self.host_ids,
        )


@dataclass
class Model:
    """A causal language model, as the rooms above need it.

    `module` runs forward (peft's wrapper when there is an adapter); `base` is the transformers model inside; `backbone`
    returns hidden states [B, S, D]; `head` is the output projection; `blocks` are the repeated units in order. `notices`
    say what loading decided or changed; they are for the user to see. `fast` is how fast blocks run (None: the model
    class's own forward runs). `home` is the device that it computes on.
    """

    module: nn.Module
    base: nn.Module
    backbone: nn.Module
    head: nn.Module
    blocks: Sequence[nn.Module]
    tokenizer: Any
    shape: Shape
    source: str
    notices: tuple[str, ...] = ()
    fast: Any = None
    home: Any = None

    @property
    def device(self) -> torch.device:
        """Where it computes: `home` where that was said, since weights may live on the host, else where they are."""
        device: torch.device = self.home or next(self.module.parameters()).device
        return device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, in model order."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; counts and loss are over all ranks. `skipped`: an fp16 step whose gradient was not
    finite, so nothing was updated; `loss_scale` is the one it was made with (None outside fp16)."""

    step: int
    loss: float
    tokens: int
    trained_tokens: int
    lr: float
    grad_norm: float
    seconds: float
    data_wait: float
    skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, the adapter or model folder inside it (None: nothing was written), and `summary.json` read."""

    dir: Path
    result: Path | None
    summary: Mapping[str, Any]


class Task(Protocol):
    """A kind of job. The loop knows nothing else of what it trains."""

    batch_coupled: bool

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Rows to one batch on the host."""

    def count(self, batch: Batch) -> int:
        """Items that are trained in the batch, known from the labels before any forward."""

    def tokens(self, batch: Batch) -> int:
        """Items that the batch holds, trained or not, without padding."""

    def loss_sum(self, model: Model, batch: Batch, plan: Plan) -> Tensor:
        """The sum (not the mean) of the losses of the batch's trained items: fp32 scalar that can be differentiated."""
