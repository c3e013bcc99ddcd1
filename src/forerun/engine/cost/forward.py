"""What a pass costs by its rows: c(N) of the design, and how such times are measured and kept.

One measurement serves a model, number type, device and thread count. It is kept in the user's cache
folder until the same work is found to be clearly faster.

A start measures for two seconds at most (START). A slow model is measured in part: the most useful
sizes come first, lines join them, and later starts measure the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Cost, Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.utils.files import write_atomically
from forerun.utils.paths import cache_folder

ROWS = (1, 17, 5, 65, 9, 33, 3, 129, 2, 25, 13, 49, 7, 97)  # the most useful first
FEW = 2  # sizes that make a curve
PREFIX, SHORT = 48, 6  # tokens before the root: alone, and where several run; read in a moment
LEVELS = 4  # of the trees that are measured
TRIES = 7  # of each kind of work at least, as far as time allows
START = 0.4, 0.7  # seconds of measuring one thing, least and most, before the first text
FULL = 0.5, 30.0  # the same where nobody waits
CHECK, HOLDS = (3, (0.0, 0.3)), 0.85  # tries and seconds of a check; what a time must not exceed
FORMAT = 11

Kind = TypeVar("Kind", tuple[int, int], tuple[int, int, int])
Pass = tuple[int, int]  # sequences in it, and the rows of all of them
Limits = tuple[float, float]


def curve_of(target: Target, limits: Limits | None = None) -> Cost:
    """The curve of a target's passes: known, read from the cache folder, or measured.

    limits: seconds of measuring, least and most; START unless given.
    """
    if target.cost is not None:
        return target.cost
    if target.curve is None:
        kinds = [(1, rows) for rows in ROWS]
        seconds = remembered(target, "", kinds, partial(pass_seconds, target), limits)
        target.curve = _curve(dict(zip(ROWS, seconds, strict=True)))
    return target.curve


def _curve(seconds: dict[int, float]) -> Cost:
    """A curve through the measured sizes, rising: what exceeds a larger pass was disturbed."""
    rows = sorted(num for num, found in seconds.items() if math.isfinite(found))
    times = np.minimum.accumulate([seconds[num] for num in reversed(rows)])[::-1]
    if len(rows) < FEW:  # too slow to tell: a row costs as much as the first
        return Cost((1, 2), (seconds[1], 2 * seconds[1]))
    return Cost(tuple(rows), tuple(float(s) for s in times))


def remembered(
    target: Target,
    name: str,
    kinds: list[Kind],
    seconds_of: Callable[[Many[Kind], int, Limits], list[float]],
    limits: Limits | None = None,
) -> list[float]:
    """Seconds of each kind of work with a target: read from the cache folder, or measured.

    `seconds_of` measures kinds with so many tries and within such limits; infinite is what the
    limits did not reach, which a later call measures. Times of a busy machine are found by a few
    tries of two kinds, and measured again.
    """
    path = cache_folder() / "costs" / f"{_key(target)}{name}.json" if target.shape else None
    known = _read(path, kinds)
    if known is not None and all(map(math.isfinite, known)):
        some = [0, len(kinds) // 2]
        now = seconds_of([kinds[i] for i in some], *CHECK)
        if all(found >= HOLDS * known[i] for i, found in zip(some, now, strict=True)):
            return known
    order = list(range(len(kinds)))
    if known is not None:  # kinds that were not reached come first; another load only slows down
        order.sort(key=lambda i: math.isfinite(known[i]))
    measured = seconds_of([kinds[i] for i in order], TRIES, limits or START)
    fresh = dict(zip(order, measured, strict=True))
    seconds = [min(fresh[i], known[i]) if known else fresh[i] for i in range(len(kinds))]
    _write(path, kinds, seconds)
    return seconds


def fastest(works: Many[Callable[[], float]], tries: int, limits: Limits) -> list[float]:
    """The fewest seconds that each work tells; they take turns, so that noise hits all of them.

    Infinite for a work that the time limit did not reach; the first one always runs.
    """
    found, started = [math.inf] * len(works), perf_counter()
    least, most = limits
    for rounds in count(1):
        for i, work in enumerate(works):
            if perf_counter() - started > most and math.isfinite(found[0]):
                return found
            found[i] = min(found[i], work())
        if rounds >= tries and perf_counter() - started > least:
            break
    return found


def some_text(target: Target, length: int, first: int = 0) -> list[int]:
    """Any tokens of a target's vocabulary; others for each `first`, as common ones cost less."""
    base = max(1, target.vocab_size - 1)  # `first` in digits, the lowest in front
    return [1 + (i + first // base**i) % base for i in range(length)]


def bush(nodes: int, vocab: int, levels: int = LEVELS) -> Tree:
    """Chains of four below the root: about the shape of drafts; shorter where there is no room."""
    tree = TreeBuilder()
    for node in range(nodes):
        tree.add(node % vocab, node - 1 if node % levels else -1)
    return tree.build()


def pass_seconds(target: Target, kinds: Many[Pass], tries: int, limits: Limits) -> list[float]:
    """Seconds of passes; rows beyond one of each sequence are a tree of the first one."""
    most = max(num for num, _ in kinds)
    length = max(1, min(SHORT if most > 1 else PREFIX, target.context - LEVELS))
    texts = [some_text(target, length, i) for i in range(most)]
    seqs = [
        Sequence(text, length, Sampling(), SeededDice(i), limit=1, index=i)
        for i, text in enumerate(texts)
    ]
    levels = max(1, min(LEVELS, target.context - length))

    def run(num: int, tree: Tree) -> float:
        start = perf_counter()
        _wait(target.forward(ForwardBatch(seqs[:num], [tree] + [EMPTY] * (num - 1))))
        return perf_counter() - start

    try:
        run(len(seqs), EMPTY)  # prefill
        trees = [bush(rows - num, target.vocab_size, levels) for num, rows in kinds]
        works = [partial(run, num, tree) for (num, _), tree in zip(kinds, trees, strict=True)]
        for work in works if target.is_slow_at_first else ():
            work()
        return fastest(works, tries, limits)
    finally:
        for seq in seqs:
            target.release(seq)


def _wait(rows: list[Rows]) -> None:
    """Until the pass is done: on a GPU it has only been asked for when `forward` returns."""
    if rows[0].logits.is_cuda:
        import torch

        torch.cuda.synchronize(rows[0].logits.device)


def _key(target: Target) -> str:
    import torch

    from forerun.runner.native import kernels

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


def _read(path: Path | None, kinds: list[Kind]) -> list[float] | None:
    """What a file says of these kinds, if it is sound."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text())
            seconds = [math.inf if s is None else float(s) for s in found["seconds"]]
            told = json.loads(json.dumps(kinds))  # tuples are lists there
            if found["kinds"] == told and len(seconds) == len(kinds) and min(seconds) > 0:
                return seconds
    return None


def _write(path: Path | None, kinds: list[Kind], seconds: list[float]) -> None:
    if path is None:
        return
    with suppress(OSError):  # a cache that cannot be written costs a measurement, no more
        reached = [s if math.isfinite(s) else None for s in seconds]
        text = json.dumps({"kinds": kinds, "seconds": reached})
        write_atomically(path, lambda beside: beside.write_text(text))
