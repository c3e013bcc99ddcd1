"""Search over steps: extend branches by one step, score them, keep the best, repeat.

The branches form `groups` trees. Each tree keeps `keep` branches and samples `width` continuations
of each. Beam search is one tree that keeps many branches; DVTS is many trees that keep one. A
finished branch stays until a better one replaces it.

The KV cells of kept branches are reused by their continuations. Text of pruned branches stays in
the n-gram memory, as all branches belong to one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from forerun.core.records import Sequence
from forerun.engine.stats import Stats
from forerun.errors import ConfigError, UnknownName
from forerun.search._answers import (
    Parse,
    check_num,
    count_votes,
    line_of_votes,
    read,
    usable_selection,
)
from forerun.search._scorers import AnyScorer, Attempt, as_scorer, score_all
from forerun.search._session import Session
from forerun.utils.text import counted

SELECT = ("weighted", "majority", "score")
AGGREGATE: dict[str, Callable[[Many[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "mean": lambda scores: math.fsum(score / len(scores) for score in scores),
    "product": math.prod,
}


@dataclass(eq=False)
class Branch:
    """A trajectory up to the end of one of its steps."""

    number: int
    parent: Branch | None
    depth: int  # steps so far
    group: int  # number of its tree
    tokens: list[int]  # prompt and everything generated
    text: str = ""  # generated so far
    step: str = ""  # text of its last step
    finish: str | None = None  # "stop" or "length"; None: unfinished
    logprobs: tuple[float, ...] = ()  # of the target, if the scorer needs them
    scores: tuple[float, ...] = ()  # one per step
    score: float | None = None  # aggregate of `scores`; None: not scored, or lost
    fate: str = "open"  # root, open, pruned, lost, finished

    @property
    def is_open(self) -> bool:
        return self.fate == "open"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the text of the last step only."""
        names = ("number", "depth", "group", "step", "score", "fate", "finish")
        parent = None if self.parent is None else self.parent.number
        return {"parent": parent} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Found:
    """Result of a search over steps: the chosen branch and the whole tree."""

    prompt: str
    method: str
    chosen: Branch
    answer: str | None
    votes: dict[str, float]  # answer -> votes or sum of scores of finished branches; descending
    tree: list[Branch]  # all branches, parents first; the first one is the prompt
    seed: int
    stats: Stats
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.chosen.text

    @property
    def finished(self) -> list[Branch]:
        """Branches that are finished and kept; only these vote."""
        return [branch for branch in self.tree if branch.fate == "finished"]

    @property
    def num_abandoned(self) -> int:
        """Tokens of steps that are in no finished or chosen branch; included in `stats`."""
        held: set[Branch] = set()
        for leaf in (self.chosen, *self.finished):
            branch: Branch | None = leaf
            while branch is not None and branch not in held:
                held.add(branch)
                branch = branch.parent
        kept = sum(len(b.tokens) - len(b.parent.tokens) for b in held if b.parent is not None)
        return max(0, self.stats.generated - kept)

    @property
    def num_texts(self) -> int:
        return len(self.finished)

    def shown(self) -> str:
        return self.text

    def remarks(self, seconds: float) -> list[str]:
        num_lost = sum(branch.fate == "lost" for branch in self.tree)
        branches = counted(len(self.tree) - 1, "branch", "branches")
        counts = f"{branches}, {num_lost} lost, {self.num_texts} finished"
        return [line_of_votes(self.answer, self.votes), counts]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the chosen branch, votes and all branches."""
        return {
            "method": self.method,
            "prompt": self.prompt,
            "text": self.text,
            "answer": self.answer,
            "votes": self.votes,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            "abandoned_tokens": self.num_abandoned,
            "notes": self.notes,
            "chosen": self.chosen.number,
            "tree": [branch.to_dict() for branch in self.tree],
        }


class BranchesLost(ConfigError):
    """The scorer failed on every branch; `tree` has all of them."""

    tree: list[Branch]


@dataclass(frozen=True)
class Options:
    """Options of a search over steps. Raises ConfigError, UnknownName."""

    n: int
    width: int
    step_tokens: int
    max_steps: int
    aggregate: str
    select: str
    parse: Parse

    def __post_init__(self) -> None:
        check_num(self.n)
        for name in ("n", "width", "step_tokens", "max_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n % self.width:
            raise ConfigError(
                f"n must be a multiple of width, got n={self.n} and width={self.width}; "
                f"try n={self.width * max(1, self.n // self.width)}"
            )
        for kind, name, known in (
            ("selection", self.select, SELECT),
            ("aggregate", self.aggregate, AGGREGATE),
        ):
            if name not in known:
                raise UnknownName.of(kind, name, known)


class StepSearch:
    """Grows the tree of one prompt."""

    def __init__(self, session: Session, scorer: AnyScorer, options: Options) -> None:
        self.session, self.options = session, options
        self.scorer = as_scorer(scorer)
        self.root = Branch(0, None, 0, -1, session.pattern.tokens, fate="root")
        self.tree = [self.root]
        self._round = 0

    def run(self, groups: int, keep: int) -> list[Branch]:
        """Grows the tree to the end; returns the kept branches."""
        n, width = self.options.n, self.options.width
        stems = [(self.root, g) for g in range(groups)]
        kept = self._prune(self._expand(stems, n // groups), keep)
        for _ in range(self.options.max_steps - 1):
            stems = [(branch, branch.group) for branch in kept if branch.is_open]
            if not stems:
                break
            children = self._expand(stems, width)
            kept = self._prune([*children, *(b for b in kept if not b.is_open)], keep)
        return kept

    def _expand(self, stems: list[tuple[Branch, int]], width: int) -> list[Branch]:
        """Samples `width` continuations of every stem by one step; returns the scored ones."""
        self._round += 1
        self.session.keep(stem.tokens for stem, _ in stems)
        # the first continuations of all stems come first, so that each finds its stem's cells
        places = [(k, i) for k in range(width) for i in range(len(stems))]
        seqs = {self._continue(stems[i][0], i * width + k): stems[i] for k, i in places}
        children = []
        for seq in self.session.run(seqs):
            children.append(self._child(seq, *seqs[seq]))
            if children[-1].is_open:
                self.session.hold(seq)
        children.sort(key=lambda child: child.number)
        self.tree += children
        self._score(children)
        return [child for child in children if child.fate != "lost"]

    def _continue(self, stem: Branch, number: int) -> Sequence:
        limit = self.options.step_tokens
        return self.session.sequence(self._round, number, tokens=stem.tokens, limit=limit)

    def _child(self, seq: Sequence, stem: Branch, group: int) -> Branch:
        text = self.session.text(seq)
        new = seq.tokens[len(stem.tokens) :]
        logprobs = tuple(top[t] for t, top in zip(new, seq.logprobs, strict=False))
        is_finished = self.session.is_finished(seq)
        return Branch(
            number=len(self.tree) + seq.index,
            parent=stem,
            depth=stem.depth + 1,
            group=group,
            tokens=seq.tokens,
            text=text,
            step=self._last(text, stem, new),
            finish=("stop" if seq.finish == "stop" else "length") if is_finished else None,
            logprobs=stem.logprobs + logprobs,
            fate="finished" if is_finished else "open",
        )

    def _last(self, text: str, stem: Branch, new: list[int]) -> str:
        """The text of new tokens; the text before may have ended within a character."""
        if text.startswith(stem.text):
            return text[len(stem.text) :]
        return self.session.engine.stops.decode(new, stem.tokens)

    def _score(self, children: list[Branch]) -> None:
        """Sets the scores; a child without a score is lost, with a note."""
        prompt = self.session.prompt
        attempts = [Attempt(prompt, child.text, child.logprobs) for child in children]
        for child, score in zip(children, score_all(self.scorer, attempts), strict=True):
            before = child.parent.scores if child.parent else ()
            value = score if isinstance(score, str) else self._aggregated((*before, score))
            if isinstance(score, str) or isinstance(value, str):
                child.fate = "lost"
                where = f"branch {child.number} is dropped at step {child.depth}"
                self.session.note(f"{where}: {value}")
                continue
            child.scores, child.score = (*before, score), value

    def _aggregated(self, scores: Many[float]) -> float | str:
        """The aggregate of a branch's scores, or the reason why there is none (overflow)."""
        try:
            value = AGGREGATE[self.options.aggregate](scores)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
        return f"the {self.options.aggregate} of its scores is not finite: {scores}"

    def _prune(self, branches: list[Branch], keep: int) -> list[Branch]:
        """The `keep` best of every group; among equals, different parents come first."""
        kept = []
        for group in sorted({branch.group for branch in branches}):
            ranked = by_rank([branch for branch in branches if branch.group == group])
            kept += ranked[:keep]
            for branch in ranked[keep:]:
                branch.fate = "pruned"
        return kept


