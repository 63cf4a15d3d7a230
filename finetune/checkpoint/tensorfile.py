"""Writing safetensors files one tensor at a time, hashed on the way.

The format is safetensors' own (any of its readers opens the file); the writer is ours because the library's wants all
tensors on the host at once and hides the system's error number. Here a GPU's state passes through one tensor's worth of
host memory, a full disk is known as such, and the checksum costs no second reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of element types in the format (https://github.com/huggingface/safetensors#format)."""

PIECE = 16 * 2**20


def shared_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name: an earlier name of the very same elements, for tied tensors (same memory, shape and strides)."""
    first: dict[tuple, str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        key = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if key in first:
            shared[name] = first[key]
        else:
            first[key] = name
    return shared


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `write_tensors` writes, without the header."""
    shared = shared_names(tensors)
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if name not in shared)


def header_of(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The file's header and the names in the order of their bytes: wider element types first, so all are aligned."""
    shared = shared_names(tensors)
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in TYPES]
    if unknown:
        raise TypeError(f"element types that safetensors lacks: {', '.join(unknown)}")
    order = sorted((name for name in tensors if name not in shared), key=lambda name: -tensors[name].element_size())
    header: dict = {"__metadata__": {"format": "pt", "shared": json.dumps(shared)}} if shared else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Writes and flushes one file; its size and sha256. Tensors that share memory are stored once; none is changed."""
    header, order = header_of(tensors)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        file.write(header)
        digest.update(header)
        for name in order:
            host = tensors[name].detach().to("cpu").contiguous()
            if host.numel() == 0:
                continue
            data = memoryview(host.reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                file.write(piece)
                digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file on the CPU; those stored once under two names are one tensor again under both."""
    with safe_open(path, framework="pt", device="cpu") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata() or {}
    for name, source in json.loads(metadata.get("shared", "{}")).items():
        tensors[name] = tensors[source]
    return tensors
