"""On-policy and mixed batches: texts generated with the current weights at every step of a run.

Prompts, coins and seeds of a step depend on the seed of the run and the step number only; texts
also depend on the weights. A resumed run therefore generates the same batches as an uninterrupted
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.models.hf import HFTarget
from forerun.models.tokenizer import Tokenizer

from .data.documents import Batches, Documents, Micro, normalised

Draw = Callable[[list[list[int]], int], list[list[int]]]  # prompts, seed -> generated ids


@dataclass(frozen=True)
class LiveBatches:
    """Endless steps of `size` prompts each; `draw` generates the texts when a step is requested.

    In a mixed batch (Zhou et al., DistillSpec, 2024) each prompt has, with probability 1 - `share`,
    one of its stored answers instead.
    """

    prompts: Many[list[int]]  # token ids
    draw: Draw
    size: int = 16
    budget: int = 4096  # padded tokens per micro-batch
    prompt_weight: float = 0.0
    by_text: bool = False  # as in `Batches`
    pad: int = 0
    seed: int = 0
    answers: Many[Many[list[int]]] = ()  # stored answers of each prompt, for mixed batches
    share: float = 1.0  # probability of a generated text

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share must be from 0 to 1, got {self.share}")
        if self.share < 1 and not (len(self.answers) == len(self.prompts) and all(self.answers)):
            raise ConfigError(
                f"mixed batches need stored answers for each of {len(self.prompts)} prompts; "
                "generate records for them, or use share=1"
            )

    def steps(self, start: int = 0) -> Iterator[list[Micro]]:
        """Batches from step `start` on; each is generated when it is requested."""
        step = start
        while True:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> list[Micro]:
        """The micro-batches of one step, generated with the current weights."""
        numbers = self.numbers(step)
        prompts, texts = [list(self.prompts[i]) for i in numbers], self.stored(step)
        live = [row for row, text in enumerate(texts) if text is None]
        made = self.draw([prompts[row] for row in live], self.seed_of(step)) if live else []
        for row, text in zip(live, made, strict=True):
            texts[row] = text
        pairs = [(p + list(text or ()), len(p)) for p, text in zip(prompts, texts, strict=True)]
        batches = Batches(
            Documents.of(pairs),
            self.budget,
            accumulate=1,
            prompt_weight=self.prompt_weight,
            by_text=self.by_text,
            pad=self.pad,
            seed=self.seed_of(step),
        )
        return normalised([batches.micro(group) for group in batches.groups(0)])

    def numbers(self, step: int) -> list[int]:
        """Indices of the prompts of a step: all once per epoch, in an order given by the seed."""
        places = range(step * self.size, (step + 1) * self.size)
        return [int(self._order(at // len(self.prompts))[at % len(self.prompts)]) for at in places]

    def stored(self, step: int) -> list[list[int] | None]:
        """The stored answer of each prompt of a step; None where a text is to be generated."""
        rng, found = np.random.default_rng((self.seed, 2, step)), list[list[int] | None]()
        for i in self.numbers(step):
            is_live, pick = rng.random() < self.share, rng.random()
            answers = () if is_live else self.answers[i]
            found.append(None if is_live else answers[int(pick * len(answers))])
        return found

    def seed_of(self, step: int) -> int:
        """The sampling seed of a step."""
        return int(np.random.default_rng((self.seed, step)).integers(1 << 31))

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, 1, epoch)).permutation(len(self.prompts))


def draw_from(model: Model, sampling: Sampling, drafter: str = "none") -> Draw:
    """A `Draw` that uses a loaded model; its weights may be updated between steps."""

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        results = model.generate(prompts, sampling, seed=seed, n=1, drafter=drafter)
        return [result.samples[0].tokens for result in results]

    return draw


def draw_from_module(module: Any, tokenizer: Tokenizer, sampling: Sampling) -> Draw:
    """A `Draw` that uses a transformers model in training, with its weights at each call."""
    way: list[str] = []  # how trees are computed; determined at the first call

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        was_training = module.training
        try:
            target = HFTarget(
                module, way=way[0] if way else None
            )  # without KV cells of old weights
            way[:] = [target.way]
            return draw_from(Model(target, tokenizer), sampling)(prompts, seed)
        finally:
            module.train(was_training)

    return draw
