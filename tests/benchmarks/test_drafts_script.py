"""The benchmark of draft training: its figures are right, its parts run, it fills a page."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from forerun.errors import ConfigError, DataError

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "draft_training.md"
PARTS = ("fastdraft", "alignment", "distillspec", "lenient", "osd", "s2d", "vocabtrim", "omnidraft")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the benchmark."""
    monkeypatch.syspath_prepend(FOLDER)

    def imported(name: str) -> ModuleType:
        return importlib.import_module(f"drafts.{name}")

    return imported


def test_intervals_over_seeds_are_student_t(module) -> None:
    figures = module("figures")
    mean, half = figures.spread([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.3027 / math.sqrt(3)))
    assert figures.spread([0.5]) == (0.5, math.inf) and figures.cell([0.5]) == "0.500"


@pytest.mark.parametrize(
    ("values", "least", "verdict"),
    [
        ([0.10, 0.11, 0.12], 0.0, "SHOWN"),
        ([0.10, 0.11, 0.12], 0.1, "NOT_SHOWN"),  # the interval reaches below the goal
        ([-0.10, 0.11, 0.12], 0.0, "NOT_SHOWN"),
        ([-0.10, -0.11, -0.12], 0.0, "OPPOSITE"),
        ([0.5], 0.0, "NOT_SHOWN"),  # one seed shows nothing
        ([-0.5], 0.0, "NOT_SHOWN"),
    ],
)
def test_the_verdict_on_a_goal_follows_the_whole_interval(
    values: list[float], least: float, verdict: str, module
) -> None:
    figures = module("figures")
    assert figures.goal("x", values, least).endswith(f"; {getattr(figures, verdict)}.")


def test_the_ratio_of_taus_is_paired_by_prompt(module) -> None:
    slow = [{"tokens": [40, 20], "passes": [20, 10]}]
    fast = [{"tokens": [40, 20], "passes": [10, 5]}, {"tokens": [40, 20], "passes": [10, 5]}]
    assert module("figures").ratio(fast, slow) == pytest.approx((2.0, 2.0, 2.0))


def test_ends_of_blocks_are_quarters_without_requests_that_drafted_nothing(module) -> None:
    alphas = [0.0, 0.0, 0.5, 1.0] + [None, 0.2, 0.4, 0.4] + [0.5] * 8
    ends = module("osd").ends
    assert ends({"alpha": alphas}, 0) == (0.0, 1.0)
    assert ends({"alpha": alphas}, 1) == pytest.approx((0.2, 0.4))


def test_the_report_replaces_the_places_of_parts_with_results(tmp_path: Path, module) -> None:
    page, out, report = tmp_path / "page.md", tmp_path / "out", module("report")
    out.mkdir()
    page.write_text(PAGE.read_text("utf-8"))
    (out / "osd.md").write_text("| a \\1 | b |\n")
    for _ in range(2):  # the second time it replaces the first
        report.write_report(page, out, PARTS)
    before, after = PAGE.read_text("utf-8"), page.read_text("utf-8")
    place = re.compile("<!-- osd -->.*<!-- end of osd -->", re.DOTALL)
    assert place.search(after)[0] == "<!-- osd -->\n\n| a \\1 | b |\n\n<!-- end of osd -->"
    assert place.sub("", after) == place.sub("", before)


def test_a_page_without_places_is_refused(tmp_path: Path, module) -> None:
    (tmp_path / "osd.md").write_text("table")
    (tmp_path / "page.md").write_text("no place")
    with pytest.raises(DataError, match="has no place for osd"):
        module("report").write_report(tmp_path / "page.md", tmp_path, ["osd"])


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_the_bench_alone(part: str, module) -> None:
    (bench,) = inspect.signature(module(part).run).parameters
    assert bench == "bench"


def test_a_missing_workbench_is_named(tmp_path: Path, module) -> None:
    bench = module("common").Bench(tmp_path, tmp_path, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="forerun train workbench"):
        bench.draft()


@pytest.fixture(scope="module")
def workbench(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workbench that learned for one step."""
    from forerun.training.recipes.workbench import Workbench

    out = tmp_path_factory.mktemp("workbench")
    Workbench(data=data_dir / "corpora", threads=1, max_steps=1, micro_tokens=512).train(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_and_resumes(
    part: str, tmp_path: Path, data_dir: Path, workbench: Path
) -> None:
    words = [sys.executable, str(FOLDER / "drafts" / "run.py"), "--part", part, "--quick"]
    words += ["--workbench", str(workbench), "--data-dir", str(data_dir), "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    texts = []
    for _ in range(2):
        done = subprocess.run(
            [*words, "--threads", "1"], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout)
    assert texts[0] == texts[1] == (tmp_path / "quick" / f"{part}.md").read_text("utf-8")
    assert "| --- |" in texts[0] and "nan" not in texts[0]
    assert json.loads((tmp_path / "quick" / f"{part}.json").read_text())["rows"]
