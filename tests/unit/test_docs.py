"""The checks of the docs find planted mistakes and pass good pages; the pages' Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from forerun import registry

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import check  # noqa: E402
import check_parts  # noqa: E402
import check_words  # noqa: E402

PAGE = """# none: plain decoding

## What it does

One pass per token. See [stand](stand.md).

## How it works

1. The tree is empty, with `.5` and acceptance 0.5.

## Use it

```bash
forerun generate --prompt "Ann has 12 pens." --drafter none
```

## Options

| verifier `typical` | default | meaning |
|---|---|---|
| `epsilon` | 0.09 | threshold |
| `delta` | `0.3` | scale |

## Results and limits

None.
"""

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
METHODS = sorted((ROOT / "docs" / "methods").glob("*.md"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes docs/methods/none.md of a small checkout, with one text replaced, and returns it."""
    folder = tmp_path / "docs" / "methods"
    folder.mkdir(parents=True)
    (folder / "stand.md").write_text("# stand: trees\n")

    def written(old: str = "", new: str = "") -> Path:
        assert old in PAGE
        page = folder / "none.md"
        page.write_text(PAGE.replace(old, new, 1) if old else PAGE)
        return page

    return written


def found(page: Path, root: Path) -> list[str]:
    """What all checks of one method page say."""
    checks: Iterable[Iterable[str]] = (
        check.broken_links(page, root),
        check.long_pages(page, root),
        check.wrong_sections(page),
        check_parts.wrong_options(page),
        check_parts.wrong_commands(page),
        check_words.wrong_numbers(root),
        check_words.over_limit(check_words.page_counts(root), {}),
    )
    return [line for lines in checks for line in lines]


def test_a_good_page_passes(write: Callable[..., Path], tmp_path: Path) -> None:
    assert found(write(), tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(stand.md)", "(gone.md)", "gone.md leads nowhere"),
        ("(stand.md)", "(stand.md#gone)", "stand.md#gone names no heading"),
        ("None.\n", "More.\n" * 80, "the limit is 80"),
        ("# none: plain", "# Plain", "title must be '# none: one line'"),
        ("## Use it", "## Usage", "expected ['What it does'"),
        ("## Options", "### Options", "expected ['What it does'"),
        ("--drafter none", "--drafter nun", "unknown drafter 'nun'"),
        ("--drafter none", "--drafter stand:entry=3", "option of drafter 'stand': 'entry'"),
        ("--prompt", "--promt", "--promt"),
        ("| `delta` | `0.3` | scale |\n", "", "typical has an option 'delta'"),
        ("`delta`", "`gamma`", "typical has no option 'gamma'"),
        ("| 0.09 |", "| 0.9 |", "typical:epsilon is '0.09' unless given, not '0.9'"),
        ("| verifier `typical` |", "| verifier `typikal` |", "names no part"),
        ("| verifier `typical` |", "| option |", "must begin '| KIND `name` |"),
        ("| `delta` | `0.3` | scale |", "| delta | 0.3 |", "not a row of options"),
        ("acceptance 0.5", "acceptance .5", "none.md:9: leading zero missing"),
        ("One pass per token.", "Nobody asks.", "none.md has 1 words of the list"),
        ("One pass per token.", "It looks in\nvain.", "none.md has 1 words of the list"),
    ],
)
def test_a_planted_mistake_is_found(
    write: Callable[..., Path], tmp_path: Path, old: str, new: str, said: str
) -> None:
    lines = found(write(old, new), tmp_path)
    assert any(said in line for line in lines), lines


def test_readme_and_log_have_limits(tmp_path: Path) -> None:
    readme, log = tmp_path / "README.md", tmp_path / "docs" / "results" / "LOG.md"
    log.parent.mkdir(parents=True)
    readme.write_text("x" * 90 + "\n" + "y" * 8_900)
    log.write_text("line\n" * 400)
    assert [*check.long_pages(readme, tmp_path), *check.long_pages(log, tmp_path)] == []
    readme.write_text("x" * 100 + "\n" * 151 + "y" * 8_900)
    log.write_text("line\n" * 401)
    assert list(check.long_pages(readme, tmp_path)) == [
        "README.md has 152 lines; the limit is 150",
        "README.md has 9151 characters; the limit is 9000",
    ]
    assert "401 lines" in "".join(check.long_pages(log, tmp_path))


def test_parts_without_a_table_are_found() -> None:
    assert check_parts.undocumented(METHODS) == []
    without = [page for page in METHODS if page.stem != "suffix"]
    assert check_parts.undocumented(without) == [
        "no page lists the options of drafter 'suffix' (docs/methods/suffix.md)"
    ]


@pytest.mark.parametrize(
    ("default", "text"),
    [
        (None, "none"),
        ((), "none"),
        (True, "true"),
        (3.0, "3"),
        (("a", "b"), "a+b"),
        (object(), None),
    ],
)
def test_defaults_are_shown_as_users_write_them(default: object, text: str | None) -> None:
    assert check_parts.shown(default) == text


def test_shown_defaults_are_read_back_by_the_registry() -> None:
    cls = registry.get("drafter", "aded")
    options = registry.text_options(cls)
    spec = ",".join(f"{name}={check_parts.shown(p.default)}" for name, p in options.items())
    _, given = registry.resolve("drafter", f"aded:{spec}")
    assert given == {n: p.default for n, p in options.items()}


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("latest = 'the latest word'\n", 0),
        ("def in_vain(): ...\n", 1),
        ("class AsTold: ...\n", 1),
        ("# code that is dear\nx = 1\n", 1),
        ('"""Nobody is told."""\n', 2),
        ("x = f'{beside} is told'\n", 2),
        ("TOLD = 'beside'\n", 2),
    ],
)
def test_words_of_sources_are_counted(code: str, number: int) -> None:
    assert check_words.source_count(code) == number


def test_source_counts_may_only_fall(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("# told\n")
    (tmp_path / "api.py").write_text("whose = 1\n")
    counts = check_words.source_counts(tmp_path)
    assert counts == {"engine": 1, "api.py": 1}
    assert check_words.over_limit(counts, {"engine": 1, "api.py": 1}) == []
    (line,) = check_words.over_limit(counts, {"engine": 1})
    assert line.startswith("api.py has 1 words of the list")


@pytest.mark.slow
@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In a folder with the files that the pages name: notes.txt, and INDEX built from it."""
    text = "Ann has 12 pens. Ben has 3 times as many pens as Ann. How many have both?\n\n"
    (tmp_path / "notes.txt").write_text(text * 60)
    blocks = PYTHON.findall(page.read_text("utf-8"))
    assert blocks, "a page shows how to use the method from Python"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    lines = [[sys.executable, "-c", block] for block in blocks]
    if any('"INDEX"' in block for block in blocks):
        build = ["index", "build", "INDEX", "notes.txt", "--tokenizer", "reasoner"]
        lines.insert(0, [sys.executable, "-m", "forerun", *build])
    for line in lines:
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
