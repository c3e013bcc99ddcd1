"""The mixture with a corpus is the target law: drafts keep it exactly, whoever judges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fakes import VOCAB, NoRepeats, TableSource, table_law
from forerun import registry
from forerun.constraints.infini import InfiniMix
from forerun.drafters.base import Grown
from forerun.ngrams.infini import Index
from forerun.ngrams.interpolation import TwoWeights
from forerun.records import Plan
from forerun.roles import Drafter, Shaper
from forerun.sampling import Sampling
from forerun.shaping import Adjust
from forerun.template import grid
from harness import distance

TARGET, DRAFT, EXACT = table_law(1), table_law(2), 1e-12
DOCUMENTS = [[0, 1, 2, 0, 1, 1, 0], [1, 2, 2, 0, 1]]
CHAIN, TREE = Plan(nodes=2, depth=2), Plan(nodes=4, depth=2)


def mix(sparse: float, other: float, eos: int | None = None) -> InfiniMix:
    return InfiniMix(Index.of(DOCUMENTS, eos=eos), TwoWeights(sparse, other))


def grown(grower: str, **options: object) -> Callable[[], Drafter]:
    return lambda: Grown(TableSource(DRAFT), registry.get("grower", grower)(**options))


def made(spec: str, **options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", spec, **options)


# name -> drafter, plan, lengths of the sequences that share the batch
DRAFTERS = {
    "none": (made("none"), TREE, (3,)),
    "chain": (grown("chain"), CHAIN, (3,)),
    "chain, ragged batch": (grown("chain"), Plan(1, 1), (1, 2)),
    "gumbel 2x1": (grown("gumbel", template=grid(2, 1)), TREE, (3,)),
    "top 2x2": (grown("template", template=grid(2, 2)), Plan(6, 2), (3,)),
    "infini": (made("infini:corpus=0+1+2+0+0+2+1+1"), Plan(3, 2), (3,)),
    "stand": (made("stand", context=1, entries=3), Plan(3, 2), (4,)),
}
REQUESTS: dict[str, tuple[Sampling, Callable[[], tuple[Shaper, ...]]]] = {
    "two weights": (Sampling(), lambda: (mix(0.7, 0.2),)),
    "sparse estimates alone": (Sampling(), lambda: (mix(1.0, 0.0),)),
    "greedy": (Sampling(temperature=0), lambda: (mix(0.4, 0.3),)),
    "with an end id": (Sampling(), lambda: (mix(0.5, 0.5, eos=2),)),
    "temperature .5, top-k 2": (Sampling(temperature=0.5, top_k=2), lambda: (mix(0.6, 0.6),)),
    "penalties and a constraint": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), NoRepeats(), mix(0.6, 0.4)),
    ),
}


@pytest.mark.parametrize("verifier", ["speculative", "match"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_mixture_is_kept(name: str, request_: str, verifier: str) -> None:
    make, plan, lengths = DRAFTERS[name]
    sampling, shapers = REQUESTS[request_]
    error = distance(
        TARGET,
        make,
        registry.make("verifier", verifier),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=(2,) if verifier == "match" and len(lengths) == 1 else lengths,
    )
    assert error <= EXACT


def test_the_mixture_is_that_of_its_formula() -> None:
    """After (0, 1) the corpus has 2, 1 and an end; after (1, 2) 0 and 2; after (2, 0) 1 alone."""
    shaper, index = mix(0.7, 0.2), Index.of(DOCUMENTS)
    for context in ((0, 1), (1, 2), (2, 0), (2, 2, 0), ()):
        p = TARGET(context)
        found = index.infgram_ntd(context)
        inside = found.ids < VOCAB
        q = np.bincount(found.ids[inside], found.counts[inside], minlength=VOCAB)
        w = 0.7 if found.is_sparse else 0.2
        mixed = np.exp(shaper.logits(context, np.log(p)))
        assert np.allclose(mixed, w * q / q.sum() + (1 - w) * p, atol=1e-15)
        assert abs(mixed.sum() - 1) < 1e-12 and np.abs(mixed - p).max() > 0.01


def test_what_was_forbidden_stays_so() -> None:
    logits = np.array([-np.inf, 0.3, -0.2])
    shaped = mix(0.9, 0.9).logits((1, 2), logits)  # the corpus goes on with 0 or 2
    assert shaped[0] == -np.inf and np.isclose(np.exp(shaped).sum(), 1)
    only_other = np.array([-np.inf, 0.3, -np.inf])
    assert np.array_equal(mix(0.9, 0.9).logits((1, 2), only_other), only_other)
