"""Faults in the training of a sorted draft: texts, tokenizers, overflow, a full disk, Ctrl-C."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_no_room import room
from tiny import make_tiny, make_tokenizer

import forerun
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.models.draft_link import load_draft
from forerun.training.plans import has_run
from forerun.training.recipes.sorted import Sorted

OPTIONS = {"exits": (1, 2), "hidden": 32, "micro_tokens": 512, "max_steps": 6, "minutes": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target") / "target", seed=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat and the dog on the log. " * 150)
    return path


def recipe(target: Path, text: Path, **options) -> Sorted:
    return Sorted(model=str(target), corpus=text, **OPTIONS | options)


def interrupt(title: str, share: float, note: str) -> None:
    if share >= 0.5:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("content", "said"), [("", "has no text"), ("the cat", "has 1 row of 256 tokens")]
)
def test_too_little_text(target: Path, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises((ConfigError, DataError), match=said):
        recipe(target, tmp_path / "text.txt").train(tmp_path / "out")


def test_an_interrupted_run_continues_bit_for_bit(target: Path, text: Path, tmp_path: Path) -> None:
    recipe(target, text).train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        recipe(target, text).train(tmp_path / "out", watch=interrupt)
    recipe(target, text).train(tmp_path / "out", resume=True)
    whole, found = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "out"))
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_other_tokenizers_are_refused(target: Path, text: Path, tmp_path: Path) -> None:
    """Of the model that gives the first layers, and of a target that changed under a run."""
    with pytest.raises(ConfigError, match=r"different vocabularies .*'cross_vocab'"):
        recipe(target, text, init="reasoner").train(tmp_path / "init")
    copy, out = shutil.copytree(target, tmp_path / "target"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(copy, text).train(out, watch=interrupt)
    make_tokenizer(copy, 280)
    with pytest.raises(ConfigError, match="was started with tokenizer_hash"):
        recipe(copy, text).train(out, resume=True)


def test_weights_that_overflow_end_the_run(target: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(target, text).train(out, watch=interrupt)
    before = (out / "checkpoint.pt").read_bytes()
    with pytest.raises(DataError, match=r"at step \d+; try a lower learning rate|after step \d"):
        recipe(target, text, rate=1e38).train(out, resume=True)
    assert (out / "checkpoint.pt").read_bytes() == before
    recipe(target, text, rate=0.5).train(out, resume=True)
    assert (out / "model.safetensors").exists()


def test_a_full_disk_is_named_and_the_run_continues(
    target: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for size in (100, 2_000, 60_000):  # of the largest file that can be written
        with room(size), pytest.raises(CapacityError, match="raise the limit of file sizes"):
            recipe(target, text).train(out, resume=has_run(out))
    recipe(target, text).train(out, resume=True)
    assert load_draft(str(out), "auto", "cpu", 1, None).exits is not None


def test_a_vocabulary_with_padding(target: Path, text: Path, tmp_path: Path) -> None:
    """288 tokens in 320 rows: every sub-model drafts, and so do exits per token."""
    from transformers import AutoModelForCausalLM

    padded, out = shutil.copytree(target, tmp_path / "target"), tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    model.save_pretrained(padded)
    recipe(padded, text, targets=(str(target),)).train(out)
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 320
    sampling = Sampling(temperature=0, max_new_tokens=12)
    for folder in (padded, target):
        served = forerun.load(str(folder), dtype="fp32")
        plain = served.generate(["the cat"], sampling, drafter="none")[0]
        for options in ("", ",confidence=0.02"):
            drafter = f"draft_model:model={out}{options}"
            found = served.generate(["the cat"], sampling, drafter=drafter)[0]
            assert found.samples[0].tokens == plain.samples[0].tokens
            assert found.stats.drafted > 0
