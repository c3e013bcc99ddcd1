"""Whole passes of the C kernels against the torch path, and their law of independence: a row's
logits are the same bits whatever else is in the pass and however many threads work."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import CASES, VOCAB, branching, forward, prompt, saved, sequence

from forerun.core.tree import EMPTY, TreeBuilder
from forerun.models.load import load_target
from forerun.runner.attention import TorchDecoder
from forerun.runner.forward_batch import FIELDS, Work, packed
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import LEVELS, decoder, kernels, layout
from forerun.runner.native.decoder import NativeDecoder, unsupported_config, warn_once
from forerun.runner.slots import Slot

pytestmark = pytest.mark.skipif(not kernels(), reason=f"native kernels: {kernels().why}")
NATIVE = {  # families at sizes that the kernels take
    case: options | {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    for case, options in CASES.items()
    if not case.startswith(("gpt2", "qwen3_moe", "phi3-partial", "phi3-longrope"))
} | {"gpt2": {"n_embd": 64}}


def runners(case: str, folder: Path, dtype: str) -> tuple[ModelRunner, ModelRunner]:
    """The same checkpoint on the kernels and on torch."""
    saved(case, folder, **NATIVE[case])
    native, plain = (load_target(folder, dtype=dtype) for _ in range(2))
    assert isinstance(native.decode, NativeDecoder)
    plain.decode = TorchDecoder(plain.model)
    return native, plain


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", NATIVE)
def test_pass_matches_torch(case: str, dtype: str, tmp_path: Path) -> None:
    """Prefill, one step, a branching tree, and a ragged batch of them."""
    most = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 1e-2}[dtype]
    native, plain = runners(case, tmp_path, dtype)
    seqs = [[sequence(prompt(n, seed=n)) for n in (70, 5, 33)] for _ in range(2)]
    for trees in ([EMPTY] * 3, [branching(), EMPTY, branching()]):
        got, want = (forward(r, s, trees) for r, s in zip((native, plain), seqs, strict=True))
        for g, w in zip(got, want, strict=True):
            error = (g.logits.double() - w.logits.double()).abs().max() / w.logits.abs().max()
            assert error <= most


@pytest.mark.parametrize(
    ("cache", "has_large_l1", "fetched"), [(1, True, 1), (1, False, 2), (1 << 40, False, 1)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3_text", "olmo2"])
def test_rows_do_not_depend_on_their_company(
    case: str,
    dtype: str,
    cache: int,
    has_large_l1: bool,
    fetched: int,
    tmp_path: Path,
    threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node of a tree in a batch has the bits of a plain step over the same text, whether the
    weights fit into the processor's cache or not, and whichever they are fetched into."""
    monkeypatch.setattr(decoder, "cache_bytes", lambda: cache)
    monkeypatch.setattr(decoder, "has_large_l1", lambda: has_large_l1)
    runner, _ = runners(case, tmp_path, dtype)
    head = runner.decode._record.head
    assert (head.is_streamed, head.fetched) == (cache == 1, fetched)
    text, other = prompt(90, seed=1), prompt(21, seed=2)
    seq, tree = sequence(text), branching()
    rows = forward(runner, [seq, sequence(other)], [tree, branching()])[0].logits.clone()
    torch.set_num_threads(1)
    for node in range(-1, len(tree)):
        path = tree.path(node) if node >= 0 else []
        alone = sequence(text)
        forward(runner, [alone], [EMPTY])
        for token in path:
            alone.tokens.append(int(token))
            last = forward(runner, [alone], [EMPTY])[0].logits
        if path:
            assert torch.equal(last[0], rows[node + 1])
        runner.release(alone)


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3_text"])
def test_long_contexts_are_split_and_merged(case: str, tmp_path: Path) -> None:
    """Beyond several chunks, with and without a window, as few rows and as many."""
    saved(case, tmp_path, **NATIVE[case] | {"max_position_embeddings": 2048})
    native, plain = (load_target(tmp_path, dtype="fp32") for _ in range(2))
    plain.decode = TorchDecoder(plain.model)
    text = prompt(3 * layout.CHUNK + 37)
    builder = TreeBuilder()
    for node in range(40):
        builder.add(node % 90, node // 2 - 1 if node > 1 else -1)
    for tree in (EMPTY, builder.build()):
        got, want = (forward(r, [sequence(text)], [tree])[0].logits for r in (native, plain))
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_what_the_kernels_lack_runs_on_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is said once, however many such models are loaded."""
    warn_once.cache_clear()
    saved("qwen3_moe", tmp_path)
    for _ in range(2):
        runner = load_target(tmp_path, dtype="fp32")
        assert "experts" in unsupported_config(runner.model.config)
        assert isinstance(runner.decode, TorchDecoder)
    said = [text for text in caplog.messages if "passes run on torch" in text]
    assert len(said) == 1 and said[0].endswith("experts")


def test_tokens_without_a_row_are_refused(tmp_path: Path) -> None:
    """Never read out of bounds."""
    runner, _ = runners("llama", tmp_path, "fp32")
    with pytest.raises(IndexError, match="token 100"):
        forward(runner, [sequence([3, VOCAB, 4])], [EMPTY])
    with pytest.raises(IndexError, match="token -1"):
        forward(runner, [sequence([3, -1, 4])], [EMPTY])


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=() if level == "avx2" else pytest.mark.slow)
        for level in LEVELS[: kernels().level + 1]  # the last one is that of all other tests
    ],
)
def test_every_instruction_set(level: str, tmp_path: Path) -> None:
    """The same checks in a process that may use no more than `level`; "off" is torch."""
    saved("llama", tmp_path, **NATIVE["llama"])
    code = f"""
import torch
from forerun.core.tree import EMPTY
from parity import branching, forward, prompt, sequence
from forerun.runner.attention import TorchDecoder
from forerun.errors import ConfigError
from forerun.models.load import load_target
from forerun.runner.native import LEVELS, kernels
assert LEVELS[kernels().level] == {level!r}
runners = [load_target({str(tmp_path)!r}, dtype="fp32") for _ in range(2)]
assert isinstance(runners[0].decode, TorchDecoder) == ({level!r} == "off")
runners[1].decode = TorchDecoder(runners[1].model)
for tree in (EMPTY, branching()):
    got, want = (forward(r, [sequence(prompt(70))], [tree])[0].logits for r in runners)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
"""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = os.environ | {"FORERUN_NATIVE": level, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_unknown_level_is_refused() -> None:
    code = "from forerun.runner.native import kernels; kernels()"
    environment = os.environ | {"FORERUN_NATIVE": "sse", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "use one of off, avx2" in done.stderr


@pytest.mark.parametrize("weights", ["int8", "int8:32"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2", "granite", "gpt2"])
def test_a_model_in_8_bits_matches_torch_with_the_same_rounding(
    case: str, weights: str, tmp_path: Path
) -> None:
    saved(case, tmp_path, **NATIVE[case])
    runner, plain, exact = (
        load_target(tmp_path, dtype="fp32", weights=held) for held in (weights, weights, "auto")
    )
    assert isinstance(runner.decode, NativeDecoder)
    plain.decode = TorchDecoder(plain.model)
    got, want, unrounded = (
        forward(r, [sequence(prompt(33))], [branching()])[0].logits for r in (runner, plain, exact)
    )
    tolerance = 0.05 if runner.model.head.packed.takes_bf16 else 1e-4  # bf16 inputs in the kernels
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert (unrounded - got).abs().max() > 1e-4 * want.abs().max()


def test_packed_spans_are_the_records_that_the_kernels_read() -> None:
    assert ctypes.sizeof(layout.Span) == 8 * FIELDS
    slots = Slot(3), Slot(1)
    slots[1].tokens += [4, 4, 4]
    works = [Work(slots[0], [1, 2]), Work(slots[1], [5], [6, 7], np.array([-1, 0], np.int32))]
    found = packed(works, (100, 10), 9, 11)
    assert (found.logits.shape, found.top, found.wrong) == ((4, 11), 5, -1)
    assert found.addresses == (found.numbers.ctypes.data, found.logits.ctypes.data)
    assert found.numbers[:5].tolist() == [1, 2, 5, 6, 7]
    assert found.numbers[5:10].tolist() == [0, 1, 3, 4, 5]
    assert found.numbers[10:15].tolist() == [300, 310, 130, 140, 150]
    assert found.numbers[15:19].tolist() == [1, 2, 3, 4]
    spans = (layout.Span * 2).from_buffer(found.numbers, 8 * 20)
    told = [(s.slot, s.base, s.stop, s.num_rows, s.first_row) for s in spans]
    assert told == [(3, 0, 2, 2, 0), (1, 3, 6, 3, 2)]
    assert not spans[0].sees and spans[1].sees == found.sees.ctypes.data
    assert found.sees.reshape(3, 3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert packed(works, (100, 10), 7, 11).wrong == 4
    assert packed(works, (100, 10), 9, 0).logits.shape == (0, 0)
