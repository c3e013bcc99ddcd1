"""The roles that methods play. A part declares what it needs; the engine honours or refuses it.

Randomness is always an argument (`dice`), so that tests can enumerate it. What only some drafters
have, saved state and costs, is in `mixins.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Cost, Plan, Rows, Sequence, Step, Verdict
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.errors import ConfigError
from forerun.utils.locks import FairLock

if TYPE_CHECKING:
    import torch

    from forerun.core.dice import Dice
    from forerun.core.logits import Laws
    from forerun.core.sampling import Sampling

Path = tuple[int, ...]  # tokens below the root
Growth = Generator[list[Path], list[Proposal | None], Tree]


class Target(ABC):
    """The model whose law is kept. State follows tokens: caches keep the common prefix."""

    vocab_size: int
    context: int  # longest sequence, in tokens
    shape: str = ""  # all that a pass's time hangs on, beside the machine; empty: not known
    curve: Cost | None = None  # of its passes alone, once they were measured
    cost: Cost | None = None  # of steps, likewise
    is_async = False  # whether a device computes between `launch` and `collect`
    is_slow_at_first = False  # whether the first pass of a shape is slower than later ones
    gives: frozenset[str] = frozenset({"hidden", "probes"})  # see `ForwardBatch.kinds`

    turns: FairLock  # held for a step, and by all else that uses it, its twins or their drafters

    def __new__(cls, *_: Any, **__: Any) -> Self:
        found = super().__new__(cls)
        found.turns = FairLock()  # a copy's place is taken by the original's, which it shares
        return found

    def warm_up(self) -> None:
        """Compiles what it runs."""

    def twin(self) -> Target:
        """The same model, which holds no sequence yet. Raises ConfigError if there can be none."""
        raise ConfigError(f"there can be no second target {name_of(self)!r} on the same weights")

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> list[Rows]:
        """Rows for the root and every node of each tree, in one pass over the batch.

        Raises ConfigError for what `gives` does not name.
        """

    def launch(self, batch: ForwardBatch) -> list[Rows]:
        """Starts a forward pass, as `forward`; its rows are valid after `collect`."""
        return self.forward(batch)

    def collect(self) -> None:
        """Blocks until the rows of the last `launch` are valid."""

    @abstractmethod
    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Keeps the state of the accepted paths and drops the rest."""

    def update_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes new weights between two steps; running sequences are computed again.

        state: tensors by their names in the Hugging Face checkpoint; parts that it leaves out stay.
        Raises ModelError for an unknown name or a wrong shape, before any weight has changed.
        """
        raise ConfigError(
            f"target {name_of(self)!r} cannot take new weights; load it from a model folder"
        )

    def release(self, seq: Sequence) -> None:
        """The sequence has ended; its state may be reused."""

    @property
    def num_held(self) -> int:
        """Sequences that it holds now."""
        return 0

    def check_room(self, seqs: int, tokens: int) -> int:
        """Bytes that so many sequences of so many tokens will take beside those that it holds.

        Raises CapacityError if they cannot be held.
        """
        return 0

    def reused(self, seq: Sequence) -> int:
        """How many of its tokens were held already, from others, when it joined."""
        return 0


class Source(ABC):
    """A next-token distribution given a path: what a drafter knows."""

    @abstractmethod
    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        """q after seq.tokens + path for each request; None where the source knows nothing."""


class Grower(ABC):
    """How a tree grows out of a source. The only code that draws, hence the only that labels.

    `grow` is a generator: it yields the paths whose q it wants and is sent the proposals, so one
    scalar text serves a whole batch. Laws that it keeps: label at the draw; stop after a doubtful
    token, never drop it; prune or reorder POINT nodes only, or before drawing.
    """

    labels: frozenset[str]  # subset of {"point", "iid", "swor"}

    @abstractmethod
    def grow(self, plan: Plan, dice: Dice) -> Growth:
        """Grows one tree of at most plan.nodes nodes and plan.depth levels."""


class Drafter:
    """Proposes a draft tree per sequence. The default proposes nothing: plain decoding.

    labels: how its tokens are found, of "point", "iid", "swor". needs: outputs of the forward pass
    that it reads; with any it is shown every step, also those in which it did not draft.
    """

    labels: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    name: str = ""  # in statistics; empty: that of its module
    parts: Many[Drafter] = ()  # drafters that it is made of
    can_observe_late: bool = False  # whether a step may be shown during the next forward pass
    num_top_logits: int = 0  # top logits per row that it learns from; 0: whole rows

    def bind(self, target: Target) -> None:
        """Learns the target and compiles its kernels. Raises ConfigError if they do not fit."""

    def start(self, seq: Sequence) -> None:
        """A sequence joins."""

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        """One tree per sequence, within its plan; a sequence's draws come from its own dice."""
        return [EMPTY] * len(seqs)

    def observe(self, step: Step) -> None:
        """Learns from a finished step."""

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""

    def memory_report(self) -> dict[str, int]:
        """Bytes held, by part."""
        return {}


