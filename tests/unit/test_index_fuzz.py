"""A damaged file of an index never crashes a query, and never changes an answer in silence."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_files import IDS, write_lines

from forerun.cli.main import main
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling
from forerun.drafters.infini import Infini
from forerun.drafters.rest import Rest
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build import verify
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.counts import corpus
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.ngrams.index.fm.index import FMIndex
from forerun.ngrams.index.query import continuations
from forerun.ngrams.index.query.continuation_kernels import FirstTokens, TreeLimits
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.tables.trigram.table import TrigramMatrix

TRIALS, MANY_TRIALS = 120, 20_000
NUM_DOCUMENTS, NUM_TOKENS, NUM_IDS = 60, 150, 7
DAMAGES = ("flip", "flips", "zero", "truncate", "extend", "swap")
Damage = Callable[[np.random.Generator, list[Path]], str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged index of two shards; most files have more than one page."""
    folder = tmp_path_factory.mktemp("fuzz")
    rng = np.random.default_rng(0)
    rows = [
        {"tokens": rng.integers(0, NUM_IDS, NUM_TOKENS).tolist(), "name": f"document {i}"}
        for i in range(NUM_DOCUMENTS)
    ]
    options = Options(tokenizer="ids", reading=IDS.reading, shards=2, workers=1)
    build(folder / "ix", [write_lines(folder / "n.jsonl", rows)], options)
    return folder / "ix"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged index of one shard."""
    folder = tmp_path_factory.mktemp("alone")
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, NUM_IDS, 400).tolist()} for _ in range(9)]
    options = Options(tokenizer="ids", reading=IDS.reading, workers=1)
    build(folder / "ix", [write_lines(folder / "n.jsonl", rows)], options)
    return folder / "ix"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged index with a saved tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [{"text": "the cat sat on the mat"}, {"text": "the cat ran"}]
    build(folder / "ix", [write_lines(folder / "t.jsonl", lines)], Options(workers=1))
    return folder / "ix"


def files_of(path: Path) -> list[Path]:
    """All files of an index but its lock."""
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name != "lock")


def damage(rng: np.random.Generator, files: list[Path]) -> str:
    """Damages a file, or swaps two; returns what was done."""
    kind, file = DAMAGES[rng.integers(len(DAMAGES))], files[rng.integers(len(files))]
    data = bytearray(file.read_bytes())
    at = int(rng.integers(len(data)))
    if kind in ("flip", "flips"):
        for place in [at] if kind == "flip" else rng.integers(len(data), size=8).tolist():
            data[place] ^= 1 << int(rng.integers(8))
    elif kind == "zero":
        data[at & ~4095 : (at | 4095) + 1] = bytes(len(data[at & ~4095 : (at | 4095) + 1]))
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += rng.bytes(int(rng.integers(1, 5000)))
    else:
        other = files[rng.integers(len(files))]
        theirs = other.read_bytes()
        other.write_bytes(data)
        data = bytearray(theirs)
    file.write_bytes(data)
    return f"{kind} {file.name} at {at}"


def answers(index: Index) -> list[Any]:
    """The answer to one query of every kind."""
    rng = np.random.default_rng(1)
    contexts = [rng.integers(0, NUM_IDS, int(n)).tolist() for n in rng.integers(1, 9, 12)]
    text = rng.integers(0, NUM_IDS, 40).tolist()
    found = [index.count_many(contexts).tolist(), index.count([1, 2]), index.find([3])]
    found += [index.infgram_prob(c, 2) for c in contexts[:4]]
    found += [index.prob([1, 2], index.eos), index.longest_suffix(text)]
    found += [shown(n) for n in index.infgram_many(contexts, 20)]
    found += [shown(index.ntd([4], None)), shown(index.infgram_ntd(text, 10))]
    found += [index.search([1, 2, 3], limit=3, window=20), index.document(7)]
    cnf = index.find_cnf([[[1, 2, 3]], [[4, 5], [6, 0, 1]]], max_clause_freq=100)
    found += [cnf.count, [r.tolist() for r in cnf.ranges], index.search_cnf([[[1, 2]], [[5, 5]]])]
    found += [index.longest_matches(text).tolist(), index.attribute(text, min_length=4)]
    firsts = FirstTokens(np.array([1, 2, 3]), np.ones(3))
    for allowed in (None, firsts):
        for each in contexts[:3]:
            drafts = continuations.retrieve(
                index, each, TreeLimits(8, 4), lengths=(1, 8), firsts=allowed
            )
            found.append([part.tolist() for part in drafts[:3]] + [*drafts[3:]])
    return found


def shown(found: Any) -> list[Any]:
    return [found.ids.tolist(), found.counts.tolist(), found.context_count, found.suffix_length]


def outcome(path: Path, how: str, ask: Callable[[Index], list[Any]] = answers) -> list[Any] | None:
    """The answers, or None for a refusal in one line."""
    try:
        return ask(Index.open(path, verify=how))
    except (ConfigError, DataError) as error:
        assert str(error) and "\n" not in str(error)
        assert isinstance(error, DataError), f"not an error of bad data: {error!r}"
        return None


def damaged_copies(whole: Path, tmp_path: Path, trials: int, seed: int) -> Any:
    """A copy of an index with one damage per trial, and what was done."""
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        done = damage(rng, files_of(path))
        yield path, f"trial {trial} of seed {seed}: {done}"


def check_default(whole: Path, tmp_path: Path, trials: int, seed: int) -> None:
    expected, refused = answers(Index.open(whole)), 0
    for path, done in damaged_copies(whole, tmp_path, trials, seed):
        found = outcome(path, "fast")
        assert found is None or found == expected, done
        refused += found is None
    assert refused > trials / 2


def test_by_default_an_answer_is_right_or_refused(whole: Path, tmp_path: Path) -> None:
    check_default(whole, tmp_path, TRIALS, 0)


@pytest.mark.slow
def test_by_default_an_answer_is_right_or_refused_often(whole: Path, tmp_path: Path) -> None:
    check_default(whole, tmp_path, MANY_TRIALS, 1)


def test_every_damage_is_refused_in_full(whole: Path, tmp_path: Path) -> None:
    expected = answers(Index.open(whole, verify="full"))
    for path, done in damaged_copies(whole, tmp_path, TRIALS // 3, 2):
        is_same = all(
            (whole / f.relative_to(path)).read_bytes() == f.read_bytes() for f in files_of(path)
        )
        found = outcome(path, "full")
        assert found == (expected if is_same else None) or "manifest" in done, done


def check_off(whole: Path, tmp_path: Path, trials: int, seed: int) -> None:
    """Without verification an answer may be wrong; its sizes are those of the index."""
    total = Index.open(whole).tokens
    for path, done in damaged_copies(whole, tmp_path, trials, seed):
        found = outcome(path, "off")
        if found is not None:
            assert all(0 <= n <= total for n in found[0]), done
            passages = [p for part in found if isinstance(part, list) for p in part]
            for one in [*passages, *found]:
                assert getattr(one, "length", 0) <= total, done


def test_without_verification_nothing_crashes(whole: Path, tmp_path: Path) -> None:
    check_off(whole, tmp_path, TRIALS, 3)


@pytest.mark.slow
def test_without_verification_nothing_crashes_often(whole: Path, tmp_path: Path) -> None:
    check_off(whole, tmp_path, MANY_TRIALS, 4)


def old(whole: Path, path: Path) -> Path:
    """A copy as an older release wrote it: without page checksums and those of the tokenizer."""
    shutil.copytree(whole, path)
    manifest = store.read_manifest(path)
    shards = []
    for number, info in enumerate(manifest.shards):
        (path / manifest.folder / store.file_name("pages", number)).unlink()
        files = {kind: file for kind, file in info.files.items() if kind != "pages"}
        shards.append(replace(info, files=files))
    tokenizer = {k: v for k, v in manifest.tokenizer.items() if k != "files"}
    changed = replace(manifest, shards=tuple(shards), tokenizer=tokenizer)
    (path / "manifest.json").write_text(changed.to_json())
    return path


def test_an_older_index_is_searched_and_gets_checksums(
    whole: Path, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    path, expected = old(whole, tmp_path / "old"), answers(Index.open(whole))
    with caplog.at_level(logging.WARNING, "forerun"):
        assert answers(Index.open(path)) == expected
    (message,) = {record.getMessage() for record in caplog.records}
    advised = message[message.index("`forerun ") + 1 : message.rindex("`")]
    assert main(advised.split()[1:]) == 0
    assert "all files match" in capsys.readouterr().out
    caplog.clear()
    assert answers(Index.open(path)) == expected and not caplog.records
    name = store.file_name("pages", 0)
    after, before = store.read_manifest(path), store.read_manifest(whole)
    assert (path / after.folder / name).read_bytes() == (whole / before.folder / name).read_bytes()


def test_small_files_of_an_older_index_are_verified(whole: Path, tmp_path: Path) -> None:
    path, expected = old(whole, tmp_path / "old"), answers(Index.open(whole))
    check = damaged_copies(path, tmp_path, TRIALS // 3, 5)
    for copy, done in check:
        found = outcome(copy, "fast")
        assert found is None or found == expected, done


def test_large_files_of_an_older_index_are_within_bounds(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "SMALL_FILE_BYTES", -1)
    check_off(old(whole, tmp_path / "old"), tmp_path, TRIALS // 3, 6)


def test_checksums_are_not_added_to_a_damaged_index(whole: Path, tmp_path: Path) -> None:
    path = old(whole, tmp_path / "old")
    file = path / store.read_manifest(path).folder / "tokens.00001.bin"
    data = bytearray(file.read_bytes())
    data[5000] ^= 4
    file.write_bytes(data)
    with pytest.raises(DataError, match="tokens.00001.bin is damaged"):
        verify.add_page_sums(path)
    assert all("pages" not in s.files for s in store.read_manifest(path).shards)


def test_a_damaged_tokenizer_of_an_index_is_refused(texts: Path, tmp_path: Path) -> None:
    expected = Index.open(texts).encoder.encode("the cat sat")
    rng = np.random.default_rng(0)
    for trial in range(20):
        path = tmp_path / str(trial)
        shutil.copytree(texts, path)
        done = damage(rng, [f for f in files_of(path) if f.parent.name == "tokenizer"])
        found = outcome(path, "fast", lambda index: list(index.encoder.encode("the cat sat")))
        assert found is None or found == list(expected), done


@pytest.mark.parametrize("how", [pytest.param("fast", marks=pytest.mark.slow), "off"])
def test_drafts_of_a_damaged_index_are_tokens_of_the_model(
    alone: Path, tmp_path: Path, how: str
) -> None:
    def drafts(index: Index) -> list[Any]:
        infini, rest = Infini(index=index, context=8), Rest(index=index, shortest=1)
        infini.source.vocab_size = NUM_IDS + 1
        rng, found = np.random.default_rng(3), []
        for temperature in (0.0, 1.0):
            text = rng.integers(0, NUM_IDS, 30).tolist()
            dice = SeededDice(1)
            seq = Sequence(text, 30, Sampling(temperature=temperature), dice, limit=99)
            for drafter in (infini, rest):
                (tree,) = drafter.propose([seq], [Plan()], [dice])
                found.append([tree.tokens.tolist(), tree.parents.tolist()])
        return found

    expected = drafts(Index.open(alone))
    assert all(tokens for tokens, _ in expected)
    for path, done in damaged_copies(alone, tmp_path, TRIALS // 3, 9):
        found = outcome(path, how, drafts)
        if how == "fast":
            assert found is None or found == expected, done
        for tokens, _ in found or []:
            assert all(0 <= token <= NUM_IDS for token in tokens), done


@pytest.mark.parametrize("words", [["count", "1 2"], ["search", "1 2"], ["ntd", "1 2"]])
def test_a_command_refuses_damage_in_one_line(
    whole: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ix"
    shutil.copytree(whole, path)
    file = path / store.read_manifest(path).folder / "buckets.00000.bin"
    file.write_bytes(
        bytes([255]) * (file.stat().st_size // 2) + file.read_bytes()[file.stat().st_size // 2 :]
    )
    command = ["index", words[0], str(path), words[1], "--ids"]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "buckets.00000.bin is damaged" in captured.err
    assert not captured.out
    assert main([*command, "--verify", "full"]) == 2
    assert main([*command, "--verify", "never"]) == 2
    assert "full" in capsys.readouterr().err


def fm_answers(index: FMIndex) -> list[Any]:
    rows = index.find([1, 2])
    ids, counts = index.next([3])
    places = index.locate(rows, 5)
    found = [index.count([1]), rows, ids.tolist(), counts.tolist(), places.tolist()]
    return [*found, index.document_of(places).tolist(), index.extract(3).tolist(), index.eos]


def array_files(folder: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """Every cached table in one file: the file, and what is asked of it."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, NUM_IDS, 90) for _ in range(6)]
    FMIndex.of(documents, NUM_IDS, sample=8).save(folder / "fm")
    NgramModel.count(documents, vocab_size=NUM_IDS).save(folder / "model")
    matrix = TrigramMatrix(entries=4)
    matrix.count([d.astype(np.int32) for d in documents])
    corpus.save(folder / "pairs", matrix, None)
    return {
        "fm": (folder / "fm", lambda path: fm_answers(FMIndex.load(path))),
        "model": (folder / "model", lambda path: NgramModel.load(path).probs([1, 2]).tolist()),
        "pairs": (
            folder / "pairs",
            lambda path: [part.tolist() for part in corpus.load(path, None, entries=4).rows()],
        ),
    }


