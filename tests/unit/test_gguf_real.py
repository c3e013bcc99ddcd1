"""Real GGUF files against the folders that transformers' own conversion made of them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import forerun  # noqa: E402
from forerun.models.gguf import GgufFile  # noqa: E402
from forerun.models.gguf_names import hf_tensors  # noqa: E402
from forerun.models.tokenizer import Tokenizer  # noqa: E402

NAMES = ("smollm2-135m", "qwen-coder-0.5b", "gemma3-270m")
SPACED_DIGIT = re.compile(r"\s\s\d")  # which transformers' conversion of smollm splits otherwise


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, models_dir: Path) -> tuple[Path, Path]:
    """A GGUF file and its folder."""
    file, folder = models_dir / f"{request.param}.gguf", models_dir / request.param
    if not file.is_file() or not folder.is_dir():
        pytest.skip(f"no {file.name} with its folder in {models_dir}")
    return file, folder


@pytest.mark.slow
def test_weights_are_equal_bit_for_bit(pair: tuple[Path, Path]) -> None:
    file, folder = pair
    with safe_open(folder / "model.safetensors", framework="pt") as theirs:
        left = set(theirs.keys())
        for name, tensor in hf_tensors(GgufFile(file), torch.bfloat16):
            expected = theirs.get_tensor(name)
            assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), name
            left.remove(name)
    assert not left


@pytest.mark.slow
def test_ids_are_equal(pair: tuple[Path, Path], data_dir: Path) -> None:
    ours, theirs = map(Tokenizer.load, pair)
    lines = (data_dir / "prompts" / "spec_bench_question.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    if pair[0].name.startswith("smollm2"):
        questions = [text for text in questions if not SPACED_DIGIT.search(text)]
    for text in random.Random(1).sample(questions, 50):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.vocabulary() == theirs.vocabulary()
    assert ours.has_chat_template == theirs.has_chat_template


@pytest.mark.slow
def test_digits_stand_alone(models_dir: Path) -> None:
    """As the original SmolLM2 tokenizer has it, and transformers' conversion has not."""
    if not (models_dir / "smollm2-135m.gguf").is_file():
        pytest.skip(f"no smollm2-135m.gguf in {models_dir}")
    tokenizer = Tokenizer.load(models_dir / "smollm2-135m.gguf")
    pieces = tokenizer.inner.convert_ids_to_tokens(tokenizer.encode("a   12"))
    assert pieces == ["a", "ĠĠĠ", "1", "2"]


@pytest.mark.slow
def test_greedy_text_is_equal(pair: tuple[Path, Path]) -> None:
    texts = []
    for path in pair:
        model = forerun.load(str(path), max_seqs=1)
        prompt = model.tokenizer.encode("Write a story about a fox and a crow.\n")
        (result,) = model.generate([prompt], temperature=0, max_new_tokens=100, drafter="none")
        texts.append(result.samples[0].tokens)
    assert texts[0] == texts[1] and len(texts[0]) > 20
