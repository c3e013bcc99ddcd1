"""REST as a drafter: which tree, which datastores, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.assets import embedded
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.tree import POINT
from forerun.drafters.rest import Rest
from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.query.datastore import in_memory
from forerun.ngrams.index.query.engine import Index

DOCS = [[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4], [5, 2, 6]]


def seq_of(tokens: list[int]):
    return sequence(tokens, 50, SeededDice(0))


def paths(drafter: Rest, tokens: list[int], plan: Plan | None = None) -> list[list[int]]:
    tree = drafter.propose([seq_of(tokens)], [plan or Plan(8, 4)], [SeededDice(0)])[0]
    assert set(tree.laws.tolist()) <= {POINT}
    return [tree.path(node) for node in range(len(tree))]


def test_most_frequent_paths_of_the_longest_match_first() -> None:
    drafter = Rest(index=Index.of(DOCS))
    assert paths(drafter, [9, 1, 2]) == [[3], [4], [3, 7], [3, 8]]
    assert paths(drafter, [9, 1, 2], Plan(3, 4)) == [[3], [4], [3, 7]]
    assert paths(drafter, [9, 1, 2], Plan(8, 1)) == [[3], [4]]
    assert paths(drafter, [1, 2, 3]) == [[7], [8]]
    assert paths(drafter, [9, 2]) == []  # a match of one token is none
    assert paths(Rest(index=Index.of(DOCS), shortest=1), [9, 2])[:2] == [[3], [4]]
    assert paths(drafter, [9, 9]) == [] == paths(drafter, [1, 2], Plan(0, 0))


def test_options_bound_the_tree() -> None:
    index = Index.of(DOCS)
    assert paths(Rest(index=index, most=2), [1, 2]) == [[3], [4]]
    assert paths(Rest(index=index, tokens=1), [1, 2]) == [[3], [4]]
    assert paths(Rest(index=index, longest=2), [1, 2, 3]) == [[7], [8]]


def test_a_batch_equals_one_by_one() -> None:
    drafter = Rest(index=Index.of(DOCS, shards=2))
    seqs = [seq_of(t) for t in ([1, 2], [9], [1, 2, 3], [5, 2])]
    plans = [Plan(5, 3), Plan(5, 3), Plan(0, 3), Plan(1, 1)]
    trees = drafter.propose(seqs, plans, [s.dice for s in seqs])
    assert [len(tree) for tree in trees] == [4, 0, 0, 1]
    for seq, plan, tree in zip(seqs, plans, trees, strict=True):
        one = drafter.propose([seq], [plan], [seq.dice])[0]
        assert np.array_equal(one.tokens, tree.tokens) and np.array_equal(one.parents, tree.parents)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_corpus_of_text(tmp_path: Path, suffix: str) -> None:
    tokenizer = Tokenizer.load(embedded("reasoner"))
    text = "the cat sat on the mat. " * 3
    file = tmp_path / f"corpus{suffix}"
    file.write_text(json.dumps({"text": text}) + "\n" if suffix == ".jsonl" else text)
    drafter = registry.make("drafter", f"rest:corpus={file}", tokenizer=tokenizer)
    prompt = tokenizer.encode("the cat sat on", special=False)
    following = tokenizer.encode(text, special=False)[len(prompt) :]
    best = paths(drafter, prompt, Plan(6, 6))
    assert following[: len(best[-1])] in best
    assert drafter.memory_report()["rest datastore in memory"] > 0


def test_ends_of_documents_and_bytes_per_token() -> None:
    class Fake:
        eos_ids, vocab_size = (9,), 10

    index = in_memory([np.array([1, 2, 9, 1, 2]), np.array([], int), np.array([1, 2])], Fake())
    assert index.shards[0].text.tolist() == [65535, 1, 2, 65535, 1, 2, 65535, 1, 2]
    assert paths(Rest(index=index), [1, 2]) == [[9]]
    assert in_memory([np.array([70_000, 1])], None).separator == 2**32 - 1


def test_what_cannot_be_a_datastore_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(embedded("reasoner"))
    for options in ({}, {"ids": (1, 2, 3), "index": "x"}):
        with pytest.raises(ConfigError, match="forerun index build"):
            Rest(**options)
    with pytest.raises(ConfigError, match="longest at least shortest"):
        Rest(ids=(1, 2, 3, 4), longest=1)
    with pytest.raises(DataError, match=r"has 2 tokens, and rest needs at least 3"):
        Rest(ids=(1, 2))
    with pytest.raises(DataError, match="no index"):
        Rest(index=str(tmp_path))
    with pytest.raises(ConfigError, match="needs the target's tokenizer"):
        Rest(corpus=(str(tmp_path / "a.txt"),))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="has no text"):
        Rest(corpus=(str(empty),), tokenizer=tokenizer)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"plain\ncaf\xe9\n")
    with pytest.raises(DataError, match="line 2, is not UTF-8"):
        Rest(corpus=(str(latin),), tokenizer=tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        Rest(corpus=(str(tmp_path / "missing.txt"),), tokenizer=tokenizer)
    with pytest.raises(DataError, match="token ids must be"):
        Rest(ids=(-1, 2, 3, 4))
    with pytest.raises(ConfigError, match="token id 7, the target has 3 ids"):
        Rest(ids=(1, 2, 7)).bind(FakeTarget(table_law(1)))


def test_an_index_of_another_tokenizer_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    build(tmp_path / "own", [corpus], Options(tokenizer=str(tiny_folder), workers=1))
    build(tmp_path / "other", [corpus], Options(tokenizer="reasoner", workers=1))
    tokenizer = Tokenizer.load(tiny_folder)
    own = Rest(index=str(tmp_path / "own"), tokenizer=tokenizer)
    assert own.memory_report() == {}  # mapped from disk
    assert len(paths(own, tokenizer.encode("the cat sat", special=False))) > 0
    with pytest.raises(ConfigError, match="built with tokenizer 'reasoner'"):
        Rest(index=str(tmp_path / "other"), tokenizer=tokenizer)
