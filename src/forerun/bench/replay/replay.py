"""What drafts would have gained on recorded text. No model runs.

A deterministic draft is a fact about the text before it: it is accepted as far as the recorded text
says the same, which is what greedy matching would have accepted on that very path. Drafts that are
drawn, and drafters that learn the target's probabilities, cannot be judged so: a text has none.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from forerun.bench.replay.recording import Trace
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.mixins import forget
from forerun.core.records import Cost, Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.engine.stats import Recorder, Stats
from forerun.errors import ConfigError

ORDERS = (2, 3, 4, 5)


@dataclass
class Replayed:
    """Counts of a drafter on all traces, and by the number of the sample within its prompt."""

    total: Stats = field(default_factory=Stats)
    by_index: list[Stats] = field(default_factory=list)

    def add(self, index: int, stats: Stats) -> None:
        """The counts of sample `index` of some prompt."""
        while len(self.by_index) <= index:
            self.by_index.append(Stats())
        self.by_index[index].add(stats)
        self.total.add(stats)

    def to_dict(self) -> dict[str, Any]:
        """For machines: what does not depend on the clock."""
        found = self.total.to_dict()
        del found["seconds"], found["tokens_per_second"]
        return found | {"tau_by_sample": [round(stats.tau, 4) for stats in self.by_index]}


class Silent:
    """Laws of a recorded text: there are none, and who asks is told so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, node: int) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"drafter {self._name!r} learns the target's probabilities, and a recorded text has "
            "none; measure it with a model (`forerun generate`, `forerun bench`), or replay one "
            "that reads texts alone, such as prompt_lookup"
        )


class Absent(Target):
    """No model: tells drafters how many tokens there are."""

    context = 1 << 40
    cost = Cost((1, 2), (1.0, 1.0))  # a pass costs the same whatever is drafted

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        raise AssertionError("a replay computes nothing")

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Nothing is kept."""


def replay(
    traces: Many[Trace], drafter: Drafter, plan: Plan, vocab_size: int, name: str = ""
) -> Replayed:
    """Drafts along every sample, prompt by prompt, one sample after another.

    Raises ConfigError for a drafter whose drafts a recorded text cannot judge.
    """
    name = name or name_of(drafter)
    check_can_replay(drafter, name)
    drafter.bind(Absent(vocab_size))
    found, laws = Replayed(), Silent(name)
    for group, trace in enumerate(traces):
        for index, sample in enumerate(trace.samples):
            found.add(index, _follow(drafter, trace.prompt, sample, plan, laws, group, index))
        forget(drafter, group)
    return found


def check_can_replay(drafter: Drafter, name: str) -> None:
    """Raises ConfigError for drafts that are drawn, or that need a model's passes."""
    if drafter.labels - {"point"}:
        raise ConfigError(
            f"drafter {name!r} draws its drafts at random, and a recorded text does not tell which "
            "of those it would have accepted; replay one that drafts the same every time, such as "
            "prompt_lookup or suffix, or measure this one with a model (`forerun bench run`)"
        )
    if drafter.needs:
        raise ConfigError(
            f"drafter {name!r} needs {', '.join(sorted(drafter.needs))} of the target's passes, "
            "and a replay has none; measure it with a model"
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
    """One sample: draft, accept what the text says, add the next token, learn."""
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
    """The nodes of the longest path that the text from `at` on spells, from the top down."""
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
    """n -> share of repeated n-grams in the first 1, 2, 3 ... samples of a prompt.

    1 - distinct n-grams / n-grams, both within samples; the mean over the prompts that have so many
    samples. Prompts themselves are not counted.
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
    """n -> share of repeated n-grams in the first 1, 2 ... samples; nan where there are none."""
    text = np.concatenate([np.asarray(sample, np.int64) for sample in samples])
    sizes = np.array([len(sample) for sample in samples])
    left = np.concatenate([np.arange(size, 0, -1) for size in sizes])  # tokens to the sample's end
    starts, codes = np.arange(len(text)), text
    found = {}
    for n in range(1, longest + 1):
        if n > 1:  # (n - 1)-gram and next token, numbered anew so that the pair fits into 64 bits
            starts, codes = starts[left[starts] >= n], codes[left[starts] >= n]
            codes = codes * (text.max() + 1) + text[starts + n - 1]
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        ends = np.cumsum(np.maximum(sizes - n + 1, 0))
        distinct = np.searchsorted(np.sort(first), ends)
        share = np.divide(distinct, ends, out=np.full(len(ends), np.nan), where=ends > 0)
        found[n] = 1 - share
    return found
