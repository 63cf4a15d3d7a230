"""What a recipe may say: frozen pydantic sections, one field a key. Unknown keys are errors.

Values come as text (from YAML and the command line) and the field's type decides what they are, so `012` is 12 for a
count and stays `012` for a name. `auto` is resolved by whoever owns the choice, never here.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

NULLS = ("null", "Null", "NULL", "~", "", "none", "None")
"""Texts that mean "not set" where a key may be unset. Quotes make no difference: a name called null is written ./null."""

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"TB": 10**12, "B": 1, "": 1}

DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
"""A number of YAML 1.2's core schema: no underscores, no base sixty; 2e-5 needs no dot."""


@dataclass(frozen=True)
class Wants:
    """What a field takes, in words, for messages and help."""

    text: str


def _null(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip() in NULLS else value


def _number(value: Any) -> Any:
    """A finite number. Text is read by YAML 1.2's rules; a truth value is not a number."""
    if isinstance(value, bool):
        raise ValueError("a truth value where a number is wanted")
    if isinstance(value, str):
        if not DECIMAL.fullmatch(value.strip()):
            raise ValueError("not a number")
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _whole(value: Any) -> Any:
    """A whole number: 12, 012 (twelve), 0x10, 0o14, and 5e5 or 12.0, which name a whole number too."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return int(text, 10)
        if re.fullmatch(r"0x[0-9a-fA-F]+|0o[0-7]+", text):
            return int(text, 0)
    number = _number(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


def _temperature(value: float) -> float:
    """Scores are divided by it in fp32, which overflows far below 1e-6."""
    if 0 < value < 1e-6:
        raise ValueError("too near to 0")
    return value


def _list(value: Any) -> Any:
    """`a,b` and `[a, b]` from the command line are lists; `all-linear` alone is a list of one; null is the empty one."""
    if value is None:
        return []
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in NULLS:
        return []
    if text.startswith("[") != text.endswith("]"):
        raise ValueError("a bracket is missing")
    inner = text[1:-1] if text.startswith("[") else text
    return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]


def _pairs(value: Any) -> Any:
    return {} if _null(value) is None else value


def _text(value: Any) -> Any:
    """Text that a path and a UTF-8 file can hold: no null character, no half of a character."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a null character")
    if isinstance(value, str):
        value.encode()
    return value


def _auto(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _auto_whole(value: Any) -> Any:
    return "auto" if _auto(value) == "auto" else _whole(value)


def _blocks(value: Any) -> Any:
    """A count of blocks from 2 on stays a number; 0 and 1, and words, are read as switches or refused."""
    value = _auto(value)
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value) and int(value) > 1:
        return int(value)
    return value


def _bytes(value: Any) -> Any:
    """`8GiB`, `24GB`, `512MiB`, a bare number of bytes, or `auto`."""
    if _auto(value) == "auto":
        return "auto"
    if not isinstance(value, str):
        return _whole(value)
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", value.strip())
    if parts is None or parts[2] not in UNITS:
        raise ValueError("not a size")
    return int(Fraction(parts[1]) * UNITS[parts[2]])


