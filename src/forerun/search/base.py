"""The Search role: a method that samples several texts and chooses one answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from forerun import registry

if TYPE_CHECKING:
    from forerun.api import Model


class Searched(Protocol):
    """Result of a search for one prompt."""

    @property
    def text(self) -> str:
        """The chosen text."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...

    def shown(self) -> str:
        """Text for standard output."""
        ...

    def remarks(self, seconds: float) -> list[str]:
        """Lines about the result; seconds: duration of the search."""
        ...


class Search(ABC):
    """A search method. Its options are the keyword arguments of its constructor."""

    draws: ClassVar[bool] = True  # samples with drafts; otherwise `run` takes only max_new_tokens
    num_tokens: ClassVar[int] = 512  # default of max_new_tokens
    constraint_sampling: ClassVar[str] = "mask"  # how its samples are drawn under a constraint
    spellings: ClassVar[Mapping[str, str]] = {}  # option -> second name on the command line
    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # option -> converter of its value
    n: int = 1  # samples at once

    def check_model(self, name: str) -> None:
        """Raises ConfigError if a model of this name needs other options."""

    @abstractmethod
    def run(self, model: Model, prompt: str | Many[int], **options: Any) -> Searched:
        """Runs the search on one prompt. options: of `Model.run`, and fields of Sampling."""


def split_options(
    cls: type[Search], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a search's constructor, and options of its `run`."""
    known = registry.options(cls)
    own = {name: value for name, value in options.items() if name in known}
    return own, {name: value for name, value in options.items() if name not in known}
