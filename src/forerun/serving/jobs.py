"""A request on its way: what is asked for, and the events that come back from the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.serving.errors import ApiError
from forerun.serving.traces import News

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """More of one choice: text that is certain, and the tokens that made it."""

    choice: int
    text: str
    tokens: list[int]
    begins: list[int]  # where the text of each token begins
    logprobs: list[dict[int, float]]  # of each token, if asked for
    finish: str | None = None  # set on the last piece of a choice
    news: News | None = None  # how the text came, if asked for


@dataclass
class Count:
    """Tokens of a request; what a predicted output gave and what it cost."""

    prompt: int = 0
    cached: int = 0  # prompt tokens that an earlier request had computed
    completion: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


@dataclass(frozen=True)
class End:
    """The last event of a request that went well."""

    count: Count
    stats: list[Stats]  # of each choice
    methods: list[str]  # that drafted for each


Event = Piece | End | ApiError


@dataclass(eq=False)
class Job:
    """One request: prompts, each sampled `sampling.n` times; choice i * n + k is sample k of i."""

    prompts: list[list[int]]
    sampling: Sampling
    seed: int
    method: str
    tenant: str
    is_seeded: bool = False  # the client gave the seed: the same request, the same text
    nodes: int | None = None  # largest draft tree, if the client said so
    constraints: tuple[str, ...] = ()  # names of those that the client asked for
    prediction: list[int] = field(default_factory=list)
    streams: bool = False  # whether pieces are wanted as they come
    traces: bool = False  # whether it is to be told how every token came
    arrived: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=lambda: next(_numbers))
    is_over: bool = False  # it has ended, or was dropped: no sequence of it may join any more
    mailbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def taught(self, prompt: int) -> str:
        """The tenant that a prompt teaches; one of its own if the text is to be the same again."""
        return f"{self.tenant}\0{self.number}.{prompt}" if self.is_seeded else self.tenant

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n
