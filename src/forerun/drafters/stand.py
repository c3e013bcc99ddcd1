"""STAND: drafts from a memory of the target's probabilities; no second model, no training.

"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025. Verification computes
the target's distribution at each emitted token. The memory keeps the running mean of its top
entries by context; a lookup uses the longest known context. Trees are drawn without replacement by
Gumbel-Top-k.

Exact: SWOR nodes with the q they were drawn from; at temperature 0 (or with choice="top") POINT
nodes, the most probable tokens. Needs only the target's distributions of finished steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from forerun.core.allowed import AllowedTokens
from forerun.core.dice import Dice, SeededDice
from forerun.core.growing import Grower, Path, Source
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Target, name_of
from forerun.core.sampling import to_probs
from forerun.core.scopes import SCOPES
from forerun.core.tree import POINT, Proposal, Tree, points
from forerun.core.tree_template import DEFAULT, Template
from forerun.drafters._stand_memories import ScopedMemories
from forerun.drafters.base import PerSequence, grow
from forerun.errors import ConfigError
from forerun.growers._fit_template import fitted_for
from forerun.growers.dynamic import Dynamic
from forerun.growers.gumbel import Gumbel
from forerun.growers.template import TopTemplate
from forerun.ngrams.tables.logits import serialize
from forerun.ngrams.tables.logits.kernels import Temper
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.ngrams.tables.logits.prompt_logits import prompt_rows
from forerun.ngrams.tables.logits.table import NEUTRAL, LogitMemory, warm_up
from forerun.ngrams.tables.logits.top_probs import largest, top_probs
from forerun.registry import File

_CHOICES = {
    "choice": ("sampled", "top"),
    "tree": ("dynamic", "template"),
    "scope": SCOPES,
    "store": ("auto", "processed", "model"),
}


class Stand(PerSequence, Persistent):
    """A logit memory with Gumbel-Top-k trees.

    context: 4 looks up contexts of 4, 3, 2 and 1 tokens; a tuple lists the lengths.
    entries: probabilities kept per context. tree: "dynamic" adds the nodes with the highest
    estimated acceptance, "template" fills ranked places as in the paper. template: a Template or
    its file; None is the one fitted for this model (`forerun fit-tree`), else a built-in ranking.
    scope: which sequences share a memory; "group" is the samples of one prompt, and becomes
    "tenant" if the memory is saved. In wider scopes the group's memory is looked up first.
    budget_mb: memory of all tables. choice: "sampled" draws tokens, "top" takes the most probable
    ones, as temperature 0 always does.
    store: "processed" stores distributions as sampled from; "model" stores them at temperature 1
    and applies the sampling parameters when drafting; "auto" is "processed" for requests and
    groups, and "model" for wider scopes, which serve mixed requests. Greedy requests always store
    "model".
    seed_from_prompt: also learns the target's distributions at prompt positions, once per group.
    copy_prompt: also learns the prompt's tokens, once per group, as if each were certain where it
    stands; needs no pass.
    """

    can_observe_late = True

    def __init__(
        self,
        *,
        context: int | tuple[int, ...] = 4,
        entries: int = 10,
        tree: str = "dynamic",
        template: Template | FilePath | File | None = None,
        scope: str = "group",
        budget_mb: float = 64,
        choice: str = "sampled",
        store: str = "auto",
        seed_from_prompt: bool = False,
        copy_prompt: bool = False,
        tokenizer: Any = None,
    ) -> None:
        if choice == "measured":
            raise ConfigError(
                "stand: choice=measured was removed in this release; remove the option"
            )
        given = {"choice": choice, "tree": tree, "scope": scope, "store": store}
        for name, value in given.items():
            if value not in _CHOICES[name]:
                raise ConfigError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")
        self.context, self.entries = context, entries
        self.num_top_logits = entries
        self.scope, self.choice = scope, choice
        self.seed_from_prompt, self.copy_prompt = seed_from_prompt, copy_prompt
        self.labels = frozenset({"point"} if choice == "top" else {"swor", "point"})
        self.is_dynamic = tree == "dynamic" and template is None
        self.template = DEFAULT
        if not self.is_dynamic:
            found = (fitted_for(tokenizer) or DEFAULT) if template is None else template
            self.template = found if isinstance(found, Template) else Template.load(FilePath(found))
        self._memories = ScopedMemories(
            scope, store, context=context, entries=entries, budget=in_bytes(budget_mb)
        )
        self._target: Target | None = None
        self._seeded: set[Hashable] = set()  # groups with a learned prompt

    def bind(self, target: Target) -> None:
        if self.seed_from_prompt and not hasattr(target, "rows_at"):
            raise ConfigError(
                f"seed_from_prompt needs a target with rows at prompt positions, but "
                f"{type(target).__name__} has none; remove the option"
            )
        self._target = target
        warm_up()

    def start(self, seq: Sequence) -> None:
        self._memories.join(seq)
        mark = seq if seq.group is None or self.scope == "request" else seq.group
        if mark in self._seeded:
            return
        if self.copy_prompt:
            self._copy(seq)
        if self.seed_from_prompt:
            self._seed(seq)
        if self.copy_prompt or self.seed_from_prompt:
            self._seeded.add(mark)

    def finish(self, seq: Sequence) -> None:
        self._memories.leave(seq)
        self._seeded.discard(seq)

    def forget(self, group: Hashable) -> None:
        self._memories.forget(group)
        self._seeded.discard(group)

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        draws = self.choice == "sampled" and not seq.sampling.is_greedy
        if not isinstance(dice, SeededDice) or AllowedTokens.of(seq):  # kernels ask no shaper
            return grow([seq], [plan], [dice], MemorySource(self), self._grower(seq, draws))[0]
        memory, temper = self.memory(seq), self.temper(seq)
        uniforms = dice.peek(plan.nodes * self.entries) if draws else None
        if self.is_dynamic:
            tree, used = memory.grow(seq.tokens, plan, temper, uniforms)
        else:
            shape = self.template.first(plan.nodes)
            tree, used = memory.draft(seq.tokens, shape, plan.depth, temper, uniforms)
        dice.skip(used)
        return tree

    def observe(self, step: Step) -> None:
        for seq, tree, verdict in zip(step.seqs, step.trees, step.verdicts, strict=True):
            if len(tree):
                self._count(self.memory(seq), tree, verdict.nodes)
        for i, (ids, probs) in self._entries(step).items():
            seq, start, memory = step.seqs[i], step.start(i), self.memory(step.seqs[i])
            root = memory.context(seq.tokens[max(0, start - memory.longest) : start])
            nodes = np.array(step.visited(i), np.int32)
            self._memories.enlarge(memory, len(nodes))
            memory.learn(root, step.trees[i], nodes, ids, probs)

    def memory_report(self) -> dict[str, int]:
        return {"logit memory": self._memories.nbytes}

    def keep(self, tenant: str = "") -> None:
        self._memories.keep(tenant)

    def release(self, tenant: str = "") -> None:
        self._memories.release(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        return self._memories.snapshot(tenant)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self._memories.restore(snapshot, tenant)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        return serialize.merge(snapshots, max_bytes)

    def memory(self, seq: Sequence) -> LogitMemory:
        """The memory that a sequence drafts from, with the wide scope's as fallback."""
        return self._memories.of(seq)

    def temper(self, seq: Sequence) -> Temper:
        """How stored probabilities become this sequence's q."""
        s = seq.sampling
        if s.is_greedy or not self._memories.stores_model(seq):
            return NEUTRAL
        return Temper(1.0 / s.temperature, int(s.top_k), float(s.top_p), float(s.min_p))

    def _grower(self, seq: Sequence, draws: bool) -> Grower:
        """The plain grower that draws the same trees as the kernels."""
        if self.is_dynamic:
            return Dynamic(drawn=draws, acceptance=self.memory(seq).acceptance[draws])
        return Gumbel(template=self.template) if draws else TopTemplate(template=self.template)

    def _count(self, memory: LogitMemory, tree: Tree, accepted: list[int]) -> None:
        """Updates the memory's acceptance counts with the nodes of its own drafts."""
        if tree.cells is None:
            return
        cells = tree.cells_of(name_of(self))
        own = 0 if cells is tree.cells else int(cells.argmax())  # a node of this drafter, if any
        if cells.item(own) >= 0:
            is_drawn = tree.laws.item(own) != POINT
            memory.acceptance[is_drawn].learn(tree.parents, cells, accepted)

    def _entries(self, step: Step) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The largest probabilities at the visited nodes of sequence i: i -> ids, probs [n, K].

        All raw logits take one call of the C kernel.
        """
        found, logits = {}, {}
        for i, (seq, laws) in enumerate(zip(step.seqs, step.laws, strict=True)):
            nodes, is_raw = step.visited(i), self._learns_model(seq)
            if not nodes:
                continue
            if laws.top_entries is not None:
                found[i] = laws.top_entries.entries(nodes, self.entries, is_raw=is_raw)
            elif is_raw:
                logits[i] = list(map(laws.logits, nodes))
            else:
                found[i] = largest(laws.at(nodes), self.entries)
        if logits:
            ids, probs = top_probs(list(chain.from_iterable(logits.values())), self.entries)
            ends = np.cumsum(list(map(len, logits.values())))[:-1]
            found |= zip(
                logits, zip(np.split(ids, ends), np.split(probs, ends), strict=True), strict=True
            )
        return dict(sorted(found.items()))

    def _seed(self, seq: Sequence) -> None:
        """Learns at all prompt positions but the last, which the first step covers."""
        is_raw, memory = self._learns_model(seq), self.memory(seq)
        for at, rows in prompt_rows(self._target, seq):
            self._memories.enlarge(memory, len(rows))
            find = top_probs if is_raw else largest
            laws = rows if is_raw else [to_probs(row, seq.sampling) for row in rows]
            memory.follow(seq.tokens, at, *find(laws, self.entries))

    def _copy(self, seq: Sequence) -> None:
        """Learns every prompt token but the first, with probability 1 after the tokens before.

        Only the sequence's own memory does: wider ones and their files hold no prompts.
        """
        prompt = np.array(seq.tokens[: seq.num_prompt], np.int32)
        if len(prompt) < 2:
            return
        memory, count = self.memory(seq), len(prompt) - 1
        nodes = np.arange(-1, count - 1, dtype=np.int32)
        ids = np.zeros((count, self.entries), np.int32)
        probs = np.zeros((count, self.entries), np.float32)
        ids[:, 0], probs[:, 0] = prompt[1:], 1.0
        self._memories.enlarge(memory, count)
        text, root = points(prompt[1:-1], nodes[:-1]), memory.context(seq.tokens[:1])
        memory.learn(root, text, nodes, ids, probs, shares=False)

    def _learns_model(self, seq: Sequence) -> bool:
        return seq.sampling.is_greedy or self._memories.stores_model(seq)


class MemorySource(Source):
    """Proposals of the memory, one path at a time."""

    def __init__(self, drafter: Stand) -> None:
        self.drafter = drafter

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        return [self._one(seq, path) for seq, path in requests]

    def _one(self, seq: Sequence, path: Path) -> Proposal | None:
        memory = self.drafter.memory(seq)
        tail = seq.tokens[-memory.longest :] + list(path)
        return memory.lookup(tail, self.drafter.temper(seq))
