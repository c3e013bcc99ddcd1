"""A short way through byte-level BPE tokenizers: every different word is encoded once.

Such a tokenizer cuts a text into words by a regular expression and encodes each by itself, so ids
of words that came before are looked up. Admitted is what the short way has been compared on: a
tokenizer whose ids of a probe of all PLAIN characters are the same both ways, and texts of such
characters that name none of its special tokens. Whatever else takes the long way.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

# Latin, Greek, Cyrillic, punctuation and signs: their classes are older than all tokenizers
PLAIN = (
    r"\t\n\r\x20-\x7e\xa0-\u024f\u0391-\u03a1\u03a3-\u03c9\u0400-\u0481\u2010-\u2027\u20ac"
    r"\u2100-\u27bf"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's
MOST_WORDS, LONGEST = 1 << 17, 64  # words that are kept; characters of one


class Words(dict[str, bytes]):
    """int32 ids of words as bytes, encoded when first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import pre_tokenizers

        super().__init__()
        self.model = tokenizer.model
        self.letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> bytes:
        letters = self.letters.pre_tokenize_str(word)[0][0]
        ids = np.array([token.id for token in self.model.tokenize(letters)], np.int32).tobytes()
        if len(word) <= LONGEST:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


class ShortWay:
    """`encode` gives the ids of a text, or None where only the long way is sure."""

    def __init__(self, words: Words, split: Any, foreign: Any) -> None:
        self.words, self.split, self.foreign = words, split, foreign

    def encode(self, text: str) -> np.ndarray | None:
        """int32 [n]."""
        if self.foreign(text):
            return None
        found = self.split(text)
        if len("".join(found)) != len(text):  # something lies between the words
            return None
        return np.frombuffer(b"".join(map(self.words.__getitem__, found)), np.int32)


def short_way(tokenizer: Any) -> ShortWay | None:
    """The short way of a `tokenizers.Tokenizer`; None if there is none."""
    try:
        import regex
    except ImportError:
        return None
    told = json.loads(tokenizer.to_str())
    pattern = word_pattern(told)
    if pattern is None:
        return None
    special = [regex.escape(token["content"]) for token in told["added_tokens"]]
    foreign = regex.compile("|".join([f"[^{PLAIN}]", *special])).search
    try:
        way = ShortWay(Words(tokenizer), regex.compile(pattern).findall, foreign)
    except regex.error:
        return None
    text = probe()
    found = way.encode(text)
    if found is None or found.tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
        return None
    return way


def word_pattern(told: dict[str, Any]) -> str | None:
    """The expression that cuts words, if all else of a tokenizer.json works word by word."""
    told_steps = told["pre_tokenizer"] or {}
    steps = told_steps.get("pretokenizers") or [told_steps]
    plain = {"type": "ByteLevel", "add_prefix_space": False}
    if told["normalizer"] or told["model"]["type"] != "BPE" or told["model"].get("dropout"):
        return None
    if any(steps[-1].get(key) != value for key, value in plain.items()):
        return None
    if len(steps) == 1:
        return GPT2 if steps[0]["use_regex"] else None
    cut = {"type": "Split", "behavior": "Isolated", "invert": False}
    if (
        len(steps) > 2
        or steps[1]["use_regex"]
        or steps[0] != cut | {"pattern": steps[0]["pattern"]}
    ):
        return None
    pattern = steps[0]["pattern"].get("Regex")
    return None if pattern is None or "(" in pattern.replace("(?", "") else pattern


def probe() -> str:
    """Every PLAIN character beside letters, digits, spaces, signs and itself."""
    import regex

    characters = regex.findall(f"[{PLAIN}]", "".join(map(chr, range(0x2800))))
    return "".join(f"a{c}b {c}{c}1{c}\n{c} {c}'s  {c}\t.{c}" for c in characters)
