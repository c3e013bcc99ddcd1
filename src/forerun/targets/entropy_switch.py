"""Switches between a small and a large model by entropy: the large one writes uncertain tokens.

Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference", 2025. The
active model runs at each token. The rolling mean of the entropies, in bits of the raw logits,
decides: above the threshold the large model gives this token and stays active; otherwise the small
model is active from the next token on. Each model has its own KV cache and catches up when needed.

Law: NOT the large model's. The next-token distribution is that of the active model, which is a
function of the text. Drafting keeps it exactly: a node is verified by the model that is active
there. Needs: two models with the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.cost import Cost
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence, Verdict
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
    """The active model and the state of the switch. Immutable: nodes share it."""

    active: int = SMALL
    held: int | None = None  # tokens since the last switch; None before the first one
    window: tuple[float, ...] = ()  # last entropies, bits


@dataclass
class Usage:
    """Counts by model (small, large)."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])  # generated
    catch_up: list[int] = field(default_factory=lambda: [0, 0])  # computed again; without prompts
    switches: int = 0

    @property
    def share(self) -> float:
        """f, the share of tokens from the large model."""
        return self.tokens[LARGE] / max(sum(self.tokens), 1)

    def cost(self, small: float, large: float, *, catch_up: bool = False) -> float:
        """Parameters used per token, relative to the large model; without prompts and drafts."""
        tokens = np.add(self.tokens, self.catch_up if catch_up else 0)
        return float(tokens @ (small, large)) / (large * max(sum(self.tokens), 1))


class EntropySwitch(Target):
    """A target that switches between `target`, the large model, and a small one.

    small: a folder, a hub id, a name, or a loaded runner. threshold: entropy in bits. window:
    number of entropies in the mean (the paper uses 5). hold: least number of tokens between
    switches. clears: empty the window at a switch. The small model starts; it has the dtype and
    device of the large one. Raises ConfigError unless both have the same vocabulary.
    """

    is_stateful = True  # the active model depends on the committed tokens
    gives = frozenset[str]()  # rows of two models are not comparable

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
        self.vocab_size = min(model.vocab_size for model in self.models)  # one may be padded
        self.context = min(model.context for model in self.models)
        self.usage = Usage()
        self._rows: dict[Sequence, SwitchRows] = {}  # of the current step

    @property
    def cost(self) -> Cost:  # type: ignore[override]
        """Cost of the large model, for controllers."""
        return cost_of(self.models[LARGE])

    @property
    def between_steps(self) -> Callable[[], None] | None:  # type: ignore[override]
        """That of the large model."""
        return self.models[LARGE].between_steps

    def mode(self, seq: Sequence) -> Mode:
        """The mode for the next token of a sequence."""
        return seq.scratch.get(self) or Mode()

    def wanted(self, mode: Mode, window: tuple[float, ...]) -> int:
        """The model that these entropies select."""
        return LARGE if sum(window) / len(window) > self.threshold else SMALL

    def is_held(self, mode: Mode) -> bool:
        """Whether fewer than `hold` tokens have passed since the last switch."""
        return mode.held is not None and mode.held + (mode.active == LARGE) < self.hold

    def after(self, mode: Mode, entropy: float) -> Mode:
        """The mode after a token for which the active model had this entropy.

        If the large model becomes active, it also gives this token.
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
        """One pass of the small model over its active sequences, then one of the large model over
        the others and those that switch to it at the root.

        Raises ConfigError for batches that need more than logits.
        """
        if batch.kinds:
            wanted = ", ".join(sorted(batch.kinds))
            raise ConfigError(
                f"target 'entropy_switch' gives only logits, not {wanted}; use a plain target"
            )
        seqs, trees = batch.seqs, batch.trees
        found: dict[Sequence, SwitchRows] = {}
        for which in (SMALL, LARGE):
            turn = [
                (seq, tree)
                for seq, tree in zip(seqs, trees, strict=True)
                if which == (found[seq].writer(-1) if seq in found else self.mode(seq).active)
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
        """Updates modes and usage along the emitted tokens."""
        self.models[SMALL].commit(seqs, trees, verdicts)
        self.models[LARGE].commit(seqs, trees, verdicts)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            rows = self._rows.pop(seq)
            for node in [-1, *verdict.nodes][: len(seq.tokens) - rows.length]:
                active, after, writer = rows.mode(node).active, rows.after(node), rows.writer(node)
                self.usage.tokens[writer] += 1
                self.usage.catch_up[active] += active != writer
                self.usage.switches += after.active != active
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
            for part, size in model.memory_report().items()
        }

    def caught_up(self, seq: Sequence, which: int, depth: int = 0) -> None:
        """Counts the tokens that a model computed to catch up."""
        behind = len(seq.tokens) - 1 - max(self._computed(seq)[which], seq.num_prompt)
        self.usage.catch_up[which] += max(behind, 0) + depth

    def _computed(self, seq: Sequence) -> list[int]:
        """Number of tokens of a sequence that each model has computed."""
        return seq.scratch.setdefault((self, "computed"), [0, 0])


class SwitchRows(Rows):
    """Rows of one sequence, each from the model that is active at the node.

    `logits` come from the first pass, one model for all nodes; rows of the other model are computed
    on demand.
    """

    def __init__(self, switch: EntropySwitch, seq: Sequence, tree: Tree, rows: Rows) -> None:
        super().__init__(rows.logits[:, : switch.vocab_size])
        self.switch, self.seq, self.tree = switch, seq, tree
        self.length = len(seq.tokens)
        self.is_open = True  # the sequence has not grown: the other model can still run
        self._modes = {-1: switch.mode(seq)}
        self._after: dict[int, Mode] = {}
        self._others: dict[int, np.ndarray] = {}  # logits [V] of the other model, by node
        self.first = self._modes[-1].active
        self.used = {self.first}
        switch.caught_up(seq, self.first)

    def split(self, nodes: int) -> Rows:
        """All rows; there are no probe rows."""
        assert nodes == len(self.tree), "probes are not supported"
        return self

    def row(self, node: int) -> np.ndarray:
        """Logits [V] of the active model at a node; of the first pass once the step is over."""
        if not self.is_open and node not in self._after:
            return super().row(node)
        writer = self.writer(node)
        is_known = self.is_open or node in self._others
        return self._logits(writer if is_known else self.first, node)

    def mode(self, node: int) -> Mode:
        """The mode for the token after a node."""
        if node not in self._modes:
            self._modes[node] = self.after(int(self.tree.parents[node]))
        return self._modes[node]

    def after(self, node: int) -> Mode:
        """The mode after the token that follows a node."""
        if node not in self._after:
            mode = self.mode(node)
            bits = entropy_bits(self._logits(mode.active, node))
            self._after[node] = self.switch.after(mode, bits)
        return self._after[node]

    def writer(self, node: int) -> int:
        """The model that gives the token after a node: large if active before or after it."""
        return max(self.mode(node).active, self.after(node).active)

    def add(self, nodes: Many[int], rows: Rows) -> None:
        """Adds rows of the other model for these nodes, in their order."""
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
            below = [node]  # and its descendants, in one pass
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
