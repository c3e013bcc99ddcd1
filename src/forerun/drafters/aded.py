"""ADED (Adaptix): a tri-gram matrix from a corpus, adapted online, searched by Monte-Carlo trees.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", 2024. The matrix scores
next tokens after a pair of tokens. Every step raises the scores of the latest tri-grams of the
text. A tree search balances probable and rarely visited paths; the most visited paths are drafted.
No training, no second model. Sequences of a tenant share the learned scores.

Exact: POINT nodes, which depend on earlier steps and on draws of the search only, not on later
draws of the target. Needs nothing; a corpus needs the tokenizer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Many
from pathlib import Path as FilePath
from typing import Any

from forerun import registry
from forerun.core.dice import Dice, SeededDice
from forerun.core.growing import Grower, Path, Source
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Target
from forerun.core.scopes import kept_key
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.core.tree_search import CONSTANT
from forerun.drafters.base import PerSequence, grow
from forerun.errors import ConfigError
from forerun.growers.monte_carlo import MonteCarlo
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.counts import corpus as corpora
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.ngrams.tables.trigram import mcts, table
from forerun.ngrams.tables.trigram.table import TrigramMatrix
from forerun.registry import Corpus, GrowerName


class Aded(PerSequence, Persistent):
    """A tri-gram matrix x Monte-Carlo tree search.

    corpus: text files in which tri-grams are counted. matrix: a file of such counts
    (`save_corpus`). Without both it starts empty. entries: successors kept per pair. window,
    increment, cap: each step adds `increment`, up to `cap`, to every tri-gram of the last `window`
    tokens; 0 turns it off. renormalise: rows sum to 1 when read. budget_mb: memory of learned
    scores of all tenants. corpus_mb: memory of the corpus. grower: "monte_carlo", which has the
    options from length to drop, or another name.
    """

    can_observe_late = True

    def __init__(
        self,
        *,
        corpus: tuple[Corpus, ...] | None = None,
        matrix: Corpus | None = None,
        entries: int = 12,
        window: int = 16,
        increment: float = 0.04,
        cap: float = 3.0,
        renormalise: bool = False,
        grower: GrowerName = "monte_carlo",
        length: int = 4,
        iterations: int = 150,
        top: int = 24,
        c1: float = 32.0,
        c2: float = 8.0,
        reward: str = "path",
        visit_all: bool = True,
        drop: str = "rarest",
        budget_mb: float = 64,
        corpus_mb: float = 1024,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if window < 3 or not (increment >= 0 and cap > 0):
            raise ConfigError(
                "window must be at least 3 tokens, increment at least 0 (no learning) and cap "
                f"above 0; got {window=}, {increment=} and {cap=}"
            )
        search = MonteCarlo(
            length=length,
            iterations=iterations,
            top=top,
            c1=c1,
            c2=c2,
            reward=reward,
            visit_all=visit_all,
            drop=drop,
        )
        self.search = search if grower == "monte_carlo" else None
        self.grower: Grower = self.search or registry.make("grower", grower)
        self.labels = self.grower.labels
        self.window, self.increment, self.cap = window, increment, cap
        self.entries, self.budget = entries, in_bytes(budget_mb)
        self.renormalise = renormalise or self.search is None  # other growers need a distribution
        self.base = _base(corpus, matrix, entries, in_bytes(corpus_mb, "corpus_mb"), tokenizer)
        self._tokenizer = tokenizer
        self._layers: OrderedDict[str, TrigramMatrix] = OrderedDict()  # by tenant, in LRU order
        self._users: Counter[str] = Counter()  # running sequences by tenant
        self._new_layer()  # checks the options

    def bind(self, target: Target) -> None:
        largest = self.base.largest_id() if self.base else -1
        if largest >= target.vocab_size:
            raise ConfigError(
                f"the corpus of aded holds token {largest}, but the ids of this model end at "
                f"{target.vocab_size - 1}; build it with the model's tokenizer"
            )
        table.warm_up()
        mcts.warm_up()

    def start(self, seq: Sequence) -> None:
        self._users[seq.tenant] += 1
        self._learn(seq)

    def finish(self, seq: Sequence) -> None:
        self._users[seq.tenant] -= 1
        if self._users[seq.tenant] < 1:
            del self._users[seq.tenant]

    def forget(self, group: Hashable) -> None:
        for tenant in [name for name in self._layers if kept_key("tenant", name) == group]:
            del self._layers[tenant], self._users[tenant]

    def layer(self, tenant: str = "") -> TrigramMatrix:
        """The learned scores of a tenant, on top of the corpus."""
        if tenant not in self._layers:
            self._layers[tenant] = self._new_layer()
            self._make_room(0)
        self._layers.move_to_end(tenant)
        return self._layers[tenant]

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        if len(seq.tokens) < 2:
            return EMPTY
        if self.search is None or not isinstance(dice, SeededDice):
            return grow([seq], [plan], [dice], MemorySource(self), self.grower)[0]
        matrix, search = self.layer(seq.tenant), self.search.within(plan.depth)
        max_draws = 0 if search.reward == CONSTANT else search.iterations * search.steps
        uniforms = dice.peek(max_draws)
        tree, used = mcts.draft(
            matrix, seq.tokens[-2:], search, plan, uniforms, renormalise=self.renormalise
        )
        dice.skip(used)
        return tree

    def observe(self, step: Step) -> None:
        for seq in step.seqs:
            self._learn(seq)

    def memory_report(self) -> dict[str, int]:
        corpus = {"tri-gram corpus": self.base.nbytes} if self.base else {}
        return corpus | {"tri-gram matrix": sum(m.nbytes for m in self._layers.values())}

    def save_corpus(self, path: FilePath | str) -> None:
        """Writes the corpus counts to a file for option `matrix`."""
        if self.base is None:
            raise ConfigError("this drafter has no corpus to save; give one: aded:corpus=FILE")
        corpora.save(FilePath(path), self.base, self._tokenizer)

    def keep(self, tenant: str = "") -> None:
        if not self.increment:
            raise ConfigError("aded with increment=0 learns nothing to save; remove the option")

    def snapshot(self, tenant: str = "") -> Snapshot:
        self.keep(tenant)
        matrix = self.layer(tenant)
        return _snapshot(matrix.rows(), self.entries, matrix.learned, matrix.dropped)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self.keep(tenant)
        snapshot.expect("aded")
        snapshot.check({"entries": self.entries})
        matrix = self.layer(tenant)
        matrix.absorb(table.check(snapshot.arrays, self.entries))
        matrix.learned += snapshot.counts["tokens"]
        self._make_room(0)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        entries = snapshots[0].settings["entries"]
        for other in snapshots[1:]:
            other.check({"entries": entries})
        rows = table.blend([table.check(s.arrays, entries) for s in snapshots], entries)
        kept = rows if max_bytes is None else table.newest(rows, max_bytes // (16 + 8 * entries))
        tokens, dropped = (sum(s.counts[n] for s in snapshots) for n in ("tokens", "evicted"))
        return _snapshot(kept, entries, tokens, dropped + len(rows.keys) - len(kept.keys))

    def _learn(self, seq: Sequence) -> None:
        if not self.increment:
            return
        matrix = self.layer(seq.tenant)
        if growth := matrix.growth(self.window):
            self._make_room(growth)
        matrix.nudge(seq.tokens[-self.window :], self.increment, self.cap)

    def _make_room(self, growth: int) -> None:
        """Frees `growth` bytes for the most recent layer: drops idle layers in LRU order."""
        held = sum(matrix.nbytes for matrix in self._layers.values())
        for tenant in list(self._layers)[:-1]:
            if held + growth <= self.budget:
                break
            if not self._users[tenant]:
                held -= self._layers.pop(tenant).nbytes
        for matrix in self._layers.values():
            matrix.budget = self.budget - held + matrix.nbytes

    def _new_layer(self) -> TrigramMatrix:
        return TrigramMatrix(entries=self.entries, budget=self.budget, base=self.base)


class MemorySource(Source):
    """The row of the matrix after a path; scores do not sum to 1 unless renormalised."""

    def __init__(self, drafter: Aded) -> None:
        self.drafter = drafter

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        return [self._one(seq, path) for seq, path in requests]

    def _one(self, seq: Sequence, path: Path) -> Proposal | None:
        a, b = (*seq.tokens[-2:], *path)[-2:]
        return self.drafter.layer(seq.tenant).row(a, b, renormalise=self.drafter.renormalise)


def _base(
    corpus: tuple[str, ...] | str | FilePath | None,
    matrix: str | None,
    entries: int,
    budget: int,
    tokenizer: Tokenizer | None,
) -> TrigramMatrix | None:
    """The counts of a corpus, from text files or from a file of counts."""
    if corpus and matrix:
        raise ConfigError(f"give a corpus or a matrix, not both; got {corpus} and {matrix!r}")
    if matrix:
        return corpora.load(FilePath(matrix), tokenizer, entries=entries, budget=budget)
    if not corpus:
        return None
    files = (corpus,) if isinstance(corpus, str | FilePath) else corpus
    base = TrigramMatrix(entries=entries, budget=budget)
    base.count(corpora.tokenised(files, tokenizer))
    return base


def _snapshot(rows: table.Rows, entries: int, tokens: int, dropped: int) -> Snapshot:
    counts: dict[str, Any] = {"tokens": tokens, "evicted": dropped, "rows": len(rows.keys)}
    return Snapshot("aded", rows._asdict(), {"entries": entries}, counts)