Nullable = BeforeValidator(_null)
Text = Annotated[str, BeforeValidator(_text), Field(min_length=1), Wants("text")]
Name = Annotated[
    str,
    BeforeValidator(_text),
    Field(pattern=r"^[^/\\]*[^/\\.]$"),
    Wants("a name: no slash, and no dot at its end"),
]
Switch = Annotated[bool, Wants("true or false")]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1), Wants("a whole number of at least 1")]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0), Wants("a whole number of at least 0")]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63), Wants("a whole number from 0 to below 2^63")]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0), Wants("a number above 0")]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0), Wants("a number of at least 0")]
Temperature = Annotated[
    float, BeforeValidator(_number), Field(ge=0), AfterValidator(_temperature), Wants("0, or a number of at least 1e-6")
]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1), Wants("a number from 0 to below 1")]
Portion = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1), Wants("a number from 0 to 1")]
OptionalCount = Annotated[Count | None, Nullable, Wants("a whole number of at least 1, or null")]
OptionalPositive = Annotated[Positive | None, Nullable, Wants("a number above 0, or null")]
OptionalText = Annotated[Text | None, Nullable, Wants("text, or null")]
Names = Annotated[tuple[Text, ...], BeforeValidator(_list), Wants("a list: a,b or [a, b]")]
Pairs = Annotated[dict[str, Text], BeforeValidator(_pairs), Wants("a section of NAME: text")]
Size = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    BeforeValidator(_bytes),
    Wants("a size such as 8GiB, 24GB or 512MiB, or auto"),
]
AutoCount = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    BeforeValidator(_auto_whole),
    Wants("a whole number of at least 1, or auto"),
]
AutoWhole = Annotated[
    Annotated[int, Field(ge=0)] | Literal["auto"],
    BeforeValidator(_auto_whole),
    Wants("a whole number of at least 0, or auto"),
]
AutoBlocks = Annotated[
    bool | Annotated[int, Field(ge=2)] | Literal["auto", "selective"],
    BeforeValidator(_blocks),
    Wants("true, false, selective, a whole number of at least 2, or auto"),
]
AutoSwitch = Annotated[bool | Literal["auto"], BeforeValidator(_auto), Wants("true, false or auto")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ModelSection(Section):
    path: Text
    """A hub id, a folder, or builtin:NAME."""
    revision: OptionalText = None
    """The hub revision (branch, tag or commit)."""
    precision: Literal["auto", "bf16", "fp32", "tf32", "fp16"] = "auto"
    """Compute precision. auto: bf16 on a GPU that has it, fp32 on a CPU. Trained weights are kept in fp32 in each. tf32: fp32
    with matrix products of 10-bit mantissas. fp16: for GPUs without bf16; the loss is scaled, and steps that overflow are
    skipped and counted."""
    base: Literal["same", "nf4"] = "same"
    """How frozen weights are stored: as computed, or in 4 bits (QLoRA)."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """The attention implementation of the model class."""
    trust_remote_code: Switch = False
    """Run Python code that the model's folder brings. Only for sources that you trust."""


class AdapterSection(Section):
    kind: Literal["none", "lora"] = "none"
    """none trains every parameter."""
    rank: Count = 16
    """The width of the two small matrices."""
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: Names = ("all-linear",)
    """Names of linear layers (each must match), or all-linear."""
    path: OptionalText = None
    """Go on from this adapter folder (a run's adapter/, or any peft LoRA)."""


class DataSection(Section):
    path: OptionalText = None
    """A JSONL, JSON, CSV or Parquet file, or a hub data set id."""
    split: Text = "train"
    """The split of a hub data set."""
    valid_path: OptionalText = None
    """Held-out rows. Not given: a share of the training rows is held out."""
    valid_share: Share = 0.0
    """The share of rows held out when there is no valid_path."""
    template: Text = "messages"
    """A name in data_templates/, or a path to a YAML of your own."""
    columns: Pairs = {}
    """Template column: the file's column, where the names differ."""
    max_tokens: Count = 2048
    """The length of a row."""
    on_long: Literal["truncate", "drop", "error", "split"] = "truncate"
    """What happens to a document longer than max_tokens (split: plain documents only). Counted and shown."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be rendered. Skips are counted and shown."""
    pack: Switch = False
    """Put several documents into one row of max_tokens; they do not see each other."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which turns are learned."""
    max_rows: OptionalCount = None
    """Use only the first rows."""


class OptimizerSection(Section):
    name: Text = "adamw"
    """A row of the optimizer table."""
    lr: Positive = 2e-4
    """The peak learning rate."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of matrices; vectors and embeddings have none."""
    beta1: Share = 0.9
    """Decay of the mean of gradients."""
    beta2: Share = 0.999
    """Decay of the mean of squared gradients."""
    epsilon: Positive = 1e-8
    """Added to the root of the second mean."""


class ScheduleSection(Section):
    name: Text = "cosine"
    """A row of the schedule table: constant, linear, cosine."""
    warmup: NotNegative = 0.0
    """Steps of linear warm-up; below 1: a share of all steps."""
    final: Portion = 0.0
    """The share of the peak rate at the end."""


class TrainSection(Section):
    batch: OptionalCount = None
    """Rows of one optimizer step, over all processes."""
    batch_tokens: OptionalCount = None
    """Tokens of one optimizer step, over all processes: rows are taken while they fit."""
    max_steps: OptionalCount = None
    """Stop after this many optimizer steps."""
    epochs: OptionalPositive = None
    """Passes over the data. Neither this nor max_steps: one pass."""
    max_grad_norm: OptionalPositive = 1.0
    """Clip the gradient's global norm; none leaves it."""
    seed: Seed = 0
    """Decides the order of rows and every random draw."""
    stop_after: OptionalCount = None
    """Stop after this many evaluations without a lower eval_loss."""


class EvaluateSection(Section):
    every: OptionalCount = None
    """Steps between evaluations; they run before the first step and after the last in any case."""
    sets: Pairs = {}
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
    """The most tokens of an answer."""
    temperature: Temperature = 0.0
    """0 takes the likeliest token; above it, tokens are drawn."""


class PlanSection(Section):
    gpu_memory: Size = "auto"
    """The most GPU memory that the process may take."""
    host_memory: Size = "auto"
    """The most host memory."""
    exact: Literal["auto", "bitwise"] = "auto"
    """bitwise: only choices that change no bit of the result."""
    micro_batch: AutoCount = "auto"
    """Rows in one forward pass on one process."""
    activation_checkpointing: AutoBlocks = "auto"
    """Keep only each block's input and recompute the rest in the backward pass. N: every N-th block keeps all of its
    activations; selective: attention's output is kept too."""
    loss_chunk: AutoWhole = "auto"
    """Positions whose logits exist at once; 0: all."""
    weights: Literal["auto", "resident", "streamed"] = "auto"
    """Where the weights live: on the device, or fetched from host memory."""
    resident_blocks: AutoWhole = "auto"
    """With streamed weights: blocks that stay on the device."""
    activation_offload: AutoSwitch = "auto"
    """Keep block inputs (without checkpointing: all large activations of blocks) in host memory until their backward."""
    optimizer_in_backward: AutoSwitch = "auto"
    """Update each parameter as soon as its gradient is complete. Needs train.max_grad_norm=none and one micro-batch."""
    optimizer_placement: Literal["auto", "device", "host"] = "auto"
    """Where optimizer state lives; from the host it passes through the GPU during the update."""
    embedding_placement: Literal["auto", "device", "host"] = "auto"
    """Where a frozen, untied embedding lives; from the host only the rows of a batch are sent."""
    probe: AutoSwitch = "auto"
    """Try forward and backward of the longest rows before the first step, so that too little memory shows at once. auto: on a
    GPU."""
    compile: AutoSwitch = "auto"
    """Compile the blocks."""
    data: AutoCount = "auto"
    """Data-parallel processes: as many as the launcher starts."""
    shard: AutoCount = "auto"
    """Processes that weights are spread over."""
    tensor: AutoCount = "auto"
    """Processes that each matrix is cut over."""
    context: AutoCount = "auto"
    """Processes that each row is cut over."""


class RunSection(Section):
    dir: OptionalText = None
    """The run's folder; default runs/NAME-TIME."""
    trackers: Names = ()
    """tensorboard, wandb, trackio, mlflow."""


class Recipe(Section):
    """One job, whole. `recipe` is its name."""

    recipe: Name = "unnamed"
    """The job's name; on the command line recipe=NAME or recipe=FILE says which one to load."""
    task: Literal["text"] = "text"
    """The kind of job."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
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
