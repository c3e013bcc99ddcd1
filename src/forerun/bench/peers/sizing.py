"""Memory of a peer for a run: weights, KV cache, and libraries.

    context = longest sequence, rounded up to a power of two, so that peers compile few shapes
    cells = block * (max(blocks per sequence * (concurrent sequences + 1), blocks of context) + 1)
    cache = cells * layers * 2 * KV heads * head dimension * bytes per number

The margin is one sequence, as prompt cells stay for the next sample, and one block that vLLM
reserves. vLLM needs one whole context. The memory of the libraries is measured at a peer's first
start and stored in memory.json next to the environments; until then the catalog's value is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.bench.contestants import CacheDemand
from forerun.bench.peers.catalog import PEERS, Peer
from forerun.errors import CapacityError
from forerun.utils.files import write_whole

NUM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SPARE_SEQS, SPARE_BLOCKS = 1, 1
MIN_CONTEXT = 512  # tokens
MEASURED = "memory.json"
DEFAULT_DEMAND = CacheDemand(num_seqs=8, num_tokens=2048)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a peer's process."""

    weights: int
    cache: int
    base: int  # libraries, and buffers that do not depend on the model

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.base


@dataclass(frozen=True)
class ModelSize:
    """Number of weights, and numbers per token in the KV cache."""

    parameters: int
    cell: int


@cache
def model_size(folder: Path) -> ModelSize:
    """The size of a checkpoint, from its config and the headers of its tensors."""
    from forerun.bench.model_info import num_parameters, tensor_headers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    cell = config["num_hidden_layers"] * 2 * kv_heads * head_dim
    return ModelSize(sum(map(num_parameters, tensor_headers(folder))), cell)


def context_of(demand: CacheDemand, longest: int) -> int:
    """Maximum tokens of a sequence; longest: the limit of the model."""
    return min(longest, max(MIN_CONTEXT, 1 << (demand.num_tokens - 1).bit_length()))


def num_cells(peer: Peer, demand: CacheDemand, context: int) -> int:
    """KV cells in complete blocks, with the margin."""
    blocks = math.ceil(min(demand.num_tokens, context) / peer.block) * (
        demand.num_seqs + SPARE_SEQS
    )
    return peer.block * (max(blocks, math.ceil(context / peer.block)) + SPARE_BLOCKS)


def memory_need(
    name: str, models: Iterable[Path], dtype: str, cells: int, environments: Path
) -> MemoryNeed:
    """Estimated memory of a peer. models: the checkpoint, and its draft if it has one."""
    peer, sizes = PEERS[name], [model_size(folder) for folder in models]
    return MemoryNeed(
        weights=sum(size.parameters for size in sizes) * NUM_BYTES[dtype],
        cache=cells * sum(size.cell for size in sizes) * NUM_BYTES[peer.cell_dtype or dtype],
        base=measured(environments).get(name, peer.base),
    )


def measured(environments: Path) -> dict[str, int]:
    """Measured bytes of the libraries by peer."""
    try:
        found: Any = json.loads((environments / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: size for name, size in pairs if isinstance(size, int) and size > 0}


def remember(environments: Path, name: str, base: int) -> None:
    """Stores the largest measured memory of a peer's libraries; ignores a full disk."""
    known = measured(environments)
    known[name] = max(base, known.get(name, 0))
    with suppress(OSError, CapacityError):
        write_whole(environments / MEASURED, json.dumps(known, indent=1) + "\n")
