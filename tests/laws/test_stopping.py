"""Where a sequence ends is part of its law: end tokens, minimum length, stop strings, length.

All with drafting on, enumerated; ends in the middle of an accepted draft are among the outcomes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from made_drafts import DRAFTERS, Says

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.controllers.fixed import Fixed
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.records import Step
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import Tree
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.engine.stopping import Stops, Stream
from forerun.growers.chain import Chain
from forerun.growers.gumbel import Gumbel
from forerun.growers.iid import Iid

TARGET, DRAFT = table_law(1), table_law(2)
EOS, LENGTH = 2, 3


class Letters(Stream):
    """A detokenizer: token 0 is a, 1 is b, 2 is c."""

    def push(self, token: int) -> str:
        return "abc"[token]


def expected(sampling: Sampling) -> dict[tuple[tuple[int, ...], str], float]:
    """The law of (tokens, reason) by recursion over plain decoding."""
    found: dict[tuple[tuple[int, ...], str], float] = defaultdict(float)
    adjust = Adjust((EOS,))

    def extend(tokens: list[int], prob: float) -> None:
        start = sequence([0, 1], LENGTH, None, sampling)
        state = adjust.start(start)
        logits = np.log(TARGET([0, 1, *tokens]))
        if state is not None:
            for token in tokens:
                state = adjust.advance(state, token)
            logits = adjust.logits(state, logits)
        for token, p in enumerate(to_probs(logits, sampling)):
            text = [*tokens, token]
            if p == 0:
                continue
            if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                found[tuple(text), "stop"] += prob * p
            elif (cut := stop_string(text)) is not None:
                found[tuple(text[:cut]), "stop"] += prob * p
            elif len(text) == LENGTH:
                found[tuple(text), "length"] += prob * p
            else:
                extend(text, prob * p)

    def stop_string(text: list[int]) -> int | None:
        letters = "".join("abc"[t] for t in text)
        at = [letters.find(s) for s in sampling.stop if s in letters]
        return min(at) if at and len(text) >= sampling.min_new_tokens else None

    extend([], 1.0)
    return found


GROWN: dict[str, Callable] = {
    "chain": Chain,
    "tree": lambda: Gumbel(template=grid(2, 1)),
    "i.i.d. tree": lambda: Iid(width=2),
}
MADE: dict[str, Callable] = {
    **{name: (lambda make=make: Grown(TableSource(DRAFT), make())) for name, make in GROWN.items()},
    "fixed tokens": lambda: Says((EOS, 0)),  # drafts below an end token
}
REQUESTS = {
    "end token": Sampling(),
    "end token ignored": Sampling(ignore_eos=True),
    "minimum length": Sampling(min_new_tokens=2),
    "minimum length and penalty": Sampling(min_new_tokens=2, repetition_penalty=1.5),
    "stop token": Sampling(stop_token_ids=(1,)),
    "minimum length, stop token": Sampling(stop_token_ids=(1,), min_new_tokens=3),
    "stop string": Sampling(stop=("ba",), ignore_eos=True),
    "greedy": Sampling(temperature=0, stop_token_ids=(1,)),
}


@pytest.mark.parametrize("drafter", MADE)
@pytest.mark.parametrize("request_", REQUESTS)
def test_the_law_of_where_it_ends(request_: str, drafter: str) -> None:
    sampling = REQUESTS[request_]

    def program(dice: Dice) -> tuple[tuple[int, ...], str]:
        engine = Engine(
            FakeTarget(TARGET),
            MADE[drafter](),
            registry.make("verifier", "recursive"),
            Fixed(nodes=4, depth=2),
            stops=Stops((EOS,), Letters),
            shapers=(Adjust((EOS,)),),
        )
        seq = sequence([0, 1], LENGTH, dice, sampling)
        (tokens,) = run_all(engine, [seq])
        return tokens, seq.finish

    found: dict = defaultdict(float)
    for outcome, probability in EnumeratedDice().outcomes(program):
        found[outcome] += probability
    law = expected(sampling)
    assert sum(law.values()) == pytest.approx(1.0)
    assert set(found) == set(law)
    assert max(abs(found[k] - p) for k, p in law.items()) <= 1e-12


class Asked(TableSource):
    """Records the paths it was asked to extend."""

    def __init__(self) -> None:
        super().__init__(DRAFT)
        self.paths: list[tuple[int, ...]] = []

    def next(self, requests):
        self.paths += [path for _, path in requests]
        return super().next(requests)


def trees_of(drafter: Drafter, sampling: Sampling) -> list[Tree]:
    """The draft trees of twelve sequences, of up to 12 nodes and 4 levels."""
    trees: list[Tree] = []
    engine = Engine(
        FakeTarget(TARGET),
        drafter,
        registry.make("verifier", "speculative"),
        Fixed(nodes=12, depth=4),
        stops=Stops((EOS,)),
        listeners=[lambda step: trees.extend(step.trees)],
        max_seqs=4,
    )
    run_all(engine, [sequence([0, 1], 30, SeededDice(5, i), sampling, index=i) for i in range(12)])
    return trees


def below_ends(trees: list[Tree], ends: set[int]) -> int:
    """Number of nodes below a node with an end token."""
    return sum(not ends.isdisjoint(t.path(i)[:-1]) for t in trees for i in range(len(t)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_draft_goes_on_behind_an_end_token(name: str) -> None:
    for sampling in (Sampling(), Sampling(ignore_eos=True, stop_token_ids=(1,))):
        trees = trees_of(DRAFTERS[name][0](), sampling)
        assert below_ends(trees, {1} if sampling.ignore_eos else {EOS}) == 0


def test_drafts_go_on_behind_an_end_token_that_is_ignored() -> None:
    trees = trees_of(Says((EOS, 0, 1)), Sampling(ignore_eos=True))
    assert below_ends(trees, {EOS}) > 20


def test_the_draft_model_is_not_asked_behind_an_end_token() -> None:
    source = Asked()
    trees_of(Grown(source, Chain()), Sampling())
    assert len(source.paths) > 10 and all(EOS not in path for path in source.paths)


def test_logprobs_are_the_targets_own_whatever_is_drafted() -> None:
    """Equal to -log of the unshaped law at each position, with penalties, truncation, drafts on."""
    from forerun.engine.generation import record_logprobs

    sampling = Sampling(temperature=0.5, top_k=2, frequency_penalty=0.7, logprobs=2)
    accepted = Recorder()
    engine = Engine(
        FakeTarget(TARGET),
        Grown(TableSource(DRAFT), Gumbel(template=grid(2, 1))),
        registry.make("verifier", "recursive"),
        Fixed(nodes=4, depth=2),
        shapers=(Adjust(),),
        listeners=[record_logprobs, accepted],
    )
    seq = sequence([0, 1], 50, SeededDice(3), sampling)
    run_all(engine, [seq])
    assert accepted.of(seq).accepted > 5
    assert len(seq.logprobs) == 50
    for at, (token, reported) in enumerate(zip(seq.generated, seq.logprobs, strict=True)):
        law = np.log(TARGET(seq.tokens[: 2 + at]))
        assert list(reported)[0] == token
        assert set(np.argsort(-law)[:2]) <= set(reported)
        assert all(abs(reported[t] - law[t]) < 1e-12 for t in reported)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_seed_means_the_same_samples_whatever_shares_the_batch(batch: int) -> None:
    def generate(indices: list[int], batch: int) -> dict[int, tuple[int, ...]]:
        engine = Engine(
            FakeTarget(TARGET),
            Grown(TableSource(DRAFT), Gumbel(template=grid(2, 1))),
            registry.make("verifier", "speculative"),
            Fixed(nodes=4, depth=2),
            max_seqs=batch,
        )
        seqs = [sequence([0, 1], 20 + 3 * i, SeededDice(5, i), index=i) for i in indices]
        return dict(zip(indices, run_all(engine, seqs), strict=True))

    alone = {i: generate([i], 1)[i] for i in range(4)}
    assert generate([0, 1, 2, 3], batch) == alone


def test_listeners_see_each_position_once() -> None:
    """Every emitted token comes with the law that produced it, in order, exactly once."""
    seen: list[tuple[int, np.ndarray]] = []

    def listen(step: Step) -> None:
        nodes = step.visited(0)
        seen.extend(
            (token, step.laws[0][node]) for node, token in zip(nodes, step.emitted[0], strict=True)
        )

    engine = Engine(
        FakeTarget(TARGET),
        Grown(TableSource(DRAFT), Gumbel(template=grid(2, 1))),
        registry.make("verifier", "recursive"),
        Fixed(nodes=4, depth=2),
        stops=Stops((EOS,)),
        listeners=[listen],
    )
    seq = sequence([0, 1], 40, SeededDice(6), Sampling(stop_token_ids=(), ignore_eos=False))
    run_all(engine, [seq])
    assert [token for token, _ in seen] == seq.generated
    for at, (_, law) in enumerate(seen):
        assert np.allclose(law, TARGET(seq.tokens[: 2 + at]), atol=1e-12)
