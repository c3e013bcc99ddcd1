"""Tokenizers of GGUF files give the ids of the original tokenizers."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from convert_stories260k import convert  # noqa: E402
from gguf_files import write_gguf  # noqa: E402
from parity import tiny  # noqa: E402
from tokenizers import Tokenizer as Fast

from forerun.models.gguf import GgufFile  # noqa: E402
from forerun.models.gguf_names import hf_tensors  # noqa: E402
from forerun.models.gguf_splits import SPLITS, pre_tokenizer  # noqa: E402
from forerun.models.gguf_tokenizer import Vocabulary, build, end_ids  # noqa: E402
from forerun.models.tokenizer import Tokenizer  # noqa: E402

TEXTS = (
    "The quick brown fox can't jump 1234567 times; it's 3.14.",
    "  two spaces,\ttabs\t\t and   9 more 42\n\n\nlines \n end ",
    "naïve cafe\u0301 日本語テスト １２ Ünïcödé HELLOWorld iOSApp",
    "def f(x):\n    return x  # 12  3\n\n\n",
    "emoji 😀👨‍👩‍👧 <s> </s> <|end|> <|user|>\nhi<|end|>\n<|assistant|>\n",
    "",
    " ",
    "https://example.org/a/b?c=d&e=%20f",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def texts_of(data_dir: Path) -> list[str]:
    """Short texts of every kind, and 42 pieces of Spec-Bench questions: 50 in all."""
    lines = (data_dir / "prompts" / "spec_bench_question.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    return [*TEXTS, *(q[:1000] for q in random.Random(0).sample(questions, 50 - len(TEXTS)))]


def file_with(path: Path, case: str, **fields: Any) -> GgufFile:
    """A tiny model with this vocabulary."""
    size = len(fields["tokens"])
    said = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    said.setdefault("tokenizer.ggml.pre", None)
    said.setdefault("tokenizer.ggml.merges", None)
    said.setdefault("tokenizer.ggml.eos_token_id", None)
    model = tiny(case, vocab_size=size, tie_word_embeddings=True, num_hidden_layers=1)
    return GgufFile(write_gguf(model, path, fields=said))


WORDS = ("I", "'m", " OK", ",", " HelloWorld")
DIGITS = ("1", "2", "3", "4", "5")
REST = ("  ", " ", "6", "\n\n", "x")
PIECES = {
    "gpt-2": [*WORDS, "'", "S", " 12345", "  ", " 6", "\n", "\n", "x"],
    "smollm": [*WORDS, "'", "S", " ", *DIGITS, "   ", "6", "\n", "\n", "x"],
    "llama-bpe": [*WORDS, "'S", " ", "123", "45", *REST],
    "qwen2": [*WORDS, "'S", " ", *DIGITS, *REST],
    "gpt-4o": ["I'm", " OK", ",", " Hello", "World'S", " ", "123", "45", *REST],
    "tekken": ["I", "'m", " OK", ",", " Hello", "World", "'S", " ", *DIGITS, *REST],
}


@pytest.mark.parametrize("name", PIECES)
def test_splits(name: str) -> None:
    """Pieces of a text by the published rules; ByteLevel spells a space as Ġ, a break as Ċ."""
    text = "I'm OK, HelloWorld'S 12345   6\n\nx"
    found = [piece for piece, _ in pre_tokenizer(SPLITS[name]).pre_tokenize_str(text)]
    assert [p.replace("Ġ", " ").replace("Ċ", "\n") for p in found] == PIECES[name]


def test_gpt2(data_dir: Path, tmp_path: Path) -> None:
    """The real vocabulary and merges, against the tokenizer that transformers makes of them."""
    from transformers import GPT2Tokenizer

    source = data_dir / "tokenizers" / "gpt2"
    ids = json.loads(gzip.decompress((source / "vocab.json.gz").read_bytes()))
    lines = gzip.decompress((source / "merges.txt.gz").read_bytes()).decode().splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    tokens = sorted(ids, key=lambda token: ids[token])
    end = ids["<|endoftext|>"]
    kinds = [CONTROL if i == end else NORMAL for i in range(len(tokens))]
    how = {"model": "gpt2", "pre": "gpt-2", "merges": merges, "token_type": kinds}
    file = file_with(tmp_path / "m.gguf", "llama", tokens=tokens, eos_token_id=end, **how)
    inner = build(Vocabulary(file))
    theirs = GPT2Tokenizer(vocab=ids, merges=[tuple(line.split(" ")) for line in merges])
    for text in [*texts_of(data_dir), "a<|endoftext|>b"]:
        assert inner.encode(text).ids == theirs.encode(text), text
        assert inner.decode(inner.encode(text).ids, skip_special_tokens=False) == text
    assert end_ids(file) == [end]


def test_phi3(data_dir: Path, tmp_path: Path) -> None:
    """The real tokenizer.json of phi3, from what a GGUF file keeps of it: tokens and scores."""
    said = json.loads(
        gzip.decompress((data_dir / "tokenizers" / "phi3" / "tokenizer.json.gz").read_bytes())
    )
    for row in said["added_tokens"]:  # this is the file of phi3 vision; as phi3 mini has them
        row["rstrip"] = row["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    theirs = Fast.from_str(json.dumps(said))
    ids = dict(said["model"]["vocab"]) | {t["content"]: t["id"] for t in said["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [NORMAL] * len(tokens)
    kinds[0] = UNKNOWN
    for row in said["added_tokens"][1:]:
        kinds[row["id"]] = CONTROL if row["special"] else USER_DEFINED
    for i in range(3, 259):  # <0x00> and so on
        kinds[i] = BYTE
    # as sentencepiece has them: by rank, and runs of spaces last
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    scores = [
        -1e9 if t.strip("▁") == "" and len(t) > 1 else s
        for t, s in zip(tokens, scores, strict=True)
    ]
    how = {"model": "llama", "token_type": kinds, "scores": scores, "unknown_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 32000}
    file = file_with(tmp_path / "m.gguf", "phi3", tokens=tokens, **how, **ends)
    inner = build(Vocabulary(file))
    for text in texts_of(data_dir):
        assert inner.encode(text).ids == theirs.encode(text).ids, text
        found = theirs.encode(text).ids
        assert inner.decode(found) == theirs.decode(found)
    merges = json.loads(inner.to_str())["model"]["merges"]
    assert [" ".join(pair) for pair in merges] == said["model"]["merges"]
    assert end_ids(file) == [32000, ids["<|end|>"]]


def test_stories(data_dir: Path, tmp_path: Path) -> None:
    """A file that llama.cpp's own converter made, against the same model of another format."""
    source = data_dir / "models" / "stories260K"
    convert(source / "stories260K.bin", source / "tok512.bin", tmp_path)
    path = source / "stories260Ktok512.gguf"
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "model.safetensors")
    found = dict(hf_tensors(GgufFile(path), next(iter(theirs.values())).dtype))
    for name, tensor in theirs.items():
        assert (found[name] == tensor).all(), name
    ours, original = Tokenizer.load(path), Tokenizer.load(tmp_path)
    for text in texts_of(data_dir):
        assert ours.encode(text) == original.encode(text), text
    assert ours.eos_ids == (2,) and ours.encode("Once")[0] == 1


