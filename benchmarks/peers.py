"""One GPU, the Llama-3-8B shape: this toolkit beside transformers + peft + Liger and Unsloth, a process a cell.

    python benchmarks/peers.py                                     # every cell; JSON lines to benchmarks/results/peers.jsonl
    python benchmarks/peers.py --tool ours --method lora           # one cell, printed
    python benchmarks/peers.py --shape tiny --tool ours --method lora --steps 4    # a smoke test for a CPU

All tools get the same folder of random weights, the same rows of 2,048 tokens (4 a step), the same settings: LoRA of
rank 16 on all linear layers, alpha 16, AdamW; NF4 with double quantisation for QLoRA; 8-bit AdamW for full fine-tuning.
Each checkpoints its activations. `ours` with `--method full` keeps bf16 weights, as the peers do, but rounds its updates
stochastically.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cells

LENGTH, ROWS, WARM = 2048, 4, 3
RESULTS = Path(__file__).parent / "results" / "peers.jsonl"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
METHODS = ("lora", "qlora", "full")
TOOLS = ("ours", "liger", "unsloth")


def model_folder(shape: str, place: Path) -> Path:
    """A folder with random bf16 weights of the shape and a tokenizer of one word an id; made once."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = place / f"random-{shape}"
    if (folder / "tokenizer_config.json").exists():
        return folder
    vocabulary = 320 if shape == "tiny" else 128256
    config = LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 4, rope_theta=500000.0,
        max_position_embeddings=131072, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=3,
        **SHAPES[shape],
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocabulary)}, unk_token="<2>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<0>", "eos_token": "<1>", "unk_token": "<2>", "pad_token": "<3>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return folder


def row_ids(shape: str, rows: int) -> list[list[int]]:
    """Rows of 2,048 random ids, the last the end token; the same for every tool."""
    import numpy as np

    generator = np.random.default_rng(0)
    ids = generator.integers(4, 320 if shape == "tiny" else 128256, (rows, LENGTH))
    ids[:, -1] = 1
    return ids.tolist()


def in_order(steps: int) -> list[int]:
    """The rows as this toolkit takes them, so that losses can be compared step by step."""
    from finetune.data.loader import Order

    batches = Order([LENGTH] * ROWS * steps, batch=ROWS, batch_tokens=None, seed=0).batches(0)
    return [int(row) for batch in batches for row in batch]


def rows_file(shape: str, place: Path, rows: int) -> Path:
    path = place / f"rows-{shape}-{rows}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in row_ids(shape, rows):
            file.write(json.dumps({"text": " ".join(f"<{i}>" for i in row[:-1])}) + "\n")
    return path


def ours(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    import finetune

    full = cell.method.startswith("full")
    optimizer: dict[str, Any] = {"lr": 1e-5 if full else 1e-4, "name": "adamw8bit" if full else "adamw"}
    if cell.method == "full":
        optimizer["full_state"] = []
    recipe = {
        "recipe": "peers",
        "model": {
            "path": str(model_folder(cell.shape, place)),
            "base": "nf4" if cell.method == "qlora" else "same",
            **({"trained": "stochastic"} if full else {}),
        },
        "adapter": {"kind": "none"} if full else {"kind": "lora", "rank": 16, "alpha": 16},
        "data": {
            "path": str(rows_file(cell.shape, place, ROWS * cell.steps)),
            "template": "text",
            "max_tokens": LENGTH,
        },
        "optimizer": optimizer,
        "schedule": {"name": "constant"},
        "train": {"batch": ROWS, "max_steps": cell.steps},
        "evaluate": {"samples": 0},
        "plan": dict(pair.split("=") for pair in cell.plan),
        "run": {"dir": tempfile.mkdtemp(dir=place), "keep": False},
    }
    run = finetune.run(recipe)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if "loss" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {"seconds": seconds, "losses": losses, "planned": run.summary["peak_gpu_bytes_planned"]}


def load_unsloth(cell: argparse.Namespace, folder: Path) -> Any:
    import torch
    from unsloth import FastLanguageModel

    full = cell.method == "full"
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=LENGTH, dtype=torch.bfloat16, load_in_4bit=cell.method == "qlora",
        full_finetuning=full,
    )  # fmt: skip
    if full:
        return model
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth",
        target_modules=TARGETS,
    )  # fmt: skip


def load_liger(cell: argparse.Namespace, folder: Path) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, cross_entropy=False)
    options: dict[str, Any] = {}
    if cell.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": device}, attn_implementation="sdpa", **options
    )
    model.config.use_cache = False
    if cell.method != "full":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def peer(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The loop around a peer's model: what its documentation shows, without its trainer."""
    if cell.tool == "unsloth":
        os.environ.update(UNSLOTH_RETURN_LOGITS="0", UNSLOTH_DISABLE_STATISTICS="1", HF_HUB_OFFLINE="1")
        import unsloth  # noqa: F401  (it must come before torch and transformers)
    import torch

    folder = model_folder(cell.shape, place)
    torch.manual_seed(0)
    model = {"liger": load_liger, "unsloth": load_unsloth}[cell.tool](cell, folder)
    model.train()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any
    if cell.method == "full":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=1e-5, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=device == "cuda")
    ids = torch.tensor(row_ids(cell.shape, ROWS * cell.steps))[in_order(cell.steps)]
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for step in range(cell.steps):
        started = time.perf_counter()
        batch = ids[step * ROWS : (step + 1) * ROWS].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=cell.method != "full"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "losses": losses, "planned": None}


def measure(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    figures = ours(cell, place) if cell.tool == "ours" else peer(cell, place)
    import torch

    from finetune.train.finish import versions

    on_gpu = torch.cuda.is_available()
    gib = 2.0**30
    return {
        "tool": cell.tool,
        "method": cell.method,
        "shape": cell.shape,
        "seq": LENGTH,
        "tokens_per_step": LENGTH * ROWS,
        "peak_gib": round(torch.cuda.max_memory_allocated() / gib, 3) if on_gpu else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / gib, 3) if on_gpu else None,
        "planned_gib": None if figures["planned"] is None else round(figures["planned"] / gib, 3),
        "tokens_per_s": round(LENGTH * ROWS / statistics.median(figures["seconds"][WARM:])),
        "plan": cell.plan,
        "loss_first": figures["losses"][0],
        "loss_last": figures["losses"][-1],
        "seconds": [round(value, 4) for value in figures["seconds"]],
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {**versions(), **_peer_versions()},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _peer_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("liger-kernel", "unsloth", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def every_cell(arguments: argparse.Namespace) -> int:
    """Each cell in a process of its own."""
    pins = [part for pair in arguments.plan for part in ("--plan", pair)]
    rest = ["--shape", arguments.shape, "--steps", str(arguments.steps), "--place", str(arguments.place), *pins]
    named = [(tool, method) for method in arguments.methods.split(",") for tool in arguments.tools.split(",")]
    commands = [(f"{tool} {method}", [__file__, "--tool", tool, "--method", method, *rest]) for tool, method in named]
    return cells.every(commands, '{"tool"', arguments.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS)
    parser.add_argument("--method", choices=(*METHODS, "full-default"))
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--plan", action="append", default=[], metavar="KEY=VALUE", help="a pin of ours: plan.KEY=VALUE"
    )
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "finetune-peers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.plan = arguments.plan or ["activation_checkpointing=true"]
    arguments.place.mkdir(parents=True, exist_ok=True)
    if arguments.tool is None:
        return every_cell(arguments)
    print(json.dumps(measure(arguments, arguments.place)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
