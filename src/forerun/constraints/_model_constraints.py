"""The constraints of a model by spec: each is made once; ASAp learns from run to run."""

from __future__ import annotations

from collections.abc import Sequence as Many
from threading import Lock

from forerun import registry
from forerun.constraints._request import check_given, prepared
from forerun.constraints.asap import AsapMemory
from forerun.constraints.base import Constraint
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling
from forerun.engine.requests import check_role
from forerun.models.tokenizer import Tokenizer


class ModelConstraints:
    """Constraints by spec, such as "corpus:index=FILE", bound to a model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.asap = AsapMemory()  # what constraint_sampling="asap" learned
        self._keeps_asap = False
        self._shapers: dict[str, Shaper] = {}
        self._making = Lock()  # each constraint is made once

    def get(self, spec: str | Shaper) -> Shaper:
        """The constraint of a name, always the same object for the same text."""
        check_given(spec)
        if not isinstance(spec, str):
            check_role("constraint", spec, Shaper)
            return spec.bind(self.tokenizer, self.vocab_size)
        with self._making:
            if spec not in self._shapers:
                made = registry.make("constraint", spec, tokenizer=self.tokenizer)
                self._shapers[spec] = made.bind(self.tokenizer, self.vocab_size)
            return self._shapers[spec]

    def keep_asap(self, keeps: bool) -> None:
        """Whether seeded runs use what ASAp learned too: it is kept in a file."""
        self._keeps_asap = keeps

    def prepare(self, requests: Many[Sampling], shapers: Many[Shaper]) -> list[Sampling]:
        """The sampling parameters, with the constraints among `shapers` added to each."""
        model = self.tokenizer, self.vocab_size
        hard = [one.bind(*model) for one in shapers if isinstance(one, Constraint)]
        unseeded, seeded = self.asap, self.asap if self._keeps_asap else AsapMemory()
        law = " ".join(self._name(one) for one in shapers if not isinstance(one, Constraint))
        return [
            prepared(one, hard, *model, unseeded if one.seed is None else seeded, law)
            for one in requests
        ]

    def _name(self, shaper: Shaper) -> str:
        """The spec that a shaper was made from, or its key."""
        specs = (spec for spec, one in self._shapers.items() if one is shaper)
        return next(specs, None) or shaper.key()
