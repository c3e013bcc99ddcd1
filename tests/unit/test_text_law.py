"""One list of tokens has one text: whole, streamed, with an unused stop string, in two calls."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from spm import ids, says, spm
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.core.sampling import Sampling
from forerun.engine.stopping import Stops
from forerun.models.tokenizer import TextStream, Tokenizer

ROUNDS = 150
GREEDY: dict[str, Any] = {"temperature": 0, "drafter": "none", "ignore_eos": True}
DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "strip each": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
}


def real(kind: str, data_dir: Path, folder: Path) -> Tokenizer:
    """A real tokenizer of the shared data."""
    names = {"gpt2": ("vocab.json", "merges.txt"), "phi3": ("tokenizer.json",)}[kind]
    for name in names:
        packed = data_dir / "tokenizers" / kind / f"{name}.gz"
        (folder / name).write_bytes(gzip.decompress(packed.read_bytes()))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return Tokenizer.load(folder)


def small(kind: str) -> Tokenizer:
    """A tokenizer of few words with the decoder of this name."""
    words = ["▁a", "b", "▁", "▁▁", "c▁d", "##x", "e</w>", "."]
    rust = Rust(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="b"))
    if DECODERS[kind] is not None:
        rust.decoder = DECODERS[kind]
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens of single bytes."""
    assert tokenizer.pieces is not None
    pairs = ((i, tokenizer.pieces(i)) for i in range(tokenizer.vocab_size))
    return [i for i, piece in pairs if piece is not None and len(piece) == 1]


