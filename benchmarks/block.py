"""Where a step's time goes: one 8B-shape decoder layer by transformers, Liger and the fast block, forward and backward.

    python benchmarks/block.py                 # JSON lines, one a form; needs a GPU (--quick: a CPU smoke test)
    python benchmarks/block.py --rows 1 --length 32k --tiles 0,4096,1024    # the fast block alone, its MLP in tiles

4 rows of 2,048 tokens (or as told), bf16, LoRA of rank 16 on all seven linears with fp32 factors. `recomputed` is what activation
checkpointing costs: forward without gradients, then forward and backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from frontier_run import made_with
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama


def milliseconds(work: Callable[[], object], device: str) -> float:
    """The median of eight runs after three."""
    if device == "cpu":
        work()
        return 0.0
    times = []
    for _ in range(11):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[4]


def layer_of(config: LlamaConfig, device: str, lora: bool, kind: type[nn.Module]) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    with torch.device(device):
        layer = kind(config, 0).bfloat16()
    for name, parameter in layer.named_parameters():
        parameter.data.fill_(1) if "norm" in name else parameter.data.normal_(0, 0.02)
        parameter.requires_grad_(not lora)
    if lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=names), layer)
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    return layer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", "--tiny", action="store_true", help="a few tokens on a CPU")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--length", default=None, help="tokens a row; 32k is 32,768")
    parser.add_argument("--tiles", default="", help="only the recomputing fast block, for each plan.mlp_tile of these")
    arguments = parser.parse_args()
    device = "cpu" if arguments.quick else "cuda"
    hidden, wide, heads, rows, length = (64, 96, 4, 2, 16) if arguments.quick else (4096, 14336, 32, 4, 2048)
    if not arguments.quick:
        rows = arguments.rows or rows
        length = (
            int(arguments.length.replace("k", "")) * (1024 if "k" in arguments.length else 1)
            if arguments.length
            else length
        )
    tiles = [int(one) for one in arguments.tiles.split(",") if one]
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=heads // 4, rope_theta=500000.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    x = torch.randn(rows, length, hidden, device=device).bfloat16()
    rotary = modeling_llama.LlamaRotaryEmbedding(config).to(device)
    tables = rotary(x, torch.arange(length, device=device)[None])
    grad = torch.randn_like(x)

    def report(name: str, layer: nn.Module, call: Callable[[Tensor], Any], autocast: bool) -> None:
        def forward() -> None:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
                call(x)

        def both() -> None:
            own = x.detach().requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out = call(own)
            (out[0] if isinstance(out, tuple) else out).backward(grad)
            for parameter in layer.parameters():
                parameter.grad = None

        first, second = milliseconds(forward, device), milliseconds(both, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            peak = 0
        line = {"form": name, "forward_ms": first, "both_ms": second, "recomputed_ms": first + second, "peak": peak}
        line |= {"rows": rows, "length": length, **made_with()}
        print(json.dumps(line), flush=True)

    def plain(layer: nn.Module) -> Callable[[Tensor], Any]:
        return lambda own: layer(own, attention_mask=None, position_embeddings=tables)

    for lora in (True, False):
        method = "lora" if lora else "full"
        layer = layer_of(config, device, lora, modeling_llama.LlamaDecoderLayer)
        if not tiles:
            report(f"transformers {method}", layer, plain(layer), lora)
        for backend in ("auto", "flash", "cudnn") if device == "cuda" else ("auto",):
            from finetune.models.fast.attention import Look
            from finetune.models.fast.block import FastBlock, Inputs

            block = FastBlock(layer)
            inputs = Inputs(*tables, Look(backend), torch.bfloat16)

            def call(own: Tensor, block: FastBlock = block, inputs: Inputs = inputs) -> Any:
                return block(own, inputs=inputs)

            block.recompute = True
            for tile in tiles:
                block.mlp_tile = tile
                report(f"fast {method} {backend} own recomputation, tiles of {tile or 'all'}", layer, call, False)
            if tiles:
                continue
            block.recompute = False
            report(f"fast {method} {backend}", layer, call, False)
            block.recompute = True
            report(f"fast {method} {backend} own recomputation", layer, call, False)
        del layer
    if tiles:
        return
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return
    if device == "cuda":
        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, cross_entropy=False)
        for lora in (True, False):
            layer = layer_of(config, device, lora, modeling_llama.LlamaDecoderLayer)
            report(f"liger {'lora' if lora else 'full'}", layer, plain(layer), lora)


if __name__ == "__main__":
    main()
