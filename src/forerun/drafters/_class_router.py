"""Naive Bayes over token n-grams: the class of a prompt, from labelled example prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.utils.files import read_lines

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

MAX_TOKENS = 512  # of a prompt that are read, from its end
FORM = 'expected a JSON object per line with "prompt" and "class"'
Gram = tuple[int, ...]


class ClassRouter:
    """Chooses argmax_c log P(c) + sum over uni- and bigrams g of log P(g | c), add-one smoothed."""

    def __init__(self, examples: Iterable[tuple[Many[int], str]]) -> None:
        counts: dict[str, Counter[Gram]] = {}
        sizes: Counter[str] = Counter()
        for tokens, kind in examples:
            counts.setdefault(kind, Counter()).update(_grams(tokens))
            sizes[kind] += 1
        self.classes = sorted(counts)
        grams = dict.fromkeys(gram for kind in self.classes for gram in counts[kind])
        self._column = {gram: i for i, gram in enumerate(grams)}
        table = np.array([[counts[kind][gram] for gram in grams] for kind in self.classes], float)
        self._logp = np.log((table + 1) / (table.sum(1, keepdims=True) + len(grams) + 1))
        self._prior = np.log([sizes[kind] / sizes.total() for kind in self.classes])

    @classmethod
    def read(cls, path: str | Path, tokenizer: Tokenizer) -> ClassRouter:
        """A router of the examples in a JSON-lines file. Raises DataError, ConfigError."""
        try:
            lines = read_lines(Path(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read ({error}); {FORM}") from None
        examples = list[tuple[list[int], str]]()
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt, kind = _fields(line, f"{path}:{number}")
                examples.append((tokenizer.encode(prompt), kind))
        if len({kind for _, kind in examples}) < 2:
            raise ConfigError(f"{path} has fewer than two classes; leave classes out for one draft")
        return cls(examples)

    def route(self, tokens: Many[int]) -> str:
        """The class of a prompt; ties: the first name."""
        column = self._column
        found = [column[gram] for gram in _grams(tokens[-MAX_TOKENS:]) if gram in column]
        return self.classes[int(np.argmax(self._prior + self._logp[:, found].sum(1)))]


def _grams(tokens: Many[int]) -> list[Gram]:
    """All unigrams and bigrams."""
    return [(t,) for t in tokens] + list(zip(tokens, tokens[1:], strict=False))


def _fields(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        prompt, kind = row["prompt"], row["class"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} is not an example ({error!r}); {FORM}") from None
    if not (isinstance(prompt, str) and prompt and isinstance(kind, str) and kind):
        raise DataError(f"{where} has an empty prompt or class; {FORM}")
    return prompt, kind
