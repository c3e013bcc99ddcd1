"""Targets and sources small enough to enumerate: three tokens, laws from a seeded table."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from forerun.core.cost import Cost
from forerun.core.dice import Dice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.growing import Path, Source
from forerun.core.logits import advance
from forerun.core.records import Rows, Sequence, Verdict
from forerun.core.roles import Shaper, Target
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import Proposal, Tree
from forerun.engine.engine import Engine

VOCAB = 3


def table_law(seed: int, vocab: int = VOCAB, order: int = 2) -> Callable[[Many[int]], np.ndarray]:
    """A law that depends on the last `order` tokens; the same for the same seed."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def law(tokens: Many[int]) -> np.ndarray:
        key = tuple(tokens[-order:])
        if key not in known:
            rng = np.random.default_rng([seed, *(t + 1 for t in key)])
            known[key] = rng.dirichlet(np.ones(vocab))
        return known[key]

    return law


class FakeTarget(Target):
    """A target whose law is a function of the tokens, in float64; its passes take made-up times."""

    cost: Cost | None = Cost((1, 65), (1.0, 2.0))

    def __init__(self, law: Callable[[Many[int]], np.ndarray], vocab: int = VOCAB) -> None:
        self.law, self.vocab_size, self.context = law, vocab, 10_000

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        pairs = zip(batch.seqs, batch.trees, strict=True)
        return [Rows(self._logits(seq, tree)) for seq, tree in pairs]

    def _logits(self, seq: Sequence, tree: Tree) -> torch.Tensor:
        laws = [self.law(seq.tokens + tree.path(node)) for node in range(-1, len(tree))]
        return torch.from_numpy(np.log(np.stack(laws)))

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Nothing is kept."""


class TableSource(Source):
    """q from a law over tokens; knows nothing where `is_known` says so."""

    def __init__(
        self,
        law: Callable[[Many[int]], np.ndarray],
        is_known: Callable[[Many[int]], bool] = lambda tokens: True,
    ) -> None:
        self.law, self.is_known = law, is_known

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        texts = [[*seq.tokens, *path] for seq, path in requests]
        return [Proposal.of(self.law(t)) if self.is_known(t) else None for t in texts]


class NoRepeats(Shaper):
    """A constraint with memory: the last token may not come again at once."""

    def start(self, seq: Sequence) -> int:
        return seq.tokens[-1]

    def advance(self, state: int, token: int) -> int:
        return token

    def logits(self, state: int, logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[state] = -np.inf
        return logits

    def allows(self, state: int, token: int) -> bool:
        return token != state


class DeadEnd(Shaper):
    """A constraint that forbids `token`, and every token after it."""

    def __init__(self, token: int = 2) -> None:
        self.token = token

    def start(self, seq: Sequence) -> bool:
        return False

    def advance(self, state: bool, token: int) -> bool:
        return state or token == self.token

    def logits(self, state: bool, logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[slice(None) if state else self.token] = -np.inf
        return logits

    def allows(self, state: bool, token: int) -> bool:
        return not state and token != self.token


def sequence(
    prompt: Many[int], length: int, dice: Dice, sampling: Sampling | None = None, index: int = 0
) -> Sequence:
    """A sequence that ends after `length` generated tokens; all of them are one group."""
    return Sequence(
        list(prompt),
        len(prompt),
        sampling or Sampling(),
        dice,
        limit=length,
        group="one prompt",
        index=index,
    )


def exact_law(
    law: Callable[[Many[int]], np.ndarray],
    prompt: Many[int],
    length: int,
    sampling: Sampling,
    shapers: Many[Shaper] = (),
    vocab: int = VOCAB,
) -> dict[tuple[int, ...], float]:
    """Plain decoding's law of the next `length` tokens, by its definition."""
    start = sequence(prompt, length, None, sampling)  # type: ignore[arg-type]
    found: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(vocab), repeat=length):
        states, tokens, prob = tuple(s.start(start) for s in shapers), list(prompt), 1.0
        for token in text:
            logits = np.log(law(tokens))
            for shaper, state in zip(shapers, states, strict=True):
                logits = logits if state is None else shaper.logits(state, logits)
            prob *= to_probs(logits, sampling)[token]
            if prob == 0.0:
                break
            states = advance(shapers, states, token)
            tokens.append(token)
        found[text] = prob
    return found


def run_all(engine: Engine, seqs: Many[Sequence]) -> tuple[tuple[int, ...], ...]:
    """Runs sequences to their end; returns what each generated."""
    for seq in seqs:
        engine.submit(seq)
    engine.run()
    return tuple(tuple(seq.generated) for seq in seqs)


class PlainDice:
    """The same draws as other dice; drafters use no kernel with it, but their plain form."""

    def __init__(self, dice: Dice) -> None:
        self.choice, self.coin = dice.choice, dice.coin
        self.without_replacement = dice.without_replacement


class FakeRunner:
    """What `draft_model` asks of a model runner, from a law over tokens; its passes are cheap."""

    cost = Cost((1, 65), (0.01, 0.02))
    between_steps = None

    def __init__(self, law: Callable[[Many[int]], np.ndarray]) -> None:
        self.law, self.context, self.vocab_size = law, 10_000, VOCAB

    def num_unread(self, seq: Sequence) -> int:
        return len(seq.tokens)

    def rows_at(self, requests: Many[tuple[Sequence, Path]]) -> torch.Tensor:
        laws = [self.law([*seq.tokens, *path]) for seq, path in requests]
        return torch.from_numpy(np.log(np.stack(laws)))

    def release(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def memory_report(self) -> dict[str, int]:
        return {}
