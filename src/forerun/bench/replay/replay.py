"""Acceptance of deterministic drafters on recorded text, without a model.

A deterministic draft is accepted as far as it equals the recorded text, as greedy matching would
do. Random drafts and drafters that need the target's probabilities cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from forerun.bench.replay.recording import Trace
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.mixins import forget
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.engine.stats import Recorder, Stats
from forerun.errors import ConfigError

ORDERS = (2, 3, 4, 5)


@dataclass
class Replayed:
    """Counts of a drafter over all traces, and by sample number within a prompt."""

    total: Stats = field(default_factory=Stats)
    by_index: list[Stats] = field(default_factory=list)

    def add(self, index: int, stats: Stats) -> None:
        """Adds the counts of sample `index` of a prompt."""
        while len(self.by_index) <= index:
            self.by_index.append(Stats())
        self.by_index[index].add(stats)
        self.total.add(stats)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without times."""
        found = self.total.to_dict()
        del found["seconds"], found["tokens_per_second"]
        return found | {"tau_by_sample": [round(stats.tau, 4) for stats in self.by_index]}


class NoProbabilities:
    """Stands for the target's probabilities, which a recorded text lacks; raises on access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, node: int) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"drafter {self._name!r} needs the target's probabilities, which a recording lacks; "
            "measure it with a model (`forerun bench`), or replay a text-only drafter such as "
            "prompt_lookup"
        )


class NoTarget(Target):
    """A target without a model, with the vocabulary size for drafters."""

    context = 1 << 40
    cost = Cost((1, 2), (1.0, 1.0))  # the same for any draft

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        raise AssertionError("a replay runs no pass")

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Does nothing."""


def replay(
    traces: Many[Trace], drafter: Drafter, plan: Plan, vocab_size: int, name: str = ""
) -> Replayed:
    """Drafts along every sample, prompt by prompt, one sample after another.

    Raises ConfigError for a drafter that cannot be replayed.
    """
    name = name or name_of(drafter)
    check_can_replay(drafter, name)
    drafter.bind(NoTarget(vocab_size))
    found, laws = Replayed(), NoProbabilities(name)
    for group, trace in enumerate(traces):
        for index, sample in enumerate(trace.samples):
            found.add(index, _follow(drafter, trace.prompt, sample, plan, laws, group, index))
        forget(drafter, group)
    return found


def check_can_replay(drafter: Drafter, name: str) -> None:
    """Raises ConfigError for drafters with random drafts or that need a model's passes."""
    if drafter.labels - {"point"}:
        raise ConfigError(
            f"drafter {name!r} draws random drafts and cannot be replayed; replay a deterministic "
            "one such as prompt_lookup or suffix, or measure it with `forerun bench run`"
        )
    if drafter.needs:
        raise ConfigError(
            f"drafter {name!r} needs {', '.join(sorted(drafter.needs))} of the target's passes and "
            "cannot be replayed; measure it with `forerun bench run`"
        )


def _follow(
    drafter: Drafter,
    prompt: list[int],
    text: list[int],
    plan: Plan,
    laws: Any,
    group: int,
    index: int,
) -> Stats:
    """One sample: draft, accept what equals the text, add the next token, observe."""
    recorder, greedy = Recorder(), Sampling(temperature=0.0)
    seq = Sequence(
        list(prompt), len(prompt), greedy, SeededDice(0), len(text), group=group, index=index
    )
    drafter.start(seq)
    while seq.num_left:
        at = seq.num_generated
        (tree,) = drafter.propose([seq], [plan.within(seq.num_left - 1)], [seq.dice])
        nodes = agreed(tree, text, at)
        emitted = text[at : at + len(nodes) + 1]
        seq.tokens += emitted
        verdict = Verdict(nodes, emitted[-1])
        step = Step([seq], [plan], [tree], [laws], [verdict], [emitted])
        recorder(step)
        drafter.observe(step)
    drafter.finish(seq)
    return recorder.of(seq)


def agreed(tree: Tree, text: list[int], at: int) -> list[int]:
    """The nodes of the longest path that equals the text from `at` on, from the root down."""
    where: dict[tuple[int, int], int] = {}
    for node, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        where.setdefault(key, node)
    nodes: list[int] = []
    while at < len(text) - 1:
        found = where.get((nodes[-1] if nodes else -1, text[at]))
        if found is None:
            break
        nodes.append(found)
        at += 1
    return nodes


def overlap(traces: Many[Trace], orders: Many[int] = ORDERS) -> dict[int, list[float]]:
    """n -> share of repeated n-grams in the first 1, 2, 3, ... samples of a prompt.

    1 - distinct n-grams / n-grams within samples; mean over the prompts with so many samples.
    Prompts are not counted.
    """
    most = max(len(trace.samples) for trace in traces)
    shares: dict[int, list[list[float]]] = {n: [[] for _ in range(most)] for n in orders}
    for trace in traces:
        for n, found in _repeated(trace.samples, max(orders)).items():
            for m, share in enumerate(found if n in orders else ()):
                if not np.isnan(share):
                    shares[n][m].append(share)
    return {n: [float(np.mean(s)) if s else np.nan for s in shares[n]] for n in orders}


def _repeated(samples: Many[list[int]], longest: int) -> dict[int, np.ndarray]:
    """n -> share of repeated n-grams in the first 1, 2 ... samples; nan without n-grams."""
    text = np.concatenate([np.asarray(sample, np.int64) for sample in samples])
    sizes = np.array([len(sample) for sample in samples])
    left = np.concatenate([np.arange(size, 0, -1) for size in sizes])  # tokens to the sample's end
    starts, codes = np.arange(len(text)), text
    found = {}
    for n in range(1, longest + 1):
        if n > 1:  # (n - 1)-gram and next token, renumbered to fit into 64 bits
            starts, codes = starts[left[starts] >= n], codes[left[starts] >= n]
            codes = codes * (text.max() + 1) + text[starts + n - 1]
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        ends = np.cumsum(np.maximum(sizes - n + 1, 0))
        distinct = np.searchsorted(np.sort(first), ends)
        share = np.divide(distinct, ends, out=np.full(len(ends), np.nan), where=ends > 0)
        found[n] = 1 - share
    return found
