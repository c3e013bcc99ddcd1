"""SAM Decoding as a drafter: which match drafts, when another drafter does, what a corpus adds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes import FakeTarget, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.mixins import Shared
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, chain
from forerun.drafters.base import PerSequence
from forerun.drafters.sam import Sam
from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.tables.suffix.automaton import warm_up

WIDE = Plan(nodes=64, depth=64)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


class Other(PerSequence, Shared):
    """Drafts one token, 77, and notes what it hears."""

    labels, needs = frozenset({"swor"}), frozenset({"hidden"})

    def __init__(self) -> None:
        self.heard: list[str] = []

    def draft(self, seq, plan, dice):
        return chain([77])

    def bind(self, target) -> None:
        self.heard.append("bind")

    def start(self, seq) -> None:
        self.heard.append("start")

    def observe(self, step) -> None:
        self.heard.append("observe")

    def finish(self, seq) -> None:
        self.heard.append("finish")

    def forget(self, group) -> None:
        self.heard.append("forget")

    def memory_report(self) -> dict[str, int]:
        return {"other": 5}


def sequence(tokens: list[int], group: object = None) -> Sequence:
    return Sequence(list(tokens), len(tokens), Sampling(), SeededDice(0), 10**6, group)


def step(*seqs: Sequence) -> Step:
    return Step(list(seqs), [], [], [], [], [])


def drafted(drafter: Sam, tokens: list[int], plan: Plan = WIDE) -> list[int]:
    return drafter.propose([sequence(tokens)], [plan], [s.dice for s in [sequence(tokens)]])[
        0
    ].tokens.tolist()


def said(drafter: Sam, tokens: list[int]) -> None:
    """A request that has ended."""
    seq = sequence([99])
    drafter.start(seq)
    seq.tokens += tokens
    drafter.observe(step(seq))
    drafter.finish(seq)


def test_copies_what_followed_the_longest_match() -> None:
    seq = sequence([1, 2, 9, 9, 3, 1, 2, 4, 5, 3, 1, 2])
    tree = Sam(place="latest").propose([seq], [WIDE], [seq.dice])[0]
    assert tree.tokens.tolist() == [4, 5, 3, 1, 2]  # "3 1 2", not "1 2"
    assert tree.laws.tolist() == [POINT] * 5 and tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_the_first_place_gives_way_where_little_follows() -> None:
    text = [1, 2, 9, 8, 7, 3, 1, 2, 4, 5, 3, 1, 2]
    assert drafted(Sam(tokens=5), text) == [4, 5, 3, 1, 2]
    assert drafted(Sam(tokens=6), text) == [9, 8, 7, 3, 1, 2]  # of "1 2"
    assert drafted(Sam(tokens=6, place="latest"), text) == [4, 5, 3, 1, 2]


@pytest.mark.parametrize(("nodes", "depth", "size"), [(2, 9, 2), (9, 2, 2), (0, 9, 0), (90, 90, 6)])
def test_is_bounded_by_the_plan_and_by_the_text(nodes: int, depth: int, size: int) -> None:
    assert len(drafted(Sam(), [1, 2, 3, 4, 5, 6, 1], Plan(nodes, depth))) == size


def test_a_match_elsewhere_must_be_longer_by_the_bias() -> None:
    for bias, copied in ((1, [5, 6]), (2, [50, 51, 2, 3, 4])):  # 3 - bias against 1
        drafter = Sam(bias=bias)
        said(drafter, [1, 2, 3, 4, 5, 6])
        assert drafted(drafter, [4, 50, 51, 2, 3, 4]) == copied


def test_short_matches_are_left_to_the_other_drafter() -> None:
    other = Other()
    drafter = Sam(other=other, threshold=2)
    assert Sam(other=other).threshold == 5 and Sam().threshold == 1
    assert drafter.labels == {"point", "swor"} and drafter.needs == {"hidden"}
    seqs = [sequence([1, 2, 3, 9, 1, 2]), sequence([1, 3, 9, 1])]
    trees = drafter.propose(seqs, [WIDE, WIDE], [s.dice for s in seqs])
    assert trees[0].tokens.tolist() == [3, 9, 1, 2] and trees[1].tokens.tolist() == [77]
    assert drafter.propose([seqs[1]], [WIDE], [seqs[1].dice])[0].tokens.tolist() == [77]
    drafter.bind(FakeTarget(table_law(1)))
    drafter.start(seqs[0])
    drafter.observe(step(*seqs))
    drafter.finish(seqs[0])
    drafter.forget("g")
    assert other.heard == ["bind", "start", "observe", "finish", "forget"]
    assert drafter.memory_report()["other"] == 5


def test_others_by_name() -> None:
    drafter = registry.make("drafter", "sam:other=stand")
    assert drafter.labels == {"point", "swor"} and drafter.threshold == 5


def test_trajectories_hear_each_other_while_they_run() -> None:
    drafter = Sam(bias=0)
    one, two = sequence([7], "g"), sequence([8], "g")
    for seq in (one, two):
        drafter.start(seq)
    one.tokens += [1, 2, 3, 4]
    two.tokens += [1, 2]
    drafter.observe(step(one, two))
    assert drafter.propose([two], [WIDE], [two.dice])[0].tokens.tolist() == [3, 4]
    one.tokens += [5, 6]  # two has read nothing new, yet what follows has grown
    drafter.observe(step(one, two))
    assert drafter.propose([two], [WIDE], [two.dice])[0].tokens.tolist() == [3, 4, 5, 6]


def test_propose_equals_propose_one() -> None:
    rng = np.random.default_rng(2)
    one, two = Sam(bias=1, scope="global"), Sam(bias=1, scope="global")
    seqs = [sequence(tokens) for tokens in rng.integers(0, 3, (3, 8)).tolist()]
    twins = [sequence(seq.tokens) for seq in seqs]
    for seq, twin in zip(seqs, twins, strict=True):
        one.start(seq)
        two.start(twin)
    for _ in range(20):
        trees = one.propose(seqs, [WIDE] * 3, [s.dice for s in seqs])
        for tree, twin in zip(trees, twins, strict=True):
            assert (
                tree.tokens.tolist() == two.propose([twin], [WIDE], [twin.dice])[0].tokens.tolist()
            )
        for seq, twin in zip(seqs, twins, strict=True):
            seq.tokens += rng.integers(0, 3, rng.integers(1, 4)).tolist()
            twin.tokens[:] = seq.tokens
        one.observe(step(*seqs))
        two.observe(step(*twins))


def test_a_corpus_is_copied_from(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    file = tmp_path / "corpus.txt"
    file.write_text("the quick brown fox jumps over the lazy dog and runs away\n")
    drafter = Sam(corpus=(str(file),), tokenizer=tokenizer, bias=0)
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog", special=False)
    seq = sequence([ids[-1], *ids[: len(ids) // 2]])
    drafter.start(seq)
    assert (
        drafter.propose([seq], [Plan(4, 4)], [seq.dice])[0].tokens.tolist()
        == (ids[len(ids) // 2 : len(ids) // 2 + 4])
    )
    seq.tokens += [ids[0], ids[0]]  # the cursor follows
    drafter.observe(step(seq))
    assert drafter.memory_report()["automata, corpus"] > 0
    with pytest.raises(ConfigError, match="model's own tokenizer"):
        drafter.bind(FakeTarget(table_law(1)))


def test_bad_corpora(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    file = tmp_path / "latin.txt"
    file.write_bytes(b"fine\nnot f\xe9in\n")
    with pytest.raises(DataError, match="line 2, is not UTF-8"):
        Sam(corpus=(str(file),), tokenizer=tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        Sam(corpus=(str(tmp_path / "none.txt"),), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="needs the target's tokenizer"):
        Sam(corpus=(str(file),))
    file.write_bytes(b"")
    with pytest.raises(DataError, match="no text"):
        Sam(corpus=(str(file),), tokenizer=tokenizer)


def test_what_was_learned_is_saved_and_restored() -> None:
    drafter, other = Sam(bias=0), Sam(bias=0)
    said(drafter, [1, 2, 3, 4, 5])
    drafter.keep()
    other.restore(drafter.snapshot())
    assert drafted(other, [50, 1, 2]) == [3, 4, 5]
    assert Sam.merge([drafter.snapshot()] * 2).counts == {"tokens": 12, "texts": 2}


def test_bad_options() -> None:
    for spec, what in (
        ("tokens=0", "at least 1"),
        ("threshold=0", "at least 1"),
        ("bias=-1", "bias at least 0"),
        ("place=last", "place must be 'first' or 'latest'"),
        ("scope=all", "scope must be one of"),
        ("budget_mb=0.01", "raise the budget"),
        ("other=nothing_such", "unknown drafter"),
    ):
        with pytest.raises(ConfigError, match=what):
            registry.make("drafter", f"sam:{spec}")
