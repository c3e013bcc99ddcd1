"""Head that predicts whether a draft token is correct (Judge Decoding).

Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment", 2025. In the paper people label the mistakes; here the checker of a task does
(`_judge_labels.py`). The head is a logistic regression on the target's hidden row at the token,
fitted by Newton's method with equal weight of both classes. Cross-validation folds are split by
problem. The penalty with the best AUC on held-out swaps is chosen, and the delta that rejects the
share `recall` of their mistakes. Reported figures are from nested cross-validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.progress import Watch, silent
from forerun.training.recipes._judge_labels import SWAP, Tokens, label_tokens
from forerun.training.recipes.base import Recipe
from forerun.training.renamed import refuse
from forerun.utils.files import write_atomically, write_folder
from forerun.utils.stats import auc
from forerun.verifiers.judge import HEAD_FILE, Head

PENALTIES = tuple(10.0**k for k in range(-4, 3))  # of the squared norm, per unit of mass


@dataclass(kw_only=True, eq=False)
class JudgeHead(Recipe):
    """Fits the head of verifier `judge` for a target.

    problems: number of training problems with labelled texts.
    target: model that gives the hidden rows.
    draft: model that gives the judged tokens.
    swaps: maximum number of labelled draft tokens per correct text of the target.
    temperature: sampling temperature of drafts.
    max_tokens: maximum length of a text.
    recall: minimum share of mistakes that are rejected.
    folds: number of cross-validation folds.
    sources: labels that the head is fitted to (0 swaps, 1 replies, 2 slips).
    batch: number of texts generated at once.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"recall", "folds", "sources", "batch"})
    can_resume: ClassVar[bool] = False  # labels in the folder are reused anyway

    minimums = Recipe.minimums | {
        "problems": 4,
        "swaps": 1,
        "temperature": 0,
        "max_tokens": 1,
        "folds": 2,
        "batch": 1,
    }

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
        super().__post_init__()
        if self.problems < 2 * self.folds or not 0 < self.recall <= 1:
            raise ConfigError(
                f"judge_head needs problems >= {2 * self.folds} and 0 < recall <= 1, "
                f"got {self.problems}, {self.recall}"
            )

    def fixed(self) -> dict[str, Any]:
        return plans.model_hashes(target=self.target, draft=self.draft)

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        self.found = found = best(self.labelled(out, watch), self)
        write_folder(out, lambda part: found.head.save(part / HEAD_FILE))
        return [
            f"head: delta {found.head.delta:.3f}; on {found.correct} correct and {found.mistakes} "
            f"wrong tokens of held-out problems: area under the curve "
            f"{found.auc:.3f}, {found.kept_correct:.1%} of correct and {found.kept_mistakes:.1%} "
            f"of wrong tokens kept -> {out}"
        ]

    def labelled(self, out: Path, watch: Watch = silent) -> Tokens:
        """The labelled tokens; made once, then read from `out`.

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
    """A head, and the quality of heads fitted the same way, on swaps of held-out problems.

    kept_correct, kept_mistakes: shares of swaps with a score above the delta.
    """

    head: Head
    auc: float
    correct: int
    mistakes: int
    kept_correct: float
    kept_mistakes: float


class Choice(NamedTuple):
    """A penalty, and the log-odds above which a token is kept."""

    penalty: float
    border: float


def best(tokens: Tokens, recipe: JudgeHead) -> Found:
    """The head fitted to all tokens, and its expected quality by cross-validation."""
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
    """A head fitted with the penalty that `choose` selects, and its border."""
    choice = choose(tokens, recipe)
    used = tokens.where(np.isin(tokens.sources, recipe.sources))
    return fit(used, choice.penalty), choice.border


def choose(tokens: Tokens, recipe: JudgeHead) -> Choice:
    """The penalty with the best AUC on swaps of held-out folds, and the border from these scores.

    Raises DataError if all swaps have the same label.
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
    """Logistic regression by Newton's method; both classes have the same total weight.

    Raises DataError if all tokens have the same label.
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
    """Raises DataError unless labels [n] have both values."""
    if labels.all() or not labels.any():
        raise DataError(
            f"{len(labels)} labelled tokens, and all are {'right' if labels.all() else 'wrong'}; "
            "a head needs both kinds; use more problems"
        )


def held_out(tokens: Tokens, folds: int) -> Iterator[np.ndarray]:
    """One mask bool [n] per fold: its held-out tokens, every `folds`-th problem."""
    rank = np.unique(tokens.problems, return_inverse=True)[1]
    return (rank % folds == fold for fold in range(folds))


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


__getattr__ = refuse(__name__, {"Plan": "JudgeHead(...)", "run": "JudgeHead(...).train(out)"})
