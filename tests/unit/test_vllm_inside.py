"""Our proposers inside vLLM itself: the law of its texts. Slow; needs `make peers`."""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_loop import NAMES

import forerun
from forerun.assets import embedded
from forerun.bench.peers import law
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import env_of, problem, python_of
from forerun.constraints.choice import Choice
from forerun.core.sampling import Sampling
from forerun.integrations import vllm_taps

ROOT = Path(__file__).parents[2]
PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))
LAW: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LAW |= {"max_new_tokens": 16, "ends": [1]}


CHOICES = [
    " Ann has 5 pens.",
    " Ann has 12 pens in all.",
    " Ben has 5 pens.",
    " Ben has 7 apples.",
    " How many pens are left?",
    " How many apples does Ann have?",
]


def chi_square(one: Counter[str], other: Counter[str]) -> float:
    """Pearson's statistic that two samples have the same law."""
    total = 0.0
    for text in one | other:
        share = (one[text] + other[text]) / (one.total() + other.total())
        for counts in (one, other):
            expected = share * counts.total()
            total += (counts[text] - expected) ** 2 / expected
    return total


@contextmanager
def running(*paths: Path, **env: str) -> Iterator[WorkerProcess]:
    """A process of vLLM's environment, which imports from these paths first."""
    if reason := problem(PEERS_DIR, "vllm"):
        pytest.skip(f"vLLM {reason}")
    places = os.pathsep.join(map(str, (*paths, ROOT / "src")))
    env = env_of(PEERS_DIR, "vllm") | {"PYTHONPATH": places} | env
    path = ROOT / "benchmarks" / "vllm_worker.py"
    process = WorkerProcess(python_of(PEERS_DIR, "vllm"), path, threads=1, env=env)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A process that holds one engine, and finds no plugin beside the sources."""
    with running(VLLM_PLUGINS="") as process:
        yield process


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
    structured = sampling.pop("structured", None)
    asked = {**LAW, "seeds": [*range(n)]} | sampling
    fields = {"mode": mode, "prompt": prompt, "sampling": asked, "batch": True}
    fields["structured"] = structured
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

    @pytest.mark.parametrize("mode", ["stand", "suffix:plain"])
    def test_structured_outputs_have_the_masked_law(
        self, process: WorkerProcess, mode: str
    ) -> None:
        """One half of a batch under vLLM's grammar, the other half free; both with our drafts."""
        prompt = loaded(process, mode, grammars=1)
        model = forerun.load("reasoner", dtype="fp32")
        own_form = {"structured": {"choice": CHOICES}, "max_new_tokens": 48}
        found, counts = texts(process, mode, prompt, 800, **own_form)
        chosen = Counter(model.tokenizer.decode(one).strip() for one in found[::2])
        print(f"{mode}: {chosen}, {counts}")
        assert set(chosen) <= {one.strip() for one in CHOICES} and counts["accepted"] > 500
        own = model.generate([prompt], constraint=Choice(CHOICES), n=4000, seed=1)[0]
        expected = Counter(sample.text.strip() for sample in own.samples)
        assert chi_square(chosen, expected) < 25.7  # 0.01 % of 5 degrees of freedom
        check = law.check_texts(model, prompt, found[1::2], Sampling(temperature=1.0))
        assert check.passed

    def test_another_q_is_found_out(self, process: WorkerProcess) -> None:
        prompt = loaded(process, "stand", planted=1)
        found, _counts = texts(process, "stand", prompt, 400)
        model = forerun.load("reasoner", dtype="fp32")
        check = law.check_texts(model, prompt, found, Sampling(temperature=1.0))
        print(check)
        assert not check.passed

    def test_finds_the_plugin_where_it_is_installed(self, tmp_path: Path) -> None:
        """The entry points as pip would write them; loading fails where the form is the plain."""
        group = vllm_taps.GROUP
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        folder = tmp_path / "forerun-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: forerun\nVersion: 0\n")
        lines = [f"{name} = {where}" for name, where in project["entry-points"][group].items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        with running(tmp_path) as process:
            prompt = loaded(process, "stand:installed")
            found, counts = texts(process, "stand:installed", prompt, 20)
        assert len(found) == 20 and counts["accepted"] > 0
