"""Base class of searches over steps: options, and the search from prompt to answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.assets import is_embedded
from forerun.core.roles import name_of
from forerun.errors import ConfigError
from forerun.search._answers import Parse, as_parser
from forerun.search._scorers import NAMES, AnyScorer, as_scorer
from forerun.search._session import Session, as_delimiters
from forerun.search._steps import Found, Options, grow
from forerun.search.base import Search

if TYPE_CHECKING:
    from forerun.api import Model

SENTENCES = (".", "\n")  # step delimiters of the embedded models: a sentence is a computation


class StepwiseSearch(Search):
    """A search over steps; subclasses set the number of trees.

    scorer: ranks texts: arithmetic (default of the embedded models), likelihood, reward:MODEL (a
    Hugging Face reward model), MODULE:FUNCTION, or a callable on (prompt, text so far). n: number
    of branches. width: continuations of every branch; divides n. step_end: text that ends a step;
    default: a line break, for the embedded models also a full stop. step_tokens: most tokens of a
    step. max_steps: most steps of a branch. aggregate: score of a branch from its steps: last, min,
    mean or product. select: choice among finished branches: weighted (votes), majority or score.
    parse: regular expression of the final answer (last match, group 1), or a callable on a text.
    """

    spellings = {"parse": "--answer"}
    readers = {"step_end": lambda texts: tuple(text.replace("\\n", "\n") for text in texts)}

    def __init__(
        self,
        *,
        n: int = 16,
        width: int = 4,
        scorer: AnyScorer | str | None = None,
        step_end: tuple[str, ...] | str | None = None,
        step_tokens: int = 128,
        max_steps: int = 40,
        aggregate: str = "last",
        select: str | None = None,
        parse: Parse | str | None = None,
        device: str = "auto",
    ) -> None:
        parser, self.n = as_parser(parse), n
        select = select or "weighted"
        self.plan = Options(n, width, step_tokens, max_steps, aggregate, select, parser)
        self.scorer = None if scorer is None else as_scorer(scorer, device)
        self.step_end = None if step_end is None else as_delimiters(step_end)

    @property
    def method(self) -> str:
        return name_of(self)

    @property
    @abstractmethod
    def groups(self) -> int:
        """Number of independent trees; each keeps an equal share of the n / width branches."""

    def check_model(self, name: str) -> None:
        if self.scorer is None and not is_embedded(name):
            raise ConfigError(
                f"{self.method} needs a scorer, one of {', '.join(NAMES)}; write --scorer NAME, or "
                "scorer= in Python (the embedded models have 'arithmetic' by default)"
            )

    def run(
        self,
        model: Model,
        prompt: str | Many[int],
        *,
        batch: int | None = None,
        **options: Any,
    ) -> Found:
        """batch: sequences at once; None: all. options: of `Session`. Raises as `grow` does."""
        self.check_model(model.name)
        scorer = self.scorer or as_scorer("arithmetic")
        usual = SENTENCES if is_embedded(model.name) else ("\n",)
        with Session(
            model,
            prompt,
            batch=self.n if batch is None else batch,
            delimiters=self.step_end or usual,
            needs_logprobs=scorer.needs_logprobs,
            **options,
        ) as session:
            keep = self.n // self.plan.width // self.groups
            return grow(self.method, session, scorer, self.plan, self.groups, keep)
