"""Weighted verification: tokens of a tested constraint are drawn by AWRS, and drafts are followed.

"Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", 2025.
At each visited node a token is drawn by `constraints/awrs.draw`. If a child holds it, descend, else
emit it. The tree was made before the draw and does not depend on it, so any tree keeps the law, as
with `match`. Other sequences are judged by the inner rule.

Law: lossless; tokens have the masked law. `Verdict.logws` has the log weight of each token. With
`max_rejects` a step may give up; the text then ends with weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.constraints.awrs import NO_TOKEN, check_options, draw, log_sum
from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Target, Verifier
from forerun.core.sampling import Sampling, argmax
from forerun.core.tree import Tree
from forerun.errors import ConfigError
from forerun.registry import VerifierName

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Weighted(Verifier):
    """Draws tokens of tested constraints by AWRS, and judges other sequences by another rule.

    rule: the verifier of the others.
    method, max_accepts, max_rejects: of AWRS. must_end: at the last place of a sequence only end
    and stop tokens are drawn, with the weight of their mass; with stop strings, which any token may
    complete, all are.
    """

    def __init__(
        self,
        *,
        rule: VerifierName | Verifier = registry.DEFAULT_VERIFIER,
        method: str = "auto",
        max_accepts: int = 2,
        max_rejects: int | None = None,
        must_end: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check_options(method=method, max_accepts=max_accepts, max_rejects=max_rejects)
        self.method, self.max_accepts, self.max_rejects = method, max_accepts, max_rejects
        self.must_end = must_end
        made = (
            registry.make("verifier", rule, tokenizer=tokenizer) if isinstance(rule, str) else rule
        )
        if isinstance(made, Weighted):
            raise ConfigError(f"rule={rule!r} of weighted is weighted itself; use another verifier")
        self.rule: Verifier = made
        self.judges, self.needs = made.judges, made.needs
        self.lossless = made.lossless and max_rejects is None

    def bind(self, target: Target) -> None:
        self.rule.bind(target)

    def check(self, sampling: Sampling) -> None:
        self.rule.check(sampling)

    def warm_up(self) -> None:
        self.rule.warm_up()

    def probe(self, tree: Tree, room: int) -> Tree:
        return self.rule.probe(tree, room)

    def verify_all(
        self, trees: Many[Tree], laws: Many[TargetProbs], dice: Many[Dice]
    ) -> list[Verdict]:
        others = [i for i, one in enumerate(laws) if not one.is_tested]
        judged = iter(())
        if others:
            parts = ([part[i] for i in others] for part in (trees, laws, dice))
            judged = iter(self.rule.verify_all(*parts))  # type: ignore[arg-type]
        return [
            self._followed(tree, laws[i], dice[i]) if laws[i].is_tested else next(judged)
            for i, tree in enumerate(trees)
        ]

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.is_tested:
            return self._followed(tree, laws, dice)
        return self.rule.verify(tree, laws, dice)

    def _followed(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        """Draws at the root and descends while a child holds the token drawn."""
        node, kept, logws = -1, list[int](), list[float]()
        while True:
            token, logw = self._drawn(laws, node, dice)
            logws.append(logw)
            hits = [child for child in tree.children(node) if tree.tokens[child] == token]
            if not hits or logw == -math.inf:
                return Verdict(kept, token, logws)
            node = hits[0]
            kept.append(node)

    def _drawn(self, laws: TargetProbs, node: int, dice: Dice) -> tuple[int, float]:
        """A token after a node and its log weight; the end token and -inf if none is allowed."""
        logp, log_kept = log_law(laws, node), 0.0
        end_ids = laws.sampling.constraint.eos_ids
        if self.must_end and laws.num_left(node) == 1 and not laws.sampling.stop:
            stop_ids = [token for token in laws.sampling.stop_token_ids if token < len(logp)]
            logp, log_kept = _only([*end_ids, *stop_ids], logp)
        token, logw = draw(
            logp,
            lambda token: laws.allows(node, token),
            dice,
            method=self.method,
            max_accepts=self.max_accepts,
            max_rejects=self.max_rejects,
            mask=lambda: laws.mask(node),
        )
        return (end_ids[0] if token == NO_TOKEN else token), logw + log_kept


def log_law(laws: TargetProbs, node: int) -> np.ndarray:
    """Log-probabilities [V] at a node, up to a constant; requests with AWRS do not truncate."""
    logits = laws.logits(node)
    argmax(logits)  # raises if a logit is not finite, or all are forbidden
    return logits / np.float64(laws.sampling.divisor)


def _only(ids: Many[int], logp: np.ndarray) -> tuple[np.ndarray, float]:
    """The law of some tokens alone, and the log of their share of the whole."""
    found = np.full_like(logp, -np.inf)
    found[list(ids)] = logp[list(ids)]
    return found, log_sum(found) - log_sum(logp)
