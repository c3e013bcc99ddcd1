"""Models whose heads or inner channels are no whole lanes: padded at load, and saying the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import branching, error, expected, forward, prompt, saved, sequence, tiny, worst

from forerun.bench.theory import pass_cost
from forerun.core.tree import EMPTY
from forerun.errors import ModelError
from forerun.models.families import plan_for
from forerun.models.load import DTYPES, load_target
from forerun.models.padding import in_lanes
from forerun.models.transformer import DecoderConfig
from forerun.runner.attention import TorchDecoder
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels
from forerun.runner.native.decoder import NativeDecoder, unsupported_config

pytestmark = pytest.mark.skipif(not kernels(), reason=f"native kernels: {kernels().why}")
TOLERANCE = 1e-5
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ODD: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {  # and the sizes that come of it
    "head 8": ("llama", {"head_dim": 8, "intermediate_size": 172}, (16, 176)),
    "head 12": ("llama", {"head_dim": 12, "intermediate_size": 100}, (16, 112)),
    "head 20": ("llama", {"head_dim": 20, "intermediate_size": 1}, (32, 16)),
    "head 40": ("llama", {"head_dim": 40, "num_key_value_heads": 1}, (48, 80)),
    "head 250": ("llama", {"head_dim": 250, "num_hidden_layers": 1}, (256, 80)),
    "stories260K": (
        "llama",
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 172, "tie_word_embeddings": True},
        (16, 176),
    ),
    "biases, tied": ("llama-biased-tied", {"head_dim": 12, "intermediate_size": 100}, (16, 112)),
    "llama3 rope": ("llama-llama3", {"head_dim": 20}, (32, 80)),
    "windows": ("mistral", {"head_dim": 8, "intermediate_size": 90}, (16, 96)),
    "windows by layer": ("qwen2", {"intermediate_size": 90}, (16, 96)),
    "head norms": ("qwen3", {"head_dim": 12, "rms_norm_eps": 0.1}, (16, 80)),
    "head norms, biases": ("qwen3-biased", {"head_dim": 20}, (32, 80)),
    "width norms": ("olmo2", {"intermediate_size": 100, "rms_norm_eps": 0.1}, (16, 112)),
    "fused": ("phi3", {"intermediate_size": 100}, (16, 112)),
    "half rotates": (
        "phi3",
        {"num_attention_heads": 2, "rope_parameters": PARTIAL, "intermediate_size": 100},
        (32, 112),
    ),
    "longrope": ("phi3-longrope", {}, (16, 80)),
    "soft caps": ("gemma2", {"head_dim": 20, "intermediate_size": 172}, (32, 176)),
    "two rotary tables": (
        "gemma3_text-linear",
        {"head_dim": 20, "intermediate_size": 172},
        (32, 176),
    ),
    "unrotated layers": ("smollm3", {"intermediate_size": 100}, (16, 112)),
    "multipliers": ("granite", {"intermediate_size": 100}, (16, 112)),
    "learned positions": ("gpt2", {"n_inner": 100}, (16, 112)),
    "odd heads": ("gpt2", {"n_embd": 80, "n_head": 16, "n_inner": 33}, (16, 48)),
}  # fmt: skip


@pytest.fixture(scope="module", params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A transformers model, the folder that it was saved in, and its sizes on the kernels."""
    case, options, sizes = ODD[request.param]
    folder = tmp_path_factory.mktemp("odd")
    return saved(case, folder, **options), folder, sizes


def native(folder: Path, **options: Any) -> ModelRunner:
    target = load_target(folder, context=128, **options)
    assert isinstance(target, ModelRunner) and isinstance(target.decode, NativeDecoder)
    return target


