"""Drafts of another vocabulary: every method keeps the target's law; two biased variants do not."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import DeadEnd, FakeTarget, NoRepeats, table_law
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.core.dice import EnumeratedDice
from forerun.core.growing import Path
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters._ngram_law import NgramTrie, TokenLaw
from forerun.models.vocab_map import NONE, VocabMap
from harness import EXACT, Given, distance
from two_vocabularies import TARGET as TOKENS
from two_vocabularies import crossed

P, Q, SIZE = table_law(1, len(TOKENS)), table_law(2, 3), len(TOKENS)
REQUESTS = {
    "free": (Sampling(), tuple),
    "greedy": (Sampling(temperature=0), tuple),
    "top-k 2": (Sampling(top_k=2), tuple),
    "temperature 0.5": (Sampling(temperature=0.5), tuple),
    "no repeats": (Sampling(), lambda: (NoRepeats(),)),
    "dead end": (Sampling(), lambda: (DeadEnd(),)),
    "penalties": (
        Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
        lambda: (Adjust(),),
    ),
}
DRAFTS = {
    "omni": ({"method": "omni"}, Plan(2, 2), (3,)),
    "omni, ragged batch": ({"method": "omni"}, Plan(1, 1), (1, 2)),
    "omni, stops after doubt": (
        {"method": "omni"},
        Plan(2, 2, lambda q, token: bool(q.probs[0] < 0.35)),
        (3,),
    ),
    "omni, ends where q says little": ({"method": "omni"}, Plan(3, 3, min_acceptance=0.3), (3,)),
    "tli": ({"method": "tli"}, Plan(2, 2), (3,)),
    "tli, gumbel": ({"method": "tli", "grower": "gumbel"}, Plan(2, 1), (2,)),
    "tli, ragged batch": ({"method": "tli"}, Plan(1, 1), (1, 2)),
    "slem": ({"method": "slem"}, Plan(3, 3), (3,)),
    "slem, ragged batch": ({"method": "slem"}, Plan(2, 2), (1, 3)),
}


def error_of(draft: str, request: str, verifier: str = "speculative", **more: object) -> float:
    options, plan, lengths = DRAFTS[draft]
    sampling, shapers = REQUESTS[request]
    arguments = {"plan": plan, "lengths": lengths, **more}
    return distance(
        P,
        lambda: crossed(Q, **options),
        registry.make("verifier", verifier),
        sampling=sampling,
        shapers=shapers,
        target=FakeTarget(P, SIZE),
        vocab=SIZE,
        prompt=(1, 3),  # a, ab: the draft's cache begins with [a, b]
        **arguments,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_law_is_kept(draft: str, request_: str) -> None:
    assert error_of(draft, request_) <= EXACT


@pytest.mark.parametrize("verifier", ["recursive", "match"])
@pytest.mark.parametrize("draft", ["omni", "tli", "slem"])
def test_other_verifiers(draft: str, verifier: str) -> None:
    assert error_of(draft, "free", verifier, lengths=(2,)) <= EXACT
