"""The records that cross module borders. Everything else is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.tree import Proposal, Tree
from forerun.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forerun.core.dice import Dice
    from forerun.core.logits import Laws
    from forerun.core.sampling import Sampling


FLOAT32 = np.dtype(np.float32)


@dataclass(eq=False)
class Sequence:
    """One trajectory: its tokens, its randomness, what the user asked of it."""

    tokens: list[int]  # prompt and generated so far
    num_prompt: int
    sampling: Sampling
    dice: Dice
    limit: int  # most tokens that may be generated: max_new_tokens, or less where the context ends
    group: Hashable = None  # trajectories of one prompt share a group
    index: int = 0  # trajectory number within the group
    tenant: str = ""  # owner of the text: nothing learned from it may reach another tenant
    finish: str | None = None  # "stop", "length", "cancelled"; None while it runs
    end: int | None = None  # where a stop string cut the tokens off, if one did
    states: tuple[Any, ...] = ()  # one per shaper of the engine
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per generated token
    # state of parts, by the part or (part, name); it ends with the sequence
    scratch: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def generated(self) -> list[int]:
        """What counts as output: up to the stop string, if one was met."""
        return self.tokens[self.num_prompt : self.end]

    @property
    def num_generated(self) -> int:
        """Tokens generated, those that a stop string cut off counted."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """How many tokens may still be generated."""
        return self.limit + self.num_prompt - len(self.tokens)


def never(q: Proposal, token: int) -> bool:
    """The default of `Plan.stop`."""
    return False


@dataclass(frozen=True)
class Plan:
    """How much to draft for one sequence in one step."""

    nodes: int = 8  # largest tree, the root not counted; 0 is plain decoding
    depth: int = 16  # longest path
    stop: Callable[[Proposal, int], bool] = never  # asked after a token is kept, never to drop it
    least: float = 0.0  # smallest chance of acceptance worth a node; for growers that know chances
    learns: bool = True  # whether the drafter is shown this step even if it drafts nothing

    @cached_property
    def is_empty(self) -> bool:
        return self.nodes <= 0 or self.depth <= 0

    def sized(self, nodes: int) -> Plan:
        """The plan with another number of nodes."""
        return Plan(nodes, self.depth, self.stop, self.least, self.learns)

    def within(self, depth: int) -> Plan:
        """The plan with at most `depth` levels."""
        if self.depth <= depth:
            return self
        return Plan(self.nodes, max(depth, 0), self.stop, self.least, self.learns)


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Rows of the tokens from `start` up to the one before the root; a field is None unless asked.

    m tokens: logits [m, V], hidden [m, d] after the final norm, taps: layer -> [m, d], embeddings
    [m, d].
    """

    start: int
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    taps: dict[int, torch.Tensor] | None = None
    embeddings: torch.Tensor | None = None


