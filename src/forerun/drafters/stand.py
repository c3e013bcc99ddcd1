"""STAND: drafts from a memory of the target's own probabilities; no second model, no training.

"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025. Every verification pass
already computes the target's distribution at each emitted token; the memory keeps the running mean
of its top entries by context, longest context first. Trees are drawn from it without replacement
by Gumbel-Top-k on a tree, so a draft that knows the law is accepted nearly always.

Law: SWOR nodes that carry the q they were drawn from, a snapshot; at temperature 0 (or with
choice="top") POINT nodes, the best tokens. Lossless under any verifier that judges those.
Needs: nothing but the target's processed laws of finished steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import Laws
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Drafter, Path, Source, Target, name_of
from forerun.core.sampling import softmax, to_probs
from forerun.core.scopes import SCOPES, WIDE, kept_key, keys_of
from forerun.core.tree import EMPTY, POINT, Proposal, Tree
from forerun.core.tree_template import DEFAULT, Template
from forerun.drafters.base import followed, grow
from forerun.errors import ConfigError
from forerun.growers._fit_template import Refit, fitted_for
from forerun.growers.dynamic import Dynamic
from forerun.growers.gumbel import Gumbel
from forerun.growers.template import TopTemplate
from forerun.ngrams.tables.logits import serialize
from forerun.ngrams.tables.logits.kernels import Temper
from forerun.ngrams.tables.logits.pool import FAR, Memories, in_bytes
from forerun.ngrams.tables.logits.prompt_logits import prompt_rows
from forerun.ngrams.tables.logits.table import NEUTRAL, LogitMemory, context_lengths, warm_up
from forerun.ngrams.tables.logits.top_k import select_rows
from forerun.registry import File

_CHOICES = {
    "choice": ("sampled", "top", "measured"),
    "tree": ("dynamic", "template"),
    "scope": SCOPES,
    "update_from": ("path", "tree"),
    "store": ("auto", "processed", "model"),
}


class Stand(Drafter):
    """A logit memory x Gumbel-Top-k.

    context: 4 looks up contexts of 4, 3, 2 and 1 tokens; a tuple gives the lengths themselves.
    entries: probabilities kept per context. tree: "dynamic" grows where acceptance is likely,
    "template" fills ranked places as the paper does. template: a Template or the file of one;
    None is the one fitted for this model (`forerun fit-tree`), else a ranking of our own. refit:
    fill a template, and rank its places anew as acceptances are counted.
    scope: who shares a memory; group is the trajectories of one prompt, which becomes tenant where
    the memory is to be saved. In wider scopes a group's own is asked first. budget_mb: of all.
    choice: "sampled" draws tokens, "top" takes the best ones, as temperature 0 always does, and
    "measured" does for each sequence what has gained more (`core.acceptance_prior.Gain`), as far
    as it and those that share its memory have shown.
    update_from: "path" learns at every emitted token, "tree" at rejected nodes too.
    store: "processed" laws as sampled from, or the "model" law at temperature 1, tempered when
    drafting; "auto" is the former within a request or group and the latter in wider scopes, which
    serve mixed requests. Greedy requests always store the latter.
    seed_from_prompt: learns at prompt positions too, once per group.
    """

    def __init__(
        self,
        *,
        context: int | tuple[int, ...] = 4,
        entries: int = 10,
        tree: str = "dynamic",
        template: Template | FilePath | File | None = None,
        refit: bool = False,
        scope: str = "group",
        budget_mb: float = 64,
        choice: str = "sampled",
        update_from: str = "path",
        store: str = "auto",
        seed_from_prompt: bool = False,
        tokenizer: Any = None,
    ) -> None:
        given = {"choice": choice, "tree": tree, "scope": scope}
        for name, value in (given | {"update_from": update_from, "store": store}).items():
            if value not in _CHOICES[name]:
                raise ConfigError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")
        self.context, self.entries = context, entries
        self.num_top_logits = entries
        # measuring and refitting compare drafts with the text, so they must learn first
        self.can_learn_during_forward = choice != "measured" and not refit
        self.scope, self.store, self.update_from = scope, store, update_from
        self.choice, self.seed_from_prompt = choice, seed_from_prompt
        self.labels = frozenset({"point"} if choice == "top" else {"swor", "point"})
        self.is_patient = choice != "measured" and update_from == "path" and not refit  # see `hear`
        self._trials: WeakKeyDictionary[Sequence, Trial] = WeakKeyDictionary()  # if measured
        self._kept: set[str] = set()  # tenants whose groups' memories are one, to be saved
        self.is_dynamic = tree == "dynamic" and template is None and not refit
        self._fill(DEFAULT)
        self._refit: Refit | None = None
        if not self.is_dynamic:
            found = (fitted_for(tokenizer) or DEFAULT) if template is None else template
            self._refit = Refit(found) if refit else None
            self._fill(found if isinstance(found, Template) else Template.load(FilePath(found)))
        self._filled: WeakKeyDictionary[Sequence, np.ndarray] = WeakKeyDictionary()  # if refit
        self._memories = Memories(context=context, entries=entries, budget=in_bytes(budget_mb))
        self._target: Target | None = None
        self._name = name_of(self)  # in `sources`
        self._seeded: set[Hashable] = set()  # groups whose prompt has been learned

    @property
    def settings(self) -> dict[str, Any]:
        """What two saved memories must agree in."""
        lengths = list(context_lengths(self.context))
        store = "processed" if self.store == "processed" else "model"
        return {"context": lengths, "entries": self.entries, "store": store}

    def bind(self, target: Target) -> None:
        if self.seed_from_prompt and not hasattr(target, "rows_at"):
            raise ConfigError(
                f"seed_from_prompt needs a target that gives rows at prompt positions, which "
                f"{type(target).__name__} does not; leave the option out"
            )
        self._target, self._name = target, name_of(self)

    def warm_up(self) -> None:
        warm_up()

    def start(self, seq: Sequence) -> None:
        for key in self._keys(seq):
            self._memories.join(key, seq)
        mark = seq if seq.group is None else seq.group
        if self.seed_from_prompt and mark not in self._seeded:
            self._seed(seq)
            self._seeded.add(mark)

    def finish(self, seq: Sequence) -> None:
        if self._trials and (trial := self._trials.pop(seq, None)):
            self.memory(seq).gain.learn(seq, trial.difference(seq)[0])
        for key in self._keys(seq):
            self._memories.leave(key, seq)
        self._seeded.discard(seq)
        if seq.group is None or self.scope == "request":
            self._memories.forget(seq)  # a group's stays for trajectories that may still come

    def forget(self, group: Hashable) -> None:
        self._memories.forget(group)
        self._seeded.discard(group)

    def memory(self, seq: Sequence) -> LogitMemory:
        """The memory that a sequence drafts from: its own, with that of a wide scope behind it."""
        keys = self._keys(seq)
        if len(keys) == 1:
            return self._memories[keys[0]]
        wide, own = self._memories[keys[0]], self._memories[keys[1]]
        own.lean_on(wide)
        return own

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        draws = self._draws(seq)
        if not self.is_dynamic:
            grower = self._drawn if draws else self._best
            return self._noted(seq, grow([seq], [plan], [dice], Recall(self), grower)[0])
        dynamic = Dynamic(drawn=draws, chances=self.memory(seq).chances[draws])
        return grow([seq], [plan], [dice], Recall(self), dynamic)[0]

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        return list(map(self._propose, seqs, plans))

    def observe(self, step: Step) -> None:
        self.hear([step])

    def hear(self, steps: Many[Step]) -> None:
        """Texts that share a memory teach it step by step, however late: its bits rest on order."""
        memories: dict[Hashable, LogitMemory] = {}
        is_shared = self.scope != "request"
        for step in steps:
            if self.choice == "measured":  # before anything is learned from this step
                for i, seq in enumerate(step.seqs):
                    self._compare(seq, step, i)
            for i, (seq, tree) in enumerate(zip(step.seqs, step.trees, strict=True)):
                mark = (seq.tenant, seq.group) if is_shared and seq.group is not None else seq
                memory = memories.get(mark)
                if memory is None:
                    memory = memories[mark] = self.memory(seq)
                if len(tree.tokens):
                    self._count(memory, tree, step.verdicts[i].nodes)
                if self._refit and self._filled.get(seq) is tree.tokens:
                    self._refit.count(tree, step.verdicts[i].nodes, step.plans[i])
                self._learn(memory, step, i)
        if self._refit and self._refit.is_due:  # between steps: trees under way keep their places
            self._fill(self._refit.ranked())

    def memory_report(self) -> dict[str, int]:
        return {"logit memory": self._memories.nbytes}

    def keep(self, tenant: str = "") -> None:
        if self.scope == "request":
            raise ConfigError(
                "a memory of scope request ends with its request, so there is nothing to save; use "
                "stand:scope=tenant"
            )
        if self.scope == "global" and tenant:
            raise ConfigError(
                f"a memory of scope global belongs to all, not to tenant {tenant!r}; use "
                "stand:scope=tenant"
            )
        if self.scope == "group" and tenant not in self._kept:
            with self._memories.moving(tenant, self._keys):
                self._kept.add(tenant)

    def let_go(self, tenant: str = "") -> None:
        if tenant in self._kept:
            with self._memories.moving(tenant, self._keys):
                self._memories.drop(self._kept_key(tenant))
                self._kept.discard(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        self.keep(tenant)
        memory = self._memories[self._kept_key(tenant)]
        counts = {"tokens": memory.observed, "evicted": memory.evicted}
        rows, chances = memory.rows(), memory.chances
        return serialize.to_snapshot("stand", rows, self.settings, counts, chances)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        snapshot.expect("stand")
        snapshot.check(self.settings)
        rows, chances = serialize.from_snapshot(snapshot)
        self.keep(tenant)
        memory = self._memories.renew(self._kept_key(tenant))
        memory.chances = chances
        self._memories.make_room(memory.growth(len(rows.keys)))
        memory.budget = min(memory.budget, int(FAR * self._memories.budget))
        memory.hold(rows, snapshot.counts["tokens"])
        memory.evicted += snapshot.counts["evicted"]

    @classmethod
    def merged(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        return serialize.merged(snapshots, max_bytes)

    def temper(self, seq: Sequence) -> Temper:
        """How the memory's probabilities become this sequence's q."""
        s = seq.sampling
        if s.is_greedy or not self._stores_model(seq):
            return NEUTRAL
        return Temper(1.0 / s.temperature, int(s.top_k), float(s.top_p), float(s.min_p))

    def _propose(self, seq: Sequence, plan: Plan) -> Tree:
        if plan.is_empty:
            return EMPTY
        if not isinstance(seq.dice, SeededDice):
            return self.propose_one(seq, plan, seq.dice)
        uniforms = seq.dice.peek(plan.nodes * self.entries) if self._draws(seq) else None
        tree, used = self._drafted(seq, seq.tokens, plan, uniforms)
        seq.dice.skip(used)
        return self._noted(seq, tree)

    def _drafted(
        self, seq: Sequence, tokens: list[int], plan: Plan, uniforms: np.ndarray | None
    ) -> tuple[Tree, int]:
        """A tree below `tokens`, and how many of the uniforms it took; without, of best tokens."""
        memory, temper = self.memory(seq), self.temper(seq)
        if self.is_dynamic:
            return memory.grow(tokens, plan, temper, uniforms)
        shape = self.template.first(plan.nodes)
        return memory.draft(tokens, shape, plan.depth, temper, uniforms)

    def _fill(self, template: Template) -> None:
        """Trees are filled by this template from now on."""
        self.template = template
        self._drawn, self._best = Gumbel(template=template), TopTemplate(template=template)

    def _noted(self, seq: Sequence, tree: Tree) -> Tree:
        """The tree itself; a refit counts it only if it is judged as it was drawn."""
        if self._refit is not None:
            self._filled[seq] = tree.tokens
        return tree

    def _draws(self, seq: Sequence) -> bool:
        if self.choice == "top" or seq.sampling.is_greedy:
            return False
        return self.choice == "sampled" or self.memory(seq).gain.draws(seq)

    def _compare(self, seq: Sequence, step: Step, i: int) -> None:
        """Begins a trial where a drawn tree of ours was judged, ends one that the text decides."""
        gain, trial, tree = self.memory(seq).gain, self._trials.get(seq), step.trees[i]
        is_drawn = bool(len(tree) and (tree.laws != POINT).all())
        if trial is None and is_drawn and gain.compares(seq) and self._is_own(tree):
            start = len(seq.tokens) - len(step.emitted[i])
            best, _ = self._drafted(seq, seq.tokens[:start], step.plans[i], None)
            trial = self._trials[seq] = Trial(start, best, len(step.verdicts[i].nodes))
        if trial is not None:
            difference, is_final = trial.difference(seq)
            if is_final:
                gain.learn(seq, difference)
                del self._trials[seq]
        gain.step(seq)

    def _count(self, memory: LogitMemory, tree: Tree, accepted: list[int]) -> None:
        """The memory's chances learn what became of nodes that were valued by them."""
        if tree.cells is None:
            return
        cells = tree.cells_of(self._name)
        own = 0 if cells is tree.cells else int(cells.argmax())  # a node of ours, if there is one
        if cells.item(own) >= 0:
            is_drawn = tree.laws.item(own) != POINT
            memory.chances[is_drawn].learn(tree.parents, cells, accepted)

    def _is_own(self, tree: Tree) -> bool:
        return tree.sources.count(self._name) == len(tree.sources)

    def _learn(self, memory: LogitMemory, step: Step, i: int) -> None:
        """Adds the laws at visited nodes of sequence i (and, from the tree, at all others)."""
        seq, laws, nodes, start = step.seqs[i], step.laws[i], step.visited(i), step.start(i)
        if not nodes:
            return
        if self.update_from == "tree":
            self._learn_tree(memory, seq, start, step.trees[i], laws, nodes)
            return
        if laws.top_logits is not None:
            ids, probs = laws.top_logits.entries(
                nodes, self.entries, is_raw=self._learns_model(seq)
            )
            self._learn_entries(memory, seq.tokens[:start], step.trees[i], nodes, ids, probs)
            return
        self._memories.teach(memory, seq.tokens, start, self._rows(seq, laws, nodes))

    def _learn_tree(
        self,
        memory: LogitMemory,
        seq: Sequence,
        start: int,
        tree: Tree,
        laws: Laws,
        visited: list[int],
    ) -> None:
        """Of nodes that share a context the first teaches it, those of the text before others."""
        nodes = [*visited, *sorted(set(range(-1, len(tree))) - set(visited))]
        if laws.top_logits is not None:
            ids, probs = laws.top_logits.entries(
                nodes, self.entries, is_raw=self._learns_model(seq)
            )
        else:
            ids = np.empty((len(nodes), self.entries), np.int32)
            probs = np.empty((len(nodes), self.entries), np.float32)
            for i, node in enumerate(nodes):
                select_rows(self._rows(seq, laws, [node]), ids[i : i + 1], probs[i : i + 1])
        self._learn_entries(memory, seq.tokens[:start], tree, nodes, ids, probs, is_once=True)

    def _learn_entries(
        self,
        memory: LogitMemory,
        tokens: list[int],
        tree: Tree,
        nodes: list[int],
        ids: np.ndarray,
        probs: np.ndarray,
        *,
        is_once: bool = False,
    ) -> None:
        """Adds the largest entries of laws, ids and probs [n, K], at nodes of a tree."""
        for one in (memory.behind, memory):
            if one is not None:
                self._memories.enlarge(one, len(nodes) * len(one.lengths))
        root, where = memory.context(tokens), np.array(nodes, np.int32)
        memory.learn(root, tree, where, ids, probs, is_once=is_once)

    def _rows(self, seq: Sequence, laws: Laws, nodes: list[int]) -> np.ndarray:
        """What is learned at nodes: laws [n, V]."""
        is_raw = self._learns_model(seq)
        found = list(map(laws.logits, nodes)) if is_raw else laws.at(nodes)
        if isinstance(found, np.ndarray):
            return found
        rows = np.empty((len(nodes), len(found[0])), found[0].dtype)
        for row, given in zip(rows, found, strict=True):
            row[:] = softmax(given) if is_raw else given
        return rows

    def _seed(self, seq: Sequence) -> None:
        """Learns at all prompt positions but the last, whose law the first step sees."""
        is_raw, memory = self._learns_model(seq), self.memory(seq)
        for at, rows in prompt_rows(self._target, seq):
            for row in rows:  # logits that nobody else has become laws where they lie
                row[:] = softmax(row) if is_raw else to_probs(row, seq.sampling)
            self._memories.teach(memory, seq.tokens, at, rows)

    def _learns_model(self, seq: Sequence) -> bool:
        return seq.sampling.is_greedy or self._stores_model(seq)

    def _stores_model(self, seq: Sequence) -> bool:
        """Whether the law at temperature 1 is stored, whatever the request."""
        is_wide = self.scope in WIDE or seq.tenant in self._kept
        return self.store == "model" or (self.store == "auto" and is_wide)

    def _scope(self, tenant: str) -> str:
        return "tenant" if tenant in self._kept else self.scope

    def _keys(self, seq: Sequence) -> tuple[Hashable, ...]:
        return keys_of(self._scope(seq.tenant), seq)

    def _kept_key(self, tenant: str) -> Hashable:
        return kept_key(self._scope(tenant), tenant)


@dataclass(frozen=True)
class Trial:
    """The best tokens beside a tree that was drawn at the same place of a text."""

    start: int  # tokens before it
    best: Tree
    accepted: int  # nodes of the drawn tree

    def difference(self, seq: Sequence) -> tuple[int, bool]:
        """Accepted nodes, drawn less best, and whether more text could not change that."""
        count, is_final = followed(self.best, seq.tokens[self.start :])
        return self.accepted - count, is_final


class Recall(Source):
    """What the memory knows, one path at a time."""

    def __init__(self, drafter: Stand) -> None:
        self.drafter = drafter

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        return [self._one(seq, path) for seq, path in requests]

    def _one(self, seq: Sequence, path: Path) -> Proposal | None:
        memory = self.drafter.memory(seq)
        tail = seq.tokens[-memory.longest :] + list(path)
        return memory.lookup(tail, self.drafter.temper(seq))
