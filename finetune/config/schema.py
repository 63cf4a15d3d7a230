"""What a recipe may say: frozen pydantic sections, one field a key. Unknown keys are errors.

`auto` is resolved by whoever owns the choice, never here. What the kinds of values are: config/values.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from finetune.config.values import (
    AutoBlocks,
    AutoCount,
    AutoSwitch,
    AutoWhole,
    Count,
    Counts,
    Groups,
    Name,
    Names,
    NotNegative,
    OptionalCount,
    OptionalPositive,
    OptionalText,
    Pairs,
    Portion,
    Positive,
    Roles,
    Seed,
    Share,
    Size,
    Switch,
    Temperature,
    Text,
    Weights,
    Whole,
)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ModelSection(Section):
    path: Text
    """A hub id, a folder, or builtin:NAME."""
    revision: OptionalText = None
    """The hub revision (branch, tag or commit)."""
    precision: Literal["auto", "bf16", "fp32", "tf32", "fp16"] = "auto"
    """Compute precision. auto: bf16 on a GPU that has it, fp32 on a CPU. `trained` says how trained weights are kept. tf32: fp32
    with matrix products of 10-bit mantissas. fp16: for GPUs without bf16; the loss is scaled, and steps that overflow are
    skipped and counted."""
    trained: Literal["fp32", "stochastic", "split", "bf16"] = "fp32"
    """How trained weights are kept (adapter.kind=none). stochastic: in bf16, each update rounded up or down by a keyed draw.
    split: in bf16 with the lower 16 bits held by the optimizer. bf16: plain, where small updates are lost."""
    base: Literal["same", "nf4", "int8", "fp8"] = "same"
    """How the blocks' frozen matrices are stored: as computed, in 4 bits (QLoRA), or in 8 with a scale a row."""
    double_quant: Switch = True
    """With nf4: store the scales of its blocks in 8 bits too (0.37 bits a weight less)."""
    new_tokens: Names = ()
    """Tokens to add to the vocabulary. Their rows begin as the mean of the others and are trained."""
    new_tokens_path: OptionalText = None
    """A text file of such tokens, one a line. A run keeps them as new_tokens and never reads the file again."""
    layers: OptionalCount = None
    """Keep only the first blocks: another, smaller model, for trials and measurements."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """The attention implementation of the model class."""
    trust_remote_code: Switch = False
    """Run Python code that the model's folder brings. Only for sources that you trust."""


class AdapterSection(Section):
    kind: Literal["none", "lora", "dora"] = "none"
    """none trains the model's own parameters; dora is LoRA with a trained size for every output."""
    rank: Count = 16
    """The width of the two small matrices."""
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    scaling: Literal["standard", "rslora"] = "standard"
    """standard: alpha / rank; rslora: alpha / the root of the rank."""
    init: Literal["default", "gaussian", "pissa", "olora"] = "default"
    """How the two matrices begin. pissa and olora take them out of the base, by its singular values or a QR."""
    targets: Names = ("all-linear",)
    """Names of linear layers (each must match), or all-linear."""
    ranks: Counts = {}
    """Name or pattern of targets: their rank, where it is not adapter.rank."""
    alphas: Weights = {}
    """Name or pattern of targets: their alpha, where it is not adapter.alpha."""
    modules_to_save: Names = ()
    """Names of layers (norms, embed_tokens, lm_head) that are trained whole and saved with the adapter."""
    path: OptionalText = None
    """Go on from this adapter folder (a run's adapter/, or any peft LoRA)."""


class DataSection(Section):
    path: OptionalText = None
    """A file (JSONL, JSON, CSV, Parquet, Arrow, text; .gz ...), a pattern, a folder of texts, or a hub data set id."""
    mixture: Pairs = {}
    """Several files in the place of path: name: path."""
    weights: Weights = {}
    """How many of an epoch's rows come from each file of the mixture, as name: number; not given: all rows of all files."""
    on_exhausted: Literal["stop", "repeat"] = "stop"
    """With weights, when a file has too few rows: the epoch gets shorter, or the file's rows come again. Shown."""
    split: Text = "train"
    """The split of a hub data set."""
    valid_path: OptionalText = None
    """Held-out rows. A recipe's own are set aside where the command line names another data.path and no held-out rows."""
    valid_share: Share = 0.0
    """The share of rows held out when there is no valid_path."""
    template: Text = "messages"
    """A name in data_templates/, or a path to a YAML of your own."""
    columns: Pairs = {}
    """Template column: the file's column, where the names differ."""
    system: OptionalText = None
    """The system text of rows that bring none of their own. Not given: none is added."""
    roles: Pairs = {}
    """A role's name in the file: the role that it stands for (system, user, assistant, tool, call)."""
    max_tokens: Count = 2048
    """The length of a row."""
    on_long: Literal["truncate", "drop", "error", "split"] = "truncate"
    """What happens to a document longer than max_tokens (split: plain documents only). Counted and shown."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be read or rendered. Skips are counted and shown."""
    pack: Switch = False
    """Put several documents into one row of max_tokens; they do not see each other."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which turns are learned."""
    max_rows: OptionalCount = None
    """Use only the first rows."""
    streaming: Switch = False
    """Read, render and tokenise while training, for files larger than memory; train.max_steps says how long."""
    shuffle_buffer: Count = 4096
    """With streaming: rows that are read ahead and shuffled (and packed) together; 1 keeps the file's order."""
    workers: AutoWhole = "auto"
    """Processes that render and tokenise; 0: this one. auto: several when the rows are many. They change no row."""
    cache: Switch = True
    """Keep prepared rows on disk and map them at the next start."""


