"""Records that cross module borders: sequences, plans, rows, verdicts, steps, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.tree import Proposal, Tree
from forerun.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forerun.core.dice import Dice
    from forerun.core.logits import TargetProbs
    from forerun.core.roles import Shaper
    from forerun.core.sampling import Sampling


FLOAT32 = np.dtype(np.float32)


@dataclass(eq=False)
class Sequence:
    """One trajectory: tokens, sampling parameters, randomness and per-part state."""

    tokens: list[int]  # prompt and generated so far
    num_prompt: int
    sampling: Sampling
    dice: Dice
    limit: int  # max tokens to generate: max_new_tokens, or fewer if the context ends earlier
    group: Hashable = None  # trajectories of one prompt share a group
    index: int = 0  # trajectory number within the group
    tenant: str = ""  # owner of the text; state learned from it never reaches another tenant
    cache_tenant: str | None = None  # owner of its KV cells; None: `tenant`
    finish: str | None = None  # "stop", "length", "cancelled"; None while it runs
    end: int | None = None  # index at which a stop string cut the tokens
    end_ids: frozenset[int] = frozenset()  # tokens that end it
    shapers: tuple[Shaper, ...] = ()  # of the engine
    states: tuple[Any, ...] = ()  # of the shapers, after all tokens
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per generated token
    allowed_mass: list[float] = field(default_factory=list)  # per generated token, if requested
    logw: float = 0.0  # log importance weight of the text
    # state of parts, keyed by the part or (part, name); dropped with the sequence
    scratch: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def cells_owner(self) -> str:
        """The tenant that may reuse its KV cells and rows."""
        return self.tenant if self.cache_tenant is None else self.cache_tenant

    @property
    def generated(self) -> list[int]:
        """The output tokens, cut at a stop string."""
        return self.tokens[self.num_prompt : self.end]

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, including those that a stop string cut off."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.limit + self.num_prompt - len(self.tokens)


def never_stop(q: Proposal, token: int) -> bool:
    """The default of `Plan.stop`."""
    return False


@dataclass(frozen=True)
class Plan:
    """How much to draft for one sequence in one step."""

    nodes: int = 8  # max tree size without the root; 0 is plain decoding
    depth: int = 16  # max path length
    # called after a token is added; True ends the path below it and never removes the token
    stop: Callable[[Proposal, int], bool] = never_stop
    min_acceptance: float = 0.0  # of a node, for growers that estimate acceptance
    learns: bool = True  # whether the drafter observes this step even if it drafts nothing

    @cached_property
    def is_empty(self) -> bool:
        return self.nodes <= 0 or self.depth <= 0

    def sized(self, nodes: int) -> Plan:
        """The plan with `nodes` nodes."""
        return Plan(nodes, self.depth, self.stop, self.min_acceptance, self.learns)

    def within(self, depth: int) -> Plan:
        """The plan with at most `depth` levels."""
        if self.depth <= depth:
            return self
        return Plan(self.nodes, max(depth, 0), self.stop, self.min_acceptance, self.learns)


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Rows of the m tokens from `start` up to the one before the root.

    logits [m, V], hidden [m, d] after the final norm, taps: layer -> [m, d], embeddings [m, d];
    None unless requested.
    """

    start: int
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    taps: dict[int, torch.Tensor] | None = None
    embeddings: torch.Tensor | None = None


