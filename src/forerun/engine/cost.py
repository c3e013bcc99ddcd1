"""What a pass costs by its number of rows: c(N) of the design, measured on the machine at hand.

One measurement serves a model, number type, device and thread count; it is kept in the user's cache
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np

from forerun.caches import cache_folder
from forerun.dice import SeededDice
from forerun.records import Cost, Rows, Sequence
from forerun.roles import Target
from forerun.sampling import Sampling
from forerun.tree import EMPTY, Tree, TreeBuilder

ROWS = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65)
PREFIX = 48  # tokens before the root: few enough that the cache slot is given up gladly
TRIES = 7  # rounds at least, as far as time allows
SECONDS = 0.5, 3.0  # of measuring, at least and at most
FORMAT = 3


def cost_of(target: Target) -> Cost:
    """The cost curve of a target: remembered, read from the cache folder, or measured (seconds)."""
    if target.cost is None:
        path = cache_folder() / "costs" / f"{_key(target)}.json" if target.shape else None
        target.cost = _read(path) or measure(target)
        _write(path, target.cost)
    return target.cost


def measure(target: Target) -> Cost:
    """The fastest of interleaved passes at each number of rows; a larger tree never costs less.

    Other work on the machine can only slow a pass down, and the curve is kept for good.
    """
    most = min(max(ROWS), max(2, target.context - PREFIX - 1))
    sizes = [rows for rows in ROWS if rows <= most]
    tokens = [1 + i % max(1, target.vocab_size - 1) for i in range(min(PREFIX, target.context - 2))]
    seq = Sequence(tokens, len(tokens), Sampling(), SeededDice(0), limit=1)
    trees = {rows: _bush(rows - 1, target.vocab_size) for rows in sizes}
    found: dict[int, list[float]] = {rows: [] for rows in sizes}
    started = perf_counter()
    try:
        _wait(target.forward([seq], [EMPTY], frozenset()))  # prefill
        while not _is_enough(len(found[sizes[-1]]), perf_counter() - started):
            for rows, tree in trees.items():
                start = perf_counter()
                _wait(target.forward([seq], [tree], frozenset()))
                found[rows].append(perf_counter() - start)
    finally:
        target.release(seq)
    seconds = np.maximum.accumulate([np.min(found[rows]) for rows in sizes])
    return Cost(tuple(sizes), tuple(float(s) for s in seconds))


def _wait(rows: list[Rows]) -> None:
    """Until the pass is done: on a GPU it has only been asked for when `forward` returns."""
    if rows[0].logits.is_cuda:
        import torch

        torch.cuda.synchronize(rows[0].logits.device)


def _is_enough(rounds: int, seconds: float) -> bool:
    least, most = SECONDS
    return rounds > 0 and (seconds > most or (rounds >= TRIES and seconds > least))


def _bush(nodes: int, vocab: int) -> Tree:
    """Chains of four below the root: about the shape of drafts."""
    tree = TreeBuilder()
    for node in range(nodes):
        tree.add(node % vocab, node - 1 if node % 4 else -1)
    return tree.build()


def _key(target: Target) -> str:
    import torch

    from forerun.native import kernels

    threads = torch.get_num_threads()
    machine = platform.machine(), _processor(), kernels().level, *_gpus(target.shape)
    told = repr((FORMAT, target.shape, threads, machine, torch.__version__))
    return hashlib.sha256(told.encode()).hexdigest()[:24]


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return ""


def _gpus(shape: str) -> list[str]:
    """Names of the GPUs, where the model's shape says that it runs on one."""
    import torch

    if "cuda" not in shape:
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _read(path: Path | None) -> Cost | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text())
            rows, seconds = (tuple(found[name]) for name in ("rows", "seconds"))
            if len(rows) == len(seconds) >= 2 and all(s > 0 for s in seconds):
                return Cost(rows, seconds)
    return None


def _write(path: Path | None, cost: Cost) -> None:
    if path is None:
        return
    with suppress(OSError):  # a cache that cannot be written costs a measurement, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps({"rows": cost.rows, "seconds": cost.seconds}))
        part.replace(path)
