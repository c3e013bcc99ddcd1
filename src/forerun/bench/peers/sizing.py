"""Memory that a peer needs for a run: weights, key-value cells, and its libraries.

    context = the longest sequence, rounded up to a power of two: few shapes for peers that compile
    cells = block * (max(blocks of that sequence * (sequences at once + 1), blocks of context) + 1)
    cache = cells * layers * 2 * KV heads * head dimension * bytes of a number

The sequence and the block beyond those at once are the margin: the prompt's cells stay for its next
sample, and vLLM keeps one block that no sequence may use. One whole context is vLLM's own minimum.
The memory of the libraries is measured at a peer's first start and kept in memory.json in the
folder of the environments. Before that, the catalog's figure is used.
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

from forerun.bench.contestants import Demand
from forerun.bench.peers.catalog import PEERS, Peer
from forerun.errors import CapacityError
from forerun.utils.files import write_whole

NUM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SPARE_SEQS, SPARE_BLOCKS = 1, 1
MIN_CONTEXT = 512  # tokens
MEASURED = "memory.json"
USUAL = Demand(num_seqs=8, num_tokens=2048)  # where no run says what it needs


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
    """Numbers that a checkpoint consists of, and those that one token takes in its cache."""

    parameters: int
    cell: int


@cache
def model_size(folder: Path) -> ModelSize:
    """The size of a checkpoint, from its config and the headers of its tensors."""
    from forerun.bench.planning import num_parameters, tensor_headers

    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said = said.get("text_config", said)
    heads = said["num_attention_heads"]
    head_dim = said.get("head_dim") or said["hidden_size"] // heads
    kv_heads = said.get("num_key_value_heads") or heads
    cell = said["num_hidden_layers"] * 2 * kv_heads * head_dim
    return ModelSize(sum(map(num_parameters, tensor_headers(folder))), cell)


def context_of(demand: Demand, longest: int) -> int:
    """Tokens that a sequence may have; longest: what the model can."""
    return min(longest, max(MIN_CONTEXT, 1 << (demand.num_tokens - 1).bit_length()))


def num_cells(peer: Peer, demand: Demand, context: int) -> int:
    """Cells of the cache in whole blocks, with the margin."""
    blocks = math.ceil(min(demand.num_tokens, context) / peer.block) * (
        demand.num_seqs + SPARE_SEQS
    )
    return peer.block * (max(blocks, math.ceil(context / peer.block)) + SPARE_BLOCKS)


def memory_need(
    name: str, models: Iterable[Path], dtype: str, cells: int, environments: Path
) -> MemoryNeed:
    """What a peer will take for a run. models: the checkpoint, and its draft if there is one."""
    peer, sizes = PEERS[name], [model_size(folder) for folder in models]
    return MemoryNeed(
        weights=sum(size.parameters for size in sizes) * NUM_BYTES[dtype],
        cache=cells * sum(size.cell for size in sizes) * NUM_BYTES[peer.cell_dtype or dtype],
        base=measured(environments).get(name, peer.base),
    )


def measured(environments: Path) -> dict[str, int]:
    """Bytes of the libraries by peer, as far as they have been measured here."""
    try:
        found: Any = json.loads((environments / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: size for name, size in pairs if isinstance(size, int) and size > 0}


def remember(environments: Path, name: str, base: int) -> None:
    """Keeps the most that the libraries of a peer took; without room on the disk, nothing."""
    known = measured(environments)
    known[name] = max(base, known.get(name, 0))
    with suppress(OSError, CapacityError):
        write_whole(environments / MEASURED, json.dumps(known, indent=1) + "\n")
