"""Two models take turns: the small one writes while it is sure, the large one where it is not.

Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference", 2025. The
rolling mean of the active model's entropies decides, in bits and from raw logits: above the
threshold the large model goes on, else the small one, after at least `hold` tokens of one. Each
keeps its own cache and catches up when its turn comes, as state follows tokens.

Law: NOT the large model's. It is that of a third model, whose next-token law is the active model's;
which one is active follows from the text. That law is kept exactly by drafting: a node below a
switch is judged by the model that would have spoken there. Needs two models of one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.engine.cost import Cost, cost_of
from forerun.engine.runner import Runner
from forerun.errors import ConfigError
from forerun.records import Rows, Sequence, Verdict
from forerun.roles import Target
from forerun.tree import Tree

if TYPE_CHECKING:
    from forerun.engine.api import Model

SMALL, LARGE = 0, 1


@dataclass(frozen=True)
class Mode:
    """Which model gives the next token, and what that hangs on; a value: nodes share parents'."""

    active: int = SMALL
    held: int = 0  # tokens since the last switch, or since the start
    window: tuple[float, ...] = ()  # the last entropies, bits


@dataclass
class Usage:
    """What was spent, by model (small, large)."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])  # generated
    catch_up: list[int] = field(
        default_factory=lambda: [0, 0]
    )  # computed after a switch; no prompt
    switches: int = 0

    @property
    def share(self) -> float:
        """f, the share of tokens that the large model gave."""
        return self.tokens[LARGE] / max(sum(self.tokens), 1)

    def cost(self, small: float, large: float, *, catch_up: bool = False) -> float:
        """Parameters used per token over those of the large model; prompts and drafts left out."""
        tokens = np.add(self.tokens, self.catch_up if catch_up else 0)
        return float(tokens @ (small, large)) / (large * max(sum(self.tokens), 1))


class EntropySwitch(Target):
    """`threshold` in bits, swept per pair; `window` entropies; `hold`, the least between switches.

    clears: a switch empties the window. The start is with the small model.
    """

    def __init__(
        self,
        small: Runner,
        large: Runner,
        *,
        threshold: float,
        window: int = 5,
        hold: int = 10,
        clears: bool = False,
    ) -> None:
        if window < 1 or hold < 1 or np.isnan(threshold):
            raise ConfigError(
                "entropy_switch needs window and hold of at least 1 and a threshold in bits, got "
                f"{window=}, {hold=}, {threshold=}; try window=5, hold=10, threshold=0.5"
            )
        self.models = small, large
        self.threshold, self.window, self.hold, self.clears = threshold, window, hold, clears
        self.vocab_size = min(model.vocab_size for model in self.models)  # rows may be padded
        self.context = min(model.context for model in self.models)
        self.usage = Usage()
        self._modes: WeakKeyDictionary[Sequence, Mode] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()  # tokens computed
        self._rows: dict[Sequence, SwitchRows] = {}  # of the step under way

    @property
    def _cost(self) -> Cost:
        """Seconds of a pass, for controllers: those of the large model."""
        return cost_of(self.models[LARGE])

    def mode(self, seq: Sequence) -> Mode:
        """What holds for the next token of a sequence."""
        return self._modes.get(seq) or Mode()

    def after(self, mode: Mode, entropy: float) -> Mode:
        """The mode once the active model has given a token, from a law of that entropy."""
        held, window = mode.held + 1, (*mode.window, entropy)[-self.window :]
        wanted = LARGE if sum(window) / len(window) > self.threshold else SMALL
        if wanted == mode.active or held < self.hold:
            return Mode(mode.active, held, window)
        return Mode(wanted, 0, () if self.clears else window)

    def forward(self, seqs: Many[Sequence], trees: Many[Tree], needs: frozenset[str]) -> list[Rows]:
        """One pass of each model for the sequences whose turn it has.

        Raises ConfigError where hidden rows are wanted: those of two models do not compare.
        """
        if "hidden" in needs:
            raise ConfigError(
                "entropy_switch has rows of two models, so hidden rows mean nothing; use a drafter "
                "or verifier that needs none, such as 'stand' and 'speculative'"
            )
        turns: tuple[list[int], list[int]] = ([], [])
        for i, seq in enumerate(seqs):
            turns[self.mode(seq).active].append(i)
        for which, turn in enumerate(turns):
            if not turn:
                continue
            own, drafts = [seqs[i] for i in turn], [trees[i] for i in turn]
            found = self.models[which].forward(own, drafts, needs)
            for seq, tree, rows in zip(own, drafts, found, strict=True):
                self._rows[seq] = SwitchRows(self, seq, tree, rows)
                self.caught_up(seq, which)
        return [self._rows[seq] for seq in seqs]

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Follows the entropies along what was emitted."""
        self.models[SMALL].commit(seqs, trees, verdicts)
        self.models[LARGE].commit(seqs, trees, verdicts)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            rows = self._rows.pop(seq)
            for node in [-1, *verdict.nodes][: len(seq.tokens) - rows.length]:
                before, after = rows.modes[node], rows.after(node)
                self.usage.tokens[before.active] += 1
                self.usage.switches += after.active != before.active
                self._modes[seq] = after
            rows.is_open = False
            for which in rows.used:
                self._seen[seq][which] = len(seq.tokens) - 1

    def release(self, seq: Sequence) -> None:
        for model in self.models:
            model.release(seq)
        for state in (self._modes, self._seen, self._rows):
            state.pop(seq, None)

    def memory_report(self) -> dict[str, int]:
        """Bytes of both models."""
        return {
            f"{name} {part}": size
            for name, model in zip(("small", "large"), self.models, strict=True)
            for part, size in model.memory_report().items()  # type: ignore[attr-defined]
        }

    def caught_up(self, seq: Sequence, which: int, depth: int = 0) -> None:
        """Counts what a model had to compute before the row that it was asked for."""
        seen = self._seen.setdefault(seq, [0, 0])
        behind = len(seq.tokens) - 1 - max(seen[which], seq.num_prompt)
        self.usage.catch_up[which] += max(behind, 0) + depth


