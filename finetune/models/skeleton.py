"""A transformers model that is made weight by weight: a skeleton on the meta device, furnished from a source of values.

Each weight takes the place of its own as soon as it is there, in the form in which it is kept (plain, 4 or 8 bits), and a
whole block goes to its place on the host at once. So memory never holds more than the model as it is stored and one
weight on its way into a quantised form. Plain blocks that live on the host are not even made: their weights are read into
the host's pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.models.decoder import find_blocks
from finetune.models.quantized import nf4_config
from finetune.models.storing import block_weights


@dataclass(frozen=True)
class Making:
    """How weights are made, in `dtype`; `nf4`: the linears' packed in 4 bits, with or without double quantisation."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    attention: str
    nf4: bool = False
    double_quant: bool = True


class Host(Protocol):
    """A place that keeps blocks (memory/streaming/host_blocks), and the ends that it names: "embedding", "head"."""

    @property
    def ends(self) -> frozenset[str]: ...

    def begin(self, blocks: int) -> None: ...

    def block(self, block: nn.Module, fill: Callable[[str, Tensor], None] | None = None) -> None: ...


class Values(Protocol):
    """Where weights come from. `made` gives one by its full name, on the device where it is packed; `into`, which may be None,
    writes it into memory of the host."""

    @property
    def into(self) -> Callable[[str, Tensor], None] | None: ...

    def made(self, name: str, leaf: str, shape: torch.Size) -> Tensor: ...


def skeleton(config: Any, making: Making) -> Any:
    """The transformers causal LM with every parameter on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=making.dtype, attn_implementation=making.attention)


@torch.no_grad()
def furnish(
    model: Any,
    making: Making,
    values: Values,
    store: Callable[[nn.Linear], nn.Module] | None = None,
    host: Host | None = None,
) -> Any:
    """Gives a skeleton its weights. `store` turns each linear of the blocks into its stored form as soon as it is made;
    `host` is handed each block when it is whole, in order."""
    quantizer = None
    if making.nf4:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(nf4_config(making.dtype, making.double_quant), pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=making.dtype, device_map={"": str(making.device)})
    stored = set(block_weights(model)) if store is not None else set()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    names = [name for name, _ in model.named_modules()]
    blocks = _block_names(model)
    plain = host is not None and values.into is not None and store is None and not making.nf4
    inside = {name for name in names if any(f"{name}.".startswith(f"{block}.") for block in blocks)} if plain else set()
    last = {} if host is None else {[n for n in names if n.startswith(f"{block}.")][-1]: block for block in blocks}
    staying = []
    if host is not None:
        host.begin(len(blocks))
        staying = [each for name, each in (("embedding", embedding), ("head", head)) if name in host.ends]
    # By name, so that nothing keeps a layer that was replaced.
    for name in names:
        module = model.get_submodule(name)
        if tied and module is head:
            head.weight = embedding.weight
            continue
        if name not in inside:
            for leaf, empty in list(module.named_parameters(recurse=False)):
                made = _parameter(f"{name}.{leaf}", module, leaf, empty, (making, values))
                if module in staying:
                    made.data = made.data.to("cpu")
                setattr(module, leaf, made)
        if store is not None and name in stored:
            model.set_submodule(name, store(module))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # The rotary tables: a function of the config, kept in fp32.
            model.set_submodule(name, type(module)(model.config).to(making.device))
        if host is not None and name in last:
            whole = model.get_submodule(last[name])
            host.block(whole, _filling(values, last[name]) if plain else None)
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return model.eval()


def _block_names(model: Any) -> list[str]:
    blocks = {id(block) for block in find_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in blocks]


def _filling(values: Values, block: str) -> Callable[[str, Tensor], None]:
    def fill(leaf: str, view: Tensor) -> None:
        assert values.into is not None
        values.into(f"{block}.{leaf}", view)

    return fill


def _parameter(
    name: str, module: nn.Module, leaf: str, empty: nn.Parameter, how: tuple[Making, Values]
) -> nn.Parameter:
    # A 4-bit weight's own shape is that of its bytes; its layer knows the matrix's.
    making, values = how
    kind: Any = type(empty)
    layer: Any = module
    is_4bit = kind.__name__ == "Params4bit"
    shape = torch.Size((layer.out_features, layer.in_features)) if is_4bit else empty.shape
    data = values.made(name, leaf, shape)
    if not is_4bit:
        return nn.Parameter(data)
    settings = {"quant_type": "nf4", "compress_statistics": making.double_quant, "module": module}
    return kind(data, requires_grad=False, **settings).to(making.device)
