"""The index as a draft source: what q is, which trees come of it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fakes import FakeTarget, PlainDice, sequence, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, SWOR
from forerun.drafters.infini import Infini
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.query.engine import Index

DOCS = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 6]]


def seq_of(tokens: list[int], temperature: float = 1.0):
    return sequence(tokens, 50, SeededDice(0), Sampling(temperature=temperature))


def q_after(
    drafter: Infini, tokens: list[int], temperature: float = 1.0
) -> dict[int, float] | None:
    (q,) = drafter.source.next([(seq_of(tokens, temperature), ())])
    return None if q is None else dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))


def drafter(**options: object) -> Infini:
    made = Infini(index=Index.of(DOCS, eos=9), **options)
    made.bind(FakeTarget(table_law(1, 10), 10))
    return made


def test_q_is_what_followed_the_longest_suffix() -> None:
    found = drafter()
    assert q_after(found, [7, 1, 2]) == {3: 2 / 3, 4: 1 / 3}
    assert q_after(found, [7, 2]) == {3: 0.5, 4: 0.25, 6: 0.25}
    assert q_after(found, [2, 3]) == {9: 1.0}  # the end of a document is the target's end id
    assert q_after(found, [8]) is None  # nothing is known: no draft


def test_q_follows_the_temperature_but_not_a_greedy_one() -> None:
    sharp = q_after(drafter(), [1, 2], 0.5)
    assert np.allclose([sharp[3], sharp[4]], [4 / 5, 1 / 5])
    assert q_after(drafter(), [1, 2], 0.0) == {3: 2 / 3, 4: 1 / 3}
    assert q_after(drafter(), [1, 2], 1e-4) == {3: 1.0}  # 2^-10000 is no probability


def test_options_bound_what_is_proposed() -> None:
    assert q_after(drafter(min_length=2), [7, 2]) is None
    assert q_after(drafter(min_count=4), [1, 2]) is None
    assert q_after(drafter(entries=1), [1, 2]) == {3: 1.0}
    assert q_after(drafter(context=1), [1, 2]) == {3: 0.5, 4: 0.25, 6: 0.25}
    q = q_after(drafter(max_support=2), [2])
    assert sum(q.values()) == 1.0 and set(q) <= {3, 4, 6}


def test_without_an_end_id_the_end_is_not_proposed() -> None:
    made = Infini(index=Index.of([[1, 2], [1, 2, 3]]))
    made.bind(FakeTarget(table_law(1, 10), 10))
    assert q_after(made, [1, 2]) == {3: 1.0}
    assert q_after(made, [2, 3]) is None


def test_greedy_requests_get_the_best_tokens() -> None:
    plan = Plan(nodes=4, depth=2)
    made = drafter()
    greedy = made.propose([seq_of([1, 2], 0.0)], [plan], [SeededDice(0)])[0]
    drawn = made.propose([seq_of([1, 2], 1.0)], [plan], [SeededDice(0)])[0]
    assert set(greedy.laws.tolist()) == {POINT} and greedy.tokens[0] == 3
    assert set(drawn.laws.tolist()) == {SWOR}
    assert set(
        drafter(grower="chain").propose([seq_of([1, 2])], [plan], [SeededDice(0)])[0].laws
    ) == {IID}
    assert made.labels == {"swor", "point"}


def test_a_batch_of_both_kinds_equals_one_by_one() -> None:
    made, plan = drafter(), Plan(nodes=5, depth=3)
    texts = [([1, 2], 0.0), ([1], 1.0), ([8], 1.0), ([5], 0.0), ([2], 0.7)]
    seqs = [seq_of(tokens, t) for tokens, t in texts]
    trees = made.propose(seqs, [plan] * 4 + [Plan(nodes=0, depth=0)], [s.dice for s in seqs])
    for (tokens, t), tree in zip(texts[:4], trees, strict=False):
        alone = seq_of(tokens, t)
        (one,) = made.propose([alone], [plan], [PlainDice(alone.dice)])
        assert tree.tokens.tolist() == one.tokens.tolist() and np.array_equal(
            tree.q_probs, one.q_probs
        )
    assert len(trees[2]) == len(trees[4]) == 0 < len(trees[0])


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forerun index build"):
        Infini()
    with pytest.raises(ConfigError, match="not both"):
        Infini(index=Index.of(DOCS), corpus=(1, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        Infini(corpus=(1, 2), entries=0)
    with pytest.raises(UnknownName):
        Infini(corpus=(1, 2), grower="gumble")
    with pytest.raises(DataError, match="no index"):
        registry.make("drafter", f"infini:index={tmp_path}")
    with pytest.raises(ConfigError, match="token id 6, but the target has 3 ids"):
        Infini(index=Index.of(DOCS)).bind(FakeTarget(table_law(1)))


def test_an_index_of_another_tokenizer_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    from forerun.models.tokenizer import Tokenizer

    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"text": "the cat sat on"}) + "\n")
    build(tmp_path / "own", [corpus], Options(tokenizer=str(tiny_folder), workers=1))
    build(tmp_path / "other", [corpus], Options(tokenizer="reasoner", workers=1))
    tokenizer = Tokenizer.load(tiny_folder)
    made = Infini(index=str(tmp_path / "own"), tokenizer=tokenizer)
    assert made.memory_report() == {}
    ids = tokenizer.encode("the cat", special=False)
    assert made.index.count(ids) == 1
    with pytest.raises(ConfigError, match="built with tokenizer 'reasoner'"):
        Infini(index=str(tmp_path / "other"), tokenizer=tokenizer)
