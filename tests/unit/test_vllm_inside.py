"""Our proposers inside vLLM itself: the law of its texts. Slow; needs `make peers`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_loop import NAMES

import forerun
from forerun.assets import embedded
from forerun.bench.peers import law
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import env_of, problem, python_of
from forerun.sampling import Sampling

ROOT = Path(__file__).parents[2]
PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))
LAW: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LAW |= {"max_new_tokens": 16, "ends": [1]}


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A process of vLLM's environment; it holds one engine."""
    if reason := problem(PEERS_DIR, "vllm"):
        pytest.skip(f"vLLM {reason}")
    env = env_of(PEERS_DIR, "vllm") | {"PYTHONPATH": str(ROOT / "src")}
    path = ROOT / "benchmarks" / "vllm_worker.py"
    process = WorkerProcess(python_of(PEERS_DIR, "vllm"), path, threads=1, env=env)
    yield process
    process.close()


def loaded(process: WorkerProcess, mode: str, **options: int) -> list[int]:
    """Loads the reasoner; a prompt after which its law is wide."""
    folder = str(Path(embedded("reasoner")).absolute())
    options = {"tokens": 4, "eager": 1} | options
    fields = {"model": folder, "dtype": "float32", "context": 256, "options": options}
    process.request("load", 900, mode=mode, **fields)
    model = forerun.load("reasoner", dtype="fp32")
    tokens = model.tokenizer.encode("Question: Ann has 5 apples and buys 7 more.")
    return law.widest(model, [tokens], Sampling(temperature=1.0))


def texts(process: WorkerProcess, mode: str, prompt: list[int], n: int, **sampling: Any) -> Any:
    """n texts, all at once, and the counts of their drafts."""
    asked = {**LAW, "seeds": [*range(n)]} | sampling
    fields = {"mode": mode, "prompt": prompt, "sampling": asked, "batch": True}
    told = process.request("run", 900, **fields)
    return [sample["tokens"] for sample in told["samples"]], told["counts"]


@pytest.mark.slow
class TestInVllm:
    @pytest.mark.parametrize("mode", [name + form for form in ("", ":plain") for name in NAMES])
    def test_keeps_the_law(self, process: WorkerProcess, mode: str) -> None:
        """16 tokens of 400 texts; a greedy text is the model's own."""
        prompt = loaded(process, mode)
        model = forerun.load("reasoner", dtype="fp32")
        found, counts = texts(process, mode, prompt, 400)
        check = law.check_texts(model, prompt, found, Sampling(temperature=1.0))
        print(f"{mode}: {check}, {counts}")
        assert check.passed and check.entropy > 0.3 and counts["accepted"] > 500
        [greedy], counts = texts(process, mode, prompt, 1, temperature=0.0, max_new_tokens=100)
        length, gap = law.first_difference(model, prompt, greedy)
        print(f"{mode}: greedy {length} of {len(greedy)}, {counts}")
        assert counts["accepted"] > 0
        assert length == len(greedy) or gap < 1e-3  # rounding in fp32

    def test_another_q_is_found_out(self, process: WorkerProcess) -> None:
        prompt = loaded(process, "stand", planted=1)
        found, _counts = texts(process, "stand", prompt, 400)
        model = forerun.load("reasoner", dtype="fp32")
        check = law.check_texts(model, prompt, found, Sampling(temperature=1.0))
        print(check)
        assert not check.passed
