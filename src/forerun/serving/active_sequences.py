"""The running sequences of requests, and the part of their text that has been sent."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from forerun.constraints._request import Report
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.engine.stopping import Stops
from forerun.serving.admission import Group
from forerun.serving.jobs import Job, Piece, TokenCounts
from forerun.serving.prediction import MAX_CHAIN, PredictedText, Prediction
from forerun.serving.traces import Trace


@dataclass(eq=False)
class Choice:
    """One sequence of a job, and how much of it has been sent."""

    job: Job
    number: int
    seq: Sequence
    num_chars: int = 0
    num_tokens: int = 0
    num_seen: int = 0  # tokens counted in the latency metrics
    last: float = 0.0  # time of the last of them
    trace: Trace | None = None  # if requested

    def next_piece(self, stops: Stops) -> Piece | None:
        """New text in whole tokens that no stop string can take back; None if there is none."""
        text, begins = stops.text(self.seq), stops.token_starts(self.seq)
        is_final = self.seq.finish is not None
        tokens = self.seq.generated
        if begins and not is_final and any(len(stop) > 1 for stop in self.seq.sampling.stop):
            # hold a token back while a stop string may remove the end of its text
            text = text[: begins[bisect_right(begins, len(text)) - 1]]
        stop = len(tokens) if is_final else bisect_left(begins, len(text))
        start, piece = self.num_tokens, text[self.num_chars :]
        if not piece and not is_final:
            return None
        update = self.trace.take_update(text, begins, self.num_chars) if self.trace else None
        self.num_chars, self.num_tokens = len(text), stop
        offsets = begins[start:stop]
        offsets += [len(text)] * (stop - start - len(offsets))  # an end token has no text
        logprobs = self.seq.logprobs[start:stop]
        finish = self.seq.finish
        texts = stops.token_texts(self.seq)[start:stop]
        texts += [""] * (stop - start - len(texts))
        return Piece(
            self.number, piece, tokens[start:stop], offsets, logprobs, finish, update, texts
        )


@dataclass(eq=False)
class Progress:
    """The state of a job with running sequences."""

    job: Job
    predicted: PredictedText | None
    choices: dict[int, Choice] = field(default_factory=dict)
    num_ended: int = 0
    reports: dict[int, Report | None] = field(default_factory=dict)  # of constraints
    count: TokenCounts = field(default_factory=TokenCounts)

    @classmethod
    def of(cls, job: Job) -> Progress:
        count = TokenCounts(prompt=sum(map(len, job.prompts)))
        return cls(job, PredictedText(job.prediction) if job.prediction else None, count=count)

    @property
    def is_done(self) -> bool:
        return self.num_ended == self.job.num_choices

    def prediction(self) -> Prediction | None:
        """The prediction for a new choice, if there is a predicted output."""
        if self.predicted is None:
            return None
        return Prediction(self.predicted, MAX_CHAIN if self.job.nodes is None else self.job.nodes)


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
            tenant=job.memory_tenant(i),
            cache_tenant=job.cache_tenant,
        )
        found.append(Choice(job, i * n + k, seq))
    return found
