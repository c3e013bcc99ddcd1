"""Scorers of a search: any callable on (prompt, text), the target's likelihood, a reward model.

A scorer sees the prompt and the text so far, never an answer key. Larger is better. If it raises or
returns no finite number, only that attempt is dropped.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, ModelError, UnknownName
from forerun.models.chat_template import check_template, rendered
from forerun.search._arithmetic import arithmetic


@dataclass(frozen=True)
class Attempt:
    """Input of a scorer: a whole trajectory, or one up to the end of a step."""

    prompt: str
    text: str  # generated so far
    logprobs: tuple[float, ...] = ()  # of the target, per generated token; if recorded


class Scorer(ABC):
    """Scores a batch of attempts. `needs_logprobs`: record the target's log-probabilities."""

    needs_logprobs = False

    @abstractmethod
    def score(self, attempts: Many[Attempt]) -> list[float]:
        """One number per attempt."""


AnyScorer = Scorer | Callable[[str, str], float]
NAMES = ("arithmetic", "likelihood", "reward:MODEL", "MODULE:FUNCTION")  # scorers as text


class FunctionScorer(Scorer):
    """A scorer that calls a function on (prompt, text)."""

    def __init__(self, function: Callable[[str, str], float]) -> None:
        self.function = function

    def score(self, attempts: Many[Attempt]) -> list[float]:
        return [self.function(attempt.prompt, attempt.text) for attempt in attempts]


class Likelihood(Scorer):
    """The target's log-probability of the text: the sum, or the mean per token."""

    needs_logprobs = True

    def __init__(self, *, per_token: bool = True) -> None:
        self.per_token = per_token

    def score(self, attempts: Many[Attempt]) -> list[float]:
        counts = [len(a.logprobs) if self.per_token else 1 for a in attempts]
        return [math.fsum(a.logprobs) / n for a, n in zip(attempts, counts, strict=True)]


ANSWERED = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]


class RewardModel(Scorer):
    """A Hugging Face sequence classifier with one output, as outcome or process reward.

    model: a folder, a hub id, or a loaded model with its tokenizer. Prompt and text become a user's
    and an assistant's turn if the tokenizer has a chat template, otherwise one text. batch:
    attempts per forward pass. Raises ModelError if the model cannot be loaded or has several
    outputs.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, batch: int = 8, device: str = "auto"
    ) -> None:
        from forerun.models.load import choose_device

        if batch < 1:
            raise ConfigError(f"batch must be at least 1, got {batch}; 8 is the default")
        if isinstance(model, str | Path):
            model, tokenizer = _load(model)
        elif tokenizer is None:
            raise ConfigError("a loaded reward model needs its tokenizer; give both")
        if (outputs := model.config.num_labels) != 1:
            raise ModelError(
                f"the reward model has {outputs} outputs, expected 1; use a model trained as "
                "a reward model, or wrap this one in a callable on (prompt, text)"
            )
        self.model, self.tokenizer = model.to(choose_device(device)).eval(), tokenizer
        self.batch = batch
        if getattr(self.tokenizer, "chat_template", None):
            check_template(self.tokenizer, (ANSWERED,))

    def score(self, attempts: Many[Attempt]) -> list[float]:
        parts = [attempts[at : at + self.batch] for at in range(0, len(attempts), self.batch)]
        return [score for part in parts for score in self._scores([self._ids(a) for a in part])]

    def _ids(self, attempt: Attempt) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(attempt.prompt + attempt.text))
        turns = [("user", attempt.prompt), ("assistant", attempt.text)]
        messages = [{"role": role, "content": content} for role, content in turns]
        text = rendered(self.tokenizer, messages)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _scores(self, texts: list[list[int]]) -> list[float]:
        """Scores of token lists, padded on the right to one batch."""
        pad = self.model.config.pad_token_id
        if pad is None:  # without it a classifier cannot find the last token of padded texts
            return [self._pass([ids], 0)[0] for ids in texts]
        return self._pass(texts, pad)

    def _pass(self, texts: list[list[int]], pad: int) -> list[float]:
        import torch

        longest = max(map(len, texts))
        ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        where = self.model.device
        with torch.inference_mode():
            logits = self.model(input_ids=ids.to(where), attention_mask=mask.to(where)).logits
        return logits.float().reshape(len(texts)).tolist()


def as_scorer(given: AnyScorer | str, device: str = "auto") -> Scorer:
    """A Scorer for a callable or a text, see `NAMES`. Raises ConfigError, ModelError."""
    if isinstance(given, str):
        given = of_text(given, device)
    if isinstance(given, Scorer):
        return given
    if not callable(given):
        raise ConfigError(
            f"scorer must be a callable on (prompt, text) or a Scorer, got {given!r}; "
            "e.g. lambda prompt, text: -len(text)"
        )
    return FunctionScorer(given)


def of_text(spec: str, device: str = "auto") -> AnyScorer:
    """The scorer of a text. Raises ConfigError, ModelError."""
    kind, _, rest = spec.partition(":")
    if spec == "arithmetic":
        return arithmetic
    if spec == "likelihood":
        return Likelihood()
    if kind == "reward" and rest:
        return RewardModel(rest, device=device)
    if not rest:
        raise UnknownName.of("scorer", spec, NAMES)
    try:
        return getattr(importlib.import_module(kind), rest)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"scorer {spec!r} cannot be imported: {error}; write MODULE:FUNCTION, and set "
            "PYTHONPATH=. for a file in this folder"
        ) from None


def score_all(scorer: Scorer, attempts: Many[Attempt]) -> list[float | str]:
    """A score per attempt, or the error message.

    If scoring the batch fails, attempts are scored one by one, so that one failure drops only one.
    """
    try:
        return [_checked(score) for score in _exactly(scorer, attempts)]
    except Exception:  # a user's scorer may raise anything
        return [_score_alone(scorer, attempt) for attempt in attempts]


def _score_alone(scorer: Scorer, attempt: Attempt) -> float | str:
    try:
        return _checked(_exactly(scorer, [attempt])[0])
    except Exception as error:
        return f"the scorer raised {type(error).__name__}: {error}"


def _exactly(scorer: Scorer, attempts: Many[Attempt]) -> list[Any]:
    scores = list(scorer.score(attempts))
    if len(scores) != len(attempts):
        raise ValueError(f"{len(scores)} scores for {len(attempts)} attempts")
    return scores


def _checked(score: Any) -> float | str:
    try:
        value = float(score)
    except (TypeError, ValueError):
        return f"the scorer gave {score!r}, not a number"
    return value if math.isfinite(value) else f"the scorer gave {value}"


def _load(name: str | Path) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from forerun.models.hf_load import load_whole
    from forerun.models.paths import model_folder
    from forerun.models.remote_code import is_trusted

    folder = model_folder(name)
    try:
        return (
            load_whole(AutoModelForSequenceClassification, folder),
            AutoTokenizer.from_pretrained(folder, trust_remote_code=is_trusted()),
        )
    except Exception as cause:  # files, types and heads may be wrong in many ways
        first = str(cause).strip().partition("\n")[0]
        raise ModelError(f"the reward model in {folder} cannot be used: {first}") from cause
