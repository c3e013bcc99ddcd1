"""Pre-tokenization patterns of byte-level BPE, by their names in GGUF files.

The patterns are those of the original tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The split of GPT-4; later models changed the number of digits per piece."""
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"(?i:{ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{marks}|{BLANKS}"


def _cased(ending: str, digits: str) -> str:
    """The case-sensitive split of GPT-4o and mistral."""
    words = "|".join(word + ending for word in CASED_WORDS)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"


@dataclass(frozen=True)
class Split:
    """How text is split before BPE.

    pattern: "" is GPT-2's. has_nfc: text is normalised to NFC first. takes_whole: a piece that is a
    token skips the merges. adds_bos: default if the file does not say.
    """

    pattern: str = ""
    single_digits: bool = False
    has_nfc: bool = False
    takes_whole: bool = False
    adds_bos: bool = False


LLAMA3 = Split(_words(r"\p{N}{1,3}"), takes_whole=True, adds_bos=True)
QWEN2 = Split(_words(r"\p{N}"), has_nfc=True)
GPT4O = Split(_cased(f"(?i:{ENDINGS})?", r"\p{N}{1,3}"))
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "dbrx": Split(_words(r"\p{N}{1,3}")),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "gpt-4o": GPT4O,
    "tekken": Split(_cased("", r"\p{N}"), takes_whole=True, adds_bos=True),
}


def pre_tokenizer(split: Split) -> PreTokenizer:
    """The pre-tokenizer of a split."""
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)
    if split.pattern:
        first = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([first, bytes_only])
    if split.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    return bytes_only