class OptimizerSection(Section):
    name: Text = "adamw"
    """A row of the optimizer table: adamw, adamw8bit, paged_adamw8bit, adamw4bit, adamwfp8, adafactor, lion, sgd, muon."""
    lr: Positive = 2e-4
    """The peak learning rate."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of matrices; vectors and embeddings have none."""
    beta1: Share = 0.9
    """Decay of the mean of gradients; the momentum of sgd."""
    beta2: Share = 0.999
    """Decay of the mean of squared gradients. For lion, which has none, of the mean (0.99 is usual there)."""
    epsilon: Positive = 1e-8
    """Added to the root of the second mean."""
    full_state: Roles = ("embedding", "head")
    """Large tensors that keep fp32 state where the optimizer codes it in fewer bits; []: none."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale the rate with the step's batch: by batch / base_batch, or the root of that."""
    base_batch: OptionalCount = None
    """The batch (in the unit that the recipe gives: rows or tokens) that lr belongs to."""
    groups: Groups = {}
    """Parameters by name pattern (* and ?; the first that matches counts): a factor on their rate, a decay of their own."""


class ScheduleSection(Section):
    name: Text = "cosine"
    """A row of the schedule table: constant, linear, cosine, wsd (warm-up, stable, decay)."""
    warmup: NotNegative = 0.0
    """Steps of linear warm-up; below 1: a share of all steps."""
    decay: NotNegative = 0.1
    """wsd: steps of decay at the end; below 1: a share of all steps."""
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
    """Clip the gradient's global norm; null leaves it."""
    last_blocks: OptionalCount = None
    """Without an adapter: train only the last blocks."""
    modules: Names = ()
    """Without an adapter: train only these (names or patterns of modules or parameters), and last_blocks."""
    freeze: Names = ()
    """Without an adapter: leave these as they are (names or patterns, such as embed_tokens)."""
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
    scores: Names = ()
    """Scores of answers to held-out prompts, before the first step and after the last: exact_match, rouge_l."""
    answers: Count = 100
    """The most held-out rows of a set that are answered for the scores."""


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
    mlp_tile: AutoWhole = "auto"
    """Tokens that the MLP of a block takes at a time where the block is recomputed (plan.activation_checkpointing=true, or
    streamed weights), for fast blocks; 0: all."""
    weights: Literal["auto", "resident", "streamed"] = "auto"
    """Where the weights live: on the device, or fetched from host memory. auto: on the device; on one GPU where no such plan
    fits, streamed."""
    resident_blocks: AutoWhole = "auto"
    """With streamed weights: blocks that stay on the device."""
    slots: AutoCount = "auto"
    """With streamed weights: blocks that have room on the device at once, beside the resident ones. auto: 2."""
    activation_offload: AutoSwitch = "auto"
    """Keep block inputs (without checkpointing: all large activations of blocks) in host memory until their backward."""
    optimizer_in_backward: AutoSwitch = "auto"
    """Update each parameter as soon as its gradient is complete. Needs train.max_grad_norm=none and one micro-batch."""
    optimizer_placement: Literal["auto", "device", "host"] = "auto"
    """Where optimizer state lives; from the host it passes through the GPU during the update."""
    embedding_placement: Literal["auto", "device", "host"] = "auto"
    """Where a frozen, untied embedding lives; from the host only the rows of a batch are sent."""
    head_placement: Literal["auto", "device", "visit", "host"] = "auto"
    """With streamed weights: where the head lives. visit: on the host, and whole on the device while losses are made; host: it
    passes through the device in parts of its rows."""
    fast_block: AutoSwitch = "auto"
    """Run decoder layers through this toolkit's fused operations: on a GPU, where the model's form is known."""
    attention: Literal["auto", "deterministic", "flash", "cudnn", "efficient", "math"] = "auto"
    """The attention kernel of fast blocks. auto: torch's own order. deterministic: one with a deterministic backward, and
    the rest of the step under torch's deterministic algorithms, so that a run on a GPU gives the same bits again."""
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
    keep: Switch = True
    """Write checkpoints and the result. false: a trial, of which the metrics and, at its end, the summary are left."""


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
