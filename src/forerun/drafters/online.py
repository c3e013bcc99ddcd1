"""A draft model per class of requests, with weights that may be replaced while requests run.

Liu et al., "Online Speculative Decoding", 2024. A router chooses the class of a request from its
prompt. A request keeps the weights that it began with: new weights go into a copy of the model that
no request uses, and later requests start on it. A draft with another tokenizer drafts as
`cross_vocab` does, with one n-gram cache for all copies. The training is in
`forerun.training.online.learner`.
Exact with a verifier that supports the grower's labels, whatever the weights are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Priced, Shared
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter, Target
from forerun.core.tree import EMPTY, Tree
from forerun.drafters._class_router import ClassRouter
from forerun.errors import ConfigError
from forerun.models.draft_link import (
    ForeignDraft,
    has_vocabulary_of,
    load_draft,
    load_foreign_draft,
)
from forerun.registry import File, GrowerName, ModelName

if TYPE_CHECKING:
    import torch

    from forerun.drafters._translation import Translation
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner

ONE_CLASS = "all"
MAX_COPIES = 2  # of a class, besides the initial weights


class Router(Protocol):
    """Chooses the class of a request."""

    classes: list[str]

    def route(self, tokens: Many[int]) -> str:
        """The class of a prompt."""
        ...


class OneClass:
    """The router without classes."""

    def __init__(self) -> None:
        self.classes = [ONE_CLASS]

    def route(self, tokens: Many[int]) -> str:
        return ONE_CLASS


class ModelCopy:
    """A copy of the draft model: its drafter, the version of its weights, requests that use it."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter  # `draft_model` or `cross_vocab`
        self.runner: ModelRunner = drafter.runner
        self.version = self.num_used = 0


