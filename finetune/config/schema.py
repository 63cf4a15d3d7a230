"""What a recipe may say: frozen pydantic sections, one field a key. Unknown keys are errors.

Values come as text (from YAML and the command line) and the field's type decides what they are, so `012` is 12 for a
count and stays `012` for a name. `auto` is resolved by whoever owns the choice, never here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NULLS = ("null", "~", "", "none", "None", "Null", "NULL")


def _null(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip() in NULLS else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a truth value where a number is wanted")
    return value


def _list(value: Any) -> Any:
    """`a,b` and `[a, b]` from the command line are lists; `all-linear` alone is a list of one."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]


def _auto(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    """`8GiB`, `24GB`, `512MiB`, a bare number of bytes, or `auto`."""
    if not isinstance(value, str) or value.strip() == "auto":
        return _auto(value)
    text = value.strip()
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
    for unit, size in units.items():
        if text.endswith(unit):
            try:
                return int(float(text[: -len(unit)].strip()) * size)
            except ValueError:
                break
    if text.isdigit():
        return int(text)
    raise ValueError("a size such as 8GiB, 24GB or 512MiB is wanted")


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
Nullable = BeforeValidator(_null)
OptionalCount = Annotated[Count | None, Nullable]
OptionalPositive = Annotated[Positive | None, Nullable]
OptionalText = Annotated[str | None, Nullable]
Names = Annotated[tuple[str, ...], BeforeValidator(_list)]
Size = Annotated[int | Literal["auto"], BeforeValidator(_bytes)]
AutoCount = Annotated[Count | Literal["auto"], BeforeValidator(_auto)]
AutoWhole = Annotated[Whole | Literal["auto"], BeforeValidator(_auto)]
AutoSwitch = Annotated[bool | Literal["auto"], BeforeValidator(_auto)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    path: str
    """A hub id, a folder, or builtin:NAME."""
    revision: OptionalText = None
    """The hub revision (branch, tag or commit)."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute precision. auto: bf16 on a GPU that has it, fp32 on a CPU. Trained weights are kept in fp32 in either."""
    base: Literal["same", "nf4"] = "same"
    """How frozen weights are stored: as computed, or in 4 bits (QLoRA)."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """The attention implementation of the model class."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings. Only for sources that you trust."""


class AdapterSection(Section):
    kind: Literal["none", "lora"] = "none"
    """none trains every parameter."""
    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Share = 0.0
    targets: Names = ("all-linear",)
    """Names of linear layers (each must match), or all-linear."""
    path: OptionalText = None
    """Go on from this adapter folder (a run's adapter/, or any peft LoRA)."""


class DataSection(Section):
    path: OptionalText = None
    """A JSONL, JSON, CSV or Parquet file, or a hub data set id."""
    split: str = "train"
    """The split of a hub data set."""
    valid_path: OptionalText = None
    """Held-out rows. Not given: a share of the training rows is held out."""
    valid_share: Share = 0.0
    """The share of rows held out when there is no valid_path."""
    template: str = "messages"
    """A name in data_templates/, or a path to a YAML of your own."""
    columns: dict[str, str] = {}
    """Template column: the file's column, where the names differ."""
    max_tokens: Count = 2048
    """The length of a row."""
    on_long: Literal["truncate", "drop", "error", "split"] = "truncate"
    """What happens to a document longer than max_tokens (split: plain documents only). Counted and shown."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be rendered. Skips are counted and shown."""
    pack: bool = False
    """Put several documents into one row of max_tokens; they do not see each other."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which turns are learned."""
    max_rows: OptionalCount = None
    """Use only the first rows."""


class OptimizerSection(Section):
    name: str = "adamw"
    """A row of the optimizer table."""
    lr: Positive = 2e-4
    weight_decay: NotNegative = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.999
    epsilon: Positive = 1e-8


class ScheduleSection(Section):
    name: str = "cosine"
    """A row of the schedule table: constant, linear, cosine."""
    warmup: NotNegative = 0.0
    """Steps of linear warm-up; below 1: a share of all steps."""
    final: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)] = 0.0
    """The share of the peak rate at the end."""


class TrainSection(Section):
    batch: OptionalCount = None
    """Rows of one optimizer step, over all processes."""
    batch_tokens: OptionalCount = None
    """Tokens of one optimizer step, over all processes: rows are taken while they fit."""
    max_steps: OptionalCount = None
    epochs: OptionalPositive = None
    """Passes over the data. Neither this nor max_steps: one pass."""
    max_grad_norm: OptionalPositive = 1.0
    """Clip the gradient's global norm; none leaves it."""
    seed: Whole = 0
    stop_after: OptionalCount = None
    """Stop after this many evaluations without a lower eval_loss."""


class EvaluateSection(Section):
    every: OptionalCount = None
    """Steps between evaluations; they run before the first step and after the last in any case."""
    sets: dict[str, str] = {}
    """More held-out sets: name: path."""
    max_rows: OptionalCount = None
    """Evaluate on the first rows only. Shown beside the figure."""
    samples: Whole = 3
    """Answers to held-out rows shown before and after."""


class CheckpointSection(Section):
    every: OptionalCount = None
    """Steps between checkpoints; one is written at the end in any case."""
    keep: Count = 2
    """How many to keep, newest first."""
    keep_best: OptionalText = None
    """Keep the checkpoint with the lowest value of this evaluation metric too (eval_loss, or NAME/eval_loss)."""


class GenerateSection(Section):
    max_tokens: Count = 64
    temperature: NotNegative = 0.0


class PlanSection(Section):
    gpu_memory: Size = "auto"
    """The most GPU memory that the process may take."""
    host_memory: Size = "auto"
    """The most host memory."""
    exact: Literal["auto", "bitwise"] = "auto"
    micro_batch: AutoCount = "auto"
    """Rows in one forward pass on one process."""
    activation_checkpointing: AutoSwitch = "auto"
    loss_chunk: AutoWhole = "auto"
    """Positions whose logits exist at once; 0: all."""
    weights: Literal["auto", "resident", "streamed"] = "auto"
    resident_blocks: AutoWhole = "auto"
    activation_offload: AutoSwitch = "auto"
    optimizer_placement: Literal["auto", "device", "host"] = "auto"
    compile: AutoSwitch = "auto"
    data: AutoCount = "auto"
    shard: AutoCount = "auto"
    tensor: AutoCount = "auto"
    context: AutoCount = "auto"


class RunSection(Section):
    dir: OptionalText = None
    """The run's folder; default runs/NAME-TIME."""
    trackers: Names = ()
    """tensorboard, wandb, trackio, mlflow."""


class Recipe(Section):
    """One job, whole. `recipe` is its name."""

    recipe: str = "unnamed"
    task: Literal["text"] = "text"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelSection
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    generate: GenerateSection = GenerateSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()
    resume: OptionalText = None
    """auto (go on from the newest complete checkpoint of run.dir, if any) or a checkpoint's folder."""
