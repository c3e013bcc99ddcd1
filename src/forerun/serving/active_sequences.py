"""Sequences of admitted requests, and what of their text has been sent."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.engine.stopping import Stops
from forerun.serving.admission import Group
from forerun.serving.jobs import Count, Job, Piece
from forerun.serving.prediction import LONG, Expected, Prediction
from forerun.serving.traces import Trace


@dataclass(eq=False)
class Choice:
    """One sequence of a job; what has been sent of it."""

    job: Job
    number: int
    seq: Sequence
    num_chars: int = 0
    num_tokens: int = 0
    num_seen: int = 0  # tokens that were timed
    last: float = 0.0  # when the last of them came
    trace: Trace | None = None  # if the client asked for one

    def news(self, stops: Stops) -> Piece | None:
        """What became certain since the last call, in whole tokens; None if nothing did."""
        text, begins = stops.text(self.seq), stops.token_starts(self.seq)
        is_final = self.seq.finish is not None
        tokens = self.seq.generated
        if begins and not is_final and any(len(stop) > 1 for stop in self.seq.sampling.stop):
            # a token waits whole while such a stop string may take back its end
            text = text[: begins[bisect_right(begins, len(text)) - 1]]
        stop = len(tokens) if is_final else bisect_left(begins, len(text))
        start, piece = self.num_tokens, text[self.num_chars :]
        if not piece and not is_final:
            return None
        news = self.trace.news(text, begins, self.num_chars) if self.trace else None
        self.num_chars, self.num_tokens = len(text), stop
        places = begins[start:stop]
        places += [len(text)] * (stop - start - len(places))  # an end token has no text
        logprobs = self.seq.logprobs[start:stop]
        finish = self.seq.finish
        return Piece(self.number, piece, tokens[start:stop], places, logprobs, finish, news)


@dataclass(eq=False)
class Progress:
    """A job of which something runs."""

    job: Job
    expected: Expected | None
    choices: dict[int, Choice] = field(default_factory=dict)
    num_ended: int = 0
    count: Count = field(default_factory=Count)

    @classmethod
    def of(cls, job: Job) -> Progress:
        count = Count(prompt=sum(map(len, job.prompts)))
        return cls(job, Expected(job.prediction) if job.prediction else None, count=count)

    @property
    def is_done(self) -> bool:
        return self.num_ended == self.job.num_choices

    def prediction(self) -> Prediction | None:
        """Where one more choice stands in the predicted output, if there is one."""
        if self.expected is None:
            return None
        return Prediction(self.expected, LONG if self.job.nodes is None else self.job.nodes)


def sequences(group: Group, context: int) -> list[Choice]:
    """The n sequences of one prompt of a job."""
    job, i = group.job, group.prompt
    prompt, n = job.prompts[i], job.sampling.n
    limit = min(job.sampling.max_new_tokens, context - len(prompt))
    found = []
    for k in range(n):
        seq = Sequence(
            list(prompt),
            len(prompt),
            job.sampling,
            SeededDice(job.seed, i, k),
            limit=limit,
            group=(job.number, i),
            index=k,
            tenant=job.taught(i),
        )
        found.append(Choice(job, i * n + k, seq))
    return found
