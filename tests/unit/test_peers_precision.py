"""In which number type OpenVINO is asked to compute."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.bench.peers.catalog import WORKERS
from forerun.bench.peers.workers import serve


@pytest.mark.parametrize(
    ("dtype", "able", "asked"),
    [
        ("bfloat16", ["FP32", "BF16"], "bf16"),
        ("float16", ["FP32", "FP16"], "f16"),
        ("float32", ["FP32"], "f32"),
        ("bfloat16", ["FP32"], "f32"),
        ("float16", ["FP32", "BF16"], "f32"),
    ],
)
def test_openvino_computes_in_float32_what_the_processor_does_not_multiply(
    dtype: str, able: list[str], asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so in its note, which the report shows."""
    made: list[dict[str, Any]] = []
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace, LLMPipeline=lambda *_, **given: made.append(given)
    )
    core = SimpleNamespace(get_property=lambda *_: able)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=lambda: core))
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    worker = serve.load_worker(WORKERS / "openvino.py")
    for exported in ("bf16", "f16", "f32"):
        (tmp_path / exported).mkdir()
    worker.load("plain", "model", dtype, 1, str(tmp_path), num_cells=64, num_seqs=1)
    assert made[0]["INFERENCE_PRECISION_HINT"] == made[0]["KV_CACHE_PRECISION"] == asked
    sizes = made[0]["scheduler_config"]
    assert (sizes.num_kv_blocks, sizes.max_num_seqs) == (2, 1)  # blocks of 32 cells
    is_wider = asked == "f32" and dtype != "float32"
    said = f"computes in float32, as this processor does not support {dtype}"
    assert serve.hello(worker)["notes"] == [said] * is_wider
