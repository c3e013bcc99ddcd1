"""The head of Judge Decoding: which draft tokens are correct, whatever the target would have said.

    forerun train judge_head --out judge

Bachmann et al. 2025 had people mark mistakes. Here the checker of a task marks them, as AutoJudge
does: in a right text of the target one token is replaced by what the draft would have said and
the standard rule would have rejected; the target goes on greedily; the token is correct if the
answer still is ("swaps"). Beside them, as in the paper, right replies of the draft, whose tokens
are all correct ("replies"), and written-out solutions with a digit changed, whose tokens before and
after that one are left out ("slips"). Only problems of the training split are used.

The head is a logistic regression on the target's hidden row at the token, both classes of equal
mass, fitted to swaps, which did better than with the other tokens; folds are by problem. Penalty
and delta come from swaps that a head did not see: the best AUC, and a share `recall` of mistakes
gone. What is reported comes from swaps that nothing saw: fit and choice are made once more without
each fold (nested cross-validation), so that all problems serve all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import forerun
from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import Tree, TreeBuilder, chain
from forerun.errors import ConfigError, DataError
from forerun.models.load import load_target
from forerun.models.paths import located
from forerun.tasks._reasoning_world import MIX
from forerun.tasks.reasoning import Example, ReasoningTask
from forerun.training.plans import check_plan, write_plan
from forerun.utils.stats import auc
from forerun.verifiers.judge import NAME, Head

SWAP, REPLY, SLIP = 0, 1, 2
DIGITS = set("0123456789")
HIDDEN = frozenset({"hidden"})
PENALTIES = tuple(10.0**k for k in range(-4, 3))  # of the squared norm, per unit of mass
FIRST = 900_000  # the number of the first problem; they count down from there


@dataclass(frozen=True)
class Plan:
    """One run, resolved. temperature: at which drafts are drawn for swaps."""

    out: Path
    target: str = "reasoner"
    draft: str = "draft"
    num_problems: int = 800
    swaps: int = 6  # per right text, at most
    temperature: float = 0.6
    max_tokens: int = 300
    recall: float = 0.99  # share of mistakes that must be rejected
    folds: int = 5  # one problem of so many is held out, each in its turn
    sources: tuple[int, ...] = (SWAP,)  # which tokens the head is fitted to
    batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_problems < 2 * self.folds or not 0 < self.recall <= 1 or self.swaps < 1:
            raise ConfigError(
                f"a judge's head needs {2 * self.folds} problems or more, swaps >= 1 and "
                f"0 < recall <= 1, got {self.num_problems}, {self.swaps}, {self.recall}"
            )


@dataclass(frozen=True)
class Tokens:
    """Labelled tokens: hidden rows [n, d], labels bool [n], their problems and sources [n]."""

    rows: np.ndarray
    labels: np.ndarray
    problems: np.ndarray
    sources: np.ndarray

    def where(self, chosen: np.ndarray) -> Tokens:
        """Those of a mask bool [n]."""
        return Tokens(
            self.rows[chosen], self.labels[chosen], self.problems[chosen], self.sources[chosen]
        )


@dataclass(frozen=True)
class Found:
    """The head, and what heads made as it was do to swaps of problems that they were made without.

    Shares are of swaps above the delta that was chosen with each of those heads.
    """

    head: Head
    auc: float
    correct: int
    mistakes: int
    kept_correct: float
    kept_mistakes: float


Progress = Callable[[str, float], None]


def silent(what: str, share: float) -> None:
    """The default of `on_progress`."""


class Labeller:
    """The models, the problems, and the tokens labelled so far."""

    def __init__(self, plan: Plan, on_progress: Progress = silent) -> None:
        self.plan, self.on_progress = plan, on_progress
        self.task = ReasoningTask("train", MIX)
        self.model: Model = forerun.load(plan.target, max_seqs=plan.batch)
        self.draft = Model(
            load_target(located(plan.draft), max_seqs=plan.batch), self.model.tokenizer
        )
        self.examples = [self.task.example(FIRST - i) for i in range(plan.num_problems)]
        self.prompts = [self.model.tokenizer.encode(e.prompt) for e in self.examples]
        self.rng, self.dice = np.random.default_rng(plan.seed), SeededDice(plan.seed)
        self.found: list[tuple[np.ndarray, bool, int, int]] = []

    def replies(self) -> None:
        """Labels all tokens of the draft's right replies."""
        for i, tokens in self._right(self.draft, self.plan.temperature, "replies of the draft"):
            rows = self._rows(self.model.target, self.prompts[i], chain(tokens))
            self._add(rows, range(len(tokens)), [True] * len(tokens), i, REPLY)

    def slips(self) -> None:
        """Labels a digit of the written-out solution, as it is and changed."""
        tokenizer = self.model.tokenizer
        texts = [tokenizer.decode([token]) for token in range(self.model.target.vocab_size)]
        digits = {t: text for t, text in enumerate(texts) if text.strip() in DIGITS}
        for i, example in enumerate(self.examples):
            tokens = tokenizer.encode(example.reference, special=False)
            places = [at for at, token in enumerate(tokens) if token in digits]
            if not places:
                continue
            at = int(self.rng.choice(places))
            spaced = digits[tokens[at]][:-1]  # " 4" becomes " 7", never "7"
            others = [t for t, d in digits.items() if d[:-1] == spaced and t != tokens[at]]
            wrong = int(self.rng.choice(others))
            tree = with_swaps(tokens[: at + 1], {at: wrong})
            rows = self._rows(self.model.target, self.prompts[i], tree)
            self._add(rows, [at, at + 1], [True, False], i, SLIP)

    def swaps(self) -> None:
        """Labels draft tokens in right texts of the target by what becomes of the answer."""
        waiting: list[tuple[int, list[int], np.ndarray]] = []
        for i, tokens in self._right(self.model, 0.0, "texts of the target"):
            places = self._drafted(i, tokens)
            tree = with_swaps(tokens, places)
            rows = self._rows(self.model.target, self.prompts[i], tree)
            assert rows.hidden is not None
            for node, (at, token) in enumerate(places.items(), len(tokens)):
                row = rows.hidden[node + 1].float().cpu().numpy()
                waiting.append((i, [*tokens[:at], token], row))
        prompts = [[*self.prompts[i], *begun] for i, begun, _ in waiting]
        ends = self._generated(self.model, prompts, 0.0, "answers after a swap")
        for (i, begun, row), end in zip(waiting, ends, strict=True):
            self.found.append((row, self._is_right(i, begun + end), i, SWAP))

    def _drafted(self, i: int, tokens: list[int]) -> dict[int, int]:
        """Place -> a token drawn from the draft there that lost its coin; `swaps` of them."""
        p, q = (
            self._rows(model.target, self.prompts[i], chain(tokens))
            for model in (self.model, self.draft)
        )
        sampling, lost = Sampling(temperature=self.plan.temperature), dict[int, int]()
        for at, token in enumerate(tokens):
            ours, theirs = (to_probs(rows.row(at - 1), sampling) for rows in (p, q))
            y = self.dice.choice(theirs)
            if y != token and not self.dice.coin(min(1.0, ours[y] / theirs[y])):
                lost[at] = y
        chosen = self.rng.permutation(list(lost))[: self.plan.swaps]
        return {int(at): lost[int(at)] for at in chosen}

    def _right(self, model: Model, heat: float, what: str) -> list[tuple[int, list[int]]]:
        """Problems that a model gets right, with the tokens of its text."""
        texts = self._generated(model, self.prompts, heat, what)
        return [(i, tokens) for i, tokens in enumerate(texts) if self._is_right(i, tokens)]

    def _is_right(self, i: int, tokens: list[int]) -> bool:
        example: Example = self.examples[i]
        return bool(self.task.score(example, self.model.tokenizer.decode(tokens)))

    def _generated(
        self, model: Model, prompts: Many[list[int]], heat: float, what: str
    ) -> list[list[int]]:
        """What a model says after each prompt, ends of text left out."""
        run = model.run(
            prompts,
            drafter="none",
            controller="fixed",
            temperature=heat,
            max_new_tokens=self.plan.max_tokens,
            seed=self.plan.seed,
            batch=self.plan.batch,
        )
        ends, texts = set(model.tokenizer.eos_ids), [list[int]()] * len(prompts)
        for num, sample in enumerate(run, 1):
            texts[sample.prompt_index] = [t for t in sample.tokens if t not in ends]
            self.on_progress(what, num / len(prompts))
        return texts

    def _rows(self, target: Target, prompt: list[int], tree: Tree) -> Rows:
        """Rows of a tree behind a prompt, hidden ones too."""
        seq = Sequence(list(prompt), len(prompt), Sampling(), SeededDice(0), limit=len(tree) + 1)
        (rows,) = target.forward([seq], [tree], HIDDEN)
        target.release(seq)
        return rows

    def _add(
        self, rows: Rows, nodes: Many[int], labels: list[bool], problem: int, source: int
    ) -> None:
        assert rows.hidden is not None
        for node, label in zip(nodes, labels, strict=True):
            row = rows.hidden[node + 1].float().cpu().numpy()
            self.found.append((row, label, problem, source))


