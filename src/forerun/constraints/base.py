"""Base class of constraints: shapers that only forbid tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forerun.core.roles import Shaper
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Constraint(Shaper):
    """A set of allowed texts. At each node tokens that no allowed text goes on with are forbidden.

    Law: the target's, conditioned step by step on the allowed tokens (other logits become -inf).
    This is not the target's law given that the text is allowed; `constraints/asap.py` and
    `constraints/awrs.py` come closer to that. If no token is left, the end token is drawn alone, so
    the text ends and is not valid. Drafts keep this law exactly.

    eos_ids: end tokens of the model, set by `bind`. has_cheap_mask: whether `allowed` costs far
    less than a test of each token.
    """

    forbids = True
    eos_ids: tuple[int, ...] = ()
    has_cheap_mask = True

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        """A copy for this model. Raises ConfigError if the model has no end token."""
        if not tokenizer.eos_ids:
            raise ConfigError(
                "a constraint needs an end token, but this tokenizer has none; declare "
                "eos_token_id in the model's config.json"
            )
        self.key()  # which the copy keeps
        bound = copy(self)
        bound.eos_ids = tokenizer.eos_ids
        return bound

    @abstractmethod
    def allowed(self, state: Any) -> np.ndarray:
        """Which tokens may follow, bool [V]; end tokens if the text may end here."""

    @abstractmethod
    def allows(self, state: Any, token: int) -> bool:
        """Whether `token` may follow."""

    @abstractmethod
    def is_complete(self, state: Any) -> bool:
        """Whether the text so far is an allowed one."""

    @abstractmethod
    def begin(self, text: bytes) -> Any:
        """The state after the first bytes of a text; None if no allowed text begins with them."""

    def error(self, state: Any) -> str:
        """Why the constraint gave up on the text, if it did."""
        return ""

    def missing(self, state: Any) -> str:
        """What the text still needs before the constraint applies to it, if anything."""
        return ""

    def forced(self, state: Any) -> Many[int]:
        return ()

    def mask(self, state: Any) -> np.ndarray | None:
        return self.allowed(state) if self.has_cheap_mask else None

    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        shaped = np.full_like(logits, -np.inf)
        np.copyto(shaped, logits, where=self.allowed(state))
        if shaped.max() == -np.inf:
            shaped[self.eos_ids[0]] = 0.0
        return shaped
