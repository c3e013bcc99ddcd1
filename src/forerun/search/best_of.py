"""Best of n: sample n trajectories of a prompt and choose one.

The trajectories share one prefill and one n-gram memory. They run one after another, in a batch, or
the first ones alone and the rest in a batch that drafts from the filled memory.

Law: before selection every trajectory is an independent sample of the target. Early stopping
changes the number of samples, never the majority answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.engine.generation import Sample, sample_of
from forerun.engine.stats import Stats
from forerun.errors import ConfigError, UnknownName
from forerun.search._answers import (
    Parse,
    as_parser,
    check_num,
    count_votes,
    is_decided,
    line_of_votes,
    read,
    usable_selection,
)
from forerun.search._scorers import AnyScorer, Attempt, Likelihood, Scorer, as_scorer, score_all
from forerun.search._session import Session
from forerun.search.base import Search, split_options

if TYPE_CHECKING:
    from forerun.api import Model

SELECT = ("majority", "weighted", "score", "likelihood", "mean_likelihood")


class NoSampleLeft(ConfigError):
    """The scorer failed on every sample; `samples` has all of them."""

    samples: list[Sample]


@dataclass(frozen=True)
class BestOf:
    """The samples in order of their numbers, and the chosen one."""

    prompt: str
    select: str
    samples: list[Sample]
    chosen: Sample
    answers: list[str | None]  # one per sample
    scores: list[float | None]  # one per sample; None: not scored, or lost
    votes: dict[str, float]  # answer -> votes, or sum of scores if weighted; descending
    num_asked: int  # more than len(samples) after an early stop
    seed: int
    stats: Stats
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.chosen.text

    @property
    def num_abandoned(self) -> int:
        """Tokens of samples that an early stop cancelled; included in `stats`."""
        return max(0, self.stats.generated - sum(len(sample.tokens) for sample in self.samples))

    @property
    def answer(self) -> str | None:
        """The answer of the chosen sample; None if it has none."""
        return self.answers[self.samples.index(self.chosen)]

    @property
    def num_texts(self) -> int:
        return len(self.samples)

    def shown(self) -> str:
        return self.text

    def remarks(self, seconds: float) -> list[str]:
        return [line_of_votes(self.answer, self.votes)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the chosen sample, votes and all samples."""
        rows = zip(self.samples, self.answers, self.scores, strict=True)
        return {
            "method": "best_of",
            "prompt": self.prompt,
            "text": self.text,
            "answer": self.answer,
            "votes": self.votes,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            "abandoned_tokens": self.num_abandoned,
            "notes": self.notes,
            "select": self.select,
            "num_asked": self.num_asked,
            "chosen": self.chosen.index,
            "samples": [_record(*row) for row in rows],
        }


