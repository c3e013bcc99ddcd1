"""Head that tells correct draft tokens from mistakes (Judge Decoding).

Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment", 2025. People marked mistakes for the paper; here a task's checker does
(`_judge_labels.py`). The head is a logistic regression on the target's hidden row at the token,
solved by Newton's method, both classes of equal mass; folds are by problem. Penalty and delta are
chosen on swaps that a head was not fitted to: best AUC, and a share `recall` of mistakes rejected.
The reported figures come from swaps used for neither fit nor choice (nested cross-validation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.export import write_folder
from forerun.training.progress import Watch, silent
from forerun.training.recipes._judge_labels import SWAP, Tokens, label_tokens
from forerun.training.recipes.base import Recipe
from forerun.training.renamed import refuse
from forerun.utils.files import write_atomically
from forerun.utils.stats import auc
from forerun.verifiers.judge import HEAD_FILE, Head

PENALTIES = tuple(10.0**k for k in range(-4, 3))  # of the squared norm, per unit of mass


@dataclass(kw_only=True, eq=False)
class JudgeHead(Recipe):
    """Makes the head of verifier `judge` for a target. It is solved for, not trained by steps.

    problems: training problems, of which texts are labelled.
    target: model that gives the hidden rows.
    draft: model that gives the judged tokens.
    swaps: labelled draft tokens per right text of the target, at most.
    temperature: sampling temperature of drafts.
    max_tokens: longest text.
    recall: share of mistakes that must be rejected.
    folds: one problem of so many is held out, each in its turn.
    sources: tokens that the head is fitted to (0 swaps, 1 replies, 2 slips).
    batch: texts that are generated at once.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"recall", "folds", "sources", "batch"})
    can_resume: ClassVar[bool] = False  # labels in the folder are used again

    problems: int = 800
    target: ModelName = "reasoner"
    draft: ModelName = "draft"
    swaps: int = 6
    temperature: float = 0.6
    max_tokens: int = 300
    recall: float = 0.99
    folds: int = 5
    sources: tuple[int, ...] = (SWAP,)
    batch: int = 64

    def __post_init__(self) -> None:
        if self.problems < 2 * self.folds or not 0 < self.recall <= 1 or self.swaps < 1:
            raise ConfigError(
                f"judge_head needs problems >= {2 * self.folds}, swaps >= 1 and 0 < recall <= 1, "
                f"got {self.problems}, {self.swaps}, {self.recall}"
            )

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        self.found = found = best(self.labelled(out, watch), self)
        write_folder(out, lambda part: found.head.save(part / HEAD_FILE))
        return [
            f"head: delta {found.head.delta:.3f}; on {found.correct} correct and {found.mistakes} "
            f"wrong tokens that were used for neither fit nor delta: area under the curve "
            f"{found.auc:.3f}, {found.kept_correct:.1%} of correct and {found.kept_mistakes:.1%} "
            f"of wrong tokens kept -> {out}"
        ]

    def labelled(self, out: Path, watch: Watch = silent) -> Tokens:
        """The labelled tokens, made once and kept in `out`.

        Raises ConfigError if those in the folder were made with other settings.
        """
        file = out / "tokens.npz"
        if file.exists():
            plans.check_plan(out, plans.settings(self))
        else:
            arrays = vars(label_tokens(self, watch))
            plans.write_plan(out, plans.settings(self), plans.budgets(self))
            write_atomically(file, lambda part: _save_arrays(part, arrays))
        with np.load(file) as found:
            return Tokens(**found)


@dataclass(frozen=True)
class Found:
    """A head, and how heads made the same way judge swaps of problems they were made without.

    Shares are of swaps above the delta that was chosen with each of those heads.
    """

    head: Head
    auc: float
    correct: int
    mistakes: int
    kept_correct: float
    kept_mistakes: float


class Choice(NamedTuple):
    """A penalty and the log-odds above which a token is kept."""

    penalty: float
    border: float


def best(tokens: Tokens, recipe: JudgeHead) -> Found:
    """The head from all tokens with its own choice, and its expected quality."""
    is_swap = tokens.sources == SWAP
    scores = np.empty(len(tokens.labels))  # log-odds above the border
    for is_held in held_out(tokens, recipe.folds):
        head, border = made(tokens.where(~is_held), recipe)
        scores[is_held] = head.scores(tokens.rows[is_held]) - border
    labels, scores = tokens.labels[is_swap], scores[is_swap]
    head, border = made(tokens, recipe)
    head.delta = 1 / (1 + np.exp(-border))
    kept, counts = scores > 0, (int(labels.sum()), int((~labels).sum()))
    area = auc(scores, labels.astype(float))
    return Found(head, area, *counts, float(kept[labels].mean()), float(kept[~labels].mean()))


def made(tokens: Tokens, recipe: JudgeHead) -> tuple[Head, float]:
    """A head fitted to tokens with the penalty that they choose, and its border."""
    choice = choose(tokens, recipe)
    used = tokens.where(np.isin(tokens.sources, recipe.sources))
    return fit(used, choice.penalty), choice.border


def choose(tokens: Tokens, recipe: JudgeHead) -> Choice:
    """The penalty with the best AUC on swaps of held-out folds, and the border on the same scores.

    Raises DataError where swaps are all of one kind.
    """
    is_swap = tokens.sources == SWAP
    is_used = np.isin(tokens.sources, recipe.sources)
    labels, areas, scored = tokens.labels[is_swap], [], []
    check_kinds(labels)
    for penalty in PENALTIES:
        scores = np.empty(len(tokens.labels))
        for is_held in held_out(tokens, recipe.folds):
            head = fit(tokens.where(is_used & ~is_held), penalty)
            scores[is_held] = head.scores(tokens.rows[is_held])
        scored.append(scores[is_swap])
        areas.append(auc(scored[-1], labels.astype(float)))
    chosen = int(np.argmax(areas))
    border = np.quantile(scored[chosen][~labels], recipe.recall, method="higher")
    return Choice(PENALTIES[chosen], float(border))


def fit(tokens: Tokens, penalty: float, steps: int = 30) -> Head:
    """Logistic regression by Newton's method; both labels have the same mass.

    Raises DataError where there is one label only.
    """
    check_kinds(tokens.labels)
    mean, scale = tokens.rows.mean(0), tokens.rows.std(0) + 1e-6
    x = np.hstack([(tokens.rows - mean) / scale, np.ones((len(tokens.rows), 1))]).astype(np.float64)
    y = tokens.labels.astype(np.float64)
    mass = np.where(tokens.labels, 0.5 / y.sum(), 0.5 / (1 - y).sum())
    ridge = penalty * np.append(np.ones(x.shape[1] - 1), 1e-9)  # none on the bias
    w = np.zeros(x.shape[1])
    for _ in range(steps):
        prob = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        gradient = x.T @ (mass * (prob - y)) + ridge * w
        hessian = (x * (mass * prob * (1 - prob) + 1e-12)[:, None]).T @ x + np.diag(ridge)
        move = np.linalg.solve(hessian, gradient)
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


def held_out(tokens: Tokens, folds: int) -> Iterator[np.ndarray]:
    """Masks bool [n]: every `folds`-th problem, in turns."""
    rank = np.unique(tokens.problems, return_inverse=True)[1]
    return (rank % folds == fold for fold in range(folds))


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


__getattr__ = refuse(__name__, {"Plan": "JudgeHead(...)", "run": "JudgeHead(...).train(out)"})
