"""Stops drafting when a rejection is likely, by a trained head on the draft model's hidden rows.

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", 2024. The
head predicts the acceptance probability of a draft token from the draft model's hidden row at that
token. Drafting ends when 1 - (product of the probabilities) exceeds `threshold`. The newest token
has no row yet, so it is not scored.

Exact with any head: the decision depends on tokens already in the draft, and none is removed. Needs
drafter `draft_model` with grower `chain`, or `cross_vocab`, which scores target tokens by the
hidden row after their last draft token (OmniDraft), and a head trained for the draft.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from forerun.controllers.fixed import MAX_NODES
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Controller, Drafter, Target, name_of
from forerun.core.tree import Proposal
from forerun.errors import ConfigError, ModelError
from forerun.models.paths import located
from forerun.registry import File

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.runner.model_runner import Runner

NAME = "heads/acceptance.safetensors"  # in a subfolder: loaders read all weights in the folder


class HiddenRows(Protocol):
    """Hidden rows of a draft model after paths of target tokens."""

    def hidden_at(self, seq: Sequence, path: tuple[int, ...]) -> Tensor:
        """Hidden row [d] after the text and a path; its rows were computed in this step."""
        ...


class AcceptanceHead(Controller):
    """Drafts least to most tokens. head: a file, or the folder or name of its draft model."""

    def __init__(
        self,
        *,
        head: File | Head = "draft",
        threshold: float = 0.7,
        least: int = 2,
        most: int = 20,
    ) -> None:
        if not (0 <= threshold <= 1 and 1 <= least <= most <= MAX_NODES):
            raise ConfigError(
                "acceptance_head needs 0 <= threshold <= 1 and 1 <= least <= most <= "
                f"{MAX_NODES}, got {threshold=}, {least=}, {most=}; the paper uses thresholds of "
                "0.3 to 0.7 and 2 to 20 tokens"
            )
        self.head = read_head(head) if isinstance(head, str) else head
        self.threshold, self.least, self.most = threshold, least, most
        self.rows: HiddenRows | None = None

    def bind(self, target: Target, drafter: Drafter) -> None:
        self.rows, runner = rows_of(drafter)
        width = getattr(getattr(getattr(runner, "model", None), "config", None), "hidden_size", 0)
        if width and width != self.head.width:
            raise ConfigError(
                f"the head needs hidden size {self.head.width}, the draft model has {width}; train "
                "a head for this draft model: `forerun train acceptance_head`"
            )
        runner.keeps_hidden = True

    def plan(self, seq: Sequence) -> Plan:
        return Plan(self.most, self.most, StopRule(self, seq))


class StopRule:
    """`Plan.stop` of one draft."""

    def __init__(self, controller: AcceptanceHead, seq: Sequence) -> None:
        self.controller, self.seq = controller, seq
        self.path: list[int] = []
        self.probability = 1.0  # probability that all scored tokens are accepted

    def __call__(self, q: Proposal, token: int) -> bool:
        c = self.controller
        if self.path and c.rows is not None:  # the first row belongs to a verified token
            row = c.rows.hidden_at(self.seq, tuple(self.path))
            self.probability *= c.head.probability(row.float().cpu().numpy())
        self.path.append(token)
        return len(self.path) >= c.least and 1 - self.probability > c.threshold


class Head:
    """Residual blocks e + SiLU(W e + b), then two logits; float32.

    weights [n, d, d], biases [n, d]: n is 1 if all blocks share them. out [2, d], bias [2].
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

    def probability(self, row: np.ndarray) -> float:
        """Acceptance probability of the token with hidden row [d]."""
        e = row
        for i in range(self.layers):
            at = i % len(self.weights)
            x = self.weights[at] @ e + self.biases[at]
            e = e + x * (0.5 + 0.5 * np.tanh(0.5 * x))  # SiLU without overflow
        no, yes = self.out @ e + self.bias
        return 0.5 + 0.5 * math.tanh(0.5 * float(yes - no))


def read_head(name: str) -> Head:
    """The head in a file or in the folder of a draft model. Raises ModelError."""
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
            f"cannot read an acceptance head from {path} ({cause}); train one with `forerun train "
            "acceptance_head`, or use controller 'fixed'"
        ) from cause


def rows_of(drafter: Drafter) -> tuple[HiddenRows, Runner]:
    """What gives hidden rows after target tokens, and the draft model. Raises ConfigError."""
    inner: Any = drafter
    while not hasattr(inner, "runner") and hasattr(inner, "drafter"):
        inner = inner.drafter
    if getattr(inner, "gives_hidden", False) and not inner.is_tree:
        return inner, inner.runner
    runner = runner_of(drafter)
    return runner, runner


def runner_of(drafter: Drafter) -> Runner:
    """The draft model of a drafter that draws chains. Raises ConfigError if it has none."""
    inner: Any = drafter
    while not hasattr(inner, "runner") and hasattr(inner, "drafter"):
        inner = inner.drafter
    runner: Any = getattr(inner, "runner", None)
    runner = getattr(getattr(inner, "source", None), "runner", runner)  # padded to the target
    source = getattr(inner, "source", None)
    draws_chains = not getattr(source, "is_tree", False)
    is_one_model = not hasattr(source, "confidence")  # else rows are of several depths
    if source is None or not (hasattr(runner, "hidden_at") and draws_chains and is_one_model):
        name = name_of(inner)
        raise ConfigError(
            f"acceptance_head needs a draft model that drafts chains, got drafter {name!r}; "
            "use drafter 'draft_model' with grower 'chain' and without confidence, 'cross_vocab', "
            "or controller 'budget'"
        )
    return runner
