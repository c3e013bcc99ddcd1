"""The law under a corpus constraint is the target law: drafts keep it, whatever drafts and judges.

And it is the definition's: the target's law, its mass on tokens that do not go on the corpus moved
to the others in proportion.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from made_drafts import CHAIN, SHAPED, TREE, grown, made

from fakes import VOCAB, exact_law
from forerun.constraints._penalties import Adjust
from forerun.constraints.corpus import Corpus
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling
from forerun.core.tree_template import grid
from forerun.ngrams.index.fm.index import FMIndex
from harness import PROMPT, TARGET, Request, check_shaped

END = VOCAB - 1
DOCUMENTS = [(0, 1, 1, 0), (1, 0, 0), (0, 0, 1, 0, 1)]
INDEX = FMIndex.of(DOCUMENTS, END)


def corpus(**options: object) -> Callable[[], tuple[Shaper, ...]]:
    return lambda: (Corpus(INDEX, **options),)


DRAFTERS = SHAPED | {
    "none": (made("none"), TREE, (4,)),
    "i.i.d. 2": (grown("iid", width=2), Plan(3, 2), (3,)),
    "top 2x2": (grown("template", template=grid(2, 2)), Plan(6, 2), (4,)),
    "prompt lookup": (made("prompt_lookup:ngram=2,tokens=2"), CHAIN, (5,)),
}
REQUESTS: dict[str, Request] = {
    "anywhere": (Sampling(), corpus()),
    "whole documents": (Sampling(), corpus(begin="document")),
    "after the prompt, 2 tokens count": (Sampling(), corpus(begin="prompt", window=2)),
    "greedy": (Sampling(temperature=0), corpus(window=1)),
    "temperature .5, top-k 2": (Sampling(temperature=0.5, top_k=2), corpus(begin="prompt")),
    "with penalties": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), Corpus(INDEX, window=1)),
    ),
}


CASES = [
    *((name, request, "recursive") for name in DRAFTERS for request in REQUESTS),
    *(
        (name, request, verifier)
        for name in ("chain", "top 2x2", "stand")
        for request in ("anywhere", "after the prompt, 2 tokens count", "greedy")
        for verifier in ("speculative", "match")
    ),
]


@pytest.mark.parametrize(("name", "request_", "verifier"), CASES)
def test_the_constrained_law_is_kept(name: str, request_: str, verifier: str) -> None:
    check_shaped(DRAFTERS[name], REQUESTS[request_], verifier)


@pytest.mark.parametrize("begin", ["anywhere", "document", "prompt"])
def test_the_law_is_that_of_the_definition(begin: str) -> None:
    """Compared with strings: a text may go on while it stands in some document."""
    borders = [f"{END}" + "".join(map(str, d)) + f"{END}" for d in DOCUMENTS]
    prefix = {"anywhere": "", "document": str(END), "prompt": "01"}[begin]
    law = exact_law(TARGET, PROMPT, 4, Sampling(), (Corpus(INDEX, begin=begin),))
    assert abs(sum(law.values()) - 1) < 1e-12
    for text, found in law.items():
        so_far, prob, tokens = prefix, 1.0, list(PROMPT)
        for token in text:
            allowed = [t for t in range(VOCAB) if any(so_far + str(t) in b for b in borders)]
            probs = TARGET(tokens)
            prob *= probs[token] / probs[allowed].sum() if token in allowed else 0.0
            so_far = str(END) if token == END else so_far + str(token)
            tokens.append(token)
        assert abs(found - prob) < 1e-12


@pytest.mark.parametrize("begin", ["anywhere", "document", "prompt"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_law_of_a_window_is_that_of_the_definition(begin: str, window: int) -> None:
    """Compared with strings; and a text that was begun before goes on by the same law."""
    borders = [f"{END}" + "".join(map(str, d)) + f"{END}" for d in DOCUMENTS]
    shaper = Corpus(INDEX, begin=begin, window=window)
    law = exact_law(TARGET, PROMPT, 4, Sampling(), (shaper,))
    assert abs(sum(law.values()) - 1) < 1e-12
    tails = ["".join(map(str, PROMPT[-n:])) for n in range(window, 0, -1)] + [""]
    occurring = next(tail for tail in tails if any(tail in b for b in borders))
    first = {"anywhere": "", "document": str(END), "prompt": occurring}[begin]
    for text, found in law.items():
        last, prob, tokens = first, 1.0, list(PROMPT)
        for token in text:
            allowed = [t for t in range(VOCAB) if any(last + str(t) in b for b in borders)]
            begun = Sequence(list(tokens), len(PROMPT), Sampling(), SeededDice(0), limit=8)
            assert shaper.next(shaper.start(begun)).tolist() == allowed
            probs = TARGET(tokens)
            prob *= probs[token] / probs[allowed].sum() if token in allowed else 0.0
            last = str(END) if token == END else (last + str(token))[-window:]
            tokens.append(token)
        assert abs(found - prob) < 1e-12


def test_the_constraint_bites() -> None:
    """The equalities above must not hold because nothing was shaped."""
    shaper = Corpus(INDEX)
    state = shaper._root
    for token in (1, 1):
        state = shaper.advance(state, token)
    assert shaper.allows(state, 0) and not shaper.allows(state, 1)
    assert np.isneginf(shaper.logits(state, np.zeros(VOCAB))).sum() == 2