def by_rank(branches: Iterable[Branch]) -> list[Branch]:
    """Best first; among equals the best child of each parent comes first, then lower numbers."""
    ordered = sorted(branches, key=lambda b: (-(b.score or 0.0), b.number))
    count: dict[Branch | None, int] = {}
    place = {}
    for branch in ordered:
        place[branch] = count.get(branch.parent, 0)
        count[branch.parent] = place[branch] + 1
    return sorted(ordered, key=lambda b: (-(b.score or 0.0), place[b], b.number))


def grow(
    method: str, session: Session, scorer: AnyScorer, options: Options, groups: int, keep: int
) -> Found:
    """Grows the tree of a session and chooses one branch.

    Raises BranchesLost if all branches are lost; any other exception gets an attribute `tree`.
    """
    grown = StepSearch(session, scorer, options)
    try:
        return _found(method, session, grown, grown.run(groups, keep))
    except BaseException as error:
        error.tree = grown.tree  # type: ignore[attr-defined]
        raise


def _found(method: str, session: Session, grown: StepSearch, kept: list[Branch]) -> Found:
    """The result of a grown tree with these kept branches."""
    finished = [branch for branch in kept if not branch.is_open]
    if not kept:
        raise BranchesLost(
            f"the scorer failed on all {len(grown.tree) - 1} branches ({session.notes[-1]}); it "
            "must return a finite number for a prompt and an unfinished text"
        )
    if not finished:
        most = grown.options.max_steps
        session.note(f"no branch finished in {most} steps; the best one is unfinished")
    chosen, answer, votes = choose(finished or kept, grown.options, session.note)
    return Found(
        session.prompt,
        method,
        chosen,
        answer,
        votes,
        grown.tree,
        session.seed,
        session.stats,
        session.notes,
    )


def choose(
    branches: list[Branch], options: Options, note: Callable[[str], None]
) -> tuple[Branch, str | None, dict[str, float]]:
    """The chosen branch, its answer and all votes."""
    answers = read(options.parse, (branch.text for branch in branches))
    scores = [branch.score or 0.0 for branch in branches]
    answer_of = dict(zip(branches, answers, strict=True))
    select = usable_selection(options.select, scores, note)
    votes = count_votes(answers, scores if select == "weighted" else [1.0] * len(branches))
    best = by_rank(branches)
    if select != "score" and votes:
        winner = next(iter(votes))
        best = [branch for branch in best if answer_of[branch] == winner]
    return best[0], answer_of[best[0]], votes
