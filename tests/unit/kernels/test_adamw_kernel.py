"""The Triton kernel of AdamW without a GPU: the plain form's bits in the interpreter, and a program for Hopper from the compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.kernels.state_codes import FORMATS

SCRIPT = Path(__file__).with_name("interpreted_adamw.py")
NUMBERS = ("decay", "take1", "beta2", "take2", "spread", "epsilon", "size")
CONSTANTS = ("FORMAT", "WEIGHT", "NARROW", "ROWS", "WIDTH")


def test_the_interpreted_kernel_gives_the_plain_forms_bits() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    found = json.loads(out.stdout.splitlines()[-1])
    assert len(found) == 4 * len(FORMATS)
    assert {name: where for name, where in found.items() if where} == {}


def compiled(form: str, weight: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from finetune.kernels.fused.adamw import BLOCK, adamw_kernel

    block = FORMATS[form].block
    codes, scales = ("*u8", "*fp32") if block else ("*fp32", "constexpr")
    signature = {
        "weight_bits": "*i16" if weight else "*i32",
        "correction": "*i16" if weight == 3 else "constexpr",
        "gradient": "*i16" if weight else "*fp32",
        "mean": codes, "mean_scales": scales, "square": codes, "square_scales": scales,
        "count": "i64", "first": "i64", "word": "i64",
        **dict.fromkeys(NUMBERS, "fp32"), **dict.fromkeys(CONSTANTS, "constexpr"),
    }  # fmt: skip
    width = block or 256
    values = {
        "FORMAT": FORMATS[form].number,
        "WEIGHT": weight,
        "NARROW": bool(weight),
        "ROWS": BLOCK // width,
        "WIDTH": width,
    }
    missing = {name: None for name, kind in signature.items() if kind == "constexpr" and name not in CONSTANTS}
    source = ASTSource(fn=adamw_kernel, signature=signature, constexprs={**values, **missing})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("weight", range(4))
def test_it_compiles_for_hopper_with_exact_arithmetic_and_wide_places(form: str, weight: int) -> None:
    kernel = compiled(form, weight)
    ptx = kernel.asm["ptx"]
    assert kernel.asm["cubin"]
    assert re.findall(r"\bfma\.|\.approx|\.full\.|\.ftz", ptx) == []
    assert ptx.count("sqrt.rn.f32") >= 8
    # Places are 64 bits wide: a program's first element is a 64-bit product or shift of its number.
    assert re.search(r"mul\.wide\.[su]32|shl\.b64|mad\.wide", ptx)
    assert kernel.metadata.shared <= 48 * 1024
