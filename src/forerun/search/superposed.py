"""Superposed Decoding: k drafts of a continuation for about the cost of one.

"Superposed Decoding: Multiple Generations from a Single Autoregressive Inference Pass", 2024. The
input of the model is the mix of the k drafts' last tokens, weighted by the drafts' scores. Each
draft may continue with any of the n likeliest tokens of the output; n-gram counts of a corpus
choose the token of each draft. One forward pass per token for any k.

Law: none. The drafts are neither samples nor a beam of the target, as they share its state. Their
scores are not the target's probabilities; `rescored` computes those. Needs: a model that runs on
forerun's own decoder, and n-gram counts made with its tokenizer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling, log_softmax
from forerun.core.tree import TreeBuilder
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.counts import corpus
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.registry import Corpus
from forerun.runner.soft_embeddings import MixedStream
from forerun.search._superposition import WEIGHTS, Draft, Settings, drafts_of
from forerun.search.base import Search
from forerun.utils.numbers import token_ids, whole
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.models.tokenizer import Tokenizer

log = logging.getLogger("forerun")
ORDER = len(WEIGHTS) + 1  # of the n-gram model


@dataclass(frozen=True)
class Superposed:
    """The drafts, best first by mean score."""

    prompt: str
    drafts: list[Draft]
    num_passes: int  # forward passes, with the prompt's
    num_asked: int = 0  # k; there are fewer drafts only if the model allows no more tokens
    logprobs: list[float] = field(default_factory=list)  # of whole drafts under the plain model

    @property
    def text(self) -> str:
        return self.drafts[0].text

    def shown(self) -> str:
        """A draft per line."""
        return "\n".join(draft.text.replace("\n", "\\n") for draft in self.drafts)

    def remarks(self, seconds: float) -> list[str]:
        shown = ", ".join(f"{logprob:.2f}" for logprob in self.logprobs)
        drafts = counted(len(self.drafts), "draft")
        passes = counted(self.num_passes, "pass", "passes")
        is_short = len(self.drafts) < self.num_asked
        why = f" of {self.num_asked}: the model allows no other tokens" if is_short else ""
        return [
            f"approximate: drafts share the model's state; log-probabilities under it: {shown}",
            f"{drafts}{why} from {passes} in {seconds:.2f} s",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; logprob is that of the whole draft under the plain model."""
        drafts = [
            {
                "text": draft.text,
                "tokens": list(draft.tokens),
                "finish": draft.finish,
                "score": draft.score,
                "logprob": logprob,
            }
            for draft, logprob in zip(self.drafts, self.logprobs, strict=True)
        ]
        return {
            "prompt": self.prompt,
            "method": "superposed",
            "lossless": False,
            "text": self.text,
            "drafts": drafts,
            "passes": self.num_passes,
        }


class SuperposedDecoding(Search):
    """Makes k approximate drafts of a continuation in one run; deterministic.

    k: number of drafts, at least 2. ngrams: text files for n-gram counts, or one saved n-gram
    model. ngram_weight: weight of the n-grams, 0 to 1; 0: no n-grams. mix_temperature: temperature
    of the target's distribution before mixing. candidates: tokens that may follow a draft; 0: 3 k.
    penalty: penalty of a draft without a successor in the n-grams. weights: weights of contexts of
    1, 2, ... tokens.
    """

    draws = False
    num_tokens = 10
    spellings = {"k": "-n"}

    def __init__(
        self,
        *,
        k: int = 3,
        ngrams: tuple[Corpus, ...] | NgramModel | str | Path = (),
        ngram_weight: float = 0.54,
        mix_temperature: float = 0.06,
        candidates: int = 0,
        penalty: float = 200.0,
        weights: tuple[float, ...] = WEIGHTS,
    ) -> None:
        self.settings = Settings(k, mix_temperature, ngram_weight, candidates, penalty, weights)
        ngrams = (str(ngrams),) if isinstance(ngrams, str | Path) else ngrams or ()
        self.ngrams = _checked_ngrams(ngrams)
        if ngram_weight and isinstance(ngrams, tuple):
            if not ngrams:
                raise ConfigError(
                    "superposed needs n-gram counts: give --ngrams FILE, a text or a saved n-gram "
                    "model; --ngram-weight 0 works without, but drafts get worse"
                )
            _check_files(ngrams)

    def run(
        self, model: Model, prompt: str | Many[int], *, max_new_tokens: int = 10, **_: Any
    ) -> Superposed:
        """The drafts, scored by the plain model in one more pass. Raises as `superposed` does."""
        ngrams = self._counted(model)
        found = _superposed(model, prompt, ngrams, self.settings, max_new_tokens)
        logprobs = [math.fsum(row) for row in rescored(model, prompt, found.drafts)]
        return replace(found, logprobs=logprobs)

    def _counted(self, model: Model) -> NgramModel | None:
        """The n-gram counts, made once with the model's tokenizer."""
        if isinstance(self.ngrams, tuple):
            if not self.ngrams:
                return None
            paths = [Path(path).expanduser() for path in self.ngrams]
            self.ngrams = NgramModel.of_files(paths, model.tokenizer, order=ORDER)
            if 2 * self.ngrams.num_tokens < self.ngrams.vocab_size:
                log.warning(
                    "ngrams has %s and lacks most of the %s ids of the vocabulary, so drafts may "
                    "be nonsense; give more text",
                    counted(self.ngrams.num_tokens, "token"),
                    self.ngrams.vocab_size,
                )
        return self.ngrams


