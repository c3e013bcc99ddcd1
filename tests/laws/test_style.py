"""The styled law is the target law: drafts keep it exactly, whatever drafts and judges."""

from __future__ import annotations

import numpy as np
import pytest
from made_drafts import SHAPED

from fakes import VOCAB, NoRepeats
from forerun.constraints._penalties import Adjust
from forerun.constraints.ngram_style import NgramStyle
from forerun.core.sampling import Sampling
from forerun.ngrams.index.counts.trie import NgramModel
from harness import TARGET, Request, check_shaped

TEXT = np.array([0, 1, 2, 0, 1, 1, 0, 1, 2, 2, 0, 1])


def style(form: str, strength: float = 0.6) -> NgramStyle:
    """Lists token 0 nowhere after (1, 1): some logits stay as they are."""
    return NgramStyle(NgramModel.count([TEXT], vocab_size=VOCAB), form=form, strength=strength)


REQUESTS: dict[str, Request] = {
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
@pytest.mark.parametrize("name", SHAPED)
def test_the_styled_law_is_kept(name: str, request_: str, verifier: str) -> None:
    check_shaped(SHAPED[name], REQUESTS[request_], verifier)


@pytest.mark.parametrize("form", ["floored", "paper"])
def test_the_style_changes_the_law(form: str) -> None:
    """The equalities above must not hold because nothing was shaped."""
    logits, shaper = np.log(TARGET([0, 1])), style(form)
    assert np.abs(shaper.logits((0, 1), logits) - logits).max() > 0.1
