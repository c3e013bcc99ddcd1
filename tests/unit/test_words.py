"""The short way of byte-level tokenizers gives the ids of the long way, or nothing."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from forerun.assets import embedded
from forerun.ngrams.index.build import encoders, word_cache
from forerun.ngrams.index.build.word_cache import word_cache_encoder

pytest.importorskip("regex", reason="regex is not installed")

TEXT = "To be, or not to be: that's the question. It's 1603, isn't it?\n\n\tÉté à Łódź — ok… " * 5
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS = {"add_prefix_space": False, "use_regex": False}
CUTS: dict[str, Any] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA), "isolated"), pre_tokenizers.ByteLevel(**LETTERS)]
    ),
}


def trained(cut: Any, **options: Any) -> Tokenizer:
    """A small byte-level BPE tokenizer with one special token."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = cut
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


KNOWN = {name: trained(cut) for name, cut in CUTS.items()} | {
    "reasoner": Tokenizer.from_file(str(Path(embedded("reasoner")) / "tokenizer.json"))
}
PLAIN = st.text(st.sampled_from("aZé Łя'sT.,1٣²½\t\n\r  \u00a0…—€→█-ll' "), max_size=60)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=150, deadline=None)
@given(text=PLAIN)
def test_ids_are_those_of_the_long_way(name: str, text: str) -> None:
    way = WAYS[name]
    assert way is not None
    found = way.encode(text)
    if "٣" in text:  # not among the characters that were compared
        assert found is None
    else:
        expected = KNOWN[name].encode(text, add_special_tokens=False).ids
        assert found is not None and found.tolist() == expected


WAYS = {name: word_cache_encoder(tokenizer) for name, tokenizer in KNOWN.items()}


def test_real_text_takes_the_short_way(data_dir: Path) -> None:
    """Code with few foreign characters: most files take it, all give the same."""
    encoder = encoders.load("reasoner")
    with tarfile.open(data_dir / "corpora" / "python_code.tar.gz") as archive:
        files = [archive.extractfile(entry) for entry in archive if entry.isfile()]
        texts = [file.read().decode() for file in files[:60] if file]
    found = [encoder._word_cache.encode(text) for text in texts]  # type: ignore[attr-defined]
    assert sum(f is not None for f in found) > 0.75 * len(texts)
    arrays = encoder.encode_arrays(texts)
    assert [a.tolist() for a in arrays] == encoder.encode_batch(texts)


def test_special_tokens_and_foreign_characters_take_the_long_way() -> None:
    way = WAYS["gpt2"]
    assert way is not None
    assert way.encode("a <end> b") is None and way.encode("漢字") is None
    assert way.encode("") is not None and way.encode("a <en> b") is not None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(**LETTERS)},
    ],
    ids=["normalizer", "no words", "prefix space", "metaspace", "one word"],
)
def test_other_tokenizers_have_no_short_way(change: dict[str, Any]) -> None:
    tokenizer = trained(CUTS["gpt2"])
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert word_cache_encoder(tokenizer) is None


def test_dropout_has_no_short_way() -> None:
    assert word_cache_encoder(trained(CUTS["gpt2"], dropout=0.5)) is None


def test_an_expression_that_leaves_gaps_is_not_believed() -> None:
    """The long way keeps what lies between matches; so the short way must not be taken."""
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), pre_tokenizers.ByteLevel(**LETTERS)]
    )
    assert word_cache_encoder(trained(cut)) is None


def test_words_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_CACHED_WORDS", 3)
    way = word_cache_encoder(KNOWN["gpt2"])
    assert way is not None
    text = "one two three four five one two " + "x" * 100
    expected = KNOWN["gpt2"].encode(text).ids
    assert way.encode(text).tolist() == expected and len(way.words) <= 3  # type: ignore[union-attr]
    assert all(len(word) <= word_cache.MAX_WORD_CHARACTERS for word in way.words)


def test_arrays_of_all_encoders_equal_their_batches(tmp_path: Path) -> None:
    KNOWN["gpt2"].save(str(tmp_path / "tokenizer.json"))
    texts = ["to be", "", "漢字 to be", "a <end> b"]
    for spec in (str(tmp_path), "bytes", "reasoner"):
        encoder = encoders.load(spec)
        arrays = encoder.encode_arrays(texts)
        assert [a.tolist() for a in arrays] == [list(ids) for ids in encoder.encode_batch(texts)]
        assert all(np.issubdtype(a.dtype, np.integer) for a in arrays)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
