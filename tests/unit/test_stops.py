"""Sequences end at the right token; ids, text and what is streamed are cut at the same place."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeTarget, run_all, sequence
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import chain
from forerun.drafters.base import PerSequence
from forerun.engine.engine import Engine
from forerun.engine.stopping import Stops, Stream
from forerun.verifiers.greedy import Greedy


class Pieces(Stream):
    """Detokenizer over byte pieces; holds incomplete UTF-8 back, as real ones do."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self.pieces[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def cut(
    pieces: list[str | bytes],
    tokens: list[int],
    eos: tuple[int, ...] = (),
    limit: int = 100,
    **options,
) -> tuple[Sequence, str, list[int]]:
    """Gives all tokens in one block; returns the sequence, its text and the tokens kept."""
    raw = [p.encode() if isinstance(p, str) else p for p in pieces]
    stops = Stops(eos, lambda: Pieces(raw))
    seq = sequence([9], limit, SeededDice(0), Sampling(**options))
    stops.start(seq)
    kept = stops.cut(seq, tokens)
    seq.tokens += kept
    return seq, stops.text(seq), kept


def test_a_stop_string_inside_a_block_cuts_ids_and_text_together():
    seq, text, kept = cut(["a", "b", "STOP", "c"], [0, 1, 2, 3, 3], stop="STOP")
    assert (text, seq.generated, seq.finish) == ("ab", [0, 1], "stop")
    assert kept == [0, 1, 2]


def test_a_token_that_only_begins_before_the_stop_string_stays():
    seq, text, _ = cut(["a", "b.ST", "OP.c"], [0, 1, 2, 0], stop="STOP")
    assert (text, seq.generated) == ("ab.", [0, 1])


def test_a_stop_string_at_the_very_start_leaves_nothing():
    seq, text, _ = cut(["STOP", "a"], [0, 1], stop="STOP")
    assert (text, seq.generated, seq.finish) == ("", [], "stop")


def test_the_earliest_of_several_stop_strings_counts():
    seq, text, _ = cut(["one ", "two-three"], [0, 1], stop=("three", "two", "absent"))
    assert (text, seq.generated) == ("one ", [0])


def test_a_stop_string_may_span_blocks():
    stops = Stops((), lambda: Pieces([b"x", b"#", b"y"]))
    seq = sequence([9], 100, SeededDice(0), Sampling(stop="###"))
    stops.start(seq)
    shown = ""
    for block in ([0, 1], [1, 2, 1], [1, 1, 2]):
        seq.tokens += stops.cut(seq, block)
        text = stops.text(seq)
        assert text.startswith(shown), "what was shown is never taken back"
        shown = text
    assert (shown, seq.generated, seq.finish) == ("x##y", [0, 1, 1, 2], "stop")


def test_eos_inside_a_draft_ends_there_and_has_no_text():
    seq, text, kept = cut(["a", "b", "</s>"], [0, 2, 1, 1], eos=(2,))
    assert (kept, seq.generated, text, seq.finish) == ([0, 2], [0, 2], "a", "stop")


def test_ignored_eos_is_a_token_like_others():
    seq, text, kept = cut(["a", "b", "</s>"], [0, 2, 1], eos=(2,), ignore_eos=True)
    assert (kept, text, seq.finish) == ([0, 2, 1], "a</s>b", None)


def test_stop_token_ids_end_a_sequence_even_where_eos_is_ignored():
    seq, _, kept = cut(["a", "b"], [0, 1, 0], stop_token_ids=(1,), ignore_eos=True)
    assert (kept, seq.finish) == ([0, 1], "stop")


def test_the_limit_cuts_an_accepted_draft():
    seq, text, kept = cut(["a", "b"], [0, 1, 0, 1], limit=3)
    assert (kept, text, seq.finish) == ([0, 1, 0], "aba", "length")


def test_a_stop_on_the_last_token_counts_as_a_stop():
    assert cut(["a", "b"], [0, 1], limit=2, stop="b")[0].finish == "stop"
    assert cut(["a", "b"], [0, 1], limit=2, eos=(1,))[0].finish == "stop"


def test_stop_strings_wait_for_min_new_tokens():
    seq, text, _ = cut(["a", "#"], [1, 0, 1, 0], stop="#", min_new_tokens=3)
    assert (text, seq.generated, seq.finish) == ("#a", [1, 0], "stop")


def test_without_stop_strings_text_is_shown_at_once_and_with_them_held_back():
    assert cut(["a", "b"], [0, 1])[1] == "ab"
    assert cut(["a", "b"], [0, 1, 0, 1], stop="xyz")[1] == "ab"


@pytest.mark.parametrize(("stop", "pushed"), [((), []), (("zz",), [0, 1, 0])])
def test_tokens_become_text_when_somebody_reads_it(stop: tuple[str, ...], pushed: list[int]):
    seen: list[int] = []

    class Watched(Pieces):
        def push(self, token: int) -> str:
            seen.append(token)
            return super().push(token)

    stops = Stops((), lambda: Watched([b"a", b"b"]))
    seq = sequence([9], 100, SeededDice(0), Sampling(stop=stop))
    stops.start(seq)
    for token in (0, 1, 0):
        seq.tokens += stops.cut(seq, [token])
    assert seen == pushed
    assert stops.token_starts(seq) == [0, 1, 2] and seen == [0, 1, 0]
    seq.finish = "length"
    assert stops.text(seq) == "aba" and seen == [0, 1, 0]


