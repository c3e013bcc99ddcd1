"""Maps between vocabularies, and texts written in the tokens of another tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from spm import spm
from tiny import tokenizer_pair

from forerun.errors import ConfigError
from forerun.models.retokenize import Retokenizer, TextView
from forerun.models.tokenizer import Tokenizer
from forerun.models.vocab_map import NONE, Vocab, VocabMap

TEXT = "the cat sat on the mat, and ten dogs — naïve ones — sat on 日本 logs\n\nthe end "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    return tokenizer_pair(tmp_path_factory.mktemp("tokenizers"))


def writer(source: Tokenizer, goal: Tokenizer) -> Retokenizer:
    ours, theirs = Vocab.of(source), Vocab.of(goal)
    return Retokenizer(ours, theirs, VocabMap.between(ours, theirs), goal.encode_inside)


def test_tokens_map_by_their_bytes(pair: tuple[Tokenizer, Tokenizer]) -> None:
    small, large = map(Vocab.of, pair)
    found = VocabMap.between(small, large)
    assert found.is_total and not found.is_identity
    for i in found.shared[found.shared > 0]:
        assert small.pieces[i] == large.pieces[found.to(i)]
        assert found.source_of(found.to(i)) == i
    back = VocabMap.between(large, small)
    assert (back.forward == found.back).all() and not back.is_total


def test_space_marks_and_byte_tokens_of_another_kind(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """SentencePiece writes a space as another character, and bytes as <0xNN>."""
    ours, theirs = spm(), pair[1]
    source, goal = Vocab.of(ours), Vocab.of(theirs)
    found = VocabMap.between(source, goal)
    ids, known = ours.vocabulary(), goal.by_bytes()
    assert found.to(ids["▁a"]) == known.get(b" a", NONE)
    assert found.to(ids["<0xC3>"]) == known[b"\xc3"]
    assert found.to(ids["a"]) == known[b"a"]
    assert found.to(ids["<0x61>"]) == NONE  # "a" itself stands for this byte


def test_special_tokens_map_by_name_or_role_and_never_by_text() -> None:
    source = Vocab(
        (b"x", None, None, None), {1: "<s>", 2: "<end>", 3: "<mark>"}, {"bos": 1, "eos": 2}
    )
    goal = Vocab((None, b"<s>", None, b"x"), {0: "<mark>", 2: "</s>"}, {"eos": 2})
    found = VocabMap.between(source, goal)
    assert found.forward.tolist() == [3, NONE, 2, 0]


def test_padding_maps_to_nothing() -> None:
    source, goal = Vocab((b"a", None), {}, {}), Vocab((b"b", b"a", None), {}, {})
    assert VocabMap.between(source, goal).forward.tolist() == [1, NONE]
    assert VocabMap.padded(4, 3).forward.tolist() == [0, 1, 2, NONE]
    assert VocabMap.padded(3, 3).is_identity


def test_reduced_heads_are_stored_as_offsets() -> None:
    """d2t: id - row of each row; t2d: which ids have a row."""
    head = VocabMap.subset([0, 3, 4], 6)
    assert head.d2t.tolist() == [0, 2, 2]
    assert head.t2d.tolist() == [True, False, False, True, True, False]
    again = VocabMap.from_offsets(head.d2t, 6)
    assert (again.forward == head.forward).all() and (again.back == head.back).all()
    wide = head.widened(torch.tensor([[1.0, 2.0, 3.0]]))
    assert wide.tolist() == [[1.0, -np.inf, -np.inf, 2.0, 3.0, -np.inf]]


@pytest.mark.parametrize(("ids", "fault"), [([0, 0], "one-to-one"), ([0, 9], "names id 9")])
def test_wrong_maps_are_refused(ids: list[int], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        VocabMap.subset(ids, 4)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_text_keeps_its_bytes(pair: tuple[Tokenizer, Tokenizer], reverse: bool) -> None:
    source, goal = pair[::-1] if reverse else pair
    write, pieces = writer(source, goal), Vocab.of(goal).pieces
    tokens = source.encode(TEXT)
    for stop in range(len(tokens) + 1):  # some stop within a character
        whole = b"".join(write.piece(token) or b"" for token in tokens[:stop])
        assert b"".join(pieces[i] or b"" for i in write(tokens[:stop])) == whole


def test_a_view_follows_its_text(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Its ids are those of the whole text, also after tokens were taken back."""
    write = writer(*pair)
    view, tokens = TextView(write), pair[0].encode(TEXT)
    rng = np.random.default_rng(0)
    length = 5
    for _ in range(60):
        text = tokens[:length]
        if rng.random() < 0.3:
            text = [*text[:-2], 40, 41]
        assert view.follow(text) == write(text)
        assert view.follow(text) is view.ids
        length = int(np.clip(length + rng.integers(-4, 8), 3, len(tokens)))


def test_a_view_encodes_only_the_last_words_again(pair: tuple[Tokenizer, Tokenizer]) -> None:
    small, large = pair
    ours, theirs = Vocab.of(small), Vocab.of(large)
    read = list[str]()

    def encode(text: str) -> list[int]:
        read.append(text)
        return large.encode_inside(text)

    view = TextView(Retokenizer(ours, theirs, VocabMap.between(ours, theirs), encode))
    tokens = small.encode("the cat sat on the mat and " * 20)
    for stop in range(1, len(tokens) + 1):
        view.follow(tokens[:stop])
    assert max(map(len, read)) <= 20
    assert view.ids == large.encode("the cat sat on the mat and " * 20)


REAL = "smollm2-135m", "qwen-coder-0.5b"


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "target"), [REAL, REAL[::-1]])
def test_real_tokenizers(draft: str, target: str, models_dir: Path) -> None:
    """Vocabularies of 49,152 and 151,936 ids."""
    folder = models_dir
    if not all((folder / name / "tokenizer.json").is_file() for name in (draft, target)):
        pytest.skip(f"{draft} and {target} are not in {folder}")
    sizes = dict(zip(REAL, (49_152, 151_936), strict=True))
    ours, theirs = (Tokenizer.load(folder / name) for name in (draft, target))
    source, goal = Vocab.of(ours, sizes[draft]), Vocab.of(theirs, sizes[target])
    found = VocabMap.between(source, goal)
    assert len(found.shared) == 39_237
    names = {name: i for i, name in goal.specials.items()}
    for i, name in source.specials.items():
        assert found.to(i) == names.get(name, NONE)
    write = Retokenizer(source, goal, found, theirs.encode_inside)
    view, tokens = TextView(write), ours.encode(TEXT * 3)
    for stop in range(1, len(tokens) + 1):
        view.follow(tokens[:stop])
    assert view.ids == write(tokens)
    assert theirs.decode_inside(view.ids) == ours.decode_inside(tokens)
