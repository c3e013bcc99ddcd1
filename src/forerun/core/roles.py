"""Base classes of the parts of an engine. A part declares its needs; the engine checks them.

Randomness is always an argument (`dice`), so tests can enumerate it. Optional interfaces of
drafters are in `mixins.py`, sources and growers in `growing.py`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forerun.core.cost import Cost
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.tree import EMPTY, Tree
from forerun.errors import ConfigError
from forerun.utils.locks import FairLock

if TYPE_CHECKING:
    import torch

    from forerun.core.dice import Dice
    from forerun.core.logits import TargetProbs
    from forerun.core.sampling import Sampling
    from forerun.models.tokenizer import Tokenizer


class Target(ABC):
    """The model that defines the output distribution. Its KV cache keeps the common prefix."""

    vocab_size: int
    context: int  # max tokens of a sequence
    shape: str = ""  # cache key of pass times: model, dtype, device; empty: unknown
    cost: Cost | None = None  # measured times of passes and steps, known at the start
    refined_cost: Cost | None = None  # measured since
    between_steps: Callable[[], None] | None = None  # called after every step; measures costs
    is_async = False  # whether a device computes between `launch` and `collect`
    is_stateful = False  # whether distributions depend on state that `commit` updates
    is_slow_at_first = False  # whether the first pass of each shape compiles
    gives: frozenset[str] = frozenset({"hidden", "probes"})  # see `ForwardBatch.kinds`

    lock: FairLock  # lock of the weights and of all targets and drafters that share them

    def __new__(cls, *_: Any, **__: Any) -> Self:
        found = super().__new__(cls)
        found.lock = FairLock()  # a twin replaces it by the lock of its original
        return found

    def warm_up(self) -> None:
        """Compiles its kernels."""

    def twin(self) -> Target:
        """A second target on the same weights, with an empty cache. Raises ConfigError if it
        cannot be made."""
        raise ConfigError(f"target {name_of(self)!r} cannot share its weights with a second one")

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> list[Rows]:
        """Rows of the root and every node of each tree, in one pass over the batch.

        Raises ConfigError for a need that `gives` lacks.
        """

    def launch(self, batch: ForwardBatch) -> list[Rows]:
        """Starts `forward`; the rows are valid after `collect`."""
        return self.forward(batch)

    def collect(self) -> None:
        """Blocks until the rows of the last `launch` are valid."""

    @abstractmethod
    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Keeps the KV cells of the accepted paths and drops the rest."""

    def update_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces weights between two steps; the KV cache is computed again.

        state: tensors named as in the Hugging Face checkpoint; other weights stay. Raises
        ModelError for an unknown name or a wrong shape, before any weight changes.
        """
        raise ConfigError(
            f"target {name_of(self)!r} cannot take new weights; load it from a model folder"
        )

    def max_depth(self, seq: Sequence) -> int:
        """Max levels of the next draft of a sequence."""
        return 1 << 30

    def release(self, seq: Sequence) -> None:
        """The sequence has ended; its state may be reused."""

    @property
    def num_held(self) -> int:
        """Number of sequences in the cache."""
        return 0

    def check_room(self, seqs: int, tokens: int) -> int:
        """Bytes that `seqs` more sequences of `tokens` tokens need.

        Raises CapacityError if they do not fit into memory.
        """
        return 0

    def reused(self, seq: Sequence) -> int:
        """Number of prompt tokens that a sequence took from the cache of others."""
        return 0

    def memory_report(self) -> dict[str, int]:
        """Bytes of memory, by part."""
        return {}


class Drafter:
    """Proposes a draft tree per sequence. The default proposes nothing: plain decoding.

    labels: how tokens are drawn, a subset of "point", "iid", "swor", "lazy". needs: outputs of
    the forward pass that it reads; a drafter with needs observes every step, also those without a
    draft.
    """

    labels: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    name: str = ""  # in statistics; empty: the name of its module
    parts: Many[Drafter] = ()  # drafters that it wraps
    can_observe_late: bool = False  # whether it may observe a step during the next forward pass
    num_top_logits: int = 0  # top logits per row that it learns from; 0: whole rows

    def bind(self, target: Target) -> None:
        """Prepares for a target and compiles kernels. Raises ConfigError if they do not fit."""

    def start(self, seq: Sequence) -> None:
        """A sequence starts."""

    def read(self, seqs: Many[Sequence]) -> None:
        """Reads the texts ahead of their drafts.

        Called while an asynchronous target computes; must not run passes of the target.
        """

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        """One tree per sequence, within its plan, drawn with the sequence's own dice."""
        return [EMPTY] * len(seqs)

    def observe(self, step: Step) -> None:
        """Learns from a finished step."""

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""

    def memory_report(self) -> dict[str, int]:
        """Bytes of memory, by part."""
        return {}


