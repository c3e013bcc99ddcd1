"""What drafters with a draft model share: its distributions, its costs, its KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.growing import Path, Source
from forerun.core.mixins import Priced, Shared
from forerun.core.records import Plan, Sequence, SharedBytes
from forerun.core.sampling import softmax, to_probs
from forerun.core.tree import Proposal
from forerun.engine.cost.step import DRAFT_MODEL_SECONDS, cost_of
from forerun.models.draft_padding import PaddedRunner

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.runner.model_runner import ModelRunner

MAX_CHEAP_UNREAD = 32  # unread tokens after an accepted draft, processed at no extra cost
# A step between passes of the target finds cold caches, so it takes longer than one in a row.
COLD_FACTOR = 2.5  # times as long, if the draft model fits the caches
COLD_SECONDS = 3.5e-4  # longer at most: weights of larger models are read from memory anyway


class ModelDrafter(Shared, Priced):
    """Costs and cache of a drafter that runs a draft model, its attribute `runner`.

    is_tree: whether a level of a draft has several nodes. passes: passes per drafted token of each
    model, if there are several.
    """

    learns = False
    is_tree = False

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.passes: dict[ModelRunner, float] = {}
        self._read: set[Hashable] = set()  # groups with a prompt in its cache

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        need = 0
        for runner in self._passes():
            most = min(tokens, runner.context)
            need += runner.check_room(runner.num_held + seqs, most, taken + need)
        return need

    def begin_costs(self) -> None:
        """Measures costs of the draft model for a limited time, here rather than in a step."""
        for runner in self._passes():
            cost_of(runner, DRAFT_MODEL_SECONDS)

    def measure_costs(self) -> None:
        """Goes on measuring; called after every step."""
        for runner in self._passes():
            if runner.between_steps is not None:
                runner.between_steps()

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        """One step of the draft model per node of a chain; half as many for a tree; at least 1."""
        return sum(
            num_passes * self._seconds(runner, nodes, num)
            for runner, num_passes in self._passes().items()
        )

    def _passes(self) -> dict[ModelRunner, float]:
        return self.passes or {self.runner: 1.0}

    def _seconds(self, runner: ModelRunner, nodes: int, num: int) -> float:
        rows, cost = 1 + self.is_tree, cost_of(runner)
        steps = max(nodes, 1) / rows
        warm = cost.pass_time(rows * num) + cost.overhead(num, 0)
        return steps * min(COLD_FACTOR * warm, warm + COLD_SECONDS) / num

    def catch_up(self, seq: Sequence, unread: int) -> float:
        """Seconds of a pass over unread tokens, if they are more than MAX_CHEAP_UNREAD."""
        if seq.group in self._read:  # the prompt is copied from another slot
            unread = min(unread, seq.num_generated)
        if unread <= MAX_CHEAP_UNREAD:
            return 0.0
        cost = cost_of(self.runner)
        return cost.pass_time(unread) - cost.pass_time(1)

    def note_read(self, seqs: Many[Sequence]) -> None:
        """Records that the prompts of these sequences are in the draft model's cache."""
        self._read.update(seq.group for seq in seqs if seq.group is not None)

    def forget(self, group: Hashable) -> None:
        self._read.discard(group)

    def memory_report(self) -> dict[str, int]:
        found = _held(self.runner)
        for runner in self.passes:
            if runner is not self.runner:
                cells = _held(runner)["draft kv cache"]  # weights are shared
                found[f"draft kv cache, {runner.num_layers} layers"] = cells
        return found


def _held(runner: ModelRunner) -> dict[str, int]:
    """Bytes of a draft model by part."""
    held = runner.memory_report()
    return {f"draft {part}": SharedBytes(n, (id(runner), part)) for part, n in held.items()}


class ModelSource(Source):
    """q is the draft model's distribution with the request's temperature and truncation.

    A reduced head gives q over its own tokens. A greedy request gives a unit mass, so a tree would
    have one child per node. Trees then use temperature 1.
    """

    def __init__(self, runner: ModelRunner, is_tree: bool) -> None:
        self.inner, self.is_tree = runner, is_tree
        self.runner: ModelRunner | PaddedRunner = runner
        self.vocab_size = runner.vocab_size
        self._columns, self._ids = self._head()

    def fit(self, vocab_size: int) -> None:
        """Gives q the ids of the target; either of the two may have padding."""
        is_small = self.inner.vocab_size < vocab_size
        if vocab_size != self.vocab_size:
            self.runner = PaddedRunner(self.inner, vocab_size) if is_small else self.inner
        self.vocab_size = vocab_size
        self._columns, self._ids = self._head()

    def _head(self) -> tuple[slice | np.ndarray, np.ndarray]:
        """The columns of the logits that are used, and the id of each, int32."""
        head = getattr(self.inner, "head_map", None)
        if head is None:
            return slice(self.vocab_size), np.arange(self.vocab_size, dtype=np.int32)
        used = np.flatnonzero(head.forward < self.vocab_size)
        is_whole = len(used) == len(head.forward)
        return slice(len(used)) if is_whole else used, head.forward[used].astype(np.int32)

    def logits(self, requests: Many[tuple[Sequence, Path]]) -> np.ndarray:
        """Logits [n, used columns] after each path."""
        return on_host(self.runner.rows_at(requests))[:, self._columns]

    def num_unread(self, seq: Sequence) -> int:
        """Tokens of a text that the draft model has not read."""
        return self.runner.num_unread(seq)

    def release(self, seq: Sequence) -> None:
        """Drops the KV cells of a sequence."""
        self.runner.release(seq)

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        narrow = self.logits(requests)
        probs = probs_of([seq for seq, _ in requests], narrow, is_tree=self.is_tree)
        full = np.all(probs, axis=1).tolist()
        return [
            Proposal(self._ids, row) if is_full else self._sparse(row)
            for row, is_full in zip(probs, full, strict=True)
        ]

    def _sparse(self, row: np.ndarray) -> Proposal:
        kept = np.flatnonzero(row)
        return Proposal(self._ids[kept], row[kept])


def on_host(logits: Tensor) -> np.ndarray:
    """Logits as NumPy; half precision becomes float32."""
    return (logits.float() if logits.element_size() < 4 else logits).cpu().numpy()


def probs_of(seqs: list[Sequence], logits: np.ndarray, *, is_tree: bool = False) -> np.ndarray:
    """Distribution of each row under its request, float64; [n, V] -> [n, V].

    Vectorised if no request truncates. p / q must use exactly the q that is drawn from.
    """
    laws = _laws(seqs, logits, is_tree).astype(np.float64)
    return laws / laws.sum(axis=1, keepdims=True)


def _laws(seqs: list[Sequence], logits: np.ndarray, is_tree: bool) -> np.ndarray:
    highest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all() or not all(seq.sampling.is_softmax for seq in seqs):
        return np.stack([_law(*pair, is_tree) for pair in zip(seqs, logits, strict=True)])
    inverse = [1.0 / seq.sampling.divisor for seq in seqs]
    probs = logits - highest
    probs *= np.array(inverse, np.float32)[:, None]
    np.exp(probs, out=probs)
    probs /= np.add.reduce(probs, axis=1, keepdims=True)
    return probs


def _law(seq: Sequence, logits: np.ndarray, is_tree: bool) -> np.ndarray:
    if seq.sampling.is_greedy and is_tree:
        return softmax(logits)
    return to_probs(logits, seq.sampling)


def within_context(runner: ModelRunner, seq: Sequence, plan: Plan) -> Plan:
    """The plan within the draft model's context, which may be shorter than the target's."""
    return plan.within(runner.context - len(seq.tokens))
