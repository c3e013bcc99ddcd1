"""Bounded threads that turn requests into jobs: large texts and chats never delay small ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forerun.serving.limits import SMALL_BODY_BYTES

T = TypeVar("T")
GRAMMAR = "grammar"
LANES = {"small": 2, "chat": 2, "large": 1, GRAMMAR: 2}  # number of threads


class Lanes:
    """A thread pool for each kind of request; requests without a free thread wait in order."""

    def __init__(self) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, f"forerun-{name}") for name, count in LANES.items()
        }

    async def run(self, size: int, is_chat: bool, work: Callable[[], T]) -> T:
        """The result of `work` for a body of `size` bytes."""
        name = "large" if size > SMALL_BODY_BYTES else "chat" if is_chat else "small"
        return await self.run_in(name, work)

    async def run_in(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work` in the threads of this name."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[name], work)

    def close(self) -> None:
        """Drops work that has not begun."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
