"""Fixtures for command lines, drafts, reports, `forerun bench run`, and the number of threads."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call
from draft_runs import PAIRS
from report_page import Page
from sample_run import write_run
from tiny import make_tiny

from forerun.bench import cpu_load, hardware_limits, memory_pressure, theory
from forerun.bench.report import write_report
from forerun.bench.results import Record
from forerun.cli.main import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "other", vocab=300)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of trained drafts; copy it before a change."""
    return make_tiny(tmp_path_factory.mktemp("target") / "target", seed=3)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts of trained drafts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"the {a} {b}"} for a, b in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process; gives status, standard output, standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def generate(call: Call, tiny: Path) -> Call:
    """`forerun generate` on the tiny model, few tokens."""
    return lambda *words: call("generate", "-m", tiny, "--max-new-tokens", 8, *words)


@pytest.fixture
def refuses(call: Call) -> Callable[..., str]:
    """Runs a command line that must end in one line of error and status 2; gives that line."""

    def run(*words: Any) -> str:
        status, out, err = call(*words)
        notices = "#", "compiling kernels", "compiled in"
        lines = [line for line in err.splitlines() if not line.startswith(notices)]
        assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
        assert out == ""
        return lines[0]

    return run


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text on standard input."""

    def put(text: str) -> None:
        stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return put


@pytest.fixture(scope="session")
def packed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF file that `shop` sells in three packages."""
    from pull_shop import make_gguf

    return make_gguf(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def shop(packed_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model that `forerun pull` can fetch without a network."""
    from pull_shop import open_shop

    from forerun.models.downloads import downloads

    yield open_shop(tmp_path, packed_gguf, monkeypatch)
    downloads.cache_clear()


@pytest.fixture
def threads():
    """Restores torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def skip_measurements(patch: pytest.MonkeyPatch) -> None:
    """Fixed limits of the machine, and a short cost curve."""
    curve = theory.cost_curve
    patch.setattr(hardware_limits, "read_bandwidth", lambda threads, **options: 12.5)
    patch.setattr(hardware_limits, "product_rate", lambda dtype, **options: 100.0)
    patch.setattr(cpu_load, "lost_share", lambda *measured: 0.0)
    no_pressure = memory_pressure.Sample(0, 0.0, 0, 1 << 40)
    patch.setattr(memory_pressure, "sample", lambda: no_pressure)
    patch.setattr(theory, "cost_curve", lambda target: curve(target, (1, 4), rounds=1))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, threads: None, short_collections: None) -> None:
    """The machine is not measured, and a full garbage collection is short."""
    skip_measurements(monkeypatch)


@pytest.fixture(scope="session")
def bench_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench") / "tiny", context=512)


@pytest.fixture(scope="session")
def bench_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six prompts in two categories."""
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    lines = [{"prompt": f"the cat sat on {i} mats and", "category": "ab"[i % 2]} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def bench_words(bench_model: Path, bench_prompts: Path) -> list[Any]:
    """Options of `forerun bench run`: two prompts, two samples of six tokens."""
    words = ["--model", bench_model, "--tasks", f"file:{bench_prompts}", "--examples", 2]
    return [*words, "-n", 2, "--max-new-tokens", 6, "--threads", 1]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, bench_words: list[Any]) -> Path:
    """The folder of a finished run of plain and stand; copy it before a change."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        skip_measurements(patch)
        assert main([str(w) for w in ("bench", "run", "--out", folder, *bench_words)]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[Page, str]]:
    """Page and Markdown of records with changes to the plan."""

    def make(made: list[Record] | None = None, **changes: object) -> tuple[Page, str]:
        html, text, *_ = write_report(write_run(tmp_path / "run", made, **changes))
        return Page(html.read_text(encoding="utf-8")), text.read_text(encoding="utf-8")

    return make


@pytest.fixture(scope="session")
def random_llama() -> Any:
    """A small random model of transformers; tests get it as `fresh`."""
    from hf_small import made

    return made("llama")


@pytest.fixture
def fresh(random_llama: Any) -> Any:
    """A copy of a small random model of transformers, which a test may change."""
    return copy.deepcopy(random_llama)