def name_of(part: object) -> str:
    """What users call a part: its own name, or that of its module."""
    return (part.name if isinstance(part, Drafter) else "") or _module(type(part))


def _module(cls: type) -> str:
    name = cls.__module__.rpartition(".")[2]
    return cls.__name__ if name == "__main__" else name  # of a script or notebook


class Verifier(ABC):
    """Turns a tree and the target's laws into accepted nodes and one more token.

    Lossless law: whatever the tree, the emitted tokens follow the target's processed law.
    """

    judges: frozenset[str] = frozenset({"point", "iid", "swor"})
    needs: frozenset[str] = frozenset()
    lossless: bool = True

    def bind(self, target: Target) -> None:
        """Learns the target. Raises ConfigError if it cannot."""

    def probe(self, tree: Tree, room: int) -> Tree:
        """The tree, perhaps with nodes behind its own that are never emitted.

        Asked if `needs` names "probes". room: how many levels below the root the context has left.
        Their rows come in the same pass; `verify` and all listeners see the tree as drafted, with
        theirs as `laws.rows.probes`.
        """
        return tree

    @abstractmethod
    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        """Walks the tree; laws[node] is the processed law [V] at a node, -1 the root."""

    def verify_all(self, trees: Many[Tree], laws: Many[Laws], dice: Many[Dice]) -> list[Verdict]:
        """The verdicts of a batch; must equal `verify` for each."""
        return [self.verify(*one) for one in zip(trees, laws, dice, strict=True)]

    def warm_up(self) -> None:
        """Compiles what it runs."""

    def check(self, sampling: Sampling) -> None:
        """Raises ConfigError if this rule cannot serve these sampling parameters."""


class Controller(ABC):
    """Decides how much to draft."""

    def bind(self, target: Target, drafter: Drafter) -> None:
        """Learns what its plans will cost."""

    @abstractmethod
    def plan(self, seq: Sequence) -> Plan:
        """The plan of the next step of one sequence."""

    def observe(self, step: Step) -> None:
        """Learns from a finished step."""

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""


class Shaper(ABC):
    """Changes the target's law: sampling parameters, grammars, style. Applied at every tree node.

    States are values: `advance` returns a new one and leaves the old one valid, because sibling
    nodes share their parent's state.
    """

    def start(self, seq: Sequence) -> Any:
        """State after all that it holds, which may be more than its prompt: steps of a search.

        None: this shaper leaves the sequence alone.
        """
        return ()

    def advance(self, state: Any, token: int) -> Any:
        """State after one more token."""
        return state

    @abstractmethod
    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        """Shaped logits [V]; must not write into its argument."""

    def allows(self, state: Any, token: int) -> bool:
        """Whether `token` keeps a positive probability."""
        return True
