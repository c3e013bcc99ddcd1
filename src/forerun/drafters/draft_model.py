"""A smaller model drafts, the target verifies: speculative sampling as first published.

Leviathan et al. 2023; Chen et al. 2023. Any grower turns its distribution into a chain or a tree.
Exact with a verifier that supports the grower's labels. Needs a model with the target's vocabulary;
the number of padded rows may differ.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.growing import Path, Source
from forerun.core.mixins import Priced, Shared
from forerun.core.records import Plan, Sequence, SharedBytes, Step
from forerun.core.roles import Target
from forerun.core.sampling import softmax, to_probs
from forerun.core.tree import Proposal, Tree
from forerun.drafters.base import Grown
from forerun.engine.cost.step import DRAFT_MODEL_SECONDS, cost_of
from forerun.models.draft_link import check_size, load_draft
from forerun.models.draft_padding import PaddedRunner
from forerun.registry import GrowerName, ModelName

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner

MAX_CHEAP_UNREAD = 32  # unread tokens after an accepted draft, processed at no extra cost
COLD_FACTOR = 2.5  # time of a step between passes of the target over one in a row: cold caches


class DraftModel(Grown, Shared, Priced):
    """`model` is a folder, a hub id or a loaded runner; `grower` is a registered name.

    Raises ConfigError when the draft's vocabulary is not the target's.
    """

    learns, can_observe_late = False, True

    def __init__(
        self,
        *,
        model: ModelName | ModelRunner,
        grower: GrowerName = "chain",
        dtype: str = "auto",
        device: str = "auto",
        max_seqs: int = 256,
        tokenizer: Tokenizer | None = None,
        target: Target | None = None,
    ) -> None:
        made = registry.make("grower", grower)
        if isinstance(model, str):
            graphs = getattr(target, "graphs", True)  # off for both models or for none
            model = load_draft(model, dtype, device, max_seqs, tokenizer, graphs=graphs)
        self.source: ModelSource
        super().__init__(ModelSource(model, is_tree=grower != "chain"), made)
        self.runner, self._tokenizer = model, tokenizer
        self._read: set[Hashable] = set()  # groups with a prompt in its cache

    def bind(self, target: Target) -> None:
        check_size(self.runner, target, self._tokenizer)
        self.source.fit(target.vocab_size)
        cost_of(self.runner, DRAFT_MODEL_SECONDS)  # here rather than in the first step

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        runner = self.runner
        return runner.check_room(runner.num_held + seqs, min(tokens, runner.context), taken)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        """One step of the draft model per node of a chain; half as many for a tree; at least 1."""
        rows, cost = 1 + self.source.is_tree, cost_of(self.runner)
        return (
            COLD_FACTOR
            * max(nodes, 1)
            / rows
            * (cost.pass_time(rows * num) + cost.overhead(num, 0))
            / num
        )

    def catch_up_seconds(self, seq: Sequence) -> float:
        """A pass over unread tokens, if they are more than MAX_CHEAP_UNREAD."""
        rows = self.source.runner.num_unread(seq)
        if seq.group in self._read:  # the prompt is copied from another slot
            rows = min(rows, seq.num_generated)
        if rows <= MAX_CHEAP_UNREAD:
            return 0.0
        cost = cost_of(self.runner)
        return cost.pass_time(rows) - cost.pass_time(1)

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        """Typical acceptance of model pairs of one family."""
        return 0.7, 0.85

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self._read.update(seq.group for seq in seqs if seq.group is not None)
        capped = [self._cap(*pair) for pair in zip(seqs, plans, strict=True)]
        return super().propose(seqs, capped, dice)

    def observe(self, step: Step) -> None:
        super().observe(step)
        if self.runner.between_steps is not None:
            self.runner.between_steps()

    def finish(self, seq: Sequence) -> None:
        self.source.runner.release(seq)

    def forget(self, group: Hashable) -> None:
        self._read.discard(group)

    def memory_report(self) -> dict[str, int]:
        held = self.runner.memory_report()
        return {
            f"draft {part}": SharedBytes(n, (id(self.runner), part)) for part, n in held.items()
        }

    def _cap(self, seq: Sequence, plan: Plan) -> Plan:
        """The plan within the draft model's context, which may be shorter than the target's."""
        return plan.within(self.runner.context - len(seq.tokens))


class ModelSource(Source):
    """q is the draft model's distribution with the request's temperature and truncation.

    A greedy request gives a unit mass, so a tree would have one child per node. Trees then use
    temperature 1.
    """

    def __init__(self, runner: ModelRunner, is_tree: bool) -> None:
        self.inner, self.is_tree = runner, is_tree
        self.runner: ModelRunner | PaddedRunner = runner
        self.vocab_size = runner.vocab_size

    def fit(self, vocab_size: int) -> None:
        """Gives q the ids of the target; either of the two may have padding."""
        is_small = self.inner.vocab_size < vocab_size
        if vocab_size != self.vocab_size:
            self.runner = PaddedRunner(self.inner, vocab_size) if is_small else self.inner
        self.vocab_size = vocab_size

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        logits = self.runner.rows_at(requests)
        narrow = (logits.float() if logits.element_size() < 4 else logits).cpu().numpy()
        laws = self._laws([seq for seq, _ in requests], narrow[:, : self.vocab_size])
        probs = laws.astype(np.float64)  # p / q must use exactly the q drawn from
        probs /= probs.sum(axis=1, keepdims=True)
        ids = np.arange(probs.shape[1], dtype=np.int32)
        full = np.all(probs, axis=1).tolist()
        return [
            Proposal(ids, row) if is_full else Proposal.of(row)
            for row, is_full in zip(probs, full, strict=True)
        ]

    def _laws(self, seqs: list[Sequence], logits: np.ndarray) -> np.ndarray:
        """Distribution of each row; [n, V] -> [n, V]. Vectorised if no request truncates."""
        highest = logits.max(axis=1, keepdims=True)
        if not np.isfinite(highest).all() or not all(seq.sampling.is_softmax for seq in seqs):
            return np.stack([self._law(*pair) for pair in zip(seqs, logits, strict=True)])
        inverse = [1.0 / seq.sampling.divisor for seq in seqs]
        probs = logits - highest
        probs *= np.array(inverse, np.float32)[:, None]
        np.exp(probs, out=probs)
        probs /= np.add.reduce(probs, axis=1, keepdims=True)
        return probs

    def _law(self, seq: Sequence, logits: np.ndarray) -> np.ndarray:
        if seq.sampling.is_greedy and self.is_tree:
            return softmax(logits)
        return to_probs(logits, seq.sampling)
