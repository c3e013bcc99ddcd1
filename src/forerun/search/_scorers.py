"""What a search ranks by: any callable on (prompt, text), the target's likelihood, a reward model.

A scorer sees what was asked and what was written so far, never an answer key. Larger is better.
One that raises, or gives no finite number, loses that attempt alone, and the search goes on.
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
from forerun.search._arithmetic import arithmetic


@dataclass(frozen=True)
class Attempt:
    """What is scored: a whole trajectory, or one that ends with a step."""

    prompt: str
    text: str  # generated so far
    logprobs: tuple[float, ...] = ()  # the target's own, per generated token; if asked for


class Scorer(ABC):
    """Scores attempts, many at once. `needs_logprobs`: the target's log-probabilities are read."""

    needs_logprobs = False

    @abstractmethod
    def score(self, attempts: Many[Attempt]) -> list[float]:
        """One number per attempt."""


AnyScorer = Scorer | Callable[[str, str], float]
NAMES = ("arithmetic", "likelihood", "reward:MODEL", "MODULE:FUNCTION")  # scorers as text


class Plain(Scorer):
    """A callable on (prompt, text)."""

    def __init__(self, function: Callable[[str, str], float]) -> None:
        self.function = function

    def score(self, attempts: Many[Attempt]) -> list[float]:
        return [self.function(attempt.prompt, attempt.text) for attempt in attempts]


class Likelihood(Scorer):
    """The target's own log-probability of the text: its sum, or the mean per token."""

    needs_logprobs = True

    def __init__(self, *, per_token: bool = True) -> None:
        self.per_token = per_token

    def score(self, attempts: Many[Attempt]) -> list[float]:
        counts = [len(a.logprobs) if self.per_token else 1 for a in attempts]
        return [math.fsum(a.logprobs) / n for a, n in zip(attempts, counts, strict=True)]


class RewardModel(Scorer):
    """A Hugging Face sequence classifier with one output, as outcome or process reward.

    model: a folder, a hub id, or a loaded model (then its tokenizer too). Where the tokenizer has a
    chat template, prompt and text are a user's and an assistant's turn, else one text. batch: how
    many are scored in one pass. Raises ModelError if it cannot be loaded, or has several outputs.
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
            raise ConfigError("a loaded reward model needs its tokenizer; give it as well")
        if (outputs := model.config.num_labels) != 1:
            raise ModelError(
                f"the reward model has {outputs} outputs, expected 1; use one that was trained as "
                "a reward model, or wrap it in a callable on (prompt, text) of your own"
            )
        self.model, self.tokenizer = model.to(choose_device(device)).eval(), tokenizer
        self.batch = batch

    def score(self, attempts: Many[Attempt]) -> list[float]:
        parts = [attempts[at : at + self.batch] for at in range(0, len(attempts), self.batch)]
        return [score for part in parts for score in self._scores([self._ids(a) for a in part])]

    def _ids(self, attempt: Attempt) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(attempt.prompt + attempt.text))
        turns = [("user", attempt.prompt), ("assistant", attempt.text)]
        messages = [{"role": role, "content": content} for role, content in turns]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _scores(self, texts: list[list[int]]) -> list[float]:
        """Scores of token lists, padded on the right to one batch."""
        pad = self.model.config.pad_token_id
        if pad is None:  # a classifier finds the last token by it, or takes one text at a time
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
    return Plain(given)


def of_text(spec: str, device: str = "auto") -> AnyScorer:
    """The scorer that a text names. Raises ConfigError, ModelError."""
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
            f"scorer {spec!r} cannot be imported: {error}; write MODULE:FUNCTION, and for a file "
            "in this folder put PYTHONPATH=. before the call"
        ) from None


def score_all(scorer: Scorer, attempts: Many[Attempt]) -> list[float | str]:
    """A score per attempt, or the reason why there is none.

    If scoring all at once fails, each is scored alone, so that one bad attempt loses itself only.
    """
    try:
        return [_checked(score) for score in _exactly(scorer, attempts)]
    except Exception:  # whatever a user's scorer may raise
        return [_alone(scorer, attempt) for attempt in attempts]


def _alone(scorer: Scorer, attempt: Attempt) -> float | str:
    try:
        return _checked(_exactly(scorer, [attempt])[0])
    except Exception as error:
        return f"the scorer raised {type(error).__name__}: {error}"


def _exactly(scorer: Scorer, attempts: Many[Attempt]) -> list[Any]:
    scores = list(scorer.score(attempts))
    if len(scores) != len(attempts):
        raise ValueError(f"{len(scores)} scores came for {len(attempts)} attempts")
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

    folder = model_folder(name)
    try:
        return (
            load_whole(AutoModelForSequenceClassification, folder),
            AutoTokenizer.from_pretrained(folder),
        )
    except Exception as cause:  # files, types and heads may be wrong in many ways
        first = str(cause).strip().partition("\n")[0]
        raise ModelError(f"the reward model in {folder} cannot be used: {first}") from cause
