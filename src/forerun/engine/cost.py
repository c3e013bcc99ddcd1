"""What a step costs: c(N) of the design by rows, and what each sequence and draft adds to it.

Rows of several sequences cost more than those of one tree: attention per sequence, and the engine's
own work. That is measured on rounds of the real loop with given drafts. One measurement serves a
model, number type, device and thread count; it is kept in the user's cache folder until passes are
found to be clearly faster.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from forerun import registry
from forerun.caches import cache_folder
from forerun.dice import Dice, SeededDice
from forerun.engine.guard import Guarded
from forerun.engine.loop import Engine
from forerun.errors import CapacityError
from forerun.records import Cost, Plan, Rows, Sequence
from forerun.roles import Controller, Drafter, Target
from forerun.sampling import Sampling
from forerun.tree import EMPTY, Tree, TreeBuilder

ROWS = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65)
PREFIX = 48  # tokens before the root: few enough that the cache slot is given up gladly
TRIES = 7  # rounds at least, as far as time allows
SECONDS = 0.5, 3.0  # of measuring, at least and at most
CHECK, HOLDS = (3, (0.0, 0.3)), 0.85  # tries and seconds of a check; what a curve must not exceed
SEQS, NODES = 8, 4  # sequences that run at once where others than one are measured; their drafts
FORMAT = 4


def cost_of(target: Target) -> Cost:
    """The cost curve of a target: remembered, read from the cache folder, or measured (seconds).

    One that was measured on a busy machine is found out by a few passes, and measured again.
    """
    if target.cost is None:
        path = cache_folder() / "costs" / f"{_key(target)}.json" if target.shape else None
        cost = _read(path)
        if cost is None or not _holds(cost, target):
            cost = _faster(measure(target), cost)
            _write(path, cost)
        target.cost = cost
    return target.cost


def measure(target: Target) -> Cost:
    """The fastest of interleaved passes and rounds: other work only slows them down."""
    most = min(max(ROWS), max(2, target.context - PREFIX - 1))
    sizes = [rows for rows in ROWS if rows <= most]
    seconds = np.maximum.accumulate(_passes(target, sizes, TRIES, SECONDS))  # larger never cheaper
    return _with_rounds(target, Cost(tuple(sizes), tuple(float(s) for s in seconds)))


def _holds(cost: Cost, target: Target) -> bool:
    """Whether no pass of a few is clearly faster than the curve says."""
    sizes = [cost.rows[0], cost.rows[len(cost.rows) // 2]]
    found = _passes(target, sizes, *CHECK)
    return all(now >= HOLDS * float(cost.at(n)) for n, now in zip(sizes, found, strict=True))


def _faster(found: Cost, before: Cost | None) -> Cost:
    """The faster pass of two measurements; what comes beside it is the later one's."""
    if before is None or before.rows != found.rows:
        return found
    return replace(found, seconds=tuple(map(min, found.seconds, before.seconds)))


def _passes(
    target: Target, sizes: Many[int], tries: int, seconds: tuple[float, float]
) -> list[float]:
    """Seconds of the fastest pass over one sequence with so many rows, tried in turn."""
    tokens = [1 + i % max(1, target.vocab_size - 1) for i in range(min(PREFIX, target.context - 2))]
    seq = Sequence(tokens, len(tokens), Sampling(), SeededDice(0), limit=1)
    trees = [_bush(rows - 1, target.vocab_size) for rows in sizes]
    fastest, rounds, started = [math.inf] * len(sizes), 0, perf_counter()
    try:
        _wait(target.forward([seq], [EMPTY], frozenset()))  # prefill
        while not _is_enough(rounds, perf_counter() - started, tries, seconds):
            for i, tree in enumerate(trees):
                start = perf_counter()
                _wait(target.forward([seq], [tree], frozenset()))
                fastest[i] = min(fastest[i], perf_counter() - start)
            rounds += 1
    finally:
        target.release(seq)
    return fastest


