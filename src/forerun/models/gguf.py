"""Reads a GGUF file: its header, and its tensors dequantised one at a time.

The header is parsed here, since the reader of the package `gguf` is slow for large vocabularies.
The package provides the block formats of the quantisation types.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError, in_a_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 20  # of metadata or tensors
MAX_NESTING = 2  # arrays within arrays
MAX_DIMS = 4
CHUNK = 1 << 17  # weights dequantised at once; they fit into the CPU cache
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # type codes that need no decoding
SCALARS = {  # value type code -> format of struct
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
DAMAGED = "; fetch or copy it again"


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor in the file. `shape` is in torch's order."""

    name: str
    shape: tuple[int, ...]
    kind: int  # type code of GGML
    start: int  # first byte in the file
    size: int  # bytes


class GgufFile:
    """The metadata of a GGUF file and the locations of its tensors. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
                header = _Header(path, m)
                header.read()
        except OSError as cause:
            raise ModelError(f"{path} cannot be read: {cause.strerror or cause}") from cause
        except ValueError as cause:  # an empty file cannot be mapped
            raise ModelError(f"{path} is empty{DAMAGED}") from cause
        self.metadata, self.tensors = header.metadata, header.tensors

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def kinds(self) -> set[int]:
        """Type codes of the matrices."""
        return {info.kind for info in self.tensors.values() if len(info.shape) > 1}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor by name, converted to `dtype`, in new memory."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=dtype)
        if not out.numel():
            return out
        raw = np.memmap(self.path, np.uint8, "r", info.start, (info.size,))
        if info.kind in PLAIN:
            _copy(raw, PLAIN[info.kind], out.view(-1))
        else:
            _dequantise(raw, info.kind, out.view(-1))
        return out


def _copy(raw: np.ndarray, stored: torch.dtype, out: Tensor) -> None:
    step = CHUNK * stored.itemsize
    for i in range(0, len(raw), step):
        piece = torch.frombuffer(bytearray(raw[i : i + step]), dtype=stored)
        at = i // stored.itemsize
        out[at : at + len(piece)] = piece


def _dequantise(raw: np.ndarray, kind: int, out: Tensor) -> None:
    package = gguf_package()
    code = package.GGMLQuantizationType(kind)
    block, size = package.GGML_QUANT_SIZES[code]
    step = CHUNK // block * size
    for i in range(0, len(raw), step):
        piece = package.dequantize(np.array(raw[None, i : i + step]), code).reshape(-1)
        at = i // size * block
        out[at : at + len(piece)] = torch.from_numpy(piece)


def gguf_package() -> Any:
    """The package `gguf`. Raises ModelError if it is not installed."""
    try:
        import gguf
    except ImportError as cause:
        raise ModelError(
            f"GGUF files need the package gguf ({in_a_line(cause)}); "
            "install it with pip install gguf"
        ) from None
    return gguf


def block_size(kind: int) -> tuple[int, int] | None:
    """Number of weights and bytes of one block; None for a type that cannot be dequantised."""
    if kind in PLAIN:
        return 1, PLAIN[kind].itemsize
    package = gguf_package()
    try:
        code = package.GGMLQuantizationType(kind)
        sizes = package.GGML_QUANT_SIZES[code]
        package.dequantize(np.zeros((1, sizes[1]), np.uint8), code)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return sizes


def kind_name(kind: int) -> str:
    """The name of a type, such as Q4_K or F16; its number if it is unknown."""
    try:
        return str(gguf_package().GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"


class _Header:
    """Parses a header; a field beyond the end of the file means that the file is cut."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read(self) -> None:
        self._check_magic()
        num_tensors, num_fields = self._count("Q", "tensors"), self._count("Q", "fields")
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self._check_split()
        rows = [self._tensor_row() for _ in range(num_tensors)]
        self._place(rows)

    def _check_magic(self) -> None:
        magic = self.data[:4]
        if magic != MAGIC and MAGIC.startswith(magic):
            raise ModelError(
                f"{self.path} is cut: it has {len(self.data)} bytes; fetch or copy it again"
            )
        if magic != MAGIC:
            raise ModelError(
                f"{self.path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}; "
                "give a .gguf file, or a model folder"
            )
        self.at = 4
        version = self._scalar("I")
        if version in VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self.path} is a big-endian GGUF file, which is not supported; convert it with "
                "gguf-convert-endian of the package gguf"
            )
        raise ModelError(
            f"{self.path} has GGUF version {version}, supported are {VERSIONS[0]} and "
            f"{VERSIONS[1]}; convert the model again"
        )

    def _check_split(self) -> None:
        count = self.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            number = self.metadata.get("split.no")
            which = f"part {number + 1}" if isinstance(number, int) else "one part"
            raise ModelError(
                f"{self.path} is {which} of {count} of a split model; merge the parts first: "
                "llama-gguf-split --merge FIRST_PART MERGED.gguf"
            )

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset in the data."""
        name, num_dims = self._string(), self._scalar("I")
        if not 0 < num_dims <= MAX_DIMS:
            raise ModelError(f"{self.path}: tensor {name} has {num_dims} dimensions{DAMAGED}")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(self, rows: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Computes the locations of tensors. Raises ModelError if they do not fit."""
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise ModelError(f"{self.path}: general.alignment is {align!r}, no power of 2{DAMAGED}")
        base = -(-self.at // align) * align
        sizes = {kind: block_size(kind) for kind in {row[2] for row in rows}}
        for name, shape, kind, offset in rows:
            found = sizes[kind]
            if found is None:
                raise ModelError(
                    f"{self.path}: tensor {name} is quantised as {kind_name(kind)}, which cannot "
                    "be dequantised here; use another quantisation of the model, such as Q4_K_M"
                )
            if name in self.tensors or shape[-1] % found[0]:
                what = "is there twice" if name in self.tensors else f"has shape {list(shape)}"
                raise ModelError(f"{self.path}: tensor {name} {what}{DAMAGED}")
            size = math.prod(shape) // found[0] * found[1]
            self.tensors[name] = TensorInfo(name, shape, kind, base + offset, size)
        end = max((info.start + info.size for info in self.tensors.values()), default=0)
        if end > len(self.data):
            raise self._cut(f"at least {end:,}")

    def _cut(self, wanted: str = "more") -> ModelError:
        return ModelError(
            f"{self.path} is cut: it has {len(self.data):,} bytes, its header describes "
            f"{wanted}{DAMAGED}"
        )

    def _scalar(self, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        if self.at + size > len(self.data):
            raise self._cut()
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += size
        return value

    def _count(self, form: str, what: str) -> int:
        value = self._scalar(form)
        if value > MAX_ENTRIES:
            raise ModelError(f"{self.path} claims to hold {value:,} {what}{DAMAGED}")
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if self.at + size > len(self.data):
            raise self._cut()
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw.decode("utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY or depth > MAX_NESTING:
            raise ModelError(f"{self.path}: a field has the unknown type {kind}{DAMAGED}")
        inner, length = self._scalar("I"), self._scalar("Q")
        if inner in SCALARS:
            return self._numbers(SCALARS[inner], length)
        if length > len(self.data):
            raise self._cut()
        return [self._value(inner, depth + 1) for _ in range(length)]

    def _numbers(self, form: str, length: int) -> list[Any]:
        size = struct.calcsize(f"<{form}")
        if self.at + size * length > len(self.data):
            raise self._cut()
        kind = np.dtype(form).newbyteorder("<")
        found = np.frombuffer(self.data, kind, length, self.at).tolist()
        self.at += size * length
        return found
