"""Models of few positions start, decode to their end, and price drafts as others do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny import make_tiny

import forerun
from forerun.engine.cost import forward, step

GREEDY = {"temperature": 0, "n": 2, "max_new_tokens": 99, "ignore_eos": True}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, measured_cost: None) -> None:
    monkeypatch.setattr(step, "START_SECONDS", (0.0, 20.0))


@pytest.mark.parametrize("context", [2, 3, 8, 16, 32, 64])
def test_a_small_model_says_all_that_it_has_room_for(
    tmp_path: Path, context: int, quick: None
) -> None:
    model = forerun.load(make_tiny(tmp_path, context=context))
    results = {}
    for drafter in ("none", "stand", "auto"):
        (found,) = model.generate([[7]], drafter=drafter, **GREEDY)
        results[drafter] = [sample.tokens for sample in found.samples]
        assert not found.stats.failures
    assert model.target.cost.rows == tuple(sorted(forward.MEASURED_ROWS)), (
        "drafts of every size have a price"
    )
    assert [len(tokens) for tokens in results["none"]] == 2 * [context - 1]
    assert results["stand"] == results["auto"] == results["none"]


@pytest.mark.parametrize("way", ["folder", "transformers"])
def test_a_context_may_be_cut_to_a_few_positions(tiny_folder: Path, way: str, quick: None) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_folder
    if way == "transformers":
        source = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model = forerun.load(source, context=16)
    assert len(model.generate([[7]], **GREEDY)[0].samples[0].tokens) == 15


def test_more_context_than_a_model_has_is_refused_aloud(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "forerun"):
        assert forerun.load(tiny_folder, context=128).target.context == 128
        assert not caplog.messages
        assert forerun.load(tiny_folder, context=129).target.context == 128
    assert caplog.messages == ["context=129 exceeds the model's maximum of 128; using that"]


def test_a_context_without_room_for_an_answer_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(forerun.errors.ConfigError, match=r"at least 2, got 1; omit it"):
        forerun.load(tiny_folder, context=1)


def test_a_text_that_the_context_ends_is_warned_about_once(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = forerun.load(tiny_folder, context=16)
    model.generate([[1, 2, 3, 4]] * 3, max_new_tokens=12, ignore_eos=True)
    assert not caplog.messages
    model.generate([[1, 2, 3, 4]] * 3, max_new_tokens=60, ignore_eos=True)
    (said,) = caplog.messages
    assert said == (
        "a text ended after 12 of 60 tokens: the context of this model is 16 tokens with the prompt"
    )
