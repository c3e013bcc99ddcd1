"""Ids, stop ids, chat, and text that grows token by token."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.errors import DataError, ModelError
from forerun.models.tokenizer import TextStream, Tokenizer

TEXT = 'Ann said: "2 + 3 = 5".\n  Zoë 你好 \U0001f642\U0001f642 done '


def byte_level(folder: Path, **files: object) -> Tokenizer:
    """A tokenizer of single bytes, saved and loaded; one end token behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Rust(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    fast.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def test_round_trip_and_stream(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(ids) == TEXT
    stream = TextStream(tokenizer)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) == TEXT
    assert all("\ufffd" not in part for part in parts), "no half characters"
    assert stream.flush() == ""


@pytest.mark.parametrize("sizes", [[1], [7], [100], [1, 0, 30, 1, 2, 5]])
def test_many_tokens_at_a_time_come_as_one_by_one(tmp_path: Path, sizes: list[int]) -> None:
    """At every time the same text, also where a block ends within a character."""
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(TEXT) * 2
    single, many = TextStream(tokenizer), TextStream(tokenizer)
    shown, at = "", 0
    for size in itertools.islice(itertools.cycle(sizes), len(ids)):
        block, at = ids[at : at + size], at + size
        piece = many.extend(block)
        assert piece == "".join(map(single.push, block))
        shown += piece
    assert shown == TEXT * 2 and many.flush() == ""


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    said = r"^'ab.ud83d' is not UTF-8 text: half of a surrogate pair \(U\+D83D\) after 2 characters"
    with pytest.raises(DataError, match=said):
        byte_level(tmp_path).encode("ab\ud83d")


def test_what_is_held_back_comes_with_flush(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("ab\U0001f642")[:-1]
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in ids) == "ab"
    assert "ab" + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_streams_of_real_tokenizers_equal_decode(kind: str, data_dir: Path, tmp_path: Path) -> None:
    names = {"gpt2": ("vocab.json", "merges.txt"), "phi3": ("tokenizer.json",)}[kind]
    for name in names:
        packed = data_dir / "tokenizers" / kind / f"{name}.gz"
        (tmp_path / name).write_bytes(gzip.decompress(packed.read_bytes()))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer = Tokenizer.load(tmp_path)
    dice = random.Random(0)
    texts = [tokenizer.encode(TEXT)]
    texts += [[dice.randrange(32000) for _ in range(30)] for _ in range(50)]
    for ids in texts:
        stream = TextStream(tokenizer)
        text = "".join(stream.push(token) for token in ids) + stream.flush()
        assert text == tokenizer.decode(ids)
        stream, cuts = TextStream(tokenizer), sorted(dice.sample(range(len(ids)), 3))
        blocks = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
        assert "".join(map(stream.extend, blocks)) + stream.flush() == text


def test_end_ids_are_gathered(tmp_path: Path) -> None:
    assert byte_level(tmp_path / "a").eos_ids == (256,)
    both = byte_level(tmp_path / "b", generation_config={"eos_token_id": [7, 256]})
    assert both.eos_ids == (256, 7)
    assert byte_level(tmp_path / "c", config={"eos_token_id": 9}).eos_ids == (256, 9)


@pytest.mark.parametrize("text", ['{"eos_token_id":"zz"', "[]", "\xff", '{"eos_token_id": "zz"}'])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_damaged_files_of_end_ids_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """Without the ids in them a text would not end."""
    byte_level(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=f"{name} cannot be used: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", ["zz", [7, "zz"], 2.5, True, {}, [[7]]])
def test_end_ids_are_integers(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id must be an id or a list of ids, got"):
        byte_level(tmp_path, generation_config={"eos_token_id": value})


def test_chat(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.decode(tokenizer.chat("hi")) == "[user]hi>"
    tokenizer.inner.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat("hi")


def test_a_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json in .*; is it a model folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be used"):
        Tokenizer.load(tmp_path)


def test_the_module_is_cheap_to_import() -> None:
    code = (
        "import sys, forerun.models.tokenizer\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