def _checked_ngrams(ngrams: Any) -> Any:
    """The counts or files. Raises ConfigError for another type."""
    if not isinstance(ngrams, NgramModel | tuple | None):
        raise ConfigError(
            f"ngrams must be files or an NgramModel, got {type(ngrams).__name__}; count texts with "
            "NgramModel.of_files([FILE], tokenizer, order=6)"
        )
    return ngrams


def _check_files(files: Many[str]) -> None:
    """Raises DataError for a missing file or a folder; pipes are allowed."""
    for file in files:
        path = Path(file).expanduser()
        if not file or not path.exists():
            raise DataError(f"ngrams: there is no file {file or repr(file)}; check the path")
        if path.is_dir():
            raise DataError(f"ngrams: {file} is a folder; give the files in it")


def superposed(
    model: Model,
    prompt: str | Many[int],
    *,
    ngrams: NgramModel | None = None,
    max_new_tokens: int = 10,
    **options: object,
) -> Superposed:
    """k drafts of at most `max_new_tokens` tokens after a prompt; deterministic.

    ngrams: counts up to 6-grams use all weights; None needs ngram_weight=0. options: of `Settings`.
    Raises ConfigError, DataError for an empty prompt, CapacityError beyond the context.
    """
    how = Settings(**options)  # type: ignore[arg-type]
    if isinstance(_checked_ngrams(ngrams), tuple):
        raise ConfigError("ngrams are files; count them with NgramModel.of_files")
    if ngrams is None and how.ngram_weight:
        raise ConfigError(
            "superposed needs n-gram counts, got none; give "
            "ngrams=NgramModel.of_files([FILE], tokenizer, order=6), or ngram_weight=0"
        )
    return _superposed(model, prompt, ngrams, how, max_new_tokens)


def _superposed(
    model: Model,
    prompt: str | Many[int],
    ngrams: NgramModel | None,
    how: Settings,
    max_new_tokens: int,
) -> Superposed:
    """The drafts, without scores of the plain model."""
    whole("max_new_tokens", max_new_tokens)
    if ngrams is not None:
        _check_vocabulary(model, ngrams)
    tokens = prompt_ids(model, prompt)
    if how.k > model.target.vocab_size:
        raise ConfigError(
            f"k={how.k} exceeds the model's {model.target.vocab_size} token ids; use fewer drafts"
        )
    with model.target.lock:
        stream = MixedStream(model.target)
        found = drafts_of(stream, tokens, ngrams, how, max_new_tokens, model.tokenizer.eos_ids)
    decode = model.tokenizer.decode
    drafts = [Draft(d.tokens, d.score, decode(d.tokens, tokens), d.finish) for d in found]
    text = prompt if isinstance(prompt, str) else model.tokenizer.decode(tokens)
    return Superposed(text, drafts, stream.num_passes, how.k)


def prompt_ids(model: Model, prompt: str | Many[int]) -> list[int]:
    """The token ids of a prompt. Raises DataError for no tokens and for ids of no token."""
    if isinstance(prompt, str):
        tokens = model.tokenizer.encode(prompt) if prompt else []
    else:
        tokens = token_ids(prompt).tolist()
    if not tokens:
        raise DataError("the prompt is empty; give it at least one token")
    _check_range(model, tokens)
    return tokens


def _check_range(model: Model, tokens: Many[int]) -> None:
    """Raises DataError for an id outside the model's vocabulary."""
    wrong = [token for token in tokens if not 0 <= token < model.target.vocab_size]
    if wrong:
        raise DataError(
            f"token id {wrong[0]} is out of range; the model's ids are 0 to "
            f"{model.target.vocab_size - 1}"
        )


def _check_vocabulary(model: Model, ngrams: NgramModel) -> None:
    """Raises ConfigError unless the counts are of the model's token ids."""
    if ngrams.order < 2:
        raise ConfigError("superposed needs n-grams of 2 tokens or more, got counts of order 1")
    ours = (model.tokenizer.vocab_size, model.target.vocab_size)
    is_other = ngrams.vocab_size not in ours or ngrams.largest_id >= model.target.vocab_size
    if not is_other and ngrams.tokenizer:
        is_other = ngrams.tokenizer != _fingerprint(model.tokenizer)
    if is_other:
        raise ConfigError(
            f"the n-grams are counts of another vocabulary ({ngrams.vocab_size} ids, the model has "
            f"{ours[0]}); count the text with the model's tokenizer"
        )


@lru_cache(maxsize=4)
def _fingerprint(tokenizer: Tokenizer) -> str:
    return corpus.fingerprint(tokenizer)


def rescored(model: Model, prompt: str | Many[int], drafts: Many[Draft]) -> list[list[float]]:
    """Log-probabilities of all draft tokens under the plain model, in one pass over a trie."""
    tokens = prompt_ids(model, prompt)
    for draft in drafts:
        _check_range(model, token_ids(draft.tokens).tolist())
    seq = Sequence(tokens, len(tokens), Sampling(), SeededDice(0), limit=1)
    builder, where, paths = TreeBuilder(), dict[tuple[int, ...], int](), []
    for draft in drafts:
        path = [-1]
        for length in range(1, len(draft.tokens) + 1):
            prefix = draft.tokens[:length]
            if prefix not in where:
                where[prefix] = builder.add(prefix[-1], path[-1])
            path.append(where[prefix])
        paths.append(path)
    with model.target.lock:
        rows = model.target.forward(ForwardBatch([seq], [builder.build()]))[0]
        model.target.release(seq)
    laws = {node: log_softmax(rows.row(node)) for path in paths for node in path[:-1]}
    return [
        [float(laws[node][token]) for node, token in zip(path, draft.tokens, strict=False)]
        for path, draft in zip(paths, drafts, strict=True)
    ]