class BestOfN(Search):
    """Samples n trajectories and chooses one.

    n: number of samples. select: choice: majority of the answers, weighted (votes weighted by
    score), score, likelihood (of the target) or mean_likelihood (per token); default: score if
    there is a scorer, otherwise majority. scorer: ranks texts: arithmetic, likelihood, reward:MODEL
    (a Hugging Face reward model), MODULE:FUNCTION, or a callable on (prompt, text). parse: regular
    expression of the final answer (last match, group 1), or a callable on a text. early_stop: stop
    when the vote is decided. alone: samples to run one by one before the rest.
    """

    spellings = {"parse": "--answer"}

    def __init__(
        self,
        *,
        n: int = 16,
        select: str | None = None,
        scorer: AnyScorer | str | None = None,
        parse: Parse | str | None = None,
        early_stop: bool = False,
        alone: int = 0,
        device: str = "auto",
    ) -> None:
        self.n, self.early_stop, self.alone = n, early_stop, alone
        self.select = select or ("majority" if scorer is None else "score")
        self.parse = as_parser(parse)
        _check(n, alone, early_stop, self.select, scorer is not None)
        self.scorer = _scorer(self.select, scorer, device)

    def run(
        self,
        model: Model,
        prompt: str | Many[int],
        *,
        batch: int | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> BestOf:
        """batch: sequences at once; None: all. Raises as `best_of` does."""
        needs = self.scorer is not None and self.scorer.needs_logprobs
        how = options | {"batch": self.n if batch is None else batch, "needs_logprobs": needs}
        with Session(model, prompt, sampling, **how) as session:
            done: list[Sample] = []
            try:
                for sample in _samples(session, self.n, self.alone):
                    done.append(sample)
                    self._stop_early(session, done)
                done.sort(key=lambda sample: sample.index)
                return _choose(session, done, self.n, self.select, self.parse, self.scorer)
            except BaseException as error:
                error.samples = done  # type: ignore[attr-defined]
                raise

    def _stop_early(self, session: Session, done: list[Sample]) -> None:
        """Cancels the rest if `early_stop` is set and the vote is decided."""
        left = self.n - len(done)
        texts = (sample.text for sample in done)
        if self.early_stop and left and is_decided(read(self.parse, texts), left):
            session.note(f"early stop: the vote is decided after {len(done)} of {self.n}")
            session.cancel_all()


def best_of(
    model: Model, prompt: str | Many[int], *, batch: int | None = 1, **options: Any
) -> BestOf:
    """Samples n trajectories and chooses one. options: of `BestOfN`, `Model.run` and Sampling.

    batch: sequences at once; None: all. sampling: a Sampling. Raises ConfigError; NoSampleLeft if
    the scorer failed on all. Any exception gets an attribute `samples`.
    """
    own, run = split_options(BestOfN, options)
    return BestOfN(**own).run(model, prompt, batch=batch, **run)


def _scorer(select: str, scorer: AnyScorer | str | None, device: str) -> Scorer | None:
    """The scorer of the samples; None for a majority vote."""
    if scorer is not None:
        return as_scorer(scorer, device)
    return None if select == "majority" else Likelihood(per_token=select == "mean_likelihood")


def _check(n: int, alone: int, early_stop: bool, select: str, has_scorer: bool) -> None:
    check_num(n)
    if not 0 <= alone <= n:
        raise ConfigError(f"expected alone in 0..n, got n={n}, alone={alone}")
    if select not in SELECT:
        raise UnknownName.of("selection", select, SELECT)
    wants = select in ("score", "weighted")
    if wants != has_scorer:
        remedy = "give one" if wants else "select='score' or 'weighted' do"
        raise ConfigError(f"select={select!r} {'needs' if wants else 'uses no'} scorer; {remedy}")
    if early_stop and select != "majority":
        raise ConfigError(
            f"early_stop needs select='majority', got {select!r}; only a vote can be decided early"
        )


def _samples(session: Session, n: int, alone: int) -> Iterator[Sample]:
    """Yields samples as they finish; the first `alone` ones run one by one."""
    scheduler = session.engine.scheduler
    batch = scheduler.max_seqs
    if alone:
        scheduler.max_seqs = 1
    seqs = [session.sequence(k) for k in range(n)]
    for num_ended, seq in enumerate(session.run(seqs), start=1):
        if num_ended == alone:
            scheduler.max_seqs = batch
        if seq.finish != "cancelled":
            yield _sample(session, seq)


def _sample(session: Session, seq: Sequence) -> Sample:
    text, stats = session.engine.stops.text(seq), session.recorder.of(seq)
    return sample_of(seq, session.engine, stats, session.prompt_index, text)


def _choose(
    session: Session, samples: list[Sample], n: int, select: str, parse: Parse, scorer: Any
) -> BestOf:
    answers = read(parse, (sample.text for sample in samples))
    scores: list[float | None] = [None] * len(samples)
    if scorer is not None:
        scores = _scores(session, samples, scorer)
    alive = [i for i in range(len(samples)) if scorer is None or scores[i] is not None]
    select = usable_selection(select, [scores[i] or 0.0 for i in alive], session.note)
    weights = [1.0] * len(samples)
    if select == "weighted":
        weights = [score or 0.0 for score in scores]
    votes = count_votes([answers[i] for i in alive], [weights[i] for i in alive])
    if select in ("majority", "weighted"):
        winner = next(iter(votes), None)
        best = next((i for i in alive if answers[i] == winner), alive[0])
        if winner is None:
            session.note("`parse` found no answer in any sample; the first one is chosen")
    else:
        best = max(alive, key=lambda i: (scores[i], -i))
    return BestOf(
        session.prompt,
        select,
        samples,
        samples[best],
        answers,
        scores,
        votes,
        n,
        session.seed,
        session.stats,
        session.notes,
    )


def _scores(session: Session, samples: list[Sample], scorer: Any) -> list[float | None]:
    """A score per sample; None if the scorer failed. Raises NoSampleLeft."""
    attempts = [Attempt(session.prompt, s.text, own_logprobs(s)) for s in samples]
    found = score_all(scorer, attempts)
    for sample, score in zip(samples, found, strict=True):
        if isinstance(score, str):
            session.note(f"sample {sample.index} is dropped: {score}")
    scores = [None if isinstance(score, str) else score for score in found]
    if all(score is None for score in scores):
        raise NoSampleLeft(
            f"the scorer failed on all {len(samples)} samples (the last: {found[-1]}); correct the "
            "scorer, or use select='majority'"
        )
    return scores


def own_logprobs(sample: Sample) -> tuple[float, ...]:
    """The target's log-probabilities of a sample's tokens, if recorded."""
    pairs = zip(sample.tokens, sample.logprobs or [], strict=False)
    return tuple(top[token] for token, top in pairs)


def _record(sample: Sample, answer: str | None, score: float | None) -> dict[str, Any]:
    return {
        "index": sample.index,
        "text": sample.text,
        "tokens": sample.tokens,
        "finish": sample.finish,
        "answer": answer,
        "score": score,
        "tau": round(sample.stats.tau, 4),
    }
