"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# what tests measure of their models' cost stays out of the user's cache, and is measured once
os.environ.setdefault("FORERUN_CACHE", tempfile.mkdtemp(prefix="forerun-tests-"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-dir",
        default=str(Path(__file__).parents[2] / "shared" / "data"),
        help="folder of real prompts, traces and models; tests that need it skip without it",
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real data, or a skip with the reason."""
    folder = Path(request.config.getoption("--data-dir"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; give --data-dir")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint with its tokenizer, made once."""
    from tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