def with_unused_stop(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text of a sequence with a stop string that never comes."""
    stops = Stops((), lambda: TextStream(tokenizer))
    seq = sequence(prompt, len(tokens), SeededDice(0), Sampling(stop="\x00never\x00"))
    stops.start(seq)
    for token in tokens:
        seq.tokens += stops.cut(seq, [token])
    assert "".join(stops.token_texts(seq)) == stops.text(seq)
    return stops.text(seq)


def check(tokenizer: Tokenizer, tokens: list[int], dice: random.Random) -> None:
    whole = tokenizer.decode(tokens)
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, tokens)) + stream.flush() == whole
    assert with_unused_stop(tokenizer, [], tokens) == whole
    at = dice.randrange(len(tokens) + 1)
    before, after = tokens[:at], tokens[at:]
    assert with_unused_stop(tokenizer, before, after) == tokenizer.decode(after, before)
    shown, rest = tokenizer.decode(before), tokenizer.decode(after, before)
    if whole.startswith(shown):
        assert shown + rest == whole
    else:  # the second part completes a character, of which the first shows U+FFFD
        num_broken = len(shown) - len(shown.rstrip("\ufffd"))
        options = [shown[: len(shown) - n] + rest for n in range(1, min(num_broken, 3) + 1)]
        assert whole in options


@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_real_tokenizers(kind: str, data_dir: Path, tmp_path: Path) -> None:
    tokenizer, dice = real(kind, data_dir, tmp_path), random.Random(0)
    single = byte_ids(tokenizer)
    assert len(single) >= 256
    for _ in range(ROUNDS):
        for pool in (range(tokenizer.vocab_size + 3), single):
            check(tokenizer, [dice.choice(pool) for _ in range(dice.randrange(1, 30))], dice)


@pytest.mark.parametrize("kind", DECODERS)
def test_other_decoders(kind: str) -> None:
    tokenizer, dice = small(kind), random.Random(1)
    for _ in range(ROUNDS):
        tokens = [dice.randrange(tokenizer.vocab_size) for _ in range(dice.randrange(1, 12))]
        assert tokenizer.decode(tokens) == tokenizer.decode_plain(tokens)
        check(tokenizer, tokens, dice)


@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_valid_text_is_that_of_the_tokenizer_s_own_decoder(
    kind: str, data_dir: Path, tmp_path: Path
) -> None:
    tokenizer, dice = real(kind, data_dir, tmp_path), random.Random(2)
    words = [" there", "Zoë", "你好", "\U0001f642", "\n", "  ", "a", "<s>", "</s>", "1"]
    for _ in range(ROUNDS):
        text = "".join(dice.choice(words) for _ in range(dice.randrange(1, 12)))
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == tokenizer.decode_plain(tokens)


def test_byte_level_text_is_always_that_of_its_own_decoder(data_dir: Path, tmp_path: Path) -> None:
    tokenizer, dice = real("gpt2", data_dir, tmp_path), random.Random(3)
    single = byte_ids(tokenizer)
    for _ in range(4 * ROUNDS):
        tokens = [dice.choice(single) for _ in range(dice.randrange(1, 20))]
        assert tokenizer.decode(tokens) == tokenizer.decode_plain(tokens)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((0xC3, 0xA9, 0xFF), "é\ufffd"),  # a valid character stays
        ((0xFF, 0xC3, 0xA9), "\ufffdé"),
        ((0xE2, 0x82, "a"), "\ufffd\ufffda"),  # one for each byte
        ((0xE2, 0x82), "\ufffd\ufffd"),
        ((0xE2, 0x82, "</s>", 0xAC), "€"),  # a special token has no text
        (("é", 0xC3, 0xA9, 0xC3), "éé\ufffd"),
        (("▁", "▁a"), " a"),  # one leading space is stripped
        (("<s>", "▁▁", "a"), " a"),
    ],
)
def test_byte_fallback(names: tuple[str | int, ...], text: str) -> None:
    tokenizer = spm()
    assert tokenizer.decode(ids(tokenizer, *names)) == text
    check(tokenizer, ids(tokenizer, *names), random.Random(0))


def test_a_context_that_ends_within_a_character() -> None:
    tokenizer = spm()
    before, after = ids(tokenizer, "a", 0xE2, 0x82), ids(tokenizer, 0xAC, "a")
    assert tokenizer.decode(after, before) == "€a"


def test_a_leading_space_is_kept_behind_a_prompt() -> None:
    """Prompt and text join to the text of all tokens, in one call and in two."""
    tokenizer = spm()
    prompt = ids(tokenizer, "<s>", "▁there", "▁was")
    tokens = ids(tokenizer, "▁a", "▁little", "girl", "▁", "▁a", ".")
    model = says(tokenizer, tokens, len(prompt))
    assert tokenizer.decode(prompt) == "there was"
    for most in range(1, len(tokens) + 1):
        (one,) = model.generate([prompt], max_new_tokens=most, **GREEDY)
        assert one.text == " a littlegirl  a."[: len(one.text)]
        assert tokenizer.decode(prompt) + one.text == tokenizer.decode(prompt + tokens[:most])
        longer = [*prompt, *one.samples[0].tokens]
        (two,) = model.generate([longer], max_new_tokens=6, **GREEDY)
        (both,) = model.generate([prompt], max_new_tokens=most + 6, **GREEDY)
        assert one.text + two.text == both.text
    streamed = "".join(e.text for e in model.stream([prompt], max_new_tokens=6, **GREEDY))
    assert streamed == " a littlegirl  a."


def test_the_text_behind_special_tokens_alone_begins_like_a_text() -> None:
    tokenizer = spm()
    model = says(tokenizer, ids(tokenizer, "▁a", "▁little"), 1)
    (found,) = model.generate([ids(tokenizer, "<s>")], max_new_tokens=2, **GREEDY)
    assert found.text == "a little"


def test_a_stop_string_may_begin_with_the_space_of_the_first_token() -> None:
    tokenizer = spm()
    prompt = ids(tokenizer, "<s>", "▁was")
    model = says(tokenizer, ids(tokenizer, "▁a", "▁little"), len(prompt))
    (found,) = model.generate([prompt], max_new_tokens=2, stop=" a", **GREEDY)
    sample = found.samples[0]
    assert (sample.text, sample.tokens, sample.finish) == ("", [], "stop")


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        ("<s>", "a little", 2),  # the special token itself
        ("little<s>", "a ", 2),
        ("<s>.", "a little", 2),
        ("<s><s>", "a little.", 4),
        ("s><s>", "a little.", 5),  # it begins within a name, which has no text
        ("</s>", "a little.girl", 7),
        ("<unk>", "a little.girls", 9),
        ("e.", "a littl", 2),  # text joins across a special token
    ],
)
def test_special_tokens_are_stop_strings(stop: str, text: str, kept: int) -> None:
    tokenizer = spm()
    names = ("▁a", "▁little", "<s>", ".", "<s>", "<s>", "girl", "</s>", "s")
    model = says(tokenizer, ids(tokenizer, *names), 1)
    how = GREEDY | {"stop": stop, "max_new_tokens": len(names)}
    (found,) = model.generate([ids(tokenizer, "<s>")], **how)
    sample = found.samples[0]
    assert (sample.text, sample.tokens) == (text, ids(tokenizer, *names)[:kept])
    assert sample.finish == ("length" if stop == "<unk>" else "stop")
    streamed = "".join(event.text for event in model.stream([ids(tokenizer, "<s>")], **how))
    assert streamed == text


class Counted:
    """A tokenizer without bytes that counts the tokens it decodes."""

    def __init__(self, text: str) -> None:
        self.text, self.num_decoded = text, 0

    def decode(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        return self.text * len(tokens)


@pytest.mark.parametrize("text", ["\ufffd", "x", ""])
def test_the_cost_of_a_stream_is_linear(text: str) -> None:
    counted = Counted(text)
    stream = TextStream(counted)
    shown = [stream.push(0) for _ in range(400)]
    assert counted.num_decoded <= 40 * 400
    assert "".join(shown) + stream.flush() == text * 400
    if text:
        assert max(len(list(run)) for run in runs_of_nothing(shown)) < 4


def runs_of_nothing(shown: list[str]) -> list[list[str]]:
    """The runs of pushes without text."""
    found: list[list[str]] = [[]]
    for piece in shown:
        found[-1].append(piece) if not piece else found.append([])
    return found


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xF0, 0xE2])
def test_invalid_bytes_do_not_wait(byte: int) -> None:
    tokenizer = spm()
    stream, num_shown = TextStream(tokenizer), 0
    for count, token in enumerate(ids(tokenizer, *[byte] * 400), start=1):
        num_shown += len(stream.push(token))
        assert count - num_shown < 4
    assert num_shown + len(stream.flush()) == 400


def test_a_text_begun_twice_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = spm()
    for _ in range(2):
        assert tokenizer.encode("<s>a")[:2] == [1, 1]
    (record,) = caplog.records
    assert "begins with '<s>'" in record.getMessage()
    caplog.clear()
    tokenizer = spm()
    tokenizer.encode("<s>a", special=False)
    tokenizer.encode("a<s>")
    assert not caplog.records
