"""Stops drafting once a rejection has become likely, by a head on the draft model's hidden rows.

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", 2024. The
head tells how likely a drafted token is to be accepted, from the draft's hidden row at that token;
drafting ends when 1 - (product of these) exceeds `threshold`. The row of a token is there once the
draft has consumed it, so the newest token is not scored yet.

Law: untouched by any head. Whether a draft ends is decided from tokens that are already in it, and
none is taken out. Needs drafter `draft_model` with grower `chain`, and a trained head.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.controllers.fixed import MOST
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Controller, Drafter, Target, name_of
from forerun.core.tree import Proposal
from forerun.errors import ConfigError, ModelError
from forerun.models.paths import located
from forerun.registry import File

if TYPE_CHECKING:
    from forerun.runner.model_runner import Runner

NAME = "heads/acceptance.safetensors"  # below the model's folder: loaders read all weights in it


class AcceptanceHead(Controller):
    """`head`: a file, or the folder or name of the draft it lies with. least <= tokens <= most."""

    def __init__(
        self,
        *,
        head: File | Head = "draft",
        threshold: float = 0.7,
        least: int = 2,
        most: int = 20,
    ) -> None:
        if not (0 <= threshold <= 1 and 1 <= least <= most <= MOST):
            raise ConfigError(
                f"acceptance_head needs 0 <= threshold <= 1 and 1 <= least <= most <= {MOST}, got "
                f"{threshold=}, {least=}, {most=}; the paper has threshold .3 to .7, 2 to 20 tokens"
            )
        self.head = read_head(head) if isinstance(head, str) else head
        self.threshold, self.least, self.most = threshold, least, most
        self.runner: Runner | None = None

    def bind(self, target: Target, drafter: Drafter) -> None:
        runner = runner_of(drafter)
        width = getattr(getattr(getattr(runner, "model", None), "config", None), "hidden_size", 0)
        if width and width != self.head.width:
            raise ConfigError(
                f"the head reads hidden rows of {self.head.width} numbers, the draft has {width}; "
                "train one for this draft: `forerun train acceptance_head`"
            )
        runner.keeps_hidden = True
        self.runner = runner

    def plan(self, seq: Sequence) -> Plan:
        return Plan(self.most, self.most, Watch(self, seq))


class Watch:
    """`Plan.stop` of one draft: asked after a token is kept."""

    def __init__(self, controller: AcceptanceHead, seq: Sequence) -> None:
        self.controller, self.seq = controller, seq
        self.path: list[int] = []
        self.chance = 1.0  # that all scored tokens are accepted

    def __call__(self, q: Proposal, token: int) -> bool:
        c = self.controller
        if self.path and c.runner is not None:  # the first row is that of a verified token
            row = c.runner.hidden_at(self.seq, tuple(self.path))
            self.chance *= c.head.chance(row.float().cpu().numpy())
        self.path.append(token)
        return len(self.path) >= c.least and 1 - self.chance > c.threshold


class Head:
    """Residual blocks e + SiLU(W e + b), then two logits; float32.

    weights [n, d, d], biases [n, d]: n is 1 where all blocks share theirs. out [2, d], bias [2].
    """

    def __init__(
        self,
        weights: np.ndarray,
        biases: np.ndarray,
        out: np.ndarray,
        bias: np.ndarray,
        layers: int | None = None,
    ) -> None:
        self.weights, self.biases, self.out, self.bias = weights, biases, out, bias
        self.layers = len(weights) if layers is None else layers
        self.width = out.shape[1]

    def chance(self, row: np.ndarray) -> float:
        """Probability that the token of a hidden row [d] is accepted."""
        e = row
        for i in range(self.layers):
            at = i % len(self.weights)
            x = self.weights[at] @ e + self.biases[at]
            e = e + x * (0.5 + 0.5 * np.tanh(0.5 * x))  # SiLU that cannot overflow
        no, yes = self.out @ e + self.bias
        return 0.5 + 0.5 * math.tanh(0.5 * float(yes - no))


def read_head(name: str) -> Head:
    """The head in a file, or beside a draft. Raises ModelError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(located(name)).expanduser()
    path = path / NAME if path.is_dir() else path
    try:
        found = load_file(path)
        return Head(
            found["weights"], found["biases"], found["out"], found["bias"], int(found["layers"])
        )
    except (OSError, SafetensorError, KeyError) as cause:
        raise ModelError(
            f"expected an acceptance head in {path}, found none that can be read ({cause}); train "
            "one with `forerun train acceptance_head`, or use controller 'fixed'"
        ) from cause


def runner_of(drafter: Drafter) -> Runner:
    """The model that a drafter draws chains from. Raises ConfigError if there is none."""
    inner: Any = drafter
    while not hasattr(inner, "runner") and hasattr(inner, "drafter"):
        inner = inner.drafter
    runner: Any = getattr(inner, "runner", None)
    if not hasattr(runner, "hidden_at") or getattr(inner.source, "is_tree", False):
        name = name_of(inner)
        raise ConfigError(
            f"acceptance_head reads hidden rows of a draft model's chain, got drafter {name!r}; "
            "use drafter 'draft_model' with grower 'chain', or controller 'budget'"
        )
    return runner