class _Given(Drafter):
    """The same tree for all who may draft."""

    labels = frozenset({"point"})

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return self.tree


class _First(Controller):
    """The first `drafts` sequences draft."""

    drafts = 0

    def plan(self, seq: Sequence) -> Plan:
        return Plan(NODES if seq.index < self.drafts else 0)


def _with_rounds(target: Target, curve: Cost) -> Cost:
    """The curve with what rounds of one sequence and of several took beside it.

    A target that has no room for others is taken for one that serves one sequence only.
    """
    length = min(PREFIX, target.context - NODES - 2)
    seqs = _room(target, length)
    if length < 1 or not seqs:
        return curve
    controller = _First()
    drafter, rule = Guarded(_Given(_bush(NODES, target.vocab_size))), registry.VERIFIER
    engine = Engine(target, drafter, registry.make("verifier", rule), controller, max_seqs=seqs)
    tokens = [1 + i % max(1, target.vocab_size - 1) for i in range(length)]
    running = [
        Sequence([*tokens], length, Sampling(), SeededDice(i), limit=1 << 30, index=i)
        for i in range(seqs)
    ]
    found: dict[tuple[int, int], list[float]] = {
        (n, drafts): [] for n in (1, seqs) for drafts in (0, 1, n)
    }
    started = perf_counter()
    try:
        for seq in running:
            engine.submit(seq)
        engine.step()  # prefill
        while not _is_enough(len(found[seqs, seqs]), perf_counter() - started, TRIES, SECONDS):
            for (n, controller.drafts), times in found.items():
                for seq in running:
                    del seq.tokens[length:]
                start = perf_counter()
                engine.round(running[:n])
                times.append(perf_counter() - start)
    finally:
        for seq in running:
            engine.cancel(seq)
        engine.retire()
    return _fitted(curve, {kind: min(times) for kind, times in found.items()}, seqs)


def _fitted(curve: Cost, rounds: dict[tuple[int, int], float], seqs: int) -> Cost:
    """What is left of the rounds' times (by sequences, by drafts) beside one sequence's pass."""
    left = {
        (n, drafts): seconds - float(curve.at(n + NODES * drafts))
        for (n, drafts), seconds in rounds.items()
    }
    others = max(seqs - 1, 1)
    per_seq = max(left[seqs, 0] - left[1, 0], 0.0) / others
    per_draft = max(left[seqs, seqs] - left[seqs, 1], 0.0) / others
    return replace(
        curve,
        per_step=max(left[1, 0] - per_seq, 0.0),
        per_seq=per_seq,
        per_draft=per_draft,
        drafting=max(left[seqs, 1] - left[seqs, 0] - per_draft, 0.0),
    )


def _room(target: Target, length: int) -> int:
    """How many sequences beside those that it holds may be measured."""
    for seqs in range(SEQS, 0, -1):
        with suppress(CapacityError):
            target.check_room(target.num_held + seqs, length + NODES + 1)
            return seqs
    return 0


def _wait(rows: list[Rows]) -> None:
    """Until the pass is done: on a GPU it has only been asked for when `forward` returns."""
    if rows[0].logits.is_cuda:
        import torch

        torch.cuda.synchronize(rows[0].logits.device)


def _is_enough(rounds: int, seconds: float, tries: int, limits: tuple[float, float]) -> bool:
    least, most = limits
    return rounds > 0 and (seconds > most or (rounds >= tries and seconds > least))


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
            rows, seconds = (tuple(found.pop(name)) for name in ("rows", "seconds"))
            if len(rows) == len(seconds) >= 2 and all(s > 0 for s in seconds):
                return Cost(rows, seconds, **found)
    return None


def _write(path: Path | None, cost: Cost) -> None:
    if path is None:
        return
    with suppress(OSError):  # a cache that cannot be written costs a measurement, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(asdict(cost)))
        part.replace(path)
