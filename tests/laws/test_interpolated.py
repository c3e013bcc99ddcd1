"""The mixture with a corpus is the target law: drafts keep it exactly, whoever judges."""

from __future__ import annotations

import numpy as np
import pytest
from made_drafts import SHAPED, made

from fakes import VOCAB, NoRepeats
from forerun.constraints._penalties import Adjust
from forerun.constraints.infini import InfiniMix
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.interpolate import TwoWeights
from harness import TARGET, Request, check_shaped

DOCUMENTS = [[0, 1, 2, 0, 1, 1, 0], [1, 2, 2, 0, 1]]


def mix(sparse: float, other: float, eos: int | None = None) -> InfiniMix:
    return InfiniMix(Index.of(DOCUMENTS, eos=eos), TwoWeights(sparse, other))


DRAFTERS = SHAPED | {"infini": (made("infini:corpus=0+1+2+0+0+2+1+1"), Plan(3, 2), (3,))}
del DRAFTERS["prompt lookup"]
REQUESTS: dict[str, Request] = {
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
    check_shaped(DRAFTERS[name], REQUESTS[request_], verifier)


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
