"""Many methods on one engine: every sequence drafts by the method of its own request.

The target, its cache and the pass are shared; only drafting differs. So one engine keeps all
requests in one batch, where an engine per method would pay one pass of the target for each method.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Shared
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Drafter, Target
from forerun.core.tree import EMPTY, Tree
from forerun.drafters.fuse import merge
from forerun.engine.safe_drafter import SafeDrafter
from forerun.growers import _merge as overlay
from forerun.serving.prediction import Prediction


class Router(Shared):
    """Drafters by name, one per sequence; one that fails costs its drafts only.

    A sequence with a prediction copies it first; its method gets the nodes that are left.
    """

    def __init__(self, parts: Mapping[str, Drafter]) -> None:
        safe = {part: SafeDrafter(part) for part in parts.values()}
        self.by_name = {name: safe[part] for name, part in parts.items()}
        self.parts: tuple[SafeDrafter, ...] = tuple(safe.values())
        self.labels = frozenset().union(*(part.labels for part in self.parts))
        self.needs = frozenset().union(*(part.needs for part in self.parts))

    def assign(self, seq: Sequence, method: str, prediction: Prediction | None = None) -> None:
        """Sets the drafter of a sequence; to be called before it joins."""
        seq.scratch[self] = method
        if prediction is not None:
            seq.scratch[self, "prediction"] = prediction

    def method(self, seq: Sequence) -> str:
        """The name of the drafter of a sequence."""
        return seq.scratch[self]

    def prediction(self, seq: Sequence) -> Prediction | None:
        """The place of a sequence in its predicted output."""
        return seq.scratch.get((self, "prediction"))

    def failures(self, seq: Sequence) -> int:
        """Errors that drafting for a sequence has met."""
        return self._part(seq).failures(seq)

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)
        overlay.warm_up()  # merges the draft of a method with a prediction

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        both = [self._copy(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]
        trees = [EMPTY] * len(seqs)
        for name, rows in self._by_method(seqs).items():
            own = [seqs[i] for i in rows], [both[i][1] for i in rows], [dice[i] for i in rows]
            for i, tree in zip(rows, self.by_name[name].propose(*own), strict=True):
                trees[i] = tree
        return [
            self._both(seq, copy, tree)
            for seq, (copy, _), tree in zip(seqs, both, trees, strict=True)
        ]

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if (self, "copied") in seq.scratch:
                self._judge(step, i)
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
        """What the prediction drafts, and the plan that is left for the method."""
        prediction = self.prediction(seq)
        if prediction is None:
            return EMPTY, plan
        copy = prediction.draft(seq.generated, seq.num_left - 1)
        seq.scratch[self, "copied"] = len(copy)  # nodes in this step
        return copy, replace(plan, nodes=max(plan.nodes - len(copy), 0))

    def _both(self, seq: Sequence, copy: Tree, tree: Tree) -> Tree:
        """What the prediction drafts, then what the method does."""
        return merge([copy, tree], ("prediction", self.method(seq))) if len(copy) else tree

    def _judge(self, step: Step, i: int) -> None:
        """Copied nodes come first in their tree."""
        seq = step.seqs[i]
        copied = seq.scratch.pop((self, "copied"))
        nodes = step.verdicts[i].nodes[: len(step.emitted[i])]
        seq.scratch[self, "prediction"].judge(copied, sum(node < copied for node in nodes))


class Plans(Controller):
    """A controller for each method and size: acceptance and costs differ between them.

    Sequences with a controller of their own are planned by what they themselves meet: not even
    whose rows they took counts, as that hangs on who else is there. The others share what a method
    has learned, and see the whole batch.
    """

    def __init__(self, spec: str, router: Router) -> None:
        self._spec, self._router = spec, router
        self._shared: dict[tuple[str, int | None], Controller] = {}
        self._target: Target | None = None

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._target = target
        for method in self._router.by_name:
            self._of_method(method, None)

    def assign(self, seqs: Many[Sequence], method: str, nodes: int | None, is_own: bool) -> None:
        """Sets the controller of these sequences; to be called before they join.

        nodes: largest tree.
        """
        controller = None
        if nodes != 0 and self._router.by_name[method].labels:  # else it never drafts
            make = self._make if is_own else self._of_method
            controller = make(method, nodes)
        for seq in seqs:
            seq.scratch[self] = controller

    def plan(self, seq: Sequence) -> Plan:
        controller = seq.scratch[self]
        return Plan(0, learns=False) if controller is None else controller.plan(seq)

    def observe(self, step: Step) -> None:
        rows: dict[Controller, list[int]] = {}
        for i, seq in enumerate(step.seqs):
            controller = seq.scratch[self]
            if controller is not None:
                rows.setdefault(controller, []).append(i)
        shared = set(self._shared.values())
        for controller, own in rows.items():
            is_all = controller in shared or len(own) == len(step.seqs) and not step.leads
            controller.observe(step if is_all else step.select(own))

    def finish(self, seq: Sequence) -> None:
        controller = seq.scratch[self]
        if controller is not None:
            controller.finish(seq)

    def _of_method(self, method: str, nodes: int | None) -> Controller:
        key = method, nodes
        if key not in self._shared:
            self._shared[key] = self._make(method, nodes)
        return self._shared[key]

    def _make(self, method: str, nodes: int | None) -> Controller:
        size = {} if nodes is None else {"nodes": nodes}
        controller: Controller = registry.make("controller", self._spec, **size)
        assert self._target is not None, "bind comes first"
        controller.bind(self._target, self._router.by_name[method])
        return controller
