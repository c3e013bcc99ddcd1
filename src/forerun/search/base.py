"""The Search role: a way to spend samples on one answer to a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from forerun import registry

if TYPE_CHECKING:
    from forerun.api import Model


class Searched(Protocol):
    """What a search found for one prompt."""

    @property
    def text(self) -> str:
        """The chosen text."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...

    def shown(self) -> str:
        """What people read on standard output."""
        ...

    def remarks(self, seconds: float) -> list[str]:
        """What people read about it, a line each; seconds: how long the search took."""
        ...


class Search(ABC):
    """A search method. Its options are the keyword arguments of its constructor."""

    draws: ClassVar[bool] = True  # samples, with drafts; else `run` takes max_new_tokens alone
    num_tokens: ClassVar[int] = 512  # default of max_new_tokens
    spellings: ClassVar[Mapping[str, str]] = {}  # option -> another name on the command line
    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # option -> its value from there
    n: int = 1  # samples that it holds at a time

    def check_model(self, name: str) -> None:
        """Raises ConfigError where a model of this name needs other options."""

    @abstractmethod
    def run(self, model: Model, prompt: str | Many[int], **options: Any) -> Searched:
        """Searches for one prompt. options: of `Model.run`, and fields of Sampling."""


def divided(cls: type[Search], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a search's constructor, and those of its `run`."""
    known = registry.options(cls)
    own = {name: value for name, value in options.items() if name in known}
    return own, {name: value for name, value in options.items() if name not in known}