def test_the_kernels_say_what_transformers_says(odd: tuple) -> None:
    """Prefill, a step, a tree, its accepted branch, and a batch of them; and so does torch."""
    model, folder, sizes = odd
    runner, plain = native(folder), native(folder)
    config = runner.model.config
    assert (config.head_dim, config.mlp_size) == sizes
    plain.decode = TorchDecoder(plain.model)
    for target in (runner, plain):
        seq, other, tree = sequence(prompt(40)), sequence(prompt(7)), branching()
        assert worst(model, seq, EMPTY, forward(target, [seq], [EMPTY])[0]) < TOLERANCE
        seq.tokens += [5]
        assert worst(model, seq, tree, forward(target, [seq], [tree])[0]) < TOLERANCE
        seq.tokens += [*tree.path(6), 7]
        rows = forward(target, [seq, other], [tree, EMPTY])
        assert worst(model, seq, tree, rows[0]) < TOLERANCE
        assert worst(model, other, EMPTY, rows[1]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_close(odd: tuple, dtype: str) -> None:
    """About as far from the fp32 answer as transformers is with weights in that type."""
    model, folder, _ = odd
    tokens, tree = prompt(40), branching()
    rows = forward(native(folder, dtype=dtype), [sequence(tokens)], [tree])[0]
    path = [*tokens, *tree.path(6)]
    want = expected(model, path)
    theirs = error(expected(copy.deepcopy(model).to(DTYPES[dtype]), path), want)
    least = {"bf16": 2e-2, "fp16": 2e-3}[dtype]
    assert error(rows.logits[7], want[-1]) <= max(2 * theirs, least)


def test_a_node_has_the_bits_of_a_plain_step(odd: tuple) -> None:
    _, folder, _ = odd
    runner, text, tree = native(folder, dtype="bf16"), prompt(50, seed=1), branching()
    rows = forward(runner, [sequence(text), sequence(prompt(9))], [tree, EMPTY])[0].logits.clone()
    alone = sequence(text)
    for token in tree.path(6):
        forward(runner, [alone], [EMPTY])
        alone.tokens.append(int(token))
    assert torch.equal(forward(runner, [alone], [EMPTY])[0].logits[0], rows[7])


@pytest.mark.parametrize("weights", ["int8", "int8:32"])
def test_weights_in_8_bits(weights: str, tmp_path: Path) -> None:
    """The kernels and torch read the same rounded weights."""
    model = saved("llama", tmp_path, head_dim=12, intermediate_size=100)
    runner, plain = (native(tmp_path, weights=weights) for _ in range(2))
    plain.decode = TorchDecoder(plain.model)
    got, want = (
        forward(r, [sequence(prompt(33))], [branching()])[0].logits for r in (runner, plain)
    )
    inside = 0.05 if runner.model.head.packed.takes_bf16 else 1e-4
    assert error(got, want) <= inside
    assert error(got[0], expected(model, prompt(33))[-1]) < 0.1


def test_only_what_the_kernels_then_run_is_padded() -> None:
    def config(case: str, **options: Any) -> DecoderConfig:
        return plan_for(tiny(case, **options).config).config

    assert in_lanes(config("llama")) == replace(config("llama"), head_dim=16)
    whole = config("llama", head_dim=32, intermediate_size=96)
    assert in_lanes(whole) == whole and not unsupported_config(whole)
    for c, lack in (
        (config("llama", hidden_size=40, head_dim=12), "hidden size of 40"),  # norms divide by it
        (config("llama", head_dim=260, intermediate_size=100), "head size of 260"),
        (replace(config("llama"), num_heads=130), "64 query"),
        (config("qwen3_moe", head_dim=12), "experts"),
        (replace(config("llama"), head_dim=13), "head size of 13"),  # has no halves
        (
            replace(config("qwen3", head_dim=12), norm="layer"),
            "head size of 12",
        ),  # zeros move a mean
    ):
        assert in_lanes(c) == c and lack in unsupported_config(c)


def test_what_runs_on_torch_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path, intermediate_size=100)
    monkeypatch.setenv("FORERUN_NATIVE", "off")
    kernels.cache_clear()
    try:
        config = load_target(tmp_path).model.config
    finally:
        kernels.cache_clear()
    assert (config.head_dim, config.mlp_size) == (12, 100)


def test_shapes_in_messages_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    saved("llama", tmp_path, intermediate_size=100)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 100', '"intermediate_size": 99'))
    with pytest.raises(ModelError, match=r"shape \[\d+, \d+\].*\b(99|198)\b"):
        load_target(tmp_path)


def test_cells_are_counted_as_they_are_held(tmp_path: Path) -> None:
    """The cache grows with the padded head, and the reports say so."""
    saved("llama", tmp_path, head_dim=20)
    runner = native(tmp_path)
    forward(runner, [sequence(prompt(5))], [EMPTY])
    per_token = 2 * 3 * 2 * 32 * 4  # keys and values, layers, key heads, head, bytes
    assert pass_cost(runner).kv_bytes_per_token == per_token
    assert runner.memory_report()["kv cache"] == runner.cache.data.nbytes
    assert runner.cache.data.nbytes % per_token == 0
