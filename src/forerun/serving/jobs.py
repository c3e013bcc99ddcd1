"""A request inside the server, and the events that the engine thread sends back."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from forerun.constraints._request import Report
from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.serving.errors import ApiError
from forerun.serving.structured.fields import Wanted
from forerun.serving.traces import TraceUpdate

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """New text of one choice, which no stop string can take back, and its tokens."""

    choice: int
    text: str
    tokens: list[int]
    begins: list[int]  # offset of each token's text
    logprobs: list[dict[int, float]]  # of each token, if requested
    finish: str | None = None  # set on the last piece of a choice
    trace: TraceUpdate | None = None  # if requested
    token_texts: list[str] = field(default_factory=list)  # of each token; joined, the text


@dataclass
class TokenCounts:
    """Token counts of a request."""

    prompt: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache
    completion: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


@dataclass(frozen=True)
class End:
    """The last event of a successful request."""

    count: TokenCounts
    stats: list[Stats]  # of each choice
    methods: list[str]  # drafting method of each choice
    reports: list[Report | None]  # of the constraint of each choice


Event = Piece | End | ApiError


@dataclass(eq=False)
class Job:
    """One request: prompts, each sampled `sampling.n` times; choice i * n + k is sample k of i."""

    prompts: list[list[int]]
    sampling: Sampling
    seed: int
    method: str
    tenant: str
    cache_tenant: str | None = None  # owner of its KV cells; None: `tenant`
    is_seeded: bool = False  # the client gave the seed, so the output must be reproducible
    nodes: int | None = None  # maximum draft tree of the request
    constraints: tuple[str, ...] = ()  # names of the operator's constraints
    wanted: Wanted | None = None  # the request's own constraint, not compiled yet
    wanted_parts: list[Wanted] = field(default_factory=list)  # what it consists of
    has_tools: bool = False  # the answer may hold tool calls
    prediction: list[int] = field(default_factory=list)
    streams: bool = False  # the client wants pieces as they come
    traces: bool = False  # the client wants a trace
    arrived: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=lambda: next(_numbers))
    is_over: bool = False  # finished or dropped: none of its sequences may join
    mailbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        if self.cache_tenant is None:
            self.cache_tenant = self.tenant

    def memory_tenant(self, prompt: int) -> str:
        """The tenant under which drafters learn; separate for each prompt of a seeded request."""
        return f"{self.tenant}\0{self.number}.{prompt}" if self.is_seeded else self.tenant

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n
