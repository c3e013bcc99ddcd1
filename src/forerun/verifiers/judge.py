"""Judge decoding: also keeps draft tokens that a trained head predicts to be correct.

Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment", 2025. A linear head reads the target's hidden state e at a draft token and predicts
the probability that this token is correct. A token is kept if the standard rule keeps it or
sigmoid(w e + b) > delta. Otherwise the standard correction follows.

Law: NOT kept, except at delta = 1. The head never keeps tokens that bans or constraints forbid; it
may keep tokens that top-k or top-p exclude. Needs: hidden states, a head trained for the target.
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

HEAD_FILE = "heads/judge.safetensors"  # in a sub-folder: loaders read all weights of the folder
TRAIN = "forerun train judge_head"


class Judge(Verifier):
    """head: its file, or the folder or name of its target. delta: None is the head's value."""

    needs = frozenset({"hidden"})
    lossless = False

    def __init__(self, *, head: File | Head = "reasoner", delta: float | None = None) -> None:
        if delta is not None and not 0 <= delta <= 1:
            raise ConfigError(
                f"judge needs 0 <= delta <= 1, got {delta=}; the paper has 0.5, 1 is exact"
            )
        self.head = read_head(head) if isinstance(head, str) else head
        self.delta = self.head.delta if delta is None else delta
        self.threshold = logit(self.delta)

    def bind(self, target: Target) -> None:
        config = getattr(getattr(target, "model", None), "config", None)
        width = getattr(config, "hidden_size", self.head.width)
        if width != self.head.width:
            raise ConfigError(
                f"the judge head has hidden size {self.head.width}, but the target has {width}; "
                f"train a head for this target ({TRAIN}), or use verifier 'speculative'"
            )

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        scores = self.scores(laws) if len(tree) else np.empty(0)

        def accept_anyway(node: int) -> bool:
            logits = laws.logits(int(tree.parents[node]))
            return scores[node] > self.threshold and logits[tree.tokens[node]] > -math.inf

        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws, accept_anyway)
        return reject_recursively(tree, laws, dice, accept_anyway)

    def scores(self, laws: TargetProbs) -> np.ndarray:
        """w e + b [n] of all nodes; e of a node is the hidden state after its token."""
        hidden = laws.rows.hidden
        if hidden is None:
            raise ConfigError(
                "judge needs hidden states, but this target returned none; use a target that "
                "returns them, or verifier 'speculative'"
            )
        return self.head.scores(hidden[1:].float().cpu().numpy())


class Head:
    """A linear head: weight [d] and bias in float32; delta: minimum probability to keep a token."""

    def __init__(self, weight: np.ndarray, bias: float, delta: float = 0.5) -> None:
        self.weight, self.bias, self.delta = weight, float(bias), float(delta)
        self.width = len(weight)

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Log-odds [n] that tokens with hidden states [n, d] are correct."""
        # not rows @ weight: OpenBLAS sets the floating-point flag "invalid" for some widths of
        # finite numbers, and numpy warns
        return np.einsum("nd,d->n", rows, self.weight) + self.bias

    def save(self, path: Path) -> None:
        """Writes the file that `read_head` reads."""
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {
            "weight": self.weight.astype(np.float32),
            "bias": np.array([self.bias], np.float32),
            "delta": np.array([self.delta], np.float64),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)


def logit(probability: float) -> float:
    """log(probability / (1 - probability)); infinite at 0 and 1."""
    if probability in (0.0, 1.0):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))


def read_head(name: str) -> Head:
    """The head in a file or in the folder of a target. Raises ModelError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(located(name)).expanduser()
    path = path / HEAD_FILE if path.is_dir() else path
    try:
        found = load_file(path)
        return Head(found["weight"], found["bias"][0], found["delta"][0])
    except (OSError, SafetensorError, KeyError, IndexError) as cause:
        raise ModelError(
            f"cannot read a judge head in {path} ({cause}); train one for this target with "
            f"{TRAIN}, or use verifier 'speculative'"
        ) from cause
