"""STAND: drafts from a memory of the target's own probabilities; no second model, no training.

"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025. Every verification pass
already computes the target's distribution at each emitted token; the memory keeps the running mean
of its top entries by context, longest context first. Trees are drawn from it without replacement
by Gumbel-Top-k on a template, so a draft that knows the law is accepted nearly always.

Law: SWOR nodes that carry the q they were drawn from, a snapshot; at temperature 0 (or with
stochastic=False) POINT nodes, the best tokens. Lossless under any verifier that judges those.
Needs: nothing but the target's processed laws of finished steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Many
from pathlib import Path as FilePath

import numpy as np

from forerun.dice import Dice, SeededDice
from forerun.drafters.base import grow
from forerun.errors import ConfigError
from forerun.growers.gumbel import Gumbel
from forerun.growers.template import TopTemplate
from forerun.ngrams.kernels import Temper, select_top
from forerun.ngrams.memory import NEUTRAL, LogitMemory, warm_up
from forerun.records import Plan, Sequence, Step
from forerun.roles import Drafter, Path, Source
from forerun.shaping import Laws
from forerun.template import DEFAULT, Shape, Template
from forerun.tree import EMPTY, Proposal, Tree

_CHOICES = {
    "scope": ("request", "group", "global"),
    "update_from": ("path", "tree"),
    "store": ("auto", "processed", "model"),
}


class Stand(Drafter):
    """A logit memory x Gumbel-Top-k on a template.

    context: 4 looks up contexts of 4, 3, 2 and 1 tokens; a tuple gives the lengths themselves.
    entries: probabilities kept per context. template: a Template or the file of one.
    scope: who shares a memory; group is the trajectories of one prompt. budget_mb: of all memories.
    stochastic: False drafts the best tokens instead of drawing; temperature 0 always does.
    update_from: "path" learns at every emitted token, "tree" at rejected nodes too.
    store: "processed" laws as sampled from, or the "model" law at temperature 1, tempered when
    drafting; "auto" is the former except in a global memory, which serves mixed requests. Greedy
    requests always store the latter.
    """

    def __init__(
        self,
        *,
        context: int | tuple[int, ...] = 4,
        entries: int = 10,
        template: Template | FilePath | str | None = None,
        scope: str = "group",
        budget_mb: float = 64,
        stochastic: bool = True,
        update_from: str = "path",
        store: str = "auto",
    ) -> None:
        for name, value in (("scope", scope), ("update_from", update_from), ("store", store)):
            if value not in _CHOICES[name]:
                raise ConfigError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")
        self.context, self.entries, self.scope = context, entries, scope
        self.budget = int(budget_mb * 2**20)
        self.stochastic, self.update_from = stochastic, update_from
        self.stores_model = store == "model" or (store == "auto" and scope == "global")
        self.labels = frozenset({"swor", "point"} if stochastic else {"point"})
        self.template = _as_template(template)
        self._drawn, self._best = (
            Gumbel(template=self.template),
            TopTemplate(template=self.template),
        )
        self._shapes: dict[int, tuple[Shape, int]] = {}
        self._memories: OrderedDict[Hashable, LogitMemory] = OrderedDict()  # least recent first
        self._members: dict[Hashable, set[Sequence]] = {}  # running sequences by memory
        self._new_memory()  # refuses bad options now rather than at the first sequence

    def warm_up(self) -> None:
        warm_up()

    def start(self, seq: Sequence) -> None:
        self._members.setdefault(self._key(seq), set()).add(seq)

    def finish(self, seq: Sequence) -> None:
        key = self._key(seq)
        members = self._members.get(key, set())
        members.discard(seq)
        if not members:
            self._members.pop(key, None)
        if key is seq:  # a group's memory stays for trajectories that may still come
            self._memories.pop(key, None)

    def forget(self, group: Hashable) -> None:
        self._members.pop(group, None)
        self._memories.pop(group, None)

    def memory(self, seq: Sequence) -> LogitMemory:
        """The memory that a sequence drafts from and teaches."""
        key = self._key(seq)
        if key not in self._memories:
            self._memories[key] = self._new_memory()
            self._trim(0)
        self._memories.move_to_end(key)
        return self._memories[key]

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        grower = self._drawn if self._draws(seq) else self._best
        return grow([seq], [plan], [dice], Recall(self), grower)[0]

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        return [self._propose(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            nodes = step.visited(i)
            if nodes:
                before = len(seq.tokens) - len(step.emitted[i])
                self._learn(seq, before, step.trees[i], nodes, step.laws[i])

    def memory_report(self) -> dict[str, int]:
        return {"logit memory": sum(memory.nbytes for memory in self._memories.values())}

    def temper(self, seq: Sequence) -> Temper:
        """How the memory's probabilities become this sequence's q."""
        s = seq.sampling
        if s.is_greedy or not self.stores_model:
            return NEUTRAL
        return Temper(1.0 / s.temperature, int(s.top_k), float(s.top_p), float(s.min_p))

    def _propose(self, seq: Sequence, plan: Plan) -> Tree:
        if plan.is_empty:
            return EMPTY
        memory, temper = self.memory(seq), self.temper(seq)
        shape, most = self._shape(plan.nodes)
        if not self._draws(seq):
            return memory.draft(seq.tokens, shape, plan.depth, temper)[0]
        if not isinstance(seq.dice, SeededDice):
            return self.propose_one(seq, plan, seq.dice)
        uniforms = seq.dice.peek(most)
        tree, used = memory.draft(seq.tokens, shape, plan.depth, temper, uniforms)
        seq.dice.skip(used)
        return tree

    def _draws(self, seq: Sequence) -> bool:
        return self.stochastic and not seq.sampling.is_greedy

    def _shape(self, nodes: int) -> tuple[Shape, int]:
        """The places of a tree of `nodes` nodes, and the most uniforms that it can use."""
        if nodes not in self._shapes:
            shape = self.template.first(nodes)
            self._shapes[nodes] = shape, int(np.count_nonzero(shape.widths)) * self.entries
        return self._shapes[nodes]

    def _learn(
        self, seq: Sequence, before: int, tree: Tree, visited: list[int], laws: Laws
    ) -> None:
        """Adds the laws at `visited` (and, from the tree, everywhere) to the sequence's memory."""
        memory = self.memory(seq)
        nodes = visited
        if self.update_from == "tree":
            nodes = [*visited, *sorted(set(range(-1, len(tree))) - set(visited))]
        ids = np.empty((len(nodes), self.entries), np.int32)
        probs = np.empty((len(nodes), self.entries), np.float32)
        is_model = self.stores_model or seq.sampling.is_greedy
        for i, node in enumerate(nodes):
            select_top(laws.model_probs(node) if is_model else laws[node], ids[i], probs[i])
        growth = memory.growth(len(nodes) * len(memory.lengths))
        if growth:
            self._trim(growth)
        memory.learn(
            memory.context(seq.tokens[max(0, before - memory.longest) : before]),
            tree,
            np.array(nodes, dtype=np.int32),
            ids,
            probs,
            is_once=self.update_from == "tree",
        )

    def _trim(self, growth: int) -> None:
        """Makes room for `growth` bytes: idle memories go first, the least recently used first."""
        held = sum(memory.nbytes for memory in self._memories.values())
        for key in list(self._memories)[:-1]:
            if held + growth <= self.budget:
                break
            if key not in self._members:
                held -= self._memories.pop(key).nbytes
        for memory in self._memories.values():
            memory.budget = self.budget - held + memory.nbytes

    def _new_memory(self) -> LogitMemory:
        return LogitMemory(context=self.context, entries=self.entries, budget=self.budget)

    def _key(self, seq: Sequence) -> Hashable:
        """Who shares: everybody, a group, or nobody."""
        if self.scope == "global":
            return "global"
        return seq if self.scope == "request" or seq.group is None else seq.group


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


def _as_template(template: Template | FilePath | str | None) -> Template:
    if template is None:
        return DEFAULT
    return template if isinstance(template, Template) else Template.load(FilePath(template))