class SwitchRows(Rows):
    """Rows of one sequence, each by the model that is active there; others are computed if asked.

    `logits` are those of the pass, by one model for all nodes.
    """

    def __init__(self, switch: EntropySwitch, seq: Sequence, tree: Tree, rows: Rows) -> None:
        super().__init__(rows.logits[:, : switch.vocab_size])
        self.switch, self.seq, self.tree = switch, seq, tree
        self.length = len(seq.tokens)
        self.modes = {-1: switch.mode(seq)}
        self.used = {self.modes[-1].active}
        self.is_open = True  # the sequence has not grown, so the other model can still be asked
        self._others: dict[int, np.ndarray] = {}
        self._after: dict[int, Mode] = {}

    def row(self, node: int) -> np.ndarray:
        if self.is_open:
            self._mode(node)
        turn = self.modes.get(node, self.modes[-1]).active
        if turn == self.modes[-1].active:
            return super().row(node)
        if node not in self._others:
            self._ask(node)
        return self._others[node]

    def after(self, node: int) -> Mode:
        """The mode after the token that the law at a node gave."""
        if node not in self._after:
            bits = entropy_bits(self.row(node))
            self._after[node] = self.switch.after(self.modes[node], bits)
        return self._after[node]

    def _mode(self, node: int) -> Mode:
        if node not in self.modes:
            parent = int(self.tree.parents[node])
            self._mode(parent)
            self.modes[node] = self.after(parent)
        return self.modes[node]

    def _ask(self, node: int) -> None:
        """All rows from a node down, by the model that is active there: one pass."""
        which = self.modes[node].active
        below = [node]
        for child in range(node + 1, len(self.tree)):
            if int(self.tree.parents[child]) in below:
                below.append(child)
        paths = [tuple(self.tree.path(n)) for n in below]
        model = self.switch.models[which]
        found = model.rows_at([(self.seq, path) for path in paths])[:, : self.switch.vocab_size]
        other = Rows(found)
        for i, n in enumerate(below):
            self._others[n] = other.row(i - 1)
        if which not in self.used:
            self.switch.caught_up(self.seq, which, depth=len(paths[0]))
            self.used.add(which)


def entropy_bits(logits: np.ndarray) -> float:
    """Entropy in bits of softmax(logits [V])."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    held = weights > 0
    nats = np.log(total) - float(weights[held] @ shifted[held]) / total
    return max(float(nats / np.log(2)), 0.0)


def load(
    large: Any = "reasoner",
    small: Any = "draft",
    *,
    threshold: float,
    dtype: str = "auto",
    device: str = "auto",
    max_seqs: int = 256,
    context: int | None = None,
    **options: Any,
) -> Model:
    """A Model that generates by both: models as `forerun.load` takes them, and its options.

    Raises ConfigError unless they share a vocabulary.
    """
    from forerun.assets import embedded
    from forerun.drafters.draft_model import check_vocabulary
    from forerun.engine.api import Model
    from forerun.models.load import load_target
    from forerun.models.tokenizer import Tokenizer

    paths = [embedded(m) if isinstance(m, str) else m for m in (small, large)]
    tokenizers = [Tokenizer.load(path) for path in paths]
    check_vocabulary(tokenizers[LARGE], tokenizers[SMALL])
    how: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_seqs": max_seqs,
        "context": context,
    }
    models = [load_target(path, **how) for path in paths]
    switch = EntropySwitch(*models, threshold=threshold, **options)  # type: ignore[arg-type]
    return Model(switch, tokenizers[LARGE], f"{large} or {small}", device)