def with_swaps(tokens: Many[int], swaps: dict[int, int]) -> Tree:
    """A chain, and behind it one node per swap, beside the token that it stands for."""
    builder = TreeBuilder()
    for at, token in enumerate(tokens):
        builder.add(token, at - 1)
    for at, token in swaps.items():
        builder.add(token, at - 1)
    return builder.build()


def labelled(plan: Plan, on_progress: Progress = silent) -> Tokens:
    """The labelled tokens of a run, made once: they lie in plan.out.

    Raises ConfigError if those were made with other settings.
    """
    file, settings = plan.out / "tokens.npz", asdict(plan) | {"out": ""}
    if file.exists():
        check_plan(plan.out, settings)
    else:
        labeller = Labeller(plan, on_progress)
        labeller.slips()
        labeller.replies()
        labeller.swaps()
        rows, labels, problems, sources = zip(*labeller.found, strict=True)
        write_plan(plan.out, settings, {})
        np.savez(
            file,
            rows=np.stack(rows).astype(np.float32),
            labels=np.array(labels),
            problems=np.array(problems),
            sources=np.array(sources),
        )
    with np.load(file) as found:
        return Tokens(**found)


def fit(tokens: Tokens, penalty: float, steps: int = 30) -> Head:
    """Logistic regression by Newton's method; both labels have the same mass.

    Raises DataError where there is one label only.
    """
    check_kinds(tokens.labels)
    mean, scale = tokens.rows.mean(0), tokens.rows.std(0) + 1e-6
    x = np.hstack([(tokens.rows - mean) / scale, np.ones((len(tokens.rows), 1))]).astype(np.float64)
    y = tokens.labels.astype(np.float64)
    mass = np.where(tokens.labels, 0.5 / y.sum(), 0.5 / (1 - y).sum())
    ridge = penalty * np.append(np.ones(x.shape[1] - 1), 1e-9)
    w = np.zeros(x.shape[1])
    for _ in range(steps):
        chance = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        slope = x.T @ (mass * (chance - y)) + ridge * w
        curve = (x * (mass * chance * (1 - chance) + 1e-12)[:, None]).T @ x + np.diag(ridge)
        move = np.linalg.solve(curve, slope)
        w -= move
        if np.abs(move).max() < 1e-6:
            break
    weight = w[:-1] / scale
    return Head(weight.astype(np.float32), float(w[-1] - weight @ mean))


