"""The resident step beside a plain transformers + peft loop: peak memory, planned memory and tokens/s, a process a cell.

    python benchmarks/resident.py                        # every cell, one JSON line each to benchmarks/results/resident.jsonl
    python benchmarks/resident.py --tool ours --method lora --shape 1b --checkpointing on    # one cell, printed

Random weights of the named shape, rows of 2,048 tokens, 4 rows a step, AdamW. The plain loop is what the libraries'
documentation shows: bf16 base, fp32 trained weights, autocast, whole logits, the library's own checkpointing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, ROWS, WARM = 2048, 4, 3
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
CELLS = [
    *(("1b", method, checkpointing) for method in ("lora", "qlora", "full") for checkpointing in ("off", "on")),
    ("8b", "lora", "on"),
    ("8b", "qlora", "on"),
]


def model_folder(shape: str, place: Path) -> Path:
    """A folder with random weights of the shape and a byte tokenizer; made once."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from finetune.config.schema import ModelSection
    from finetune.models.builtin import resolve
    from finetune.models.load import load_tokenizer

    folder = place / f"random-{shape}"
    if (folder / "config.json").exists():
        return folder
    vocabulary = 320 if shape == "tiny" else 128256
    config = LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 4, rope_theta=500000.0,
        max_position_embeddings=131072, tie_word_embeddings=shape == "1b", **SHAPES[shape],
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    assert resolve("builtin:tiny")
    load_tokenizer(ModelSection(path="builtin:tiny")).save_pretrained(folder)
    return folder


def rows_file(place: Path, rows: int) -> Path:
    """Rows that fill 2,048 positions: 2,047 bytes and the end token."""
    path = place / f"rows-{rows}.jsonl"
    if not path.exists():
        with path.open("w", encoding="utf-8") as file:
            for row in range(rows):
                text = "".join(chr(97 + (row * 31 + i * i * 7 + i) % 26) for i in range(LENGTH - 1))
                file.write(json.dumps({"text": text}) + "\n")
    return path


def recipe_of(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    adapter = {"kind": "none"} if cell.method == "full" else {"kind": "lora", "rank": 16, "alpha": 32}
    return {
        "recipe": "resident",
        "model": {"path": str(model_folder(cell.shape, place)), "base": "nf4" if cell.method == "qlora" else "same"},
        "adapter": adapter,
        "data": {"path": str(rows_file(place, cell.steps * ROWS)), "template": "text", "max_tokens": LENGTH},
        "optimizer": {"lr": 1e-5},
        "schedule": {"name": "constant"},
        "train": {"batch": ROWS, "max_steps": cell.steps},
        "evaluate": {"samples": 0},
        "plan": {"activation_checkpointing": cell.checkpointing == "on", "micro_batch": cell.micro_batch},
        "run": {"dir": tempfile.mkdtemp()},
    }


def ours(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    import finetune

    run = finetune.run(recipe_of(cell, place))
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if "loss" in line][WARM:]
    planned = run.summary["peak_gpu_bytes_planned"]
    return {"seconds": statistics.median(seconds), "losses": [lines[0]["loss"], lines[-1]["loss"]], "planned": planned}


def plain(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The loop of the libraries' documentation."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder = model_folder(cell.shape, place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": torch.float32 if cell.method == "full" else torch.bfloat16}
    if cell.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **options)
    model.config.use_cache = False
    if cell.method != "full":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    if cell.checkpointing == "on":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in rows_file(place, cell.steps * ROWS).read_text().splitlines()]
    ids = torch.tensor(
        [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=device == "cuda")
    seconds, losses = [], []
    for step in range(cell.steps):
        started = time.perf_counter()
        batch = ids[step * ROWS : (step + 1) * ROWS].to(device)
        loss = torch.zeros((), device=device)
        for rows in batch.split(cell.micro_batch):
            with torch.autocast(device, dtype=torch.bfloat16):
                part = model(input_ids=rows, labels=rows).loss * len(rows) / ROWS
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[WARM:]), "losses": [losses[0], losses[-1]], "planned": None}


def measure(cell: argparse.Namespace, place: Path) -> dict[str, Any]:
    import torch

    import finetune
    from finetune.train.finish import versions

    found = (ours if cell.tool == "ours" else plain)(cell, place)
    gpu = torch.cuda.is_available()
    return {
        "tool": f"finetune {finetune.__version__}" if cell.tool == "ours" else "transformers + peft, plain loop",
        "shape": cell.shape, "method": cell.method, "checkpointing": cell.checkpointing, "seq": LENGTH,
        "tokens_per_step": LENGTH * ROWS, "micro_batch": cell.micro_batch,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if gpu else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3) if gpu else None,
        "planned_gib": round(found["planned"] / 2**30, 3) if found["planned"] else None,
        "tokens_per_s": round(LENGTH * ROWS / found["seconds"], 1), "loss_first": found["losses"][0],
        "loss_last": found["losses"][1], "hardware": torch.cuda.get_device_name() if gpu else "cpu", "versions": versions(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=["ours", "plain"])
    parser.add_argument("--method", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--checkpointing", choices=["on", "off"], default="on")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--only", help="cells such as 1b-lora-on,8b-qlora-on")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "finetune-benchmark")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resident.jsonl")
    cell = parser.parse_args()
    cell.place.mkdir(parents=True, exist_ok=True)
    if cell.tool:
        print(json.dumps(measure(cell, cell.place)))
        return
    for shape, method, checkpointing in CELLS:
        if cell.only and f"{shape}-{method}-{checkpointing}" not in cell.only.split(","):
            continue
        for tool in ("ours", "plain"):
            words = ["--tool", tool, "--shape", shape, "--method", method, "--checkpointing", checkpointing]
            words += ["--steps", str(cell.steps), "--place", str(cell.place)]
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            if done.returncode:
                print(tool, shape, method, checkpointing, "failed:", done.stderr[-600:], flush=True)
                continue
            line = done.stdout.strip().splitlines()[-1]
            with cell.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            shown = json.loads(line)
            print({key: value for key, value in shown.items() if key != "versions"}, flush=True)


if __name__ == "__main__":
    main()
