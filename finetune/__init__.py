"""Fine-tune LLaMA-class models inside whatever memory you have. `finetune.run(recipe)` is what the command line calls.

`run` and `Result` are fetched when first asked for, so that importing the package touches neither torch nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.commands.train import run
    from finetune.contracts import Result

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from finetune.commands.train import run

        return run
    if name == "Result":
        from finetune.contracts import Result

        return Result
    raise AttributeError(f"module 'finetune' has no attribute {name!r}")
