"""A constraint after a marker, with tokens that end the marker and go on."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from three_tokens import word_tokens

from fakes import sequence
from forerun.constraints._after import After
from forerun.constraints._all_of import AllOf
from forerun.constraints._request import RequestConstraint
from forerun.constraints.base import Constraint
from forerun.constraints.regex import Regex
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows
from forerun.core.sampling import Sampling
from forerun.core.tree import chain

PIECES, END = ("a", "b", "ab", "aa", "aab", "ba", "bba"), 7


TOKENIZER = word_tokens((*PIECES, "<end>"))


def may_begin(text: str, marker: str, pattern: str) -> bool:
    """Whether an allowed text begins with `text`, by trying all that may follow."""
    _, found, rest = text.partition(marker)
    ends = ("".join(end) for n in range(4) for end in itertools.product("ab", repeat=n))
    return not found or any(re.fullmatch(pattern, rest + end) for end in ends)


@pytest.mark.parametrize(
    ("marker", "pattern"),
    [("aa", "ab"), ("aa", "aab"), ("ab", "b|ba"), ("aba", "b?a"), ("ba", "ab?"), ("a", "a?b")],
)
def test_the_text_decides_not_its_tokens(marker: str, pattern: str) -> None:
    """After every text of up to three tokens, what may follow is that of the definition."""
    constraint = After(marker, Regex(pattern)).bind(TOKENIZER, END + 1)
    num_forbidden = 0
    for length in range(4):
        for path in itertools.product(range(END), repeat=length):
            texts = ["".join(PIECES[t] for t in path[:i]) for i in range(length + 1)]
            if not all(may_begin(text, marker, pattern) for text in texts):
                continue
            state = constraint.begin(b"")
            for token in path:
                state = constraint.advance(state, token)
            wanted = [may_begin(texts[-1] + piece, marker, pattern) for piece in PIECES]
            assert constraint.allowed(state)[:END].tolist() == wanted
            assert [constraint.allows(state, token) for token in range(END)] == wanted
            num_forbidden += len(wanted) - sum(wanted)
    assert num_forbidden > 10


@pytest.mark.parametrize("is_nested", [False, True])
def test_nothing_follows_a_forbidden_end_of_the_marker(is_nested: bool) -> None:
    """A drafted token that ends the marker with a forbidden rest: the law below it is asked too."""
    constraint: Constraint = After("a", Regex("b")).bind(TOKENIZER, END + 1)
    if is_nested:
        constraint = AllOf([Regex("[ab]*").bind(TOKENIZER, END + 1), constraint])
    assert constraint.begin(b"aa") is None
    seq = sequence([0], 9, SeededDice(0), Sampling(constraint=constraint))
    seq.shapers = (RequestConstraint(TOKENIZER),)
    seq.states = tuple(shaper.start(seq) for shaper in seq.shapers)
    tree = chain([3, 0])  # "aa" is the marker and a forbidden a
    laws = TargetProbs(Rows(np.zeros((3, END + 1))), seq, tree, seq.shapers)
    assert laws[-1][3] == 0.0
    for node in (0, 1):
        assert np.flatnonzero(laws[node]).tolist() == [END]
        assert not laws.allows(node, 0)