def name_of(part: object) -> str:
    """The name of a part for users: its own name, or its module's."""
    if isinstance(part, Drafter) and part.name:
        return part.name
    module = type(part).__module__.rpartition(".")[2]
    return type(part).__name__ if module == "__main__" else module  # a script or notebook


class Verifier(ABC):
    """Decides, from a tree and the target's distributions, the accepted nodes and one more token.

    A lossless verifier emits tokens with the target's processed distribution, for any tree.
    """

    judges: frozenset[str] = frozenset({"point", "iid", "swor"})
    needs: frozenset[str] = frozenset()
    lossless: bool = True

    def bind(self, target: Target) -> None:
        """Prepares for a target. Raises ConfigError if they do not fit."""

    def probe(self, tree: Tree, room: int) -> Tree:
        """The tree, with probe nodes appended if the rule needs them; they are never emitted.

        Called if `needs` names "probes". room: levels below the root that the context still has.
        Probes are computed in the same pass; `verify` gets their rows as `laws.rows.probes`.
        """
        return tree

    @abstractmethod
    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        """The verdict on a tree; laws[node] is the processed distribution [V], -1 the root."""

    def verify_all(
        self, trees: Many[Tree], laws: Many[TargetProbs], dice: Many[Dice]
    ) -> list[Verdict]:
        """The verdicts of a batch; must equal `verify` for each."""
        return [self.verify(*one) for one in zip(trees, laws, dice, strict=True)]

    def warm_up(self) -> None:
        """Compiles its kernels."""

    def check(self, sampling: Sampling) -> None:
        """Raises ConfigError for sampling parameters that this rule does not support."""


class Controller(ABC):
    """Decides how much to draft."""

    def bind(self, target: Target, drafter: Drafter) -> None:
        """Prepares for a target and a drafter; may measure their costs."""

    @abstractmethod
    def plan(self, seq: Sequence) -> Plan:
        """The plan of the next step of one sequence."""

    def observe(self, step: Step) -> None:
        """Learns from a finished step."""

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""


class Shaper(ABC):
    """Changes the target's distribution at every tree node: sampling parameters, grammars, style.

    States are immutable: `advance` returns a new state, because siblings share their parent's.
    forbids: whether drafters should ask `allows` before they draft a token.
    """

    forbids: bool = False
    has_tensors: bool = False  # whether it defines `tensor_logits`

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Shaper:
        """The shaper for a model. Raises ConfigError if they do not fit."""
        return self

    def start(self, seq: Sequence) -> Any:
        """The state after all tokens of a sequence; None if the shaper does not apply to it."""
        return ()

    def advance(self, state: Any, token: int) -> Any:
        """State after one more token."""
        return state

    @abstractmethod
    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        """Shaped logits [V]; must not write into its argument."""

    def tensor_logits(self, states: Many[Any], logits: torch.Tensor) -> torch.Tensor:
        """`logits` of rows [R, V] with a state each, on their device; must not wait for it."""
        raise NotImplementedError(f"{type(self).__name__} works on the host")

    def allows(self, state: Any, token: int) -> bool:
        """Whether `token` keeps a positive probability."""
        return True

    def key(self) -> str:
        """A text that tells it from shapers with another effect, in any process.

        The default is random, and kept by copies.
        """
        random = f"{type(self).__name__} {secrets.token_hex(8)}"
        return vars(self).setdefault("_key", random)

    def forced(self, state: Any) -> Many[int]:
        """Tokens that the only possible text begins with, if it is known."""
        return ()

    def report(self, seq: Sequence, text: str) -> Any:
        """What to report on a finished sequence and its text; None: nothing."""
        return None

    def tests(self, state: Any) -> bool:
        """Whether tokens are drawn by tests with `allows`; `logits` then forbids nothing."""
        return False

    def mask(self, state: Any) -> np.ndarray | None:
        """The allowed tokens bool [V]; None if that needs V tests."""
        return None