class Online(Shared, Priced):
    """`model`: a folder or name, or a function that loads a runner; `grower`: a registered name.

    classes: JSON-lines file of examples with "prompt" and "class"; None: one class.
    Requests that draft from nothing learned (a seed on a server) keep the initial weights.
    A draft with another tokenizer needs grower "chain".
    """

    learns = False

    def __init__(
        self,
        *,
        model: ModelName | Callable[[], ModelRunner],
        grower: GrowerName = "chain",
        classes: File | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_seqs: int = 256,
        tokenizer: Tokenizer | None = None,
        target: Target | None = None,
    ) -> None:
        if classes is not None and tokenizer is None:
            raise ConfigError("classes need a tokenizer; make the drafter by name")
        self.model = model
        self.router: Router = OneClass()
        if classes is not None and tokenizer is not None:
            self.router = ClassRouter.read(classes, tokenizer)

        is_known = isinstance(model, str) and tokenizer is not None
        self.is_foreign = is_known and not has_vocabulary_of(tokenizer, model)  # type: ignore[arg-type]

        def load() -> ModelRunner | ForeignDraft:
            if not isinstance(model, str):
                return model()
            if self.is_foreign:
                return load_foreign_draft(model, dtype, device, max_seqs, target)
            found = load_draft(model, dtype, device, max_seqs, tokenizer, target)
            found.exits = None  # what is trained is the whole model, so all its layers draft
            return found

        def make() -> ModelCopy:
            how: dict[str, Any] = {"model": load(), "grower": grower, "tokenizer": tokenizer}
            name = "cross_vocab" if self.is_foreign else "draft_model"
            return ModelCopy(registry.make("drafter", name, **how))

        self._make = make
        self.first = make()  # the initial weights, version 0 of all classes
        self.labels = self.first.drafter.labels
        self.can_observe_late = self.first.drafter.can_observe_late
        self._copies: dict[str, list[ModelCopy]] = {}
        self._current: dict[str, ModelCopy] = {}
        self._lock = threading.Lock()  # between the start of requests and `publish`
        self._target: Target | None = None

    def bind(self, target: Target) -> None:
        self._target = target
        self.first.drafter.bind(target)

    @property
    def translation(self) -> Translation:
        """The vocabularies and n-grams of a draft with another tokenizer, once it is bound."""
        return self.first.drafter.translation

    def publish(self, kind: str, state: Mapping[str, torch.Tensor], version: int) -> bool:
        """Gives later requests of a class new weights; may be called by any thread.

        state: tensors named as in the Hugging Face checkpoint. False, and nothing changes, while
        requests use all copies of the class. Raises ModelError for tensors that do not fit.
        """
        free = self._free_copy(kind)
        if free is None:
            return False
        free.runner.update_weights(state)
        free.version = version
        with self._lock:
            self._current[kind] = free
        return True

    def class_of(self, seq: Sequence) -> str | None:
        """The class of a running request that learned weights may serve; None: any other."""
        copy = seq.scratch.get(self)
        return None if copy is None or _is_isolated(seq) else seq.scratch[self, "class"]

    def version_of(self, seq: Sequence) -> int:
        """The version of the weights that a running request uses."""
        return seq.scratch[self].version

    def versions(self) -> dict[str, int]:
        """The version that new requests of each class get."""
        return {kind: self._latest(kind).version for kind in self.router.classes}

    def start(self, seq: Sequence) -> None:
        kind = self.router.route(seq.tokens[: seq.num_prompt])
        with self._lock:
            copy = self.first if _is_isolated(seq) else self._latest(kind)
            copy.num_used += 1
        seq.scratch[self], seq.scratch[self, "class"] = copy, kind
        copy.drafter.start(seq)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        for copy, rows in self._by_copy(seqs).items():
            own = [seqs[i] for i in rows], [plans[i] for i in rows], [dice[i] for i in rows]
            for i, tree in zip(rows, copy.drafter.propose(*own), strict=True):
                trees[i] = tree
        return trees

    def observe(self, step: Step) -> None:
        self.first.drafter.observe(step)

    def finish(self, seq: Sequence) -> None:
        copy = seq.scratch.pop(self, None)
        if copy is not None:
            copy.drafter.finish(seq)
            copy.num_used -= 1  # last: from here on `publish` may write its weights

    def forget(self, group: Hashable) -> None:
        for copy in self._all():
            copy.drafter.forget(group)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return self.first.drafter.check_room(seqs, tokens, taken)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return self.first.drafter.draft_seconds(nodes, num)

    def catch_up_seconds(self, seq: Sequence) -> float:
        copy = seq.scratch.get(self, self.first)
        return copy.drafter.catch_up_seconds(seq)

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        return self.first.drafter.acceptance_prior(num)

    def memory_report(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for copy in self._all():
            for part, size in copy.drafter.memory_report().items():
                found[part] = found.get(part, 0) + size
        return found

    def _latest(self, kind: str) -> ModelCopy:
        return self._current.get(kind, self.first)

    def _free_copy(self, kind: str) -> ModelCopy | None:
        """A copy that no request uses and none will start on."""
        copies = self._copies.setdefault(kind, [])
        with self._lock:
            for copy in copies:
                if copy is not self._latest(kind) and not copy.num_used:
                    return copy
        if len(copies) == MAX_COPIES:
            return None
        made = self._make()
        if self.is_foreign:
            made.drafter.translation = self.translation
        elif self._target is not None:
            made.drafter.source.fit(self._target.vocab_size)
        copies.append(made)
        return made

    def _all(self) -> list[ModelCopy]:
        return [self.first, *(copy for copies in list(self._copies.values()) for copy in copies)]

    def _by_copy(self, seqs: Many[Sequence]) -> dict[ModelCopy, list[int]]:
        """Indices of the sequences on each copy."""
        found: dict[ModelCopy, list[int]] = {}
        for i, seq in enumerate(seqs):
            if self not in seq.scratch:
                self.start(seq)
            found.setdefault(seq.scratch[self], []).append(i)
        return found


def _is_isolated(seq: Sequence) -> bool:
    """Whether a request drafts from nothing that others taught, see `Run` and `Job`."""
    return "\0" in seq.tenant


def online_parts(drafter: Drafter) -> list[Online]:
    """The drafters of this kind among a drafter and its parts."""
    from forerun.core.mixins import parts_of

    found = [getattr(part, "drafter", part) for part in parts_of(drafter)]
    return list(dict.fromkeys(part for part in found if isinstance(part, Online)))
