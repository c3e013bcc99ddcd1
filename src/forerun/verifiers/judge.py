"""Keeps a draft token that is correct, though the target would have said something else.

Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment", 2025. A linear head reads the target's hidden row e at a draft token, once the target
has read it, and tells how likely that token is to be harmless. A token is kept if the standard rule
keeps it or sigmoid(w e + b) > delta; where neither does, the standard correction follows.

Law: NOT kept, except at delta = 1. Tokens that bans and constraints forbid are never kept for the
head's sake; tokens that top-k or top-p cut off may be. Needs: hidden rows, a head for the target.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Target, Verifier
from forerun.core.tree import Tree
from forerun.errors import ConfigError, ModelError
from forerun.models.paths import located
from forerun.registry import File
from forerun.verifiers.base import follow_argmax, reject_recursively

NAME = "heads/judge.safetensors"  # below the model's folder: loaders read all weights in it
TRAIN = "forerun train judge_head"


class Judge(Verifier):
    """head: a file, or folder or name of the target it lies with. delta: None is the head's own."""

    needs = frozenset({"hidden"})
    lossless = False

    def __init__(self, *, head: File | Head = "reasoner", delta: float | None = None) -> None:
        if delta is not None and not 0 <= delta <= 1:
            raise ConfigError(
                f"judge needs 0 <= delta <= 1, got {delta=}; the paper has .5, 1 is the exact rule"
            )
        self.head = read_head(head) if isinstance(head, str) else head
        self.delta = self.head.delta if delta is None else delta
        self.border = logit(self.delta)

    def bind(self, target: Target) -> None:
        config = getattr(getattr(target, "model", None), "config", None)
        width = getattr(config, "hidden_size", self.head.width)
        if width != self.head.width:
            raise ConfigError(
                f"the judge's head reads hidden rows of {self.head.width} numbers, the target has "
                f"{width}; train one for this target ({TRAIN}), or use verifier 'speculative'"
            )

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        scores = self.scores(laws) if len(tree) else np.empty(0)

        def waived(node: int) -> bool:
            above = laws.logits(int(tree.parents[node]))
            return scores[node] > self.border and above[tree.tokens[node]] > -math.inf

        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws, waived)
        return reject_recursively(tree, laws, dice, waived)

    def scores(self, laws: TargetProbs) -> np.ndarray:
        """w e + b [n] of all nodes; the row at a node is that of a target that has read it."""
        hidden = laws.rows.hidden
        if hidden is None:
            raise ConfigError(
                "judge reads the target's hidden rows, and this target gave none; use a target "
                "that has them, or verifier 'speculative'"
            )
        return self.head.scores(hidden[1:].float().cpu().numpy())


class Head:
    """weight [d], bias, delta: above which chance a token is kept. float32."""

    def __init__(self, weight: np.ndarray, bias: float, delta: float = 0.5) -> None:
        self.weight, self.bias, self.delta = weight, float(bias), float(delta)
        self.width = len(weight)

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Log-odds [n] of hidden rows [n, d] that their tokens are correct."""
        return rows @ self.weight + self.bias

    def save(self, path: Path) -> None:
        """Writes what `read_head` reads."""
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {
            "weight": self.weight.astype(np.float32),
            "bias": np.array([self.bias], np.float32),
            "delta": np.array([self.delta], np.float64),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)


def logit(chance: float) -> float:
    """log(chance / (1 - chance)); infinite at 0 and 1."""
    if chance in (0.0, 1.0):
        return math.inf if chance else -math.inf
    return math.log(chance / (1 - chance))


def read_head(name: str) -> Head:
    """The head in a file, or beside a target. Raises ModelError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(located(name)).expanduser()
    path = path / NAME if path.is_dir() else path
    try:
        found = load_file(path)
        return Head(found["weight"], found["bias"][0], found["delta"][0])
    except (OSError, SafetensorError, KeyError, IndexError) as cause:
        raise ModelError(
            f"expected a judge's head in {path}, found none that can be read ({cause}); train one "
            f"for this target with {TRAIN}, or use verifier 'speculative'"
        ) from cause