class Rows:
    """What one forward pass returns for one sequence; row 0 is the root, row i + 1 is node i.

    logits [n + 1, V]: an array where NumPy can read them in place, else a tensor. The others are
    None unless `ForwardBatch.needs` names them:
        hidden      [n + 1, d], after the final norm
        taps        layer -> [n + 1, d], residual stream after that layer (0 is the first layer)
        attention   layer -> [heads, queries, cells], softmax weights of `attention_queries`
        embeddings  [n + 1, d], rows of the input embedding matrix
        prompt      `PromptRows`, where `ForwardBatch.prompt_rows` asks for them
        probes      logits [k, V] of nodes that the verifier appended
    lead: the sequence of the pass that these rows were computed for, if it has the same text.
    """

    lead: int | None = None

    def __init__(
        self,
        logits: torch.Tensor | np.ndarray,
        hidden: torch.Tensor | None = None,
        probes: torch.Tensor | np.ndarray | None = None,
        *,
        taps: dict[int, torch.Tensor] | None = None,
        attention: dict[int, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
        prompt: PromptRows | None = None,
    ) -> None:
        self.hidden, self._given, self._probes = hidden, logits, probes
        self.taps, self.attention, self.embeddings = taps, attention, embeddings
        self.prompt = prompt
        # whether the logits lie on an accelerator
        self.is_away = not isinstance(logits, np.ndarray) and not logits.is_cpu

    @cached_property
    def logits(self) -> torch.Tensor:
        """[n + 1, V]."""
        import torch

        return torch.as_tensor(self._given)

    @property
    def probes(self) -> torch.Tensor | None:
        """[k, V]."""
        import torch

        return None if self._probes is None else torch.as_tensor(self._probes)

    @property
    def contiguous(self) -> np.ndarray | None:
        """The logits if NumPy reads them in place, as float32 without gaps; else None."""
        given = self._given
        if not isinstance(given, np.ndarray) or given.dtype != FLOAT32:
            return None
        return given if given.flags.c_contiguous else None

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return self._given.nbytes

    def split(self, nodes: int) -> Rows:
        """The rows of the root and of `nodes` nodes; what comes after them are probes."""
        stop = nodes + 1
        if len(self._given) <= stop:
            return self
        taps = None if self.taps is None else {i: x[:stop] for i, x in self.taps.items()}
        return Rows(
            self._given[:stop],
            None if self.hidden is None else self.hidden[:stop],
            self._given[stop:],
            taps=taps,
            attention=self.attention,
            embeddings=None if self.embeddings is None else self.embeddings[:stop],
            prompt=self.prompt,
        )

    def row(self, node: int) -> np.ndarray:
        """Logits of `node` (-1: the root) as NumPy [V]; half precisions are widened."""
        return _wide(self._given[node + 1])

    def probe(self, i: int) -> np.ndarray:
        """Logits of the i-th appended node, as `row` gives them."""
        assert self._probes is not None, "nothing was appended"
        return _wide(self._probes[i])


def _wide(row: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(row, np.ndarray):
        return row
    if row.element_size() < 4:
        row = row.float()
    return row.detach().cpu().numpy()


@dataclass  # not frozen: that would take most of the time of making one, in every step
class Verdict:
    """Outcome of verification: accepted nodes from the top down, then one correction or bonus."""

    nodes: list[int]
    token: int
    logw: float = 0.0  # log importance weight; 0 for every exact rule

    def tokens(self, tree: Tree) -> list[int]:
        """The tokens that it adds to the sequence."""
        if not self.nodes:
            return [self.token]
        return [*map(int, map(tree.tokens.__getitem__, self.nodes)), self.token]


@dataclass
class Step:
    """What one step of the loop did; published to everything that learns or counts."""

    seqs: list[Sequence]
    plans: list[Plan]
    trees: list[Tree]
    laws: list[Laws]  # laws[i][node]: the processed law at a node of tree i
    verdicts: list[Verdict]
    emitted: list[list[int]]  # tokens appended per sequence, after cutting at a stop
    times: dict[str, float] = field(default_factory=dict)  # seconds spent: draft, forward, verify
    clock: float = 0.0  # perf_counter when verification ended
    starts: Many[int] = ()  # tokens of each sequence before the step, if known
    leads: Many[int] = ()  # of each sequence the one whose rows it took, if any took another's

    @property
    def num_common(self) -> int:
        """Sequences that took the rows of others."""
        return len(self.leads) - len(set(self.leads))

    @property
    def num_nodes(self) -> int:
        """Nodes that were computed; those of a tree that several have count once."""
        sizes = [len(tree.tokens) for tree in self.trees]
        if not self.leads:
            return sum(sizes)
        largest: dict[int, int] = {}
        for lead, size in zip(self.leads, sizes, strict=True):
            largest[lead] = max(largest.get(lead, 0), size)
        return sum(largest.values())

    def start(self, i: int) -> int:
        """How many tokens sequence i had before the step."""
        return self.starts[i] if self.starts else len(self.seqs[i].tokens) - len(self.emitted[i])

    def visited(self, i: int) -> list[int]:
        """Nodes of tree i that an emitted token follows, one per token; -1 is the root."""
        return [-1, *self.verdicts[i].nodes][: len(self.emitted[i])]

    def of(self, rows: Many[int]) -> Step:
        """The same as if only some of its sequences had taken part, each with rows of its own."""
        lists = ("seqs", "plans", "trees", "laws", "verdicts", "emitted")
        some: dict[str, Any] = {name: [getattr(self, name)[i] for i in rows] for name in lists}
        some["starts"] = [self.start(i) for i in rows]
        return replace(self, leads=(), **some)


KNOWN = 1024  # rows for which a cost keeps its seconds


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: of its pass at some numbers of rows, rising, and of what comes beside it.

    Between the rows and beyond the last there are lines.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]  # of a pass over one sequence
    per_step: float = 0.0  # beside the pass, whatever is drafted
    per_seq: float = 0.0
    per_draft: float = 0.0  # for each sequence that drafts and learns, its rows not counted
    drafting: float = 0.0  # once more where any of them drafts
    per_look: float = 0.0  # for each sequence of which the drafter knows nothing, though asked
    looking: float = 0.0  # once more where that is so and nobody drafts

    def at(self, rows: float | np.ndarray) -> np.ndarray:
        """Seconds of a pass over so many rows of one sequence."""
        within = np.interp(rows, self.rows, self.seconds)
        return within + np.maximum(np.subtract(rows, self.rows[-1]), 0) * self._last

    def whole(self, rows: int) -> float:
        """The same for one number of rows, looked up."""
        return self._known[rows] if rows < KNOWN else float(self.at(rows))

    def aside(self, seqs: float, drafts: float, looks: float = 0) -> float:
        """Seconds of a step beside its pass.

        Of so many sequences `drafts` draft, on average, and `looks` were looked up in vain.
        """
        each = self.per_seq * seqs + self.per_draft * drafts
        drafting = self.drafting * min(drafts, 1.0)
        if looks:
            drafting = max(drafting + self.per_look * looks, self.vain(looks))
        return self.per_step + each + drafting

    def drafted(self, times: float) -> Cost:
        """The same with a drafter that costs so many times as much."""
        names = ("per_draft", "drafting", "per_look", "looking")
        return replace(self, **{name: times * getattr(self, name) for name in names})

    def vain(self, looks: float) -> float:
        """Seconds of so many looks that find nothing in one step."""
        return self.looking * min(looks, 1.0) + self.per_look * looks

    @cached_property
    def _known(self) -> list[float]:
        return _known(self.rows, self.seconds)

    @property
    def _last(self) -> float:
        (a, b), (x, y) = self.rows[-2:], self.seconds[-2:]
        return (y - x) / (b - a)


@lru_cache(maxsize=64)
def _known(rows: tuple[int, ...], seconds: tuple[float, ...]) -> list[float]:
    """Seconds of passes over 0, 1, 2, ... rows; one list for a curve, whoever drafts beside it."""
    return Cost(rows, seconds).at(np.arange(KNOWN)).tolist()


class Lent(int):
    """Bytes that several parts report because all use them; `Model` counts a `key` once."""

    def __new__(cls, size: int, key: Hashable) -> Lent:
        made = super().__new__(cls, size)
        made.key = key
        return made

    # for copies, as records of a run make them
    def __getnewargs__(self) -> tuple[int, Hashable]:  # type: ignore[override]
        return int(self), self.key

    key: Hashable


@dataclass(frozen=True)
class Snapshot:
    """What a part has learned, as arrays and plain values: what is saved, restored and merged."""

    kind: str  # registered name of who can read the arrays
    arrays: dict[str, np.ndarray] = field(repr=False)
    settings: dict[str, Any]  # JSON; snapshots that differ in one do not fit together
    counts: dict[str, int]  # what it was learned from and what it holds; "tokens" is always there

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def expect(self, kind: str) -> None:
        """Raises ConfigError unless it is of a kind."""
        if self.kind != kind:
            raise ConfigError(
                f"expected a memory of {kind}, got one of {self.kind}; use drafter {self.kind}, or "
                "another memory"
            )

    def check(self, settings: dict[str, Any]) -> None:
        """Raises ConfigError unless it was made with these settings."""
        for name, wanted in settings.items():
            found = self.settings.get(name)
            if found != wanted:
                raise ConfigError(
                    f"expected a memory of {self.kind} with {name}={written(wanted)}, got one "
                    f"with {name}={written(found)}; use {self.kind}:{name}={written(found)}, or "
                    "another memory"
                )


def written(value: Any) -> str:
    """As users write it: lists with +."""
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
