"""Real models with another padding of one vocabulary draft for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

import forerun
from forerun.errors import ConfigError

TOKENS = 288


def padded(folder: Path, rows: int, seed: int = 0) -> Path:
    """A tiny model with this many rows; those behind the tokenizer's are as likely as others."""
    from transformers import AutoModelForCausalLM

    make_tiny(folder, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if rows != TOKENS:
        model.resize_token_embeddings(rows, mean_resizing=True)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(tmp_path_factory.mktemp("padding") / "small", TOKENS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(tmp_path_factory.mktemp("padding") / "large", 320)


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("grower", ["chain", "gumbel"])
def test_a_padded_draft(small: Path, large: Path, is_small: bool, grower: str) -> None:
    target, draft = (large, small) if is_small else (small, large)
    model = forerun.load(target, dtype="fp32")
    prompts: Any = ["the cat sat on", [5, 6, model.target.vocab_size - 1, 7]]
    how: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    plain = model.generate(prompts, drafter="none", **how)
    spec = f"draft_model:model={draft},dtype=fp32,grower={grower}"
    found = model.generate(prompts, drafter=spec, controller="fixed", verifier="recursive", **how)
    for one, other in zip(found, plain, strict=True):
        assert one.samples[0].tokens == other.samples[0].tokens
        assert one.stats.accepted > 0


def test_a_switched_target(small: Path, large: Path) -> None:
    for target, draft in ((large, small), (small, large)):
        spec = f"entropy_switch:small={draft},threshold=1"
        model = forerun.load(target, target=spec)
        (found,) = model.generate("the cat", max_new_tokens=20, ignore_eos=True)
        assert max(found.samples[0].tokens) < TOKENS


def test_a_draft_without_rows_for_all_tokens(small: Path, tmp_path: Path) -> None:
    cut = padded(tmp_path / "cut", 200, seed=1)
    model = forerun.load(small)
    with pytest.raises(ConfigError, match="the draft has 200 logits, and the vocabulary 288"):
        model.generate("the cat", drafter=f"draft_model:model={cut}")