def test_gemma_keeps_runs_of_spaces(tmp_path: Path) -> None:
    """They are stored as spaces; merges go by id, whatever the scores say."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "    ", "\n\n", "▁", "a", "b", "ab", "▁a"]
    kinds = [CONTROL] * 3 + [UNKNOWN] + [USER_DEFINED] * 3 + [NORMAL] * 5
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    how = {"model": "llama", "token_type": kinds, "scores": [0.0] * 11 + [5.0], **ids}
    file = file_with(tmp_path / "m.gguf", "gemma2", tokens=tokens, add_space_prefix=False, **how)
    inner = build(Vocabulary(file))
    names = inner.encode("ab    a\n\nab ab").tokens
    assert names == ["<bos>", "ab", "▁▁▁▁", "a", "\n\n", "ab", "▁", "ab"]
    assert inner.decode(inner.encode("ab    a").ids) == "ab    a"
    assert end_ids(file) == [1]


@pytest.mark.parametrize("flag, first", [(None, 0), (True, 1), (False, 0)])
def test_what_is_put_before_a_text(flag: bool | None, first: int, tmp_path: Path) -> None:
    tokens = ["a", "<s>", "</s>"]
    how: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "merges": ["a a"]}
    tokens, kinds = [*tokens, "aa"], [NORMAL, CONTROL, CONTROL, NORMAL]
    how |= {"token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": flag}
    file = file_with(tmp_path / "m.gguf", "llama", tokens=tokens, add_eos_token=True, **how)
    found = build(Vocabulary(file)).encode("aa").ids
    assert found == [1] * first + [3, 2]


def test_unusual_ends_are_known(tmp_path: Path) -> None:
    """Of a chat model: the end of a turn, and the end of a text, which the file does not name."""
    tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "aa"]
    kinds = [NORMAL, CONTROL, CONTROL, NORMAL, NORMAL]  # the fourth is only text
    how = {"model": "gpt2", "pre": "qwen2", "merges": ["a a"], "token_type": kinds}
    file = file_with(tmp_path / "m.gguf", "llama", tokens=tokens, eos_token_id=2, **how)
    assert end_ids(file) == [2, 1]
