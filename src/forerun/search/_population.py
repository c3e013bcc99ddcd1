"""A population of particles: weighted beginnings of texts under a constraint.

Every step extends each particle by one token, drawn by AWRS with its weight. If few particles carry
most of the weight, the population is resampled. A copy continues its original's text; the target
finds that text in the KV cache.

Law: the mean weight is an unbiased estimate of P(allowed), and the weighted particles of
P(text) 1[text allowed], for any number of particles, resampling and critic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.constraints.awrs import log_sum
from forerun.core.records import Sequence
from forerun.engine.stats import Stats
from forerun.errors import in_a_line
from forerun.search._resampling import RESAMPLING
from forerun.search._session import Session

Critic = Callable[[str], float]  # text so far -> a factor of its weight, at least 0


@dataclass(frozen=True)
class Settings:
    """Options of a population; see `particles.Particles`."""

    n: int
    ess: float
    resampling: str
    critic: Critic | None


class Population:
    """The particles of one run of a session; `Sequence.logw` is the log weight of a particle.

    number: of the run within the session.
    """

    def __init__(self, session: Session, how: Settings, number: int = 0) -> None:
        self.session, self.how, self.number = session, how, number
        self.num_resamplings = 0
        self._keys = itertools.count()
        self._dice = session.dice(number, how.n, 1)  # of resampling and the final draw
        self._twists: dict[Sequence, float] = {}  # log of the critic's value, part of the weight
        self._events: dict[Sequence, list[int]] = {}  # which draw each generated token came from
        self._num_events = itertools.count()
        self._notes = set[str]()
        self.seqs = [self._started(session.pattern.tokens) for _ in range(how.n)]

    def run(self) -> None:
        """Extends all particles to their ends."""
        while any(map(self._is_live, self.seqs)):
            self._extend()
            if any(map(self._is_live, self.seqs)):
                self._resample()
        self.session.retire()

    @property
    def logws(self) -> np.ndarray:
        """Log weights of the particles, float64 [n]."""
        return np.array([seq.logw for seq in self.seqs])

    @property
    def log_evidence(self) -> float:
        """Log of the estimated probability that a text of the model is allowed."""
        return log_sum(self.logws) - math.log(self.how.n)

    @property
    def weights(self) -> np.ndarray:
        """Weights that sum to 1, or all 0. float64 [n]."""
        return normalised(self.logws)

    def draw(self) -> int:
        """The index of one particle, drawn by weight; 0 if all weights are 0."""
        weights = self.weights
        return self._dice.choice(weights) if weights.any() else 0

    @property
    def stats(self) -> Stats:
        """Counters of all particles, those that were dropped included."""
        total = Stats()
        for seq in self._events:
            total.add(self.session.recorder.of(seq))
        return total

    @property
    def num_kept(self) -> int:
        """Number of tokens drawn that are in the text of any particle."""
        return len(set().union(*(self._events[seq] for seq in self.seqs)))

    def report(self, seq: Sequence) -> Any:
        """The constraint's report on a particle."""
        text = self.session.text(seq)
        found = (shaper.report(seq, text) for shaper in seq.shapers)
        return next((one for one in found if one is not None), None)

    def _started(self, tokens: list[int]) -> Sequence:
        """A new particle after some tokens, with its own randomness."""
        seq = self.session.sequence(self.number, next(self._keys), tokens=list(tokens))
        self._events[seq] = []
        self.session.engine.submit(seq)
        return seq

    def _is_live(self, seq: Sequence) -> bool:
        return seq.finish is None and seq.logw > -math.inf

    def _extend(self) -> None:
        """One token more for each live particle. The critic's last value is divided out first."""
        live = list(filter(self._is_live, self.seqs))
        before = [len(seq.tokens) for seq in live]
        for seq in live:
            seq.logw -= self._twists.pop(seq, 0.0)
        self.session.step()
        for seq, start in zip(live, before, strict=True):
            new = itertools.islice(self._num_events, len(seq.tokens) - start)
            self._events[seq] += new
            self._judge(seq)

    def _judge(self, seq: Sequence) -> None:
        """Ends a particle without weight; multiplies the critic's value in.

        A text that the token limit cut has not ended by itself, so it has no weight.
        """
        if seq.finish == "length" or (seq.finish is not None and not self._is_valid(seq)):
            seq.logw = -math.inf
        if seq.logw == -math.inf:
            self._drop(seq)
        elif self.how.critic is not None:
            self._twist(seq, self._criticised(seq, self.how.critic))

    def _twist(self, seq: Sequence, value: float) -> None:
        """A factor of the weight: for good at the end of a text, else until the next step."""
        if value == 0.0:
            seq.logw = -math.inf
            self._drop(seq)
            return
        seq.logw += math.log(value)
        if seq.finish is None:
            self._twists[seq] = math.log(value)

    def _criticised(self, seq: Sequence, critic: Critic) -> float:
        """The critic's value; 0 with a note if it fails."""
        is_running = seq.finish is None
        text = self.session.engine.stops.text(seq) if is_running else self.session.text(seq)
        try:
            value = float(critic(text))
        except Exception as error:  # a user's critic may raise anything
            return self._failed(f"the critic raised {type(error).__name__}: {in_a_line(error)}")
        if not 0.0 <= value < math.inf:
            return self._failed(f"the critic gave {value}, not a number of at least 0")
        return value

    def _failed(self, why: str) -> float:
        """The value 0 of a critic that failed, with one note per reason."""
        if why not in self._notes:
            self._notes.add(why)
            self.session.note(why)
        return 0.0

    def _is_valid(self, seq: Sequence) -> bool:
        found = self.report(seq)
        return found is None or found.valid

    def _drop(self, seq: Sequence) -> None:
        if seq.finish is None:
            self.session.engine.cancel(seq)

    def _resample(self) -> None:
        """Draws particles by weight if the effective sample size is below the threshold."""
        n, logws, weights = self.how.n, self.logws, self.weights
        if not weights.any() or 1.0 / float(weights @ weights) >= self.how.ess * n:
            return
        self.num_resamplings += 1
        places = RESAMPLING[self.how.resampling](weights, self._dice)
        self._fill([self.seqs[i] for i in places])
        mean = log_sum(logws) - math.log(n)
        for seq in self.seqs:
            seq.logw = mean

    def _fill(self, chosen: list[Sequence]) -> None:
        """The chosen particles become the population; a live one that comes again is copied."""
        seen, filled = set[Sequence](), []
        for seq in chosen:
            is_copy = seq in seen and self._is_live(seq)
            filled.append(self._copy(seq) if is_copy else seq)
            seen.add(seq)
        for seq in filter(self._is_live, self.seqs):
            if seq not in seen:
                self._drop(seq)
        self.seqs = filled

    def _copy(self, seq: Sequence) -> Sequence:
        """A particle with the same text, and its own randomness from here on."""
        made = self._started(seq.tokens)
        made.logprobs, made.allowed_mass = list(seq.logprobs), list(seq.allowed_mass)
        self._events[made] = list(self._events[seq])
        if seq in self._twists:
            self._twists[made] = self._twists[seq]
        return made


def normalised(logws: np.ndarray) -> np.ndarray:
    """Weights that sum to 1 from their logarithms [n]; all 0 if all are -inf."""
    if logws.max() == -np.inf:
        return np.zeros(len(logws))
    weights = np.exp(logws - logws.max())
    return weights / weights.sum()
