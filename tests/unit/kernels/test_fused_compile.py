"""Every fused kernel compiles for a Hopper GPU without one, and asks for no more shared memory than it has."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

triton = pytest.importorskip("triton")
POINTERS = {"scale_pointer": "*fp32", "labels_pointer": "*i64", "ids_pointer": "*i64", "order_pointer": "*i64", "weights_pointer": "*fp32", "losses_pointer": "*fp32",
            "gain_grad_pointer": "*fp32", "keys_pointer": "*i64", "packed_pointer": "*u8", "scales_pointer": "*u8", "table_pointer": "*fp32",
            "table2_pointer": "*fp32", "scales2_pointer": "*fp32", "offset_pointer": "*fp32"}  # fmt: skip
FLOATS = ("epsilon", "sign", "scale")
CONSTANTS = {"BLOCK": 4096, "HEADS": 32, "PAIRS": 64, "BYTES": 2048}
KERNELS = [
    ("rms_norm", "forward_kernel"), ("rms_norm", "backward_kernel"), ("swiglu", "forward_kernel"),
    ("swiglu", "backward_kernel"), ("rotary", "rotate_kernel"), ("cross_entropy", "loss_kernel"),
    ("keyed_dropout", "dropout_kernel"), ("four_bit", "decode_kernel"),
    ("embedding", "sum_kernel"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("file", "name"), KERNELS)
def test_it_compiles_for_hopper(file: str, name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"finetune.kernels.fused.{file}"), name)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument.isupper():
            signature[argument], constants[argument] = "constexpr", CONSTANTS.get(argument, True)
        elif argument.endswith("_pointer"):
            signature[argument] = POINTERS.get(argument, "*bf16")
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i64" if argument == "limit" else "i32"
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )
    assert compiled.metadata.shared <= 227 * 1024
    assert len(compiled.asm["cubin"]) > 0
