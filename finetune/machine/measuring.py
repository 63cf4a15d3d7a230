"""Measures this machine's rates: products, copies, launches, decoding; some seconds on a GPU, about two on a CPU.

Each measurement warms up once and is repeated for a short while; the median of its rounds counts, so that one disturbed
round does not. What a device cannot do (products in FP8, NF4 without bitsandbytes) is None or assumed, never a failure.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from finetune.machine.rates import ASSUMED, DECODE, DECODE_BYTES, Rates

SHAPE = {"cuda": (8192, 4096, 14336), "cpu": (256, 768, 2048)}
"""Rows, inputs and outputs of the product that is measured: one linear of an 8B model at 8,192 tokens; on a CPU of a small one."""
COPY_BYTES = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}
LINK_BYTES = 128 * 2**20
SECONDS = {"cuda": 0.4, "cpu": 0.2}
"""How long one measurement is repeated."""
ROUNDS = 5
LAUNCHES = 200
WEIGHTS = 2**24
"""Weights that are decoded at a time."""
NOT_DECODED = "measured rates (decoding of 4-bit weights, which bitsandbytes cannot here, from that of memory)"
"""The source of rates whose decoding could not be measured."""


def measure(device: torch.device, name: str) -> Rates:
    """The rates of `device`; `name` says what machine it is. Its memory's cache is given back afterwards."""
    kind = device.type
    start = replace(ASSUMED[kind], name=name, source="measured", fp8_operations_per_s=None, collective_bytes_per_s=None)
    copied, decoded = _copy_rate(device), _decode_rate(device)
    made = replace(
        start,
        source="measured" if decoded else NOT_DECODED,
        bf16_operations_per_s=_product_rate(device, torch.bfloat16),
        fp32_operations_per_s=_product_rate(device, torch.float32),
        memory_bytes_per_s=copied,
        launch_s=_launch_seconds(device),
        host_copy_bytes_per_s=_copy_rate(torch.device("cpu")) / 2 if kind == "cuda" else copied / 2,
        decode_weights_per_s=decoded or copied * DECODE / DECODE_BYTES,
        gpus=0,
        peer_access=None,
        topology="",
    )
    if kind != "cuda":
        # What moves between host and device is a copy within memory.
        one_way = made.host_copy_bytes_per_s
        return replace(made, up_bytes_per_s=one_way, down_bytes_per_s=one_way, both_bytes_per_s=one_way / 2)
    up, down, both, pinned = _link_rates(device)
    gpus = torch.cuda.device_count()
    made = replace(
        made,
        fp8_operations_per_s=_fp8_rate(device),
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        both_bytes_per_s=both,
        pin_bytes_per_s=pinned,
        gpus=gpus,
        peer_access=_peers(gpus),
        topology=_topology(gpus),
    )
    torch.cuda.empty_cache()
    return made


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one `work`, the median of some rounds of it."""
    work()
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    once = max(time.perf_counter() - started, 1e-7)
    repeats = max(1, int(SECONDS[device.type] / ROUNDS / once))
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        _wait(device)
        found.append((time.perf_counter() - started) / repeats)
    return max(statistics.median(found), 1e-9)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, inputs, outputs = SHAPE[device.type]
    x_BD = torch.randn(rows, inputs, device=device).to(dtype)
    weight_DE = torch.randn(inputs, outputs, device=device).to(dtype)
    out_BE = torch.empty(rows, outputs, device=device, dtype=dtype)
    return 2.0 * rows * inputs * outputs / _seconds(device, lambda: torch.mm(x_BD, weight_DE, out=out_BE))


def _fp8_rate(device: torch.device) -> float | None:
    """Products in FP8 (e4m3); None where the device or this torch has none."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    rows, inputs, outputs = SHAPE["cuda"]
    one = torch.ones((), device=device)
    x_BD = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
    weight_ED = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)

    def work() -> object:
        return torch._scaled_mm(x_BD, weight_ED.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return 2.0 * rows * inputs * outputs / _seconds(device, work)
    except (RuntimeError, TypeError, AttributeError):
        return None


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device's memory."""
    count = COPY_BYTES[device.type]
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    return 2.0 * count / _seconds(device, lambda: target.copy_(source))


def _launch_seconds(device: torch.device) -> float:
    """One small operation from Python."""
    one = torch.zeros(8, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    return _seconds(device, work) / LAUNCHES


def _decode_rate(device: torch.device) -> float | None:
    """NF4 weights decoded to 16 bits a second; None where bitsandbytes cannot."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        count = WEIGHTS if device.type == "cuda" else WEIGHTS // 64
        weight = torch.randn(count // 1024, 1024, device=device, dtype=torch.bfloat16)
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        return count / _seconds(device, lambda: dequantize_4bit(packed, state))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # no kernel for this device
        return None


def _link_rates(device: torch.device) -> tuple[float, float, float, float | None]:
    """Pinned copies up, down, each of both at once, and how fast memory is registered: bytes a second."""
    count = LINK_BYTES
    # Plain memory, registered: torch's own pinned allocator is another thing, and rounds sizes up.
    hosts = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    above = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2)]
    runtime = torch.cuda.cudart()
    started = time.perf_counter()
    registered = [int(runtime.cudaHostRegister(host.data_ptr(), count, 0)) == 0 for host in hosts]
    pinned = 2 * count / (time.perf_counter() - started) if all(registered) else None
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            above[0].copy_(hosts[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(above[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    try:
        rates = [count / _seconds(device, work) for work in (up, down, both)]
    finally:
        _wait(device)
        for host, done in zip(hosts, registered, strict=True):
            if done:
                runtime.cudaHostUnregister(host.data_ptr())
    return rates[0], rates[1], rates[2], pinned


def _peers(gpus: int) -> bool | None:
    """Whether neighbouring GPUs reach each other's memory; None with one."""
    if gpus < 2:
        return None
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairwise(range(gpus)))


def _topology(gpus: int) -> str:
    """How the first GPU is joined to the others, by the driver's tool: NV18, PIX, SYS and so on. Empty where it is not told."""
    tool = shutil.which("nvidia-smi")
    if gpus < 2 or tool is None:
        return ""
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return joined(done.stdout, gpus)


def joined(matrix: str, gpus: int) -> str:
    """The kinds of connection in the first GPU's row of `nvidia-smi topo -m`, each once."""
    match = re.search(r"^\W*GPU0\s+(X\s.*)$", re.sub(r"\x1b\[[0-9;]*m", "", matrix), re.MULTILINE)
    cells = match[1].split()[:gpus] if match else []
    return ", ".join(dict.fromkeys(cell for cell in cells if cell != "X"))