@pytest.mark.parametrize("is_final", [False, True])
def test_who_asks_late_where_tokens_begin_hears_of_all_of_them(is_final: bool):
    """Text made many tokens at a time is made again one by one; what was held back stays."""
    pieces = ["é".encode()[:1], b"ab", b"c"]
    stops = Stops((), lambda: Pieces(pieces))
    seq = sequence([9], 100, SeededDice(0), Sampling())
    stops.start(seq)
    seq.tokens += stops.cut(seq, [1, 2, 1])
    assert stops.text(seq) == "abcab"
    seq.tokens += stops.cut(seq, [2, 0])
    seq.finish = "length" if is_final else None
    whole = "abcabc" + ("\ufffd" if is_final else "")
    assert stops.text(seq) == whole
    assert stops.token_starts(seq) == [0, 2, 3, 5, 6]
    assert [stops.text(seq) for _ in range(2)] == [whole] * 2


def test_incomplete_utf8_is_held_back_and_completed():
    pieces = ["é".encode()[:1], "é".encode()[1:], b"z"]
    assert cut(pieces, [2, 0])[1] == "z"
    assert cut(pieces, [2, 0, 1])[1] == "zé"


def test_incomplete_utf8_at_the_end_is_shown_once():
    pieces = ["é".encode()[:1], b"z"]
    stops = Stops((), lambda: Pieces(pieces))
    seq = sequence([9], 2, SeededDice(0), Sampling())
    stops.start(seq)
    seq.tokens += stops.cut(seq, [1, 0])
    assert [stops.text(seq) for _ in range(3)] == ["z\ufffd"] * 3


def test_a_stop_string_of_several_bytes_may_be_split_between_tokens():
    pieces = ["a", "é".encode()[:1], "é".encode()[1:], "b"]
    seq, text, _ = cut(pieces, [0, 1, 2, 3], stop="é")
    assert (text, seq.generated) == ("a", [0])


def test_without_a_detokenizer_ids_still_end_a_sequence():
    stops = Stops((2,))
    seq = sequence([9], 5, SeededDice(0))
    stops.start(seq)
    assert stops.cut(seq, [0, 2, 1]) == [0, 2]
    assert (seq.finish, stops.text(seq)) == ("stop", "")


PIECES = ["a", "b", "ab", "ba", "aab"]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streaming_equals_one_block_and_the_definition(blocks, stop):
    """The text ends before the first stop string to be completed; the earliest of those counts."""
    stops = Stops((), lambda: Pieces([p.encode() for p in PIECES]))
    seq = sequence([9], 1000, SeededDice(0), Sampling(stop=stop))
    stops.start(seq)
    shown = ""
    for block in blocks:
        if seq.finish is None:
            seq.tokens += stops.cut(seq, block)
            text = stops.text(seq)
            assert text.startswith(shown)
            shown = text
    tokens, whole, at = sum(blocks, []), "", -1
    for token in tokens:
        whole += PIECES[token]
        hits = [whole.find(s) for s in stop if s in whole]
        if hits:
            at = min(hits)
            break
    assert (seq.finish == "stop") == (at >= 0)
    if at >= 0:
        assert stops.text(seq) == whole[:at]
        ends = np.cumsum([len(PIECES[t]) for t in tokens])
        assert seq.generated == tokens[: int(np.searchsorted(ends, at)) + 1 if at else 0]
    else:
        assert seq.generated == tokens
        assert whole.startswith(shown)


class Right(PerSequence):
    """Drafts what the target will say."""

    def draft(self, seq, plan, dice):
        last, depth = seq.tokens[-1], min(plan.nodes, plan.depth)
        return chain([(last + i) % 3 for i in range(1, depth + 1)])


def cycle(tokens) -> np.ndarray:
    """0 -> 1 -> 2 -> 0, nearly certain."""
    return np.where(np.arange(3) == (tokens[-1] + 1) % 3, 0.98, 0.01)


@pytest.mark.parametrize(
    ("options", "eos", "generated", "finish"),
    [
        ({"stop": "cba"}, (), (1, 2, 0, 1), "length"),
        ({"stop": "ca"}, (), (1,), "stop"),
        ({}, (2,), (1, 2), "stop"),
        ({"stop_token_ids": (0,)}, (), (1, 2, 0), "stop"),
    ],
)
@pytest.mark.parametrize("drafter", [Drafter(), Right()], ids=["plain", "drafted"])
def test_drafted_and_plain_runs_end_alike(drafter, options, eos, generated, finish):
    """From 0 the text is b c a b ...; stops are met inside an accepted draft or token by token."""
    stops = Stops(eos, lambda: Pieces([b"a", b"b", b"c"]))
    engine = Engine(FakeTarget(cycle), drafter, Greedy(), Fixed(), stops=stops)
    seq = sequence([0], 4, SeededDice(0), Sampling(temperature=0, **options))
    assert run_all(engine, [seq]) == (generated,)
    assert seq.finish == finish
