"""Sampling parameters and prompts of the units of a run, with made-up answers for warm-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from forerun.bench.contestants import CacheDemand
from forerun.bench.planning import Unit
from forerun.core.sampling import Sampling

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.tasks.base import Example

ROUND_SEED_STEP = 100_003
LENGTH_STEP = 128  # tokens; the longest sequence is rounded up, as retokenising may lengthen texts


class UnitPrompts:
    """Sampling, prompt and length of every unit."""

    def __init__(self, units: Sequence[Unit], model: Model, sampling: Sampling, seed: int) -> None:
        self.units, self.model, self.base, self.seed = units, model, sampling, seed

    def sampling(self, unit: Unit) -> Sampling:
        """The same seed for all contestants, a different one for every prompt and round."""
        longest = unit.max_new_tokens or self.base.max_new_tokens
        seed = self.seed + unit.index + ROUND_SEED_STEP * unit.round
        return replace(self.base, seed=seed, max_new_tokens=longest)

    def num_tokens(self, example: Example) -> int:
        return len(self.model.tokenizer.encode(example.prompt))

    @cached_property
    def longest(self) -> Unit:
        """The unit with the longest prompt, full-length earlier answers included."""

        def size(unit: Unit) -> int:
            answers = len(unit.example.after) * self.sampling(unit).max_new_tokens
            return self.num_tokens(unit.example) + answers

        return max(self._first_round, key=size)

    def filled(self, unit: Unit) -> Example:
        """The example of a unit, with made-up answers of full length for earlier turns."""
        from forerun.tasks.base import made_up_answers, prepare

        example, tokenizer = unit.example, self.model.tokenizer
        if not example.after:
            return example
        context, most = self.model.target.context, self.sampling(unit).max_new_tokens
        answers = made_up_answers(example, tokenizer, context, most)
        return prepare(unit.task.example(unit.index), tokenizer, answers)

    def with_answers(self, unit: Unit, answers: list[str]) -> Example:
        """The example of a unit after these answers to earlier turns."""
        from forerun.tasks.base import prepare

        return prepare(unit.task.example(unit.index), self.model.tokenizer, answers)

    def cache_demand(self, is_batched: bool) -> CacheDemand:
        """The KV cache for the longest sequence, one at a time or all samples at once."""
        return CacheDemand(self.base.n if is_batched else 1, self._max_tokens)

    @cached_property
    def _max_tokens(self) -> int:
        """Tokens of the longest sequence, rounded up, within the context."""
        longest = max(
            self.num_tokens(self.filled(unit)) + self.sampling(unit).max_new_tokens
            for unit in self._first_round
        )
        has_turns = any(unit.example.after for unit in self._first_round)
        blocks = -(-longest // LENGTH_STEP) + has_turns
        return min(blocks * LENGTH_STEP, self.model.target.context)

    @property
    def _first_round(self) -> list[Unit]:
        """Later rounds repeat its prompts."""
        return [unit for unit in self.units if unit.round == 0]
