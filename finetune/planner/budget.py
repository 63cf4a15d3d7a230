"""How much memory a run may take: what the recipe says, else what is free less a margin."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.schema import Recipe
from finetune.errors import InputError
from finetune.planner.estimate import Estimate
from finetune.planner.hardware import Hardware

MARGIN_SHARE = {"cpu": 0.10, "cuda": 0.03}
"""What is left free where the recipe gives no budget: for other programs on the host, for fragments on a GPU."""


@dataclass(frozen=True)
class Budget:
    """Bytes one process may take of its device, and all `processes` of this host together of host memory."""

    device: str
    device_bytes: int
    host_bytes: int
    processes: int
    notes: tuple[str, ...] = ()

    def lack(self, estimate: Estimate) -> int:
        """Bytes that the estimate is over the budget, on the device or the host, whichever is more; 0 if it fits."""
        return max(0, self.device_lack(estimate), self.host_lack(estimate))

    def device_lack(self, estimate: Estimate) -> int:
        return estimate.peak - self.device_bytes

    def host_lack(self, estimate: Estimate) -> int:
        """On a CPU the device is the host, and counted there."""
        if self.device == "cpu":
            return estimate.peak - self.device_bytes
        return estimate.host.total * self.processes - self.host_bytes


def device_of(recipe: Recipe, hardware: Hardware) -> str:
    """The device that a recipe runs on; InputError when it asks for a GPU that the machine has not."""
    if recipe.device == "cuda" and hardware.device != "cuda":
        raise InputError(f"device=cuda, but {hardware.name} has no GPU", "device", "device=auto or device=cpu")
    return "cpu" if recipe.device == "cpu" else hardware.device


def precision_of(recipe: Recipe, hardware: Hardware) -> str:
    """The compute precision: the recipe's, or with auto bf16 on a GPU that has it or for 16-bit trained weights, else fp32."""
    if recipe.model.precision != "auto":
        return recipe.model.precision
    if recipe.model.trained != "fp32":
        return "bf16"
    return "bf16" if device_of(recipe, hardware) == "cuda" and hardware.bf16 else "fp32"


def budget_of(recipe: Recipe, hardware: Hardware, ranks: int) -> Budget:
    """The budget of each of `ranks` processes. All of them are taken to share this host's memory."""
    device = device_of(recipe, hardware)
    notes: list[str] = []
    host = _bounded(recipe.plan.host_memory, hardware.host_bytes, "cpu", "plan.host_memory", notes)
    if device == "cpu":
        if recipe.plan.gpu_memory != "auto":
            notes.append(
                "plan.gpu_memory does not apply: the run is on a CPU (`finetune plan hardware=1x24GB,64GB` plans for a GPU that is not here)"
            )
        return Budget("cpu", host // ranks, host, ranks, tuple(notes))
    gpu = _bounded(recipe.plan.gpu_memory, hardware.gpu_bytes, "cuda", "plan.gpu_memory", notes)
    return Budget("cuda", gpu, host, min(ranks, max(1, hardware.gpus)), tuple(notes))


def _bounded(wanted: int | str, free: int, kind: str, key: str, notes: list[str]) -> int:
    if not isinstance(wanted, int):
        return int(free * (1 - MARGIN_SHARE[kind]))
    if wanted > free:
        notes.append(f"{key} is {wanted:,} bytes, but only {free:,} are free: the plan keeps to those")
    return min(wanted, free)