def check_kinds(labels: np.ndarray) -> None:
    """Raises DataError unless there are labels [n] of both kinds."""
    if labels.all() or not labels.any():
        raise DataError(
            f"{len(labels)} labelled tokens, and all are {'right' if labels.all() else 'wrong'}; "
            "a head learns from both kinds: label more problems"
        )


class Choice(NamedTuple):
    """A penalty and the log-odds above which a token is kept."""

    penalty: float
    border: float


def choose(tokens: Tokens, plan: Plan) -> Choice:
    """The penalty with the best AUC on swaps of held-out folds, and the border on the same scores.

    Raises DataError where swaps are all of one kind.
    """
    is_swap = tokens.sources == SWAP
    is_used = np.isin(tokens.sources, plan.sources)
    labels, areas, scored = tokens.labels[is_swap], [], []
    check_kinds(labels)
    for penalty in PENALTIES:
        scores = np.empty(len(tokens.labels))
        for is_held in held_out(tokens, plan.folds):
            head = fit(tokens.where(is_used & ~is_held), penalty)
            scores[is_held] = head.scores(tokens.rows[is_held])
        scored.append(scores[is_swap])
        areas.append(auc(scored[-1], labels.astype(float)))
    chosen = int(np.argmax(areas))
    border = np.quantile(scored[chosen][~labels], plan.recall, method="higher")
    return Choice(PENALTIES[chosen], float(border))


def held_out(tokens: Tokens, folds: int) -> Iterator[np.ndarray]:
    """Masks bool [n]: every `folds`-th of the problems that there are, in turns."""
    rank = np.unique(tokens.problems, return_inverse=True)[1]
    return (rank % folds == fold for fold in range(folds))


def best(tokens: Tokens, plan: Plan) -> Found:
    """The head from all tokens with its own choice, and what is to be expected of it."""
    is_swap = tokens.sources == SWAP
    scores = np.empty(len(tokens.labels))  # log-odds above the border
    for is_held in held_out(tokens, plan.folds):
        head, border = made(tokens.where(~is_held), plan)
        scores[is_held] = head.scores(tokens.rows[is_held]) - border
    labels, scores = tokens.labels[is_swap], scores[is_swap]
    head, border = made(tokens, plan)
    head.delta = 1 / (1 + np.exp(-border))
    kept, counts = scores > 0, (int(labels.sum()), int((~labels).sum()))
    area = auc(scores, labels.astype(float))
    return Found(head, area, *counts, float(kept[labels].mean()), float(kept[~labels].mean()))


def made(tokens: Tokens, plan: Plan) -> tuple[Head, float]:
    """A head fitted to tokens with the penalty that they choose, and its border."""
    choice = choose(tokens, plan)
    used = tokens.where(np.isin(tokens.sources, plan.sources))
    return fit(used, choice.penalty), choice.border


def run(plan: Plan, on_progress: Progress = silent) -> Found:
    """Labels, fits, and writes the head to plan.out. on_progress hears what is done, how far."""
    found = best(labelled(plan, on_progress), plan)
    found.head.save(plan.out / NAME)
    return found