class Rows:
    """The output of one forward pass for one sequence; row 0 is the root, row i + 1 is node i.

    logits [n + 1, V]: an array if NumPy can read them in place, else a tensor. The other fields
    are None unless `ForwardBatch.needs` names them:
        hidden      [n + 1, d], after the final norm
        taps        layer -> [n + 1, d], residual stream after that layer (0 is the first layer)
        attention   layer -> [heads, queries, cells], softmax weights of `attention_queries`
        embeddings  [n + 1, d], rows of the input embedding matrix
        prompt      `PromptRows`, if `ForwardBatch.prompt_rows` requests them
        probes      logits [k, V] of nodes that the verifier appended
    lead: index of the sequence with the same text that these rows were computed for, if any.
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
        self.hidden, self._raw, self._probes = hidden, logits, probes
        self.taps, self.attention, self.embeddings = taps, attention, embeddings
        self.prompt = prompt
        # whether the logits are on an accelerator
        self.is_on_device = not isinstance(logits, np.ndarray) and not logits.is_cpu

    @cached_property
    def logits(self) -> torch.Tensor:
        """[n + 1, V]."""
        import torch

        return torch.as_tensor(self._raw)

    @property
    def probes(self) -> torch.Tensor | None:
        """[k, V]."""
        import torch

        return None if self._probes is None else torch.as_tensor(self._probes)

    @property
    def contiguous(self) -> np.ndarray | None:
        """The logits as a contiguous float32 array; None if they are stored otherwise."""
        given = self._raw
        if not isinstance(given, np.ndarray) or given.dtype != FLOAT32:
            return None
        return given if given.flags.c_contiguous else None

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return self._raw.nbytes

    def split(self, nodes: int) -> Rows:
        """The rows of the root and the first `nodes` nodes; later rows become probes."""
        stop = nodes + 1
        if len(self._raw) <= stop:
            return self
        taps = None if self.taps is None else {i: x[:stop] for i, x in self.taps.items()}
        return Rows(
            self._raw[:stop],
            None if self.hidden is None else self.hidden[:stop],
            self._raw[stop:],
            taps=taps,
            attention=self.attention,
            embeddings=None if self.embeddings is None else self.embeddings[:stop],
            prompt=self.prompt,
        )

    def row(self, node: int) -> np.ndarray:
        """Logits of `node` (-1: the root) as NumPy [V]; half precision becomes float32."""
        return _wide(self._raw[node + 1])

    def probe(self, i: int) -> np.ndarray:
        """Logits [V] of the i-th probe node."""
        assert self._probes is not None, "there are no probes"
        return _wide(self._probes[i])


def _wide(row: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(row, np.ndarray):
        return row
    if row.element_size() < 4:
        row = row.float()
    return row.detach().cpu().numpy()


@dataclass
class Verdict:
    """Result of verification: accepted nodes from the top down, and a correction or bonus token."""

    nodes: list[int]
    token: int
    logws: Many[float] = ()  # log importance weight of each token; (): all 0

    def tokens(self, tree: Tree) -> list[int]:
        """The tokens to append to the sequence."""
        return [*tree.tokens[self.nodes].tolist(), self.token] if self.nodes else [self.token]


@dataclass
class Step:
    """The result of one engine step, passed to all listeners."""

    seqs: list[Sequence]
    plans: list[Plan]
    trees: list[Tree]
    laws: list[TargetProbs]  # laws[i][node]: processed distribution at a node of tree i
    verdicts: list[Verdict]
    emitted: list[list[int]]  # tokens appended per sequence, after cutting at a stop
    times: dict[str, float] = field(default_factory=dict)  # seconds: draft, forward, verify
    clock: float = 0.0  # perf_counter when verification ended
    starts: Many[int] = ()  # number of tokens of each sequence before the step; () if unknown
    leads: Many[int] = ()  # index of the sequence that provided the rows; () if each used its own

    @property
    def num_common(self) -> int:
        """Number of sequences that used the rows of another."""
        return len(self.leads) - len(set(self.leads))

    @property
    def num_nodes(self) -> int:
        """Number of nodes computed; a tree shared by several sequences counts once."""
        sizes = [len(tree.tokens) for tree in self.trees]
        if not self.leads:
            return sum(sizes)
        largest: dict[int, int] = {}
        for lead, size in zip(self.leads, sizes, strict=True):
            largest[lead] = max(largest.get(lead, 0), size)
        return sum(largest.values())

    def start(self, i: int) -> int:
        """Number of tokens of sequence i before the step."""
        return self.starts[i] if self.starts else len(self.seqs[i].tokens) - len(self.emitted[i])

    def visited(self, i: int) -> list[int]:
        """The node of tree i that each emitted token was sampled at; -1 is the root."""
        return [-1, *self.verdicts[i].nodes][: len(self.emitted[i])]

    def select(self, rows: Many[int]) -> Step:
        """The step restricted to the sequences with indices `rows`."""
        lists = ("seqs", "plans", "trees", "laws", "verdicts", "emitted")
        some: dict[str, Any] = {name: [getattr(self, name)[i] for i in rows] for name in lists}
        some["starts"] = [self.start(i) for i in rows]
        return replace(self, leads=(), **some)


class SharedBytes(int):
    """Bytes reported by several parts that share them; `Model` counts each `key` once."""

    def __new__(cls, size: int, key: Hashable) -> SharedBytes:
        made = super().__new__(cls, size)
        made.key = key
        return made

    # for copy and pickle
    def __getnewargs__(self) -> tuple[int, Hashable]:  # type: ignore[override]
        return int(self), self.key

    key: Hashable


@dataclass(frozen=True)
class Snapshot:
    """The learned state of a part as arrays and plain values, for saving and merging."""

    kind: str  # registered name of the part
    arrays: dict[str, np.ndarray] = field(repr=False)
    settings: dict[str, Any]  # JSON; snapshots with different settings cannot be merged
    counts: dict[str, int]  # statistics; always has "tokens"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def expect(self, kind: str) -> None:
        """Raises ConfigError unless the snapshot is of this kind."""
        if self.kind != kind:
            raise ConfigError(
                f"expected a memory of {kind}, got one of {self.kind}; use drafter {self.kind}, or "
                "another memory"
            )

    def check(self, settings: dict[str, Any]) -> None:
        """Raises ConfigError unless the snapshot was made with these settings."""
        for name, wanted in settings.items():
            found = self.settings.get(name)
            if found != wanted:
                raise ConfigError(
                    f"expected a memory of {self.kind} with {name}={written(wanted)}, got one "
                    f"with {name}={written(found)}; use {self.kind}:{name}={written(found)}, or "
                    "another memory"
                )


def written(value: Any) -> str:
    """An option value as users write it: lists joined by +."""
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
