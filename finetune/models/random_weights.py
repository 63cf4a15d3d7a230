"""Models of a published shape with random weights: made where they are used, in the type they are used in, from no file.

For plans, benchmarks and tests of a size whose real weights are not at hand; what such a model learns means nothing.
The skeleton stands on torch's meta device and each weight is made in place of its own, so that memory never holds more
than the model as it is stored and one weight on its way into a quantised form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.decoder import find_blocks
from finetune.models.quantized import nf4_config
from finetune.models.storing import block_weights

SPREAD = 0.02
"""Standard deviation of matrices, as Llama and Qwen2 begin."""


@dataclass(frozen=True)
class Making:
    """How weights are made, in `dtype`; `nf4`: the linears' packed in 4 bits, with or without double quantisation."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    attention: str
    nf4: bool = False
    double_quant: bool = True


@torch.no_grad()
def make(
    config: Any,
    making: Making,
    store: Callable[[nn.Linear], nn.Module] | None = None,
    made: Callable[[nn.Module], None] | None = None,
) -> Any:
    """A transformers causal LM: matrices normal with spread 0.02, norms 1, biases 0.

    Each weight is drawn by the seed and its own name alone, so every rank gets the same bits, and a model of fewer
    blocks has the first blocks of the whole one. Another kind of device draws other numbers. `store` turns each linear
    of the blocks into its stored form as soon as it is made; `made` is handed each block when it is whole, in order.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=making.dtype, attn_implementation=making.attention)
    quantizer = None
    if making.nf4:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(nf4_config(making.dtype, making.double_quant), pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=making.dtype, device_map={"": str(making.device)})
    stored = set(block_weights(model)) if store is not None else set()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    names = [name for name, _ in model.named_modules()]
    last = _last_parts(model, names) if made is not None else {}
    # By name, so that nothing keeps a layer that was replaced.
    for name in names:
        module = model.get_submodule(name)
        if tied and module is head:
            head.weight = embedding.weight
            continue
        for leaf, empty in list(module.named_parameters(recurse=False)):
            setattr(module, leaf, _parameter(f"{name}.{leaf}", module, leaf, empty, making))
        if store is not None and name in stored:
            model.set_submodule(name, store(module))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # The rotary tables: a function of the config, kept in fp32.
            model.set_submodule(name, type(module)(config).to(making.device))
        if made is not None and name in last:
            made(model.get_submodule(last[name]))
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return model.eval()


def _last_parts(model: Any, names: list[str]) -> dict[str, str]:
    """By the name of the last module inside each block: the block's own name."""
    blocks = {id(block) for block in find_blocks(model)}
    own = [name for name, module in model.named_modules() if id(module) in blocks]
    return {[name for name in names if name.startswith(f"{block}.")][-1]: block for block in own}


def _parameter(name: str, module: nn.Module, leaf: str, empty: nn.Parameter, making: Making) -> nn.Parameter:
    # A 4-bit weight's own shape is that of its bytes; its layer knows the matrix's.
    kind: Any = type(empty)
    is_4bit = kind.__name__ == "Params4bit"
    shape = (module.out_features, module.in_features) if is_4bit else empty.shape
    data = _drawn(name, shape, making) if len(shape) > 1 else _vector(leaf, shape, making)
    if not is_4bit:
        return nn.Parameter(data)
    settings = {"quant_type": "nf4", "compress_statistics": making.double_quant, "module": module}
    return kind(data, requires_grad=False, **settings).to(making.device)


def _drawn(name: str, shape: Any, making: Making) -> Tensor:
    digest = hashlib.sha256(f"{making.seed}:{name}".encode()).digest()
    generator = torch.Generator(making.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=making.dtype, device=making.device).normal_(std=SPREAD, generator=generator)


def _vector(leaf: str, shape: Any, making: Making) -> Tensor:
    return torch.full(tuple(shape), float(leaf != "bias"), dtype=making.dtype, device=making.device)
