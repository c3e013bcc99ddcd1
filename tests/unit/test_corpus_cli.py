"""FM-index, SEAL and corpora of `forerun generate` on the command line, with good and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.ngrams.index.fm.index import FMIndex
from forerun.ngrams.index.query.engine import Index
from forerun.retrieval.passages import Passage, write_passages

TEXTS = ["the cat sat on the mat", "the cat ran away", "a dog sat on the cat"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: Any) -> tuple[int, str, str]:
        status = main(list(map(str, words)))
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


@pytest.fixture(scope="module")
def fm(corpus: Path) -> Path:
    path = corpus.parent / "c.fm"
    assert main(["index", "fm", "build", str(path), str(corpus)]) == 0
    return path


def test_an_fm_index_counts_and_locates(call: Call, fm: Path) -> None:
    assert call("index", "fm", "count", fm, "the cat")[1] == "2\n"  # at a text's beginning
    assert (
        call("index", "fm", "count", fm, " cat", " sat", " cow")[1] == "3\t cat\n2\t sat\n0\t cow\n"
    )
    found = json.loads(call("index", "fm", "locate", fm, " dog", "--json")[1])
    index = FMIndex.load(fm)
    assert found["document"] == 2 and found["text"] == TEXTS[2]
    ids = index.extract(2).tolist()
    assert found["ids"] == ids[: len(found["ids"])]
    _, out, _ = call("index", "fm", "locate", fm, " sat", "-n", 1)
    assert out.count("document") == 1 and "2 occurrences in all" in out
    words = " ".join(map(str, ids))
    assert call("index", "fm", "count", fm, words, "--ids")[1] == "1\n"


def test_bad_input_of_an_fm_index(call: Call, fm: Path, corpus: Path, tmp_path: Path) -> None:
    def refused(*words: Any) -> str:
        status, _, err = call("index", "fm", *words)
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
        return err

    before = fm.read_bytes()
    assert "--overwrite" in refused("build", fm, corpus)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a cat"}\nno json\n')
    assert "broken.jsonl:2" in refused("build", fm, broken, "--overwrite")
    assert fm.read_bytes() == before
    status, out, err = call("index", "fm", "build", tmp_path / "x.fm", broken, "--on-error", "skip")
    assert status == 0 and "1 document" in out and "1 unreadable record" in err
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "none" in refused("build", tmp_path / "y.fm", empty)
    assert "none.fm" in refused("count", tmp_path / "none.fm", "cat")
    assert "token ids" in refused("count", fm, "cat", "--ids")
    assert "look for" in refused("locate", fm, "")
    (tmp_path / "cut.fm").write_bytes(before[:-9])
    assert "cut.fm" in refused("count", tmp_path / "cut.fm", "cat")


def test_generate_stays_within_a_corpus_and_mixes_one_in(
    call: Call, fm: Path, corpus: Path, tmp_path: Path
) -> None:
    words = ("generate", "--prompt", "Tell", "--max-new-tokens", 12, "--seed", 1, "--json")
    words += ("--drafter", "prompt_lookup")
    index = FMIndex.load(fm)
    text = json.loads(call(*words, "--within", fm)[1])
    assert text["tokens"] and index.count(text["tokens"])
    begun = json.loads(call(*words, "--within", fm, "--within-begin", "document")[1])
    assert begun["text"].startswith(("the cat", "a dog"))
    folder = tmp_path / "ix"
    assert call("index", "build", folder, corpus, "--workers", 1)[0] == 0
    greedy = (*words, "--temperature", 0, "--mix", folder, "--mix-weights", "1,1")
    told = json.loads(call(*greedy)[1])["tokens"]
    ngrams = Index.open(folder)
    assert len(told) > 1
    for at in range(1, len(told)):  # the corpus alone decides
        found = ngrams.infgram_ntd(told[:at])
        assert found.counts[found.ids == told[at]] == found.counts.max()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mix-weights", "0.5,0.1"), "needs --mix"),
        (("--within-window", "3"), "needs --within"),
        (("--mix", "nowhere"), "nowhere"),
        (("--mix", "nowhere", "--mix-weights", "half"), "SPARSE,OTHER"),
        (("--mix", "nowhere", "--mix-weights", "2,0"), "[0, 1]"),
        (("--within", "nowhere.fm"), "nowhere.fm"),
    ],
)
def test_bad_corpora_of_generate(call: Call, options: tuple[str, ...], said: str) -> None:
    status, _, err = call("generate", "--prompt", "x", "--json", *options)
    assert status == 2 and said in err


def test_seal_is_built_and_searches(call: Call, tmp_path: Path) -> None:
    names = ["Ada", "Boris", "Clara", "David", "Emma", "Felix"]
    passages = [
        Passage(
            name,
            f"{name} was born in a small town and kept {k + 2} grey cats there. "
            f"For many years {name} worked as a baker in that town.",
        )
        for k, name in enumerate(names)
    ]
    write_passages(tmp_path / "p.jsonl", passages)
    run = tmp_path / "run"
    status, out, err = call("seal", "build", run, tmp_path / "p.jsonl", "--minutes", 0.02)
    assert status == 0 and "step" in out, err
    words = ("seal", "search", run, "the baker Clara", "--beams", 3, "-n", 2, "--ngrams", 4)
    words += ("--score", "lm")  # the model has learned too little for weights above 0
    found = json.loads(call(*words, "--json")[1])
    assert len(found["passages"]) == 2 and 0 < len(found["ngrams"]) <= 4
    assert found["passages"][0]["body"] in [p.body for p in passages]
    assert "'the baker Clara': 2 passages" in call(*words)[1]
    for bad, said in (
        (("search", run, ""), "empty"),
        (("search", run, "x", "--score", "best"), "best"),
        (("search", tmp_path, "x"), "seal build"),
        (("build", tmp_path / "other", tmp_path / "none.jsonl"), "none.jsonl"),
    ):
        status, _, err = call("seal", *bad)
        assert status == 2 and said in err, err
