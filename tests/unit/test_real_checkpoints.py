"""Real checkpoints against transformers in fp32: logits of real text, and greedy texts."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import error, forward, sequence

import forerun
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.models.load import load_target, planned
from forerun.models.paths import StoredConfig
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels
from forerun.runner.native.decoder import NativeDecoder

pytestmark = pytest.mark.slow
MODELS = ("smollm2-135m", "qwen-coder-0.5b", "gemma3-270m")
TOLERANCE = 1e-4  # of logits, relative to the largest
NUM_ROWS, NUM_LONG, NUM_GREEDY = 64, 700, 200  # tokens; gemma's windows are of 512
PROMPT = "def fibonacci(n):\n    # The first n numbers of the sequence, as a list.\n"
LICENSE = Path(__file__).parents[2] / "LICENSE"  # a long real text


@dataclass
class Expected:
    """What transformers computes for one folder, and the folder."""

    folder: Path
    ids: list[int]  # of the long text
    rows: torch.Tensor  # logits [NUM_ROWS, V] after each of the first tokens
    last: torch.Tensor  # logits [V] after all of them
    prompt: list[int]
    greedy: list[int]


@pytest.fixture(scope="module", params=MODELS)
def wanted(request: pytest.FixtureRequest, models_dir: Path) -> Expected:
    """transformers' answers; its model is freed before ours is loaded."""
    import transformers

    folder = models_dir / request.param
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model folder {folder}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(LICENSE.read_text())["input_ids"][:NUM_LONG]
    prompt = tokenizer(PROMPT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([ids[:NUM_ROWS]])).logits[0]
        last = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        found = Expected(folder, ids, rows, last, prompt, _greedy(model, prompt))
    del model
    gc.collect()
    return found


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """The likeliest NUM_GREEDY tokens, one by one, past ends of text."""
    new, cache = list(prompt), None
    found: list[int] = []
    while len(found) < NUM_GREEDY:
        out = model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, new = out.past_key_values, [int(out.logits[0, -1].argmax())]
        found += new
    return found


def _chain(tokens: list[int]) -> Tree:
    builder = TreeBuilder()
    for i, token in enumerate(tokens):
        builder.add(token, i - 1)
    return builder.build()


def test_logits_of_real_text(wanted: Expected) -> None:
    """After each of 64 tokens, as a tree of one path, and after a text longer than windows."""
    runner = load_target(wanted.folder, dtype="fp32")
    assert isinstance(runner, ModelRunner)
    assert not kernels() or isinstance(runner.decode, NativeDecoder)
    ids = wanted.ids
    rows = forward(runner, [sequence(ids[:1])], [_chain(ids[1:NUM_ROWS])])[0].logits
    rows = torch.as_tensor(rows)
    assert rows.shape == wanted.rows.shape
    for got, want in zip(rows, wanted.rows, strict=True):
        assert error(got, want) <= TOLERANCE
    last = forward(runner, [sequence(ids)], [EMPTY])[0].logits[0]
    assert error(torch.as_tensor(last), wanted.last) <= TOLERANCE


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_greedy_text_is_that_of_transformers(wanted: Expected, drafter: str) -> None:
    """Token by token, plain and with drafts."""
    model = forerun.load(wanted.folder, dtype="fp32")
    (result,) = model.generate(
        [wanted.prompt],
        temperature=0,
        max_new_tokens=NUM_GREEDY,
        ignore_eos=True,
        drafter=drafter,
    )
    assert result.samples[0].tokens == wanted.greedy


def test_the_config_is_read_without_transformers(wanted: Expected) -> None:
    """Importing it takes seconds."""
    plan, config = planned(wanted.folder)
    assert isinstance(config, StoredConfig)
    assert plan.config.vocab_size == wanted.rows.shape[1]
