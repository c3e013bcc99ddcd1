"""The tri-gram matrix against a dictionary that does what the sheet says; its corpus and files."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.counts import corpus as corpora
from forerun.ngrams.tables.logits import kernels
from forerun.ngrams.tables.trigram import count, table
from forerun.ngrams.tables.trigram.table import Rows, TrigramMatrix

A, B, C, D = range(4)
Scores = dict[tuple[int, int], dict[int, float]]


def counted(documents: list[list[int]], entries: int) -> Scores:
    """P(c | a, b), the `entries` largest of each row, ties by id."""
    counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for document in documents:
        for a, b, c in zip(document, document[1:], document[2:], strict=False):
            counts[a, b][c] += 1
    return {
        pair: {
            c: n / sum(row.values())
            for c, n in sorted(row.items(), key=lambda item: (-item[1], item[0]))[:entries]
        }
        for pair, row in counts.items()
    }


def held(matrix: TrigramMatrix, vocab: int) -> Scores:
    """All rows, asked one by one."""
    rows = {(a, b): matrix.row(a, b) for a in range(vocab) for b in range(vocab)}
    return {
        pair: dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))
        for pair, q in rows.items()
        if q is not None
    }


def assert_same(found: Scores, wanted: Scores) -> None:
    assert found.keys() == wanted.keys()
    for pair, row in wanted.items():
        assert found[pair] == pytest.approx(row, abs=1e-6)
        assert list(found[pair]) == sorted(row, key=lambda c: (-round(row[c], 5), c))


def assert_consistent(matrix: TrigramMatrix) -> None:
    """Every key is found where linear probing looks for it; rows fall; the size is right."""
    slots = np.flatnonzero(matrix.table.keys)
    assert len(matrix) == len(slots)
    for slot in slots:
        assert kernels.find(matrix.table.keys, matrix.table.keys[slot]) == slot
        size = matrix.table.counts[slot]
        assert 1 <= size <= matrix.entries
        assert (np.diff(matrix.table.probs[slot, :size]) <= 0).all()


def arrays(documents: list[list[int]]) -> list[np.ndarray]:
    return [np.array(document, np.int32) for document in documents]


def test_example_of_the_sheet() -> None:
    matrix = TrigramMatrix()
    matrix.count(arrays([[A, B, C, A, B, D]]))
    assert held(matrix, 4)[A, B] == pytest.approx({C: 0.5, D: 0.5})
    matrix.nudge([A, B, D])
    assert held(matrix, 4)[A, B] == pytest.approx({D: 0.54, C: 0.5})
    for _ in range(65):
        matrix.nudge([A, B, D])
    assert held(matrix, 4)[A, B] == pytest.approx({D: 3.0, C: 0.5})
    row = matrix.row(A, B, renormalise=True)
    assert row is not None and row.probs.tolist() == pytest.approx([3 / 3.5, 0.5 / 3.5])
    assert matrix.row(D, D) is None


documents_of = st.lists(st.lists(st.integers(0, 4), max_size=30), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(documents_of, st.integers(1, 5), st.integers(1, 8))
def test_counts_equal_a_dictionary(documents: list[list[int]], entries: int, chunk: int) -> None:
    wanted = counted(documents, entries)
    matrix = TrigramMatrix(entries=entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "CHUNK_TRIGRAMS", chunk)  # many runs to merge
        if not wanted:
            with pytest.raises(DataError, match=r"too small: expected a document of 3 tokens"):
                matrix.count(arrays(documents))
            return
        matrix.count(arrays(documents))
    assert_same(held(matrix, 5), wanted)
    assert_consistent(matrix)
    assert matrix.learned == sum(max(0, len(d) - 2) for d in documents)


@settings(deadline=None, max_examples=60)
@given(documents_of, st.lists(st.lists(st.integers(0, 4), max_size=16), max_size=30))
def test_nudges_equal_a_dictionary(corpus: list[list[int]], windows: list[list[int]]) -> None:
    scores, base = counted(corpus, 12), None
    if scores:
        base = TrigramMatrix()
        base.count(arrays(corpus))
    before = {pair: dict(row) for pair, row in scores.items()}
    matrix = TrigramMatrix(base=base)
    for window in windows:
        matrix.nudge(window, 0.3, 2.0)
        for a, b, c in zip(window, window[1:], window[2:], strict=False):
            row = scores.setdefault((a, b), {})
            row[c] = max(row.get(c, 0.0), min(2.0, row.get(c, 0.0) + 0.3))
    found = held(matrix, 5)
    assert found.keys() == scores.keys()
    assert all(found[pair] == pytest.approx(row, abs=1e-5) for pair, row in scores.items())
    assert_consistent(matrix)
    if base:
        assert_same(held(base, 5), before)  # what is learned never reaches the base


def test_a_full_row_drops_its_smallest_entry() -> None:
    matrix = TrigramMatrix(entries=2)
    matrix.nudge([A, B, C, A, B, C, A, B, D])
    assert list(held(matrix, 4)[A, B]) == [C, D]
    matrix.nudge([A, B, A])
    assert held(matrix, 4)[A, B] == pytest.approx({C: 0.08, A: 0.04})


def test_growth_and_eviction_keep_what_was_hit_last() -> None:
    matrix, rng = TrigramMatrix(entries=4, budget=200 * 48), np.random.default_rng(0)
    for _ in range(200):
        matrix.nudge(rng.integers(0, 50, 16))
    assert matrix.nbytes <= matrix.budget
    assert matrix.dropped and len(matrix) <= matrix.max_rows
    assert_consistent(matrix)
    latest = rng.integers(0, 50, 16).tolist()
    matrix.nudge(latest)
    assert all(matrix.row(a, b) for a, b in zip(latest[:-2], latest[1:-1], strict=True))


def test_a_corpus_beyond_the_budget_keeps_its_most_frequent_pairs() -> None:
    matrix = TrigramMatrix(entries=4, budget=200 * 48)
    rare = [[1000 + i, 2000 + i, 1] for i in range(500)]
    matrix.count(arrays([*rare, [7, 8, 9, 7, 8, 9]]))
    assert matrix.row(7, 8) and matrix.row(8, 9)
    assert len(matrix) == matrix.max_rows
    assert matrix.dropped == 503 - matrix.max_rows


def test_rows_go_around() -> None:
    rng = np.random.default_rng(1)
    matrix = TrigramMatrix(entries=3)
    for _ in range(40):
        matrix.nudge(rng.integers(0, 9, 16))
    other = TrigramMatrix(entries=3)
    other.absorb(matrix.rows())
    assert held(other, 9) == held(matrix, 9)
    other.absorb(matrix.rows())  # the larger score holds, so the same again changes nothing
    assert held(other, 9) == held(matrix, 9)
    half = table.newest(matrix.rows(), 10)
    assert len(half.keys) == len(half.sizes) == 10 and half.sizes.sum() == len(half.ids)
    assert half.keys[-1] == matrix.rows().keys[-1]


def test_blending_takes_the_larger_score_of_each() -> None:
    one, two = TrigramMatrix(entries=2), TrigramMatrix(entries=2)
    one.nudge([A, B, C], 0.5)
    one.nudge([A, B, D], 0.25)
    two.nudge([A, B, D], 0.75)
    two.nudge([A, B, A], 0.125)
    both = TrigramMatrix(entries=2)
    both.absorb(table.blend([one.rows(), two.rows()], 2))
    assert held(both, 4)[A, B] == {D: 0.75, C: 0.5}


def test_damaged_rows_are_refused() -> None:
    matrix = TrigramMatrix(entries=2)
    matrix.nudge([A, B, C, D])
    rows = matrix.rows()
    assert table.check(rows._asdict(), 2).keys.tolist() == rows.keys.tolist()
    for change in (
        {"ids": rows.ids[:-1]},
        {"sizes": rows.sizes + 2},
        {"keys": rows.keys[[0, 0]]},
        {"scores": -rows.scores},
        {"scores": rows.scores * np.nan},
    ):
        with pytest.raises(DataError, match="are inconsistent"):
            table.check(Rows(*rows)._asdict() | change, 2)
    with pytest.raises(DataError, match="expected the arrays keys, sizes, ids, scores"):
        table.check({"keys": rows.keys}, 2)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"entries must be in 1..256, got 0"):
        TrigramMatrix(entries=0)
    with pytest.raises(ConfigError, match="raise the budget"):
        TrigramMatrix(budget=1000)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


def test_text_files_are_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "Anna has 3 apples.\nShe eats 2 of them.\n"
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write(text)
    lines = [json.dumps({"text": text}), "", json.dumps({"text": "two\ndocuments"})]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    found = list(corpora.tokenised([tmp_path / n for n in ("a.txt", "b.txt.gz")], tokenizer))
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text, special=False)] * 2
    assert list(corpora.documents(tmp_path / "c.jsonl")) == [text, "two\ndocuments"]


def test_long_documents_come_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpora, "PIECE_CHARACTERS", 10)
    text = "".join(f"line {i}\n" for i in range(20))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(corpora.documents(tmp_path / "long.txt"))
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.txt", b"good\nbad \xe9t\xe9\n", r"line 2, is not UTF-8: byte 0xe9 at position 4"),
        ("bad.txt.gz", b"no gzip", "cannot be read"),
        ("bad.jsonl", b'{"text": "a"}\n{"words": 1}\n', r'line 2: expected a JSON object with "te'),
        ("bad.jsonl", b'{"text": "a", "text": "b"}\n', "duplicate key 'text'"),
        ("bad.jsonl", b"plain\n", "line 1: expected a JSON object"),
        (
            "bad.jsonl",
            b'{"text": "a\\ud800"}\n',
            "line 1, is not UTF-8 text: half of a surrogate pair",
        ),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, tokenizer: Tokenizer, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(corpora.tokenised([tmp_path / name], tokenizer))


def test_missing_files_and_tokenizers_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(corpora.tokenised([tmp_path / "none.txt"], tokenizer))
    with pytest.raises(ConfigError, match="needs the target's tokenizer"):
        list(corpora.tokenised([tmp_path / "none.txt"], None))


def test_files_of_counts_go_around(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rng, file = np.random.default_rng(2), tmp_path / "counts"
    matrix = TrigramMatrix(entries=3)
    matrix.count(arrays([rng.integers(0, 9, 300).tolist()]))
    corpora.save(file, matrix, tokenizer)
    again = corpora.load(file, tokenizer, entries=3)
    assert held(again, 9) == held(matrix, 9) and again.learned == matrix.learned
    with pytest.raises(ConfigError, match="entries=4"):
        corpora.load(file, tokenizer, entries=4)
    with pytest.raises(ConfigError, match=r"the budget of \d+; raise corpus_mb"):
        corpora.load(file, tokenizer, entries=3, budget=130 * 40)
    corpora.save(file, matrix, None)
    assert len(corpora.load(file, tokenizer, entries=3)) == len(matrix)  # unknown: taken on trust


def test_files_of_another_tokenizer_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Other(Tokenizer):
        def vocabulary(self) -> dict[str, int]:
            return {"a": 0}

    matrix = TrigramMatrix()
    matrix.nudge([1, 2, 3])
    corpora.save(tmp_path / "counts", matrix, Other(tokenizer.inner))
    with pytest.raises(DataError, match="counted with another tokenizer"):
        corpora.load(tmp_path / "counts", tokenizer)
    data = bytearray((tmp_path / "counts").read_bytes())
    data[-1] ^= 1
    (tmp_path / "counts").write_bytes(bytes(data))
    with pytest.raises(DataError):
        corpora.load(tmp_path / "counts", tokenizer)


def test_real_corpora_can_be_counted(data_dir: Path, tokenizer: Tokenizer) -> None:
    base = TrigramMatrix()
    base.count(corpora.tokenised([data_dir / "corpora" / "tinyshakespeare.txt.gz"], tokenizer))
    assert base.learned > 100_000 and base.nbytes <= base.budget
    assert_consistent(base)
