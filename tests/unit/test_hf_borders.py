"""Ties, samples of one token, and rows without a token or a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_small import PROMPT, VOCAB, ours
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    set_seed,
)

from forerun.errors import ConfigError, ForerunError


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.0}, {"top_p": 0.0, "top_k": 0}, {"top_k": 1}, {"min_p": 1.0, "top_k": 0}],
    ids=str,
)
def test_samples_of_one_token_are_greedy(fresh: Any, options: dict[str, Any]) -> None:
    want = fresh.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert torch.equal(ours(fresh, do_sample=True, **options), want)


class Levels(LogitsProcessor):
    """Equal scores in steps of 0.5."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores * 2).round() / 2


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_k": 0, "top_p": 0.3}, {"top_k": 7, "top_p": 0.5, "temperature": 1.5}],
    ids=str,
)
def test_equal_scores_at_a_border_count_as_in_generate(fresh: Any, options: dict[str, Any]) -> None:
    """The tokens that get drawn are exactly those that plain generate leaves possible."""
    processors = {"logits_processor": LogitsProcessorList([Levels()])}
    plain = fresh.generate(
        PROMPT,
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
        **processors,
    )
    possible = plain.scores[0][0].isfinite().nonzero().flatten().tolist()
    probs = plain.scores[0][0].softmax(-1)
    set_seed(0)
    drawn = ours(
        fresh,
        max_new_tokens=1,
        do_sample=True,
        num_return_sequences=400,
        rowwise=True,
        **options,
        logits_processor=LogitsProcessorList([Levels()]),
    )
    counts = torch.bincount(drawn[:, -1], minlength=VOCAB)
    assert counts.nonzero().flatten().tolist() == possible
    assert float((counts / 400 - probs).abs().max()) < 0.1


class Nothing(LogitsProcessor):
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("value", "said"), [(-torch.inf, "Nothing"), (torch.nan, "NaN")])
def test_rows_without_a_token_are_named(
    fresh: Any, value: float, said: str, do_sample: bool
) -> None:
    processors = LogitsProcessorList([Nothing(float(value))])
    with pytest.raises(ForerunError, match=said):
        ours(fresh, do_sample=do_sample, logits_processor=processors)


def test_a_row_without_a_prompt_is_named(fresh: Any) -> None:
    ids = PROMPT.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ConfigError, match="row 1 is all zeros"):
        ours(fresh, ids, attention_mask=mask)
    with pytest.raises(ConfigError, match="prompt is empty"):
        ours(fresh, PROMPT[:, :0])
