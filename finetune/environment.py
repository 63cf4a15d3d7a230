"""The only reader of environment variables, and the place that knows paths: shipped files, a user's own. Imports no torch.

The launcher (accelerate, torchrun) talks to its processes through the environment. What it says is read once, into a
frozen `Launch`, and handed down as a value, so that nothing further inside depends on how the process was started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import InputError

CACHE_GIB = 50
"""GiB of prepared data that the cache keeps, unless FINETUNE_CACHE_GIB says otherwise."""

YES = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    `mixed_precision` and `accumulation` are None at the launcher's defaults ("no" and 1): accelerate exports those
    always, so they cannot be told from an unset value. `accelerate` is true under accelerate launch. `other` are launcher settings that this program does not
    follow. `one_of_several` says that several processes were asked for and the launcher started one (accelerate does so
    on a CPU). `settings_file` is accelerate's own configuration file, where there is one.
    """

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    mixed_precision: str | None = None
    accumulation: int | None = None
    fsdp: bool = False
    deepspeed: bool = False
    other: tuple[str, ...] = ()
    use_cpu: bool = False
    accelerate: bool = False
    one_of_several: bool = False
    settings_file: Path | None = None


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What torch's allocator for GPUs is told."""


def let_segments_grow() -> None:
    """Tells torch's allocator to let its segments grow (Linux), unless the user told it something.

    Freed memory of one size then serves another, so what is reserved stays near what is used. To be called before the
    first use of a GPU.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def _count(variables: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = variables.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise InputError(
            f"{text!r} is not a whole number of at least {least}",
            f"environment variable {name}",
            "the launcher sets it (accelerate launch, torchrun); unset it to run one process",
        )
    return int(text)


def _yes(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").strip().lower() in YES


def _other(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Launcher settings away from their defaults that this program does not follow, as the user would write them."""
    found = []
    backend = variables.get("ACCELERATE_DYNAMO_BACKEND", "no").strip()
    if backend.lower() not in ("", "no"):
        found.append(f"--dynamo_backend {backend.lower()}")
    if _yes(variables, "ACCELERATE_USE_MEGATRON_LM"):
        found.append("--use_megatron_lm")
    if _yes(variables, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        found.append("--use_parallelism_config")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if _count(variables, name, 1, 1) > 1 and "WORLD_SIZE" not in variables:
            found.append(f"mpirun ({name}={variables[name]})")
    return tuple(found)


def launch(variables: Mapping[str, str] | None = None) -> Launch:
    """What the launcher says. Raises InputError when the ranks it gives make no sense."""
    variables = os.environ if variables is None else variables
    world = _count(variables, "WORLD_SIZE", 1, 1)
    rank = _count(variables, "RANK", 0, 0)
    if rank >= world:
        raise InputError(
            f"RANK={rank} does not fit WORLD_SIZE={world}",
            "environment variables of the launcher",
            "unset both to run one process, or start with accelerate launch or torchrun",
        )
    precision = variables.get("ACCELERATE_MIXED_PRECISION", "no").strip().lower()
    accumulation = _count(variables, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1, 1)
    home = variables.get("HF_HOME") or Path(variables.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    settings = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in variables
    return Launch(
        rank=rank,
        local_rank=_count(variables, "LOCAL_RANK", 0, 0),
        world=world,
        mixed_precision=None if precision in ("", "no") else precision,
        accumulation=None if accumulation == 1 else accumulation,
        fsdp=_yes(variables, "ACCELERATE_USE_FSDP"),
        deepspeed=_yes(variables, "ACCELERATE_USE_DEEPSPEED"),
        other=_other(variables),
        use_cpu=_yes(variables, "ACCELERATE_USE_CPU"),
        accelerate=by_accelerate,
        one_of_several=by_accelerate and "MASTER_PORT" in variables and "WORLD_SIZE" not in variables,
        settings_file=settings if by_accelerate and settings.is_file() else None,
    )


def cache_folder() -> Path:
    """Where converted models are kept: FINETUNE_CACHE, else XDG_CACHE_HOME/finetune, else ~/.cache/finetune. Not made here."""
    own = os.environ.get("FINETUNE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "finetune"


def cache_limit() -> int:
    """Bytes of prepared data that the cache keeps: FINETUNE_CACHE_GIB, else 50 GiB. InputError for what is no number."""
    text = os.environ.get("FINETUNE_CACHE_GIB") or str(CACHE_GIB)
    try:
        limit = float(text)
        if not limit >= 0:
            raise ValueError(text)
        return int(min(limit, 2.0**33) * 2**30)
    except ValueError as error:
        what, remedy = f"{text!r} is no number of GiB", f"a number from 0 on, or unset it ({CACHE_GIB})"
        raise InputError(what, "environment variable FINETUNE_CACHE_GIB", remedy) from error


def hub_offline() -> bool:
    """Whether the user forbade the model hub (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return _yes(os.environ, "HF_HUB_OFFLINE") or _yes(os.environ, "TRANSFORMERS_OFFLINE")


def for_child(**changes: str) -> dict[str, str]:
    """The variables of this process with some changed, for a process that it starts."""
    return {**os.environ, **changes}


def user_path(text: str | Path, where: str) -> Path:
    """A path as a user wrote it, ~ expanded; it need not exist. InputError for one that the system cannot even look up."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"this is no path that can be looked up: {reason}", where, "check the path") from error
    return path


def shipped_folder(kind: str) -> Path:
    """The shipped `recipes` or `data_templates`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return package / kind if (package / kind).is_dir() else package.parent / kind
