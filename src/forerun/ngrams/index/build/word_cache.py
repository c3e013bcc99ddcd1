"""A word cache for byte-level BPE tokenizers: every distinct word is encoded once.

Such a tokenizer splits a text into words by a regular expression and encodes each word separately,
so the ids of known words can be looked up. The cache is used only if it gives the tokenizer's ids
for a probe text of all PLAIN characters, and only for texts of PLAIN characters without special
tokens. Other texts go to the tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

# Latin, Greek, Cyrillic, punctuation and signs: equal classes in all current Unicode versions
PLAIN = (
    r"\t\n\r\x20-\x7e\xa0-\u024f\u0391-\u03a1\u03a3-\u03c9\u0400-\u0481\u2010-\u2027\u20ac"
    r"\u2100-\u27bf"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel
MAX_CACHED_WORDS, MAX_WORD_CHARACTERS = 1 << 17, 64


class WordIds(dict[str, bytes]):
    """Cache from words to their int32 ids as bytes; a missing word is encoded."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import pre_tokenizers

        super().__init__()
        self.model = tokenizer.model
        self.letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> bytes:
        letters = self.letters.pre_tokenize_str(word)[0][0]
        ids = np.array([token.id for token in self.model.tokenize(letters)], np.int32).tobytes()
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(self) >= MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class WordCacheEncoder:
    """Encodes texts word by word with a cache."""

    def __init__(self, words: WordIds, split: Any, find_unsupported: Any) -> None:
        self.words, self.split, self.find_unsupported = words, split, find_unsupported

    def encode(self, text: str) -> np.ndarray | None:
        """int32 [n], or None if the tokenizer must encode the text."""
        if self.find_unsupported(text):
            return None
        found = self.split(text)
        if len("".join(found)) != len(text):  # text between the words
            return None
        return np.frombuffer(b"".join(map(self.words.__getitem__, found)), np.int32)


def word_cache_encoder(tokenizer: Any) -> WordCacheEncoder | None:
    """The cached encoder of a `tokenizers.Tokenizer`, or None if it is not supported."""
    try:
        import regex
    except ImportError:
        return None
    config = json.loads(tokenizer.to_str())
    pattern = word_pattern(config)
    if pattern is None:
        return None
    special = [regex.escape(token["content"]) for token in config["added_tokens"]]
    find_unsupported = regex.compile("|".join([f"[^{PLAIN}]", *special])).search
    try:
        split = regex.compile(pattern).findall
    except regex.error:
        return None
    encoder = WordCacheEncoder(WordIds(tokenizer), split, find_unsupported)
    text = probe()
    found = encoder.encode(text)
    if found is None or found.tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
        return None
    return encoder


def word_pattern(config: dict[str, Any]) -> str | None:
    """The word-splitting expression of a tokenizer.json, or None if words are not independent."""
    pre_tokenizer = config["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    plain = {"type": "ByteLevel", "add_prefix_space": False}
    model = config["model"]
    if config["normalizer"] or model["type"] != "BPE" or model.get("dropout"):
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
    """A text with every PLAIN character next to letters, digits, spaces, signs and itself."""
    import regex

    characters = regex.findall(f"[{PLAIN}]", "".join(map(chr, range(0x2800))))
    return "".join(f"a{c}b {c}{c}1{c}\n{c} {c}'s  {c}\t.{c}" for c in characters)
