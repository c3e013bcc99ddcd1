"""Faults in the training of a sorted draft: texts, tokenizers, overflow, a full disk, Ctrl-C."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_no_room import room
from tiny import make_tiny, make_tokenizer
from transformers import AutoModelForCausalLM

import forerun
from forerun.compression.vocab_trim import VocabTrim, write_trimmed
from forerun.core.sampling import Sampling
from forerun.drafters._sub_model import probs, rated_exits, sub_runners
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.models.draft_link import load_draft
from forerun.models.load import load_target
from forerun.models.sub_models import Exits, write_exits
from forerun.training.plans import has_run
from forerun.training.recipes.sorted import Sorted

OPTIONS = {"exits": (1, 2), "hidden": 32, "micro_tokens": 512, "max_steps": 6, "minutes": None}


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
    """Of the model that gives the first layers, of a target, and of one that changed in a run."""
    for options in ({"init": "reasoner"}, {"targets": ("reasoner",)}):
        with pytest.raises(ConfigError, match="reasoner and .* different vocabularies .*family"):
            recipe(target, text, **options).train(tmp_path / "other")
    copy, out = shutil.copytree(target, tmp_path / "target"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(copy, text).train(out, watch=interrupt)
    make_tokenizer(copy, 280)
    with pytest.raises(ConfigError, match="the content of tokenizer has changed"):
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


def test_depths_of_a_reduced_head_are_compared_by_token(tmp_path: Path) -> None:
    """Columns of a reduced head are other tokens than those of the target."""
    folder = make_tiny(tmp_path / "draft", seed=5)
    write_exits(folder, Exits((1, 2), tuple(range(5, 60))))
    kept = np.arange(40, 140)
    write_trimmed(folder, tmp_path / "small", kept, 288)
    target, whole = load_target(folder), load_draft(str(folder), "auto", "auto", 1, None)
    small = load_draft(str(tmp_path / "small"), "auto", "auto", 1, None)
    assert whole.exits == small.exits == Exits((1, 2), tuple(range(5, 60)))
    p = probs(target, whole.exits.text)
    for layers, part in sub_runners(small, small.exits).items():
        q = probs(sub_runners(whole, whole.exits)[layers], whole.exits.text)[:, kept]
        expected = np.minimum(p[:, kept], q / q.sum(1, keepdims=True)).sum(1).mean()
        (found,) = rated_exits({layers: part}, whole.exits.text, target)
        assert found.alpha == pytest.approx(expected, abs=1e-5)


def test_the_head_of_a_sorted_draft_is_reduced_by_measurement(
    target: Path, text: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    recipe(target, text, max_steps=2).train(draft)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n' * 4)
    how = {"calibrate": str(tmp_path / "prompts.jsonl"), "model": str(target), "tokens": 8}
    lines = list(VocabTrim(**how).trim(draft, tmp_path / "small"))
    assert "a head of" in lines[-1] and (tmp_path / "small" / "forerun-sorted.json").exists()


def test_first_layers_of_a_model_with_kinds_of_layers(
    target: Path, text: Path, tmp_path: Path
) -> None:
    """A config that lists the kind of every layer is cut with the layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = shutil.copytree(target, tmp_path / "init")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=320, **sizes, **heads)).save_pretrained(folder)
    recipe(folder, text, init=str(folder), max_steps=1).train(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(found.model.layers) == len(found.config.layer_types) == 2


def test_a_head_that_caps_its_logits_is_refused(target: Path, text: Path, tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = shutil.copytree(target, tmp_path / "init")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    Gemma2ForCausalLM(Gemma2Config(vocab_size=320, **sizes, **heads)).save_pretrained(folder)
    with pytest.raises(ConfigError, match="is a gemma2, and sorted drafts start from llama"):
        recipe(folder, text, init=str(folder), max_steps=1).train(tmp_path / "out")
