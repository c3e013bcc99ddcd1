"""Two models take turns: the small one writes while it is sure, the large one where it is not.

Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference", 2025. At each
token the active model is asked; the rolling mean of such entropies decides, in bits and from raw
logits. Above the threshold the large model gives this very token and goes on; else the small one
goes on from the next token. Each keeps its own cache and catches up as state follows tokens.

Law: NOT the large model's. It is that of a third model: its next-token law is that of the active
model, which follows from the text. That law is kept exactly by drafting: a node below a
switch is judged by the model that would have spoken there. Needs two models of one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Cost, Rows, Sequence, Verdict
from forerun.core.roles import Target
from forerun.core.tree import Tree
from forerun.engine.cost.step import cost_of
from forerun.errors import ConfigError
from forerun.models.draft_link import shared_draft
from forerun.registry import ModelName
from forerun.runner.model_runner import Runner

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

SMALL, LARGE = 0, 1


@dataclass(frozen=True)
class Mode:
    """Which model is asked for the next token, and what that hangs on; a value: nodes share it."""

    active: int = SMALL
    held: int | None = None  # tokens that it gave since the last switch; None before the first
    window: tuple[float, ...] = ()  # the last entropies, bits


@dataclass
class Usage:
    """What was spent, by model (small, large)."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])  # generated
    catch_up: list[int] = field(default_factory=lambda: [0, 0])  # computed in addition; no prompt
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
    """`target` is the large model; `small` a folder, a hub id, a name, or a loaded runner.

    threshold: bits, swept per pair. window: entropies in the mean (the paper: 5). hold: the least
    number of tokens between switches; the paper's is not known to us. clears: a switch empties the
    window. The small model is asked first, and nothing holds it; it has the dtype and device of the
    large one. Raises ConfigError unless both share a vocabulary.
    """

    is_stateful = True  # the active model depends on the tokens that were committed
    gives = frozenset[str]()  # rows of two models do not compare

    def __init__(
        self,
        target: Runner,
        *,
        small: ModelName | Runner,
        threshold: float,
        window: int = 1,
        hold: int = 0,
        clears: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if window < 1 or hold < 0 or np.isnan(threshold):
            raise ConfigError(
                "entropy_switch needs window >= 1, hold >= 0 and a threshold in bits, got "
                f"{window=}, {hold=}, {threshold=}; try window=1, hold=0, threshold=1.0"
            )
        if isinstance(small, str):
            small = shared_draft(target, small, tokenizer)
        self.models = small, target
        self.threshold, self.window, self.hold, self.clears = threshold, window, hold, clears
        self.vocab_size = min(model.vocab_size for model in self.models)  # rows may be padded
        self.context = min(model.context for model in self.models)
        self.usage = Usage()
        self._rows: dict[Sequence, SwitchRows] = {}  # of the step under way

    @property
    def cost(self) -> Cost:  # type: ignore[override]
        """Seconds of a pass, for controllers: those of the large model."""
        return cost_of(self.models[LARGE])

    def mode(self, seq: Sequence) -> Mode:
        """What holds for the next token of a sequence."""
        return seq.scratch.get(self) or Mode()

    def wanted(self, mode: Mode, window: tuple[float, ...]) -> int:
        """The model that these entropies ask for."""
        return LARGE if sum(window) / len(window) > self.threshold else SMALL

    def is_held(self, mode: Mode) -> bool:
        """Whether it is too early for a switch: up before the next token, or down after it."""
        return mode.held is not None and mode.held + (mode.active == LARGE) < self.hold

    def after(self, mode: Mode, entropy: float) -> Mode:
        """The mode once a token is there, where the law of the active model had that entropy.

        The token is the active model's, but the large one's if that is active afterwards.
        """
        window = (*mode.window, entropy)[-self.window :]
        wanted = self.wanted(mode, window)
        if wanted != mode.active and not self.is_held(mode):
            return Mode(wanted, int(wanted == LARGE), () if self.clears else window)
        return Mode(mode.active, None if mode.held is None else mode.held + 1, window)

    @property
    def num_held(self) -> int:
        return max(model.num_held for model in self.models)

    def check_room(self, seqs: int, tokens: int) -> int:
        small = self.models[SMALL].check_room(seqs, tokens)
        return small + self.models[LARGE].check_room(seqs, tokens, small)

    def reused(self, seq: Sequence) -> int:
        return min(model.reused(seq) for model in self.models)

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        """One pass of the small model for the sequences it is active for, one of the large for the
        others and for those that switch to the large model at the root.

        Raises ConfigError for batches that ask for more than logits.
        """
        if batch.kinds:
            wanted = ", ".join(sorted(batch.kinds))
            raise ConfigError(
                f"target 'entropy_switch' gives logits only, not {wanted}: rows of two models do "
                "not compare; use a plain target"
            )
        seqs, trees = batch.seqs, batch.trees
        found: dict[Sequence, SwitchRows] = {}
        for which in (SMALL, LARGE):
            turn = [
                (seq, tree)
                for seq, tree in zip(seqs, trees, strict=True)
                if which == (found[seq].speaker(-1) if seq in found else self.mode(seq).active)
            ]
            if not turn:
                continue
            own, drafts = [seq for seq, _ in turn], [tree for _, tree in turn]
            for (seq, tree), rows in zip(
                turn, self.models[which].forward(ForwardBatch(own, drafts)), strict=True
            ):
                if seq in found:
                    found[seq].add(range(-1, len(tree)), rows)
                else:
                    found[seq] = SwitchRows(self, seq, tree, rows)
        self._rows |= found
        return [found[seq] for seq in seqs]

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Follows the entropies along what was emitted."""
        self.models[SMALL].commit(seqs, trees, verdicts)
        self.models[LARGE].commit(seqs, trees, verdicts)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            rows = self._rows.pop(seq)
            for node in [-1, *verdict.nodes][: len(seq.tokens) - rows.length]:
                asked, after, spoke = rows.mode(node).active, rows.after(node), rows.speaker(node)
                self.usage.tokens[spoke] += 1
                self.usage.catch_up[asked] += asked != spoke
                self.usage.switches += after.active != asked
                seq.scratch[self] = after
            rows.is_open = False
            for which in rows.used:
                self._computed(seq)[which] = len(seq.tokens) - 1

    def release(self, seq: Sequence) -> None:
        for model in self.models:
            model.release(seq)
        self._rows.pop(seq, None)
        for key in (self, (self, "computed")):
            seq.scratch.pop(key, None)

    def memory_report(self) -> dict[str, int]:
        """Bytes of both models."""
        return {
            f"{name} {part}": size
            for name, model in zip(("small", "large"), self.models, strict=True)
            for part, size in model.memory_report().items()  # type: ignore[attr-defined]
        }

    def caught_up(self, seq: Sequence, which: int, depth: int = 0) -> None:
        """Counts what a model had to compute before the row that it was asked for."""
        behind = len(seq.tokens) - 1 - max(self._computed(seq)[which], seq.num_prompt)
        self.usage.catch_up[which] += max(behind, 0) + depth

    def _computed(self, seq: Sequence) -> list[int]:
        """Tokens of a sequence that each model has computed."""
        return seq.scratch.setdefault((self, "computed"), [0, 0])


class SwitchRows(Rows):
    """Rows of one sequence, each by the model that is active there.

    `logits` are those of the first pass, by one model for all nodes; what the other has to say is
    computed where it is asked.
    """

    def __init__(self, switch: EntropySwitch, seq: Sequence, tree: Tree, rows: Rows) -> None:
        super().__init__(rows.logits[:, : switch.vocab_size])
        self.switch, self.seq, self.tree = switch, seq, tree
        self.length = len(seq.tokens)
        self.is_open = True  # the sequence has not grown, so the other model can still be asked
        self._modes = {-1: switch.mode(seq)}
        self._after: dict[int, Mode] = {}
        self._others: dict[int, np.ndarray] = {}  # logits [V] of the other model, by node
        self.first = self._modes[-1].active
        self.used = {self.first}
        switch.caught_up(seq, self.first)

    def split(self, nodes: int) -> Rows:
        """All rows: nothing is behind them."""
        assert nodes == len(self.tree), "the engine has let something that needs probes through"
        return self

    def row(self, node: int) -> np.ndarray:
        """Logits [V] of the model that speaks at a node, or of the first pass if none was asked."""
        if not self.is_open and node not in self._after:
            return super().row(node)
        spoke = self.speaker(node)
        is_known = self.is_open or node in self._others
        return self._logits(spoke if is_known else self.first, node)

    def mode(self, node: int) -> Mode:
        """The mode in which a token comes after a node."""
        if node not in self._modes:
            self._modes[node] = self.after(int(self.tree.parents[node]))
        return self._modes[node]

    def after(self, node: int) -> Mode:
        """The mode once a token has come after a node."""
        if node not in self._after:
            mode = self.mode(node)
            bits = entropy_bits(self._logits(mode.active, node))
            self._after[node] = self.switch.after(mode, bits)
        return self._after[node]

    def speaker(self, node: int) -> int:
        """Who gives the token after a node: the large model if it is its turn before or after."""
        return max(self.mode(node).active, self.after(node).active)

    def add(self, nodes: Many[int], rows: Rows) -> None:
        """What the other model says at these nodes, in their order."""
        for i, node in enumerate(nodes):
            self._others[node] = rows.row(i - 1)[: self.switch.vocab_size]
        other = LARGE + SMALL - self.first
        if other not in self.used:
            self.used.add(other)
            self.switch.caught_up(self.seq, other, depth=len(self.tree.path(nodes[0])))

    def _logits(self, which: int, node: int) -> np.ndarray:
        if which == self.first:
            return super().row(node)
        if node not in self._others:
            below = [node]  # and all under it: one pass
            for child in range(node + 1, len(self.tree)):
                if int(self.tree.parents[child]) in below:
                    below.append(child)
            paths = [tuple(self.tree.path(n)) for n in below]
            model = self.switch.models[which]
            self.add(below, Rows(model.rows_at([(self.seq, path) for path in paths])))
        return self._others[node]


def entropy_bits(logits: np.ndarray) -> float:
    """Entropy in bits of softmax(logits [V])."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    held = weights > 0
    nats = np.log(total) - float(weights[held] @ shifted[held]) / total
    return max(float(nats / np.log(2)), 0.0)
