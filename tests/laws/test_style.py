"""The styled law is the target law: drafts keep it exactly, whatever drafts and judges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fakes import VOCAB, NoRepeats, TableSource, table_law
from forerun import registry
from forerun.constraints.ngram_style import NgramStyle
from forerun.drafters.base import Grown
from forerun.ngrams.ngram_model import NgramModel
from forerun.records import Plan
from forerun.roles import Drafter, Shaper
from forerun.sampling import Sampling
from forerun.shaping import Adjust
from forerun.template import grid
from harness import distance

TARGET, DRAFT, EXACT = table_law(1), table_law(2), 1e-12
TEXT = np.array([0, 1, 2, 0, 1, 1, 0, 1, 2, 2, 0, 1])
CHAIN, TREE = Plan(nodes=2, depth=2), Plan(nodes=4, depth=2)


def style(form: str, strength: float = 0.6) -> NgramStyle:
    """Lists token 0 nowhere after (1, 1): some logits stay as they are."""
    return NgramStyle(NgramModel.count([TEXT], vocab_size=VOCAB), form=form, strength=strength)


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
    "prompt lookup": (made("prompt_lookup:ngram=2,tokens=2"), CHAIN, (4,)),
    "stand": (made("stand", context=1, entries=3), Plan(3, 2), (4,)),
}
REQUESTS: dict[str, tuple[Sampling, Callable[[], tuple[Shaper, ...]]]] = {
    "floored": (Sampling(), lambda: (style("floored"),)),
    "paper": (Sampling(), lambda: (style("paper"),)),
    "floored, greedy": (Sampling(temperature=0), lambda: (style("floored"),)),
    "paper, temperature .5, top-k 2": (
        Sampling(temperature=0.5, top_k=2),
        lambda: (style("paper", 1.0),),
    ),
    "penalties, a constraint and floored": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), NoRepeats(), style("floored")),
    ),
}


@pytest.mark.parametrize("verifier", ["recursive", "speculative", "match"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_styled_law_is_kept(name: str, request_: str, verifier: str) -> None:
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


@pytest.mark.parametrize("form", ["floored", "paper"])
def test_the_style_changes_the_law(form: str) -> None:
    """The equalities above must not hold because nothing was shaped."""
    logits, shaper = np.log(TARGET([0, 1])), style(form)
    assert np.abs(shaper.logits((0, 1), logits) - logits).max() > 0.1
