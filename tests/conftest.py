"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# what tests measure of their models' cost stays out of the user's cache, and is measured once
os.environ.setdefault("FORERUN_CACHE", tempfile.mkdtemp(prefix="forerun-tests-"))

# asked when Triton is imported, whoever does so: without a GPU its interpreter runs the kernels
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# a shell that starts tests in the background lets them ignore Ctrl-C, and their processes with them
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-dir",
        default=str(Path(__file__).parents[2] / "shared" / "data"),
        help="folder of real prompts, traces and models; tests that need it skip without it",
    )
    parser.addoption(
        "--models-dir",
        default=str(Path(__file__).parents[1] / "runs" / "models"),
        help="real models, as NAME.gguf and as folder NAME; tests that need them skip without",
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real data, or a skip with the reason."""
    folder = Path(request.config.getoption("--data-dir"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; give --data-dir")
    return folder


@pytest.fixture(scope="session")
def models_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real models, or a skip with the reason."""
    folder = Path(request.config.getoption("--models-dir"))
    if not folder.is_dir():
        pytest.skip(f"no real models at {folder}; give --models-dir")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint with its tokenizer, made once."""
    from tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def _fixed_cost() -> Iterator[None]:
    """Every target in this process has the same cost: what a busy machine measures of a tiny model
    would decide what the default controller drafts. Commands that tests start measure their own."""
    from forerun.core.cost import Cost
    from forerun.core.roles import Target

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "cost", Cost((1, 65), (0.01, 0.02)))
        yield


@pytest.fixture
def short_collections() -> Iterator[None]:
    """A full garbage collection in this test visits only what the test made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def measured_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this test costs are measured, and kept in a folder of its own."""
    from forerun.core.roles import Target

    monkeypatch.setattr(Target, "cost", None)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
