"""One plan of one recipe as the levers' cost models see it, and the machine's rates that they share.

Rates are assumed until a machine's own are measured; they only decide which of two plans is called faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from finetune.contracts import Plan, Shape
from finetune.memory.storage import Storage, Work, trained_tensors

OPERATIONS_PER_SECOND = {"cpu": 5e10, "cuda": 4e14}
"""Matrix products of a training step."""
DECODE = {"cpu": 1e-9 * 5e10, "cuda": 0.9e-12 * 5e14}
"""Operations that could be done while one coded weight (4 or 8 bits) is decoded: seconds a weight times the rate. Assumed
from one H200."""
LINK_BYTES_PER_SECOND = {"cpu": 5e9, "cuda": 25e9}
"""Between host and device, one way while the other way is busy too: PCIe 4 x16; on a CPU a copy within memory."""


UpdateBytes = Callable[[int, str], int]


@dataclass(frozen=True)
class TrainedTensors:
    """`count` trained tensors alike: elements and role of each, and bytes of optimizer state of each."""

    count: int
    elements: int
    state: int
    role: str = ""


@dataclass(frozen=True)
class Case:
    """What a cost model may ask for; `case_of` makes one.

    `tensors` are the trained ones; `rows` are those of one rank's share of a step; `update_bytes` the temporaries of one
    tensor's update, by its elements and the device's type (None: those of torch's AdamW).
    """

    shape: Shape
    storage: Storage
    plan: Plan
    length: int
    rows: int
    tensors: tuple[TrainedTensors, ...]
    update_bytes: UpdateBytes | None = None

    @property
    def work(self) -> Work:
        """One micro-batch."""
        return Work(self.plan.micro_batch, self.length, self.plan.mlp_tile)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of every trained tensor."""
        return sum(self.storage.weight * each.count * each.elements for each in self.tensors)

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(each.count * each.state for each in self.tensors)

    @property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        return max((each.elements for each in self.tensors), default=0)

    @property
    def step_rows(self) -> int:
        return max(self.rows, self.plan.micro_batch)

    @property
    def step_tokens(self) -> int:
        return self.step_rows * self.length


def case_of(
    shape: Shape, storage: Storage, plan: Plan, length: int, rows: int, state_bytes: Callable[[int, str], int]
) -> Case:
    """The case of a plan. `state_bytes` is the optimizer row's: bytes of one tensor's state, by its elements and its role."""
    alike = Counter(trained_tensors(shape, storage))
    tensors = tuple(
        TrainedTensors(count, elements, state_bytes(elements, role), role) for (elements, role), count in alike.items()
    )
    return Case(shape, storage, plan, length, rows, tensors)


def link_seconds(case: Case, moved: int) -> float:
    """Seconds that so many bytes take between host and device, one way."""
    return moved / LINK_BYTES_PER_SECOND[case.storage.device]


def compute_seconds(case: Case, operations: float) -> float:
    return operations / OPERATIONS_PER_SECOND[case.storage.device]
