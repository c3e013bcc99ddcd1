"""A draft with another padding of the target's vocabulary: exact, and surplus ids are masked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import FakeRunner, FakeTarget, exact_law, run_all, sequence, table_law
from forerun import registry
from forerun.core.dice import Dice, EnumeratedDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from harness import EXACT, PROMPT, Given

REQUESTS = {
    "free": Sampling(),
    "top-k 2": Sampling(top_k=2),
    "greedy": Sampling(temperature=0),
    "banned": Sampling(banned_tokens=(1,)),
}


class Runner(FakeRunner):
    """A fake draft model that refuses ids outside its vocabulary."""

    def __init__(self, vocab: int) -> None:
        def law(tokens: Many[int]) -> np.ndarray:
            assert max(tokens) < vocab, "the draft has no embedding for it"
            return known(tokens)

        known = table_law(2, vocab)
        super().__init__(law)
        self.vocab_size = vocab


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(
    ("grower", "verifier"), [("chain", "speculative"), ("gumbel", "recursive")]
)
@pytest.mark.parametrize(("target", "draft"), [(4, 2), (4, 3), (3, 3), (2, 4)])
def test_any_padding_is_exact(
    target: int, draft: int, grower: str, verifier: str, request_: str
) -> None:
    law, sampling, length = table_law(1, target), REQUESTS[request_], 3
    num_drafted = 0

    def program(dice: Dice) -> tuple[tuple[int, ...], ...]:
        def count(step) -> None:
            nonlocal num_drafted
            num_drafted += sum(map(len, step.trees))
            assert all(token < min(target, draft) for tree in step.trees for token in tree.tokens)

        engine = Engine(
            FakeTarget(law, target),
            DraftModel(model=Runner(draft), grower=grower),  # type: ignore[arg-type]
            registry.make("verifier", verifier),
            Given(Plan(nodes=2, depth=2)),
            listeners=[count],
        )
        return run_all(engine, [sequence(PROMPT, length, dice, sampling)])

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for (text,), probability in EnumeratedDice().outcomes(program):
        found[text] += probability
    for text, probability in exact_law(law, PROMPT, length, sampling, vocab=target).items():
        assert found.get(text, 0.0) == pytest.approx(probability, abs=EXACT)
    assert num_drafted