@pytest.mark.parametrize("kind", ["fm", "model", "pairs"])
def test_a_damaged_table_is_refused(tmp_path: Path, kind: str) -> None:
    file, ask = array_files(tmp_path)[kind]
    expected, data, rng = ask(file), file.read_bytes(), np.random.default_rng(7)
    for trial in range(TRIALS // 2):
        file.write_bytes(data)
        done = damage(rng, [file])
        try:
            assert ask(file) == expected, f"trial {trial}: {done}"
        except DataError as error:
            assert "\n" not in str(error)


def test_an_unverified_fm_index_is_within_bounds(tmp_path: Path) -> None:
    file, _ = array_files(tmp_path)["fm"]
    data, rng = file.read_bytes(), np.random.default_rng(8)
    for _ in range(TRIALS):
        file.write_bytes(data)
        damage(rng, [file])
        try:
            fm_answers(FMIndex.load(file, verify="off"))
        except DataError as error:
            assert "\n" not in str(error)


def test_what_is_not_read_is_not_verified(whole: Path, tmp_path: Path) -> None:
    """Opening must not read a large index: damage to an unread page shows when it is read."""
    path = tmp_path / "ix"
    shutil.copytree(whole, path)
    file = path / store.read_manifest(path).folder / "tokens.00000.bin"
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    index = Index.open(path)
    assert index.count([]) == index.tokens
    with pytest.raises(DataError, match="tokens.00000.bin is damaged: bytes "):
        index.document(NUM_DOCUMENTS - 2, window=NUM_TOKENS)
