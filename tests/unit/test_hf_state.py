"""Logits processors and stopping criteria with state: called once a token, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_small import PROMPT, VOCAB, ours, same
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)

from forerun.errors import ConfigError


class Counting(LogitsProcessor):
    """Favours tokens by the number of its calls, and records them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(input_ids.shape))
        self.seen.append(input_ids[0].tolist())
        bias = torch.zeros_like(scores)
        bias[:, (7 * len(self.calls)) % VOCAB] = 3.0
        return scores + bias


@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup", "suffix", "auto"])
@pytest.mark.parametrize("end", [None, 5, "criterion"])
def test_a_processor_with_state_is_called_once_a_token(
    fresh: Any, drafter: str, end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mine = Counting(), Counting()
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 40,
        "do_sample": False,
    }
    if end == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([EndsWith(21)])
    elif end is not None:
        options["eos_token_id"] = end
    want = fresh.generate(PROMPT, **options, logits_processor=LogitsProcessorList([theirs]))
    got = ours(fresh, drafter=drafter, **options, logits_processor=LogitsProcessorList([mine]))
    assert torch.equal(got.sequences, want.sequences)
    assert mine.calls == theirs.calls and mine.seen == theirs.seen
    for name in ("scores", "logits"):
        pairs = zip(getattr(got, name), getattr(want, name), strict=True)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    assert "failed" not in caplog.text


class EndsWith(StoppingCriteria):
    """Ends a row at a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_classifier_free_guidance(fresh: Any) -> None:
    options = {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[9, 3]])}
    assert same(fresh, **options)
    assert same(fresh.train().eval(), guidance_scale=0.4)
    with pytest.raises(ConfigError, match="Guidance.*batch size 2"):
        ours(fresh, PROMPT.repeat(2, 1), guidance_scale=1.7)


class Slotted(LogitsProcessor):
    """State that `vars` does not show."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return scores


class Late(LogitsProcessor):
    """State that the first call does not change; a subclass of one without state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += input_ids.shape[1] > PROMPT.shape[1]
        return scores


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """A subclass of one without state."""


def closure(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return scores


calls: list[int] = []
KINDS = [Counting(), Slotted(), Late(), OwnPenalty(1.2), closure, lambda ids, scores: scores]


@pytest.mark.parametrize("processor", KINDS, ids=lambda p: type(p).__name__)
def test_processors_of_unknown_code_are_refused_in_a_batch(fresh: Any, processor: Any) -> None:
    name = getattr(processor, "__name__", type(processor).__name__)
    for options in ({}, {"num_return_sequences": 3, "do_sample": True}):
        ids = PROMPT if options else PROMPT.repeat(3, 1)
        with pytest.raises(ConfigError, match=f"processor {name} .*batch size 3.*rowwise=True"):
            ours(fresh, ids, logits_processor=LogitsProcessorList([processor]), **options)
    assert not calls, "refused before the first call"


def test_a_prefix_function_needs_a_batch_of_one_or_a_declaration(fresh: Any) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [(3 * int(ids[-1]) + row) % VOCAB, 4]

    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3]])
    assert same(fresh, prefix_allowed_tokens_fn=allowed)
    with pytest.raises(ConfigError, match="prefix_allowed_tokens_fn cannot be used with batch"):
        ours(fresh, ids, prefix_allowed_tokens_fn=allowed)
    assert same(fresh, ids, prefix_allowed_tokens_fn=allowed, rowwise=True)
    with pytest.raises(ConfigError, match="Guidance"):  # it does keep state
        ours(fresh, ids, guidance_scale=1.7, rowwise=True)


class RowBias(LogitsProcessor):
    """Without state; depends on the row of the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros_like(scores)
        for row in range(len(scores)):
            bias[row, 3 + 5 * row] = 2.0 + (input_ids[row, -1] % 3)
        return scores + bias


def test_a_processor_without_state_serves_a_batch(fresh: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3], [4, 4, 4, 4]])
    assert same(fresh, ids, logits_processor=LogitsProcessorList([RowBias()]), rowwise=True)


@pytest.mark.parametrize(
    "criteria",
    [
        [EosTokenCriteria(torch.tensor(21))],
        [EosTokenCriteria(torch.tensor([21, 8])), MaxLengthCriteria(20)],
        [MaxLengthCriteria(14)],
        [MaxLengthCriteria(60)],
        [MaxLengthCriteria(3)],
        [MaxTimeCriteria(0.0)],
        [EndsWith(21)],
    ],
    ids=["end", "ends and length 20", "length 14", "length 60", "length 3", "no time", "own"],
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos", [None, 30])
def test_the_users_criteria_win(fresh: Any, criteria: list[Any], rows: int, eos: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3], [4, 4, 4, 4]])[:rows]
    options: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList(criteria)}
    options |= {"eos_token_id": eos, "rowwise": any(isinstance(c, EndsWith) for c in criteria)}
    assert same(fresh, ids, **options, max_new_tokens=30)


class Calls(StoppingCriteria):
    """Ends all rows at its fifth call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.count += 1
        return torch.full((len(input_ids),), self.count >= 5)


class OwnEnd(EosTokenCriteria):
    """A subclass of one without state."""


def test_a_criterion_with_state_needs_a_batch_of_one(fresh: Any) -> None:
    def options() -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([Calls()])}

    want = fresh.generate(PROMPT, max_new_tokens=24, do_sample=False, **options())
    assert torch.equal(ours(fresh, **options()), want) and want.shape[1] == PROMPT.shape[1] + 5
    for criterion in (Calls(), OwnEnd(5), lambda ids, scores: torch.zeros(len(ids)).bool()):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        with pytest.raises(ConfigError, match=f"criterion {name} .*batch size 3.*rowwise=True"):
            ours(fresh, PROMPT.repeat(3, 1), stopping_criteria=StoppingCriteriaList([criterion]))


def test_a_criterion_gets_the_scores_that_were_asked_for(fresh: Any) -> None:
    class Sure(StoppingCriteria):
        def __init__(self) -> None:
            self.got: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            assert len(scores) == input_ids.shape[1] - PROMPT.shape[1]
            self.got.append(scores[-1])
            return torch.full((len(input_ids),), len(scores) == 11)

    theirs, mine = Sure(), Sure()
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    options |= {"do_sample": False, "max_new_tokens": 30}
    want = fresh.generate(PROMPT, stopping_criteria=StoppingCriteriaList([theirs]), **options)
    got = ours(fresh, stopping_criteria=StoppingCriteriaList([mine]), **options)
    assert torch.equal(got.sequences, want.sequences) and len(mine.got) == len(theirs.got) == 11
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine.got, theirs.got, strict=True))
