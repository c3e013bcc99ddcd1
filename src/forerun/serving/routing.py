"""Several drafting methods on one engine: every sequence uses the method of its request.

The target, its KV cache and the forward pass are shared, so requests of all methods run in one
batch. An engine per method would need one forward pass per method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Shared
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.roles import Controller, Drafter, Shaper, Target
from forerun.core.tree import EMPTY, Tree
from forerun.drafters.fuse import merge
from forerun.engine.safe_drafter import SafeDrafter
from forerun.growers import _merge as overlay
from forerun.serving.prediction import Prediction

PLAIN = Plan(0, learns=False)


class MethodDispatcher(Shared):
    """Drafters by name, one per sequence; a failing drafter only loses its drafts.

    A sequence with a predicted output copies it first; its method gets the remaining nodes.
    """

    def __init__(self, parts: Mapping[str, Drafter]) -> None:
        safe = {part: SafeDrafter(part) for part in parts.values()}
        self.by_name = {name: safe[part] for name, part in parts.items()}
        self.parts: tuple[SafeDrafter, ...] = tuple(safe.values())
        self.labels = frozenset().union(*(part.labels for part in self.parts))
        self.needs = frozenset().union(*(part.needs for part in self.parts))

    def assign(self, seq: Sequence, method: str, prediction: Prediction | None = None) -> None:
        """Sets the drafter of a sequence; call it before the sequence joins."""
        seq.scratch[self] = method
        if prediction is not None:
            seq.scratch[self, "prediction"] = prediction

    def method(self, seq: Sequence) -> str:
        """The name of the drafter of a sequence."""
        return seq.scratch[self]

    def prediction(self, seq: Sequence) -> Prediction | None:
        """The predicted output of a sequence, if any."""
        return seq.scratch.get((self, "prediction"))

    def failures(self, seq: Sequence) -> int:
        """Number of errors in drafting for a sequence."""
        return self._part(seq).failures(seq)

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)
        overlay.warm_up()  # merges the draft of a method with a prediction

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        copies = [self._copy(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]
        trees = [EMPTY] * len(seqs)
        for name, rows in self._by_method(seqs).items():
            own = [seqs[i] for i in rows], [copies[i][1] for i in rows], [dice[i] for i in rows]
            for i, tree in zip(rows, self.by_name[name].propose(*own), strict=True):
                trees[i] = tree
        return [
            self._merge(seq, copy, tree)
            for seq, (copy, _), tree in zip(seqs, copies, trees, strict=True)
        ]

    def read(self, seqs: Many[Sequence]) -> None:
        for name, rows in self._by_method(seqs).items():
            self.by_name[name].read([seqs[i] for i in rows])

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if (self, "copied") in seq.scratch:
                self._update_prediction(step, i)
        methods = self._by_method(step.seqs)
        for name, rows in methods.items():
            self.by_name[name].observe(step if len(methods) == 1 else step.select(rows))

    def finish(self, seq: Sequence) -> None:
        self._part(seq).finish(seq)

    def forget(self, group: Hashable) -> None:
        for part in self.parts:
            part.forget(group)

    def memory_report(self) -> dict[str, int]:
        return {
            f"{name}: {what}": size
            for part, name in {part: name for name, part in self.by_name.items()}.items()
            for what, size in part.memory_report().items()
        }

    def _part(self, seq: Sequence) -> SafeDrafter:
        return self.by_name[self.method(seq)]

    def _by_method(self, seqs: Many[Sequence]) -> dict[str, list[int]]:
        """Indices of the sequences of each method."""
        found: dict[str, list[int]] = {}
        for i, seq in enumerate(seqs):
            found.setdefault(self.method(seq), []).append(i)
        return found

    def _copy(self, seq: Sequence, plan: Plan) -> tuple[Tree, Plan]:
        """The draft from the prediction, and the remaining plan for the method."""
        prediction = self.prediction(seq)
        if prediction is None:
            return EMPTY, plan
        copy = prediction.draft(seq.generated, seq.num_left - 1)
        seq.scratch[self, "copied"] = len(copy)  # nodes in this step
        return copy, replace(plan, nodes=max(plan.nodes - len(copy), 0))

    def _merge(self, seq: Sequence, copy: Tree, tree: Tree) -> Tree:
        """One tree from the prediction's draft and the method's."""
        return merge([copy, tree], ("prediction", self.method(seq))) if len(copy) else tree

    def _update_prediction(self, step: Step, i: int) -> None:
        """Reports the accepted copied nodes, which come first in their tree."""
        seq = step.seqs[i]
        copied = seq.scratch.pop((self, "copied"))
        nodes = step.verdicts[i].nodes[: len(step.emitted[i])]
        seq.scratch[self, "prediction"].update_length(copied, sum(node < copied for node in nodes))


class Gate(Shaper):
    """A constraint that applies to the sequences of requests that named it."""

    def __init__(self, name: str, inner: Shaper) -> None:
        self.name, self.inner, self.forbids = name, inner, inner.forbids

    def assign(self, seq: Sequence) -> None:
        """Applies it to a sequence that has not joined yet."""
        seq.scratch[self] = True

    def start(self, seq: Sequence) -> Any:
        return self.inner.start(seq) if self in seq.scratch else None

    def advance(self, state: Any, token: int) -> Any:
        return self.inner.advance(state, token)

    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        return self.inner.logits(state, logits)

    def allows(self, state: Any, token: int) -> bool:
        return self.inner.allows(state, token)

    def mask(self, state: Any) -> np.ndarray | None:
        return self.inner.mask(state)

    def forced(self, state: Any) -> Many[int]:
        return self.inner.forced(state)


def constrain(shapers: Many[Shaper], seq: Sequence, names: Many[str]) -> None:
    """Applies the constraints of these names to a sequence that has not joined yet."""
    for shaper in shapers:
        if isinstance(shaper, Gate) and shaper.name in names:
            shaper.assign(seq)


class MethodControllers(Controller):
    """A controller for each tenant, method and tree size: acceptance rates and costs differ.

    A sequence with its own controller is planned from its own steps only, so that its drafts do not
    depend on other requests. All other sequences of a tenant and method share one controller, which
    observes the whole batch; it sees those of other tenants as sequences without drafts.
    """

    def __init__(self, spec: str, dispatcher: MethodDispatcher) -> None:
        self._spec, self._dispatcher = spec, dispatcher
        self._shared: dict[tuple[str, str, int | None], Controller] = {}
        self._target: Target | None = None

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._target = target
        for method in self._dispatcher.by_name:
            self._make(method, None)

    def assign(
        self, seqs: Many[Sequence], method: str, nodes: int | None, is_own: bool, tenant: str = ""
    ) -> None:
        """Sets the controller of these sequences of a tenant; call it before they join.

        nodes: maximum tree size. is_own: gives them their own controller.
        """
        controller = None
        if nodes != 0 and self._dispatcher.by_name[method].labels:  # else it never drafts
            args = method, nodes
            controller = self._make(*args) if is_own else self._of_tenant(tenant, *args)
        for seq in seqs:
            seq.scratch[self] = controller

    def plan(self, seq: Sequence) -> Plan:
        controller = seq.scratch[self]
        return PLAIN if controller is None else controller.plan(seq)

    def observe(self, step: Step) -> None:
        rows: dict[Controller, list[int]] = {}
        for i, seq in enumerate(step.seqs):
            controller = seq.scratch[self]
            if controller is not None:
                rows.setdefault(controller, []).append(i)
        tenants = {controller: tenant for (tenant, *_), controller in self._shared.items()}
        for controller, own in rows.items():
            if controller in tenants:
                controller.observe(_seen_by(tenants[controller], step))
            else:
                is_all = len(own) == len(step.seqs) and not step.leads
                controller.observe(step if is_all else step.select(own))

    def finish(self, seq: Sequence) -> None:
        controller = seq.scratch[self]
        if controller is not None:
            controller.finish(seq)

    def _of_tenant(self, tenant: str, method: str, nodes: int | None) -> Controller:
        key = tenant, method, nodes
        if key not in self._shared:
            self._shared[key] = self._make(method, nodes)
        return self._shared[key]

    def _make(self, method: str, nodes: int | None) -> Controller:
        size = {} if nodes is None else {"nodes": nodes}
        controller: Controller = registry.make("controller", self._spec, **size)
        assert self._target is not None, "bind comes first"
        controller.bind(self._target, self._dispatcher.by_name[method])
        return controller


def _seen_by(tenant: str, step: Step) -> Step:
    """The step, in which the sequences of other tenants drafted nothing."""
    others = {i for i, seq in enumerate(step.seqs) if _owner(seq) != tenant}
    if not others:
        return step

    def masked(parts: list[Any], plain: Callable[[Any], Any]) -> list[Any]:
        return [plain(part) if i in others else part for i, part in enumerate(parts)]

    return replace(
        step,
        plans=masked(step.plans, lambda _: PLAIN),
        trees=masked(step.trees, lambda _: EMPTY),
        verdicts=masked(step.verdicts, lambda verdict: Verdict([], verdict.token)),
        emitted=masked(step.emitted, lambda tokens: tokens[:1]),
        starts=[step.start(i) for i in range(len(step.seqs))],
    )


def _owner(seq: Sequence) -> str:
    """The tenant of a sequence; that of a seeded request has its number appended."""
    return seq.tenant.partition("\0")[0]
