"""Who shares what was said, what a budget drops, and what is saved."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from fakes import FakeTarget, table_law
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence, Snapshot
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.suffix.response_store import (
    CONTEXT_TOKENS,
    Responses,
    merge,
    pack,
    unpack,
)

pytestmark = pytest.mark.usefixtures("short_collections")


class Log:
    """A store that keeps its texts as lists, four bytes a token; the oldest go."""

    def __init__(self, budget: int = 1 << 62) -> None:
        if budget < 16:
            raise ConfigError("raise the budget")
        self.budget, self.texts = budget, []

    @property
    def nbytes(self) -> int:
        return 4 * sum(map(len, self.texts))

    def growth(self, num: int) -> int:
        return 4 * num

    def begin(self, context=()) -> list[int]:
        self.texts.append([])
        return self.texts[-1]

    def extend(self, text: list[int], tokens) -> None:
        text += tokens
        while self.nbytes > self.budget and len(self.texts) > 1:
            self.texts.pop(0)

    def end(self, text: list[int]) -> None:
        text.append(-1)

    def all_texts(self) -> list[np.ndarray]:
        return [np.array([t for t in text if t >= 0], dtype=np.int32) for text in self.texts]


def made(scope: str = "tenant", budget: int = 4000) -> Responses[Log, Log]:
    return Responses("log", Log, Log, scope=scope, budget=budget)


def sequence(tokens: list[int], group: object = None, tenant: str = "") -> Sequence:
    seq = Sequence(list(tokens), len(tokens), Sampling(), SeededDice(0), 10**6, group)
    seq.tenant = tenant
    return seq


def test_own_store_reads_all_and_the_shared_one_the_response() -> None:
    shared, seq = made(), sequence(list(range(20)))
    reader = shared.follow(seq)
    assert reader.text == list(range(20)) and reader.entry == list(range(20 - CONTEXT_TOKENS, 20))
    seq.tokens += [50, 51]
    assert shared.follow(seq) is reader
    assert reader.text[-2:] == reader.entry[-2:] == [50, 51] and len(reader.text) == 22
    shared.finish(seq)
    assert reader.entry[-1] == -1 and shared.follow(seq) is not reader


@pytest.mark.parametrize(
    ("scope", "alike"),
    [
        ("group", {0: 0, 1: 0, 2: 2, 3: 3}),
        ("tenant", {0: 0, 1: 0, 2: 0, 3: 3}),
        ("global", {0: 0, 1: 0, 2: 0, 3: 0}),
    ],
)
def test_scopes(scope: str, alike: dict[int, int]) -> None:
    shared = made(scope)
    seqs = [sequence([1], "a"), sequence([1], "a"), sequence([1], "b"), sequence([1], "c", "x")]
    stores = [shared.follow(seq).shared for seq in seqs]
    for one in alike:
        for other in alike:
            assert (stores[one] is stores[other]) == (alike[one] == alike[other])


def test_requests_without_company_share_nothing() -> None:
    assert made("request").follow(sequence([1], "a")).shared is None
    assert made("group").follow(sequence([1])).shared is None


def test_a_changed_text_is_read_anew() -> None:
    shared, seq = made(), sequence([1, 2, 3])
    seq.tokens += [4, 5, 6]
    first = shared.follow(seq)
    seq.tokens[3:] = [7, 7, 7, 7]
    reader = shared.follow(seq)
    assert reader is not first and reader.text == [1, 2, 3, 7, 7, 7, 7]


def test_idle_stores_go_first_and_the_budget_holds() -> None:
    shared = made("group", budget=4000)
    running = sequence([1], "running")
    shared.follow(running)
    for group in range(30):
        seq = sequence([1], group)
        shared.follow(seq)
        seq.tokens += [group] * 100
        shared.follow(seq)
        shared.finish(seq)
        assert shared.report()["shared texts"] <= 4000
    running.tokens += [7] * 50
    assert shared.follow(running).entry == [1] + [7] * 50  # in use, hence still there
    again = sequence([1], 29)
    assert len(shared.follow(again).shared.texts) == 2
    assert len(shared.follow(sequence([1], 0)).shared.texts) == 1  # had to go


def test_forgotten_groups_and_ended_sequences_hold_nothing() -> None:
    shared, seq = made("group"), sequence([1, 2], "a")
    shared.follow(seq)
    assert shared.report() == {"own texts": 8, "shared texts": 8, "unread texts": 0}
    shared.finish(seq)
    assert shared.report()["own texts"] == 0
    shared.forget("a")
    assert shared.report()["shared texts"] == 0
    shared.follow(sequence([1]))  # never finished, but gone
    gc.collect()
    assert shared.report()["own texts"] == 0


def ended(shared: Responses[Log, Log], tokens: list[int], **whose: object) -> None:
    """A response beside which nobody asked."""
    seq = sequence([0], **whose)
    shared.join(seq)
    seq.tokens += tokens
    shared.finish(seq)


def test_who_joined_is_read_when_somebody_gathers() -> None:
    shared, one, two = made("group"), sequence([1], "a"), sequence([2], "a")
    for seq in (one, two):
        shared.join(seq)
        seq.tokens += [5, 6]
    other = sequence([3], "b")
    shared.join(other)
    ended(shared, [7], group="a")
    shared.gather([one])
    assert shared.follow(one).shared.texts == [[1, 5, 6], [2, 5, 6], [0, 7, -1]]
    two.tokens.append(8)
    shared.finish(two)
    assert shared.follow(one).shared.texts[1] == [2, 5, 6, 8, -1]
    assert not shared.follow(other).shared.texts[1:]


def test_unread_responses_keep_to_their_share_and_go_with_their_group() -> None:
    shared = made("group", budget=1600)  # 100 bytes unread: four texts of six tokens
    for i in range(6):
        ended(shared, [i] * 5, group=i % 2)
    assert shared.report()["unread texts"] == 96
    seq = sequence([9], 0)
    assert shared.follow(seq).shared is not None and len(shared.follow(seq).shared.texts) == 1
    shared.gather([seq])
    assert [text[1] for text in shared.follow(seq).shared.texts[1:]] == [2, 4]
    shared.forget(1)
    assert shared.report()["unread texts"] == 0
    shared.gather([sequence([9], 1)])
    assert len(shared.follow(sequence([9], 1)).shared.texts) == 1


def test_unread_responses_are_saved_too() -> None:
    shared = made()
    ended(shared, [1, 2], tenant="x")
    assert shared.snapshot("x").counts == {"tokens": 3, "texts": 1}
    ended(shared, [3], tenant="x")
    shared.restore(pack("log", [np.array([7], np.int32)]), "x")
    assert shared.snapshot("x").arrays["tokens"].tolist() == [7]


def test_what_is_saved_comes_back() -> None:
    shared = made()
    for tokens in ([1, 2, 3], [4, 5], [6]):
        seq = sequence(tokens, tenant="x")
        shared.follow(seq)
        shared.finish(seq)
    snapshot = shared.snapshot("x")
    assert snapshot.counts == {"tokens": 6, "texts": 3} and snapshot.kind == "log"
    other = made()
    other.restore(snapshot, "y")
    store = other.follow(sequence([9], tenant="y")).shared
    assert [t.tolist() for t in store.all_texts()] == [[1, 2, 3], [4, 5], [6], [9]]
    running = sequence([1], tenant="y")
    other.follow(running)
    other.restore(snapshot, "y")
    assert [t.tolist() for t in other._stores["tenant", "y"].all_texts()] == [
        [1, 2, 3],
        [4, 5],
        [6],
    ]
    running.tokens.append(2)
    assert other.follow(running).shared.all_texts()[3:][0].tolist() == [1, 2]


def test_who_runs_while_a_memory_is_restored_is_saved_though_it_never_drafts_again() -> None:
    shared, running = made(), sequence([1], tenant="x")
    shared.follow(running)
    shared.restore(pack("log", [np.array([7], np.int32)]), "x")
    running.tokens += [2, 3]
    shared.finish(running)
    assert shared.snapshot("x").arrays["tokens"].tolist() == [7, 1, 2, 3]


def test_texts_of_another_target_go() -> None:
    shared, one, two = made(), FakeTarget(table_law(1), vocab=5), FakeTarget(table_law(1), vocab=9)
    shared.bind(one)
    store = shared.follow(sequence([1, 2])).shared
    shared.bind(one)
    assert shared.follow(sequence([1, 2])).shared is store
    shared.bind(two)
    assert shared.follow(sequence([1, 2])).shared is not store


def test_ids_that_a_target_lacks_are_refused() -> None:
    snapshot = pack("log", [np.array([5, 1], np.int32)])
    small, large = FakeTarget(table_law(1), vocab=5), FakeTarget(table_law(1), vocab=6)
    for target, first in ((small, "bind"), (small, "restore")):
        shared = made()
        if first == "bind":
            shared.bind(target)
        else:
            shared.restore(snapshot, "")
        with pytest.raises(ConfigError, match="token id 5, the model.s largest id is 4"):
            shared.restore(snapshot, "") if first == "bind" else shared.bind(target)
        if first == "bind":  # what was refused leaves no trace
            shared.bind(target)
    shared = made()
    shared.bind(large)
    shared.restore(snapshot, "")


def test_merged_keeps_the_last_texts() -> None:
    one = pack("log", [np.array([1, 2], np.int32), np.array([3], np.int32)])
    two = pack("log", [np.array([4, 5, 6], np.int32)])
    both = merge([one, two])
    assert [t.tolist() for t in unpack(both)] == [[1, 2], [3], [4, 5, 6]]
    capped = merge([one, two], max_bytes=both.nbytes - 1)
    assert [t.tolist() for t in unpack(capped)] == [[3], [4, 5, 6]]
    assert capped.nbytes <= both.nbytes - 1
    least = merge([one, two], max_bytes=3)
    assert [t.tolist() for t in unpack(least)] == [[4, 5, 6]], "who asks reads how much it takes"


@pytest.mark.parametrize("scope", ["request", "group"])
def test_what_ends_with_its_scope_is_not_kept(scope: str) -> None:
    with pytest.raises(ConfigError, match="use log:scope=tenant"):
        made(scope).check_can_keep("")


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="scope must be one of"):
        made("everybody")
    with pytest.raises(ConfigError, match="raise the budget"):
        made(budget=1)
    with pytest.raises(ConfigError, match="scope=tenant"):
        made("global").check_can_keep("x")
    with pytest.raises(ConfigError, match="no responses to save"):
        made().snapshot("")


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        (None, [2]),
        ([1, 2], None),
        ([1, 2], [3]),
        ([1, 2], [-1, 3]),
        ([1, -2], [2]),
        ([[1, 2]], [2]),
        ([1.0, 2.0], [2]),
    ],
)
def test_arrays_that_are_no_texts_are_refused(tokens, lengths) -> None:
    arrays = {}
    if tokens is not None:
        kind = np.float32 if isinstance(tokens[0], float) else np.int32
        arrays["tokens"] = np.array(tokens, dtype=kind)
    if lengths is not None:
        arrays["lengths"] = np.array(lengths, dtype=np.int64)
    with pytest.raises(DataError, match="expected the tokens and lengths of texts"):
        unpack(Snapshot("log", arrays, {}, {}))
