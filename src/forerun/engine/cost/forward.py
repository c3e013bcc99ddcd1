"""The time of a forward pass by its number of rows, measured once and cached on disk.

A measurement is valid for a model, dtype, device and thread count. It is cached until a check finds
the same work clearly faster.

A start measures for at most START_SECONDS. On a slow model it measures the most useful sizes,
interpolates linearly, and later starts measure the rest.
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

from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.utils.files import write_atomically
from forerun.utils.paths import cache_folder

MEASURED_ROWS = (1, 17, 5, 65, 9, 33, 3, 129, 2, 25, 13, 49, 7, 97)  # the most useful first
MIN_CURVE_POINTS = 2
PREFIX_TOKENS, SHORT_PREFIX_TOKENS = 48, 6  # before the root: of one sequence, of each of several
TREE_DEPTH = 4  # of the measured trees
MIN_TRIES = 7  # of each measurement, as far as time allows
START_SECONDS = 0.3, 0.6  # min and max seconds of one of three measurements before the first text
FULL_SECONDS = 0.5, 30.0  # the same for benchmarks
CHECK_LIMITS = 3, (0.0, 0.3)  # tries, and min and max seconds, of a check of cached times
MIN_CHECK_RATIO = 0.85  # measured over cached time; below it the cache is outdated
FORMAT_VERSION = 11

Kind = TypeVar("Kind", tuple[int, int], tuple[int, int, int])
Pass = tuple[int, int]  # number of sequences, total number of rows
Limits = tuple[float, float]


def curve_of(target: Target, limits: Limits | None = None) -> Cost:
    """The pass times of a target: already set, read from the cache, or measured.

    limits: min and max seconds of measuring; default START_SECONDS.
    """
    if target.cost is not None:
        return target.cost
    if target.curve is None:
        kinds = [(1, rows) for rows in MEASURED_ROWS]
        seconds = cached_seconds(target, "", kinds, partial(pass_seconds, target), limits)
        target.curve = _curve(dict(zip(MEASURED_ROWS, seconds, strict=True)))
    return target.curve


def _curve(seconds: dict[int, float]) -> Cost:
    """A non-decreasing curve through the measured sizes: no pass is slower than a larger one."""
    rows = sorted(num for num, found in seconds.items() if math.isfinite(found))
    times = np.minimum.accumulate([seconds[num] for num in reversed(rows)])[::-1]
    if len(rows) < MIN_CURVE_POINTS:  # too slow to measure: each row costs as much as the first
        return Cost((1, 2), (seconds[1], 2 * seconds[1]))
    return Cost(tuple(rows), tuple(float(s) for s in times))


def cached_seconds(
    target: Target,
    name: str,
    kinds: list[Kind],
    seconds_of: Callable[[Many[Kind], int, Limits], list[float]],
    limits: Limits | None = None,
) -> list[float]:
    """Seconds of each kind of work with a target, read from the cache or measured.

    `seconds_of` measures kinds with a number of tries and time limits; a kind that the limits do
    not reach is infinite, and a later call measures it. Cached times are checked by two kinds; if
    these are now faster, the cache was measured on a busy machine and is replaced.
    """
    path = cache_folder() / "costs" / f"{_key(target)}{name}.json" if target.shape else None
    known = _read(path, kinds)
    if known is not None and all(map(math.isfinite, known)):
        checked = [0, len(kinds) // 2]
        now = seconds_of([kinds[i] for i in checked], *CHECK_LIMITS)
        if all(found >= MIN_CHECK_RATIO * known[i] for i, found in zip(checked, now, strict=True)):
            return known
    order = list(range(len(kinds)))
    if known is not None:  # kinds without a time first
        order.sort(key=lambda i: math.isfinite(known[i]))
    measured = seconds_of([kinds[i] for i in order], MIN_TRIES, limits or START_SECONDS)
    fresh = dict(zip(order, measured, strict=True))
    seconds = [min(fresh[i], known[i]) if known else fresh[i] for i in range(len(kinds))]
    _write(path, kinds, seconds)
    return seconds


def min_seconds(works: Many[Callable[[], float]], tries: int, limits: Limits) -> list[float]:
    """The minimum seconds of each work; tries are interleaved, so noise affects all works.

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


def dummy_tokens(target: Target, length: int, first: int = 0) -> list[int]:
    """Arbitrary tokens, different for each `first`, since equal texts would share rows."""
    base = max(1, target.vocab_size - 1)  # `first` is written in this base, lowest digit first
    return [1 + (i + first // base**i) % base for i in range(length)]


def dummy_tree(nodes: int, vocab: int, levels: int = TREE_DEPTH) -> Tree:
    """A tree of chains of `levels` nodes below the root, similar to a draft."""
    tree = TreeBuilder()
    for node in range(nodes):
        tree.add(node % vocab, node - 1 if node % levels else -1)
    return tree.build()


def pass_seconds(target: Target, kinds: Many[Pass], tries: int, limits: Limits) -> list[float]:
    """Seconds of passes; rows beyond one per sequence are a tree of the first sequence."""
    most = max(num for num, _ in kinds)
    length = max(
        1, min(SHORT_PREFIX_TOKENS if most > 1 else PREFIX_TOKENS, target.context - TREE_DEPTH)
    )
    texts = [dummy_tokens(target, length, i) for i in range(most)]
    seqs = [
        Sequence(text, length, Sampling(), SeededDice(i), limit=1, index=i)
        for i, text in enumerate(texts)
    ]
    levels = max(1, min(TREE_DEPTH, target.context - length))

    def run(num: int, tree: Tree) -> float:
        start = perf_counter()
        _wait(target.forward(ForwardBatch(seqs[:num], [tree] + [EMPTY] * (num - 1))))
        return perf_counter() - start

    try:
        run(len(seqs), EMPTY)  # prefill
        trees = [dummy_tree(rows - num, target.vocab_size, levels) for num, rows in kinds]
        works = [partial(run, num, tree) for (num, _), tree in zip(kinds, trees, strict=True)]
        for work in works if target.is_slow_at_first else ():
            work()
        return min_seconds(works, tries, limits)
    finally:
        for seq in seqs:
            target.release(seq)


def _wait(rows: list[Rows]) -> None:
    """Waits for the GPU, where `forward` returns before the pass is done."""
    if rows[0].logits.is_cuda:
        import torch

        torch.cuda.synchronize(rows[0].logits.device)


def _key(target: Target) -> str:
    import torch

    from forerun.runner.native import kernels

    threads = torch.get_num_threads()
    machine = platform.machine(), _processor(), kernels().level, *_gpus(target.shape)
    key = repr((FORMAT_VERSION, target.shape, threads, machine, torch.__version__))
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return ""


def _gpus(shape: str) -> list[str]:
    """Names of the GPUs if the target runs on one."""
    import torch

    if "cuda" not in shape:
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _read(path: Path | None, kinds: list[Kind]) -> list[float] | None:
    """The cached seconds of these kinds; None if the file is missing, damaged or of other kinds."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text())
            seconds = [math.inf if s is None else float(s) for s in found["seconds"]]
            is_same = found["kinds"] == json.loads(json.dumps(kinds))  # tuples become lists
            if is_same and len(seconds) == len(kinds) and min(seconds) > 0:
                return seconds
    return None


def _write(path: Path | None, kinds: list[Kind], seconds: list[float]) -> None:
    if path is None:
        return
    with suppress(OSError):  # the cache is optional
        reached = [s if math.isfinite(s) else None for s in seconds]
        text = json.dumps({"kinds": kinds, "seconds": reached})
        write_atomically(path, lambda part: part.write_text(text))
