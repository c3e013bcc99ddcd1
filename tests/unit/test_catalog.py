"""The catalog tells the truth about the checkout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun import catalog, registry
from forerun.catalog import MISSING, PARTIAL, WORKS, Row
from forerun.errors import UnknownName

ROOT = Path(__file__).parents[2]
ROWS = catalog.rows()


def test_all_systems_are_listed_once() -> None:
    systems = [row for row in ROWS if row.kind == "system"]
    assert len(systems) == 41
    assert len({row.title for row in ROWS}) == len(ROWS)
    assert {row.kind for row in ROWS} <= {"system", "baseline", "method"}
    arxiv = [row.paper.arxiv for row in systems if row.paper]
    assert len(arxiv) == len(set(arxiv)) == 41


def test_the_readme_says_what_works() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    systems = [row for row in ROWS if row.kind == "system"]
    works = sum(row.state == WORKS for row in systems)
    left = len(systems) - works
    assert f"all {len(systems)} published systems of the catalog" in readme
    assert f"{works} work, {left} are not built yet" in readme


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_state_is_what_the_checkout_shows(row: Row) -> None:
    assert row.state == derive(row, ROOT)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_page_exists_for_what_is_there(row: Row) -> None:
    assert (ROOT / row.doc).is_file() or row.state == MISSING


@pytest.mark.parametrize("row", [r for r in ROWS if r.state == WORKS], ids=lambda row: row.name)
def test_named_options_exist(row: Row) -> None:
    for kind, spec in [*row.parts.items(), *row.tiny.items(), *row.lossy.items()]:
        name, given = registry.parse(spec)
        assert given.keys() <= registry.options(registry.get(kind, name)).keys()


SHOWN = [r for r in ROWS if r.state == WORKS and (r.lossless or "verifier" in r.parts)]


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.name)
def test_lossless_rows_use_lossless_verifiers(row: Row) -> None:
    """Other rows are lossy by what no verifier shows: a shaper, a search, a target."""
    verifier = registry.get("verifier", registry.parse(row.parts.get("verifier", "speculative"))[0])
    assert row.lossless == verifier.lossless


@pytest.mark.parametrize("row", [r for r in ROWS if r.state == WORKS], ids=lambda row: row.name)
def test_lossy_verifiers_are_named(row: Row) -> None:
    """A method that is not lossy as a whole names each of its verifiers that is."""
    own = {file.partition("/")[2] for file in row.files if file.startswith("verifiers/")}
    lossy = {name for name in own if not registry.get("verifier", name).lossless}
    named = {registry.parse(spec)[0] for kind, spec in row.lossy.items() if kind == "verifier"}
    assert lossy == named if row.lossless else not row.lossy


@pytest.mark.parametrize("row", [r for r in ROWS if r.state == WORKS], ids=lambda row: row.name)
def test_what_is_trained_or_compressed_has_its_command(row: Row) -> None:
    made_by = ("training/recipes/", "compression/")
    needs = row.trains or any(file.startswith(made_by) for file in row.files)
    assert row.make.startswith("forerun ") or not (needs or row.make)
    if use := row.make.partition("  # use: ")[2]:  # where --out is not what the parts name
        name, given = registry.parse(use)
        kind = next(kind for kind, spec in row.parts.items() if registry.parse(spec)[0] == name)
        assert given.keys() <= registry.options(registry.get(kind, name)).keys()


def test_states_are_derived_from_files(tmp_path: Path) -> None:
    stand = catalog.get("stand")
    assert derive(stand, tmp_path) == PARTIAL  # no acceptance check there
    (tmp_path / stand.acceptance).parent.mkdir(parents=True)
    (tmp_path / stand.acceptance).touch()
    assert derive(stand, tmp_path) == PARTIAL  # an empty file checks nothing
    (tmp_path / stand.acceptance).write_text("def test_claim(): ...\n")
    assert derive(stand, tmp_path) == WORKS
    shared = replace(stand, check="unit/test_shared.py")
    (tmp_path / "tests/unit").mkdir()
    (tmp_path / shared.acceptance).write_text('def test_other():\n    assert "none"\n')
    assert derive(shared, tmp_path) == PARTIAL  # a shared file must name the row
    (tmp_path / shared.acceptance).write_text('def test_both():\n    assert "stand"\n')
    assert derive(shared, tmp_path) == WORKS
    assert derive(replace(stand, parts={"drafter": "nothing"}), tmp_path) == PARTIAL
    unknown_grower = {"drafter": "draft_model:model=X,grower=nothing"}
    assert derive(replace(stand, parts=unknown_grower), tmp_path) == PARTIAL
    assert derive(replace(stand, files=("no/such", "drafters/no")), tmp_path) == MISSING


def test_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(UnknownName, match="token_recycling"):
        catalog.get("token_recicling")
    assert catalog.get("Token-Recycling").title == "Token Recycling"


def test_names_and_files_lead_to_rows() -> None:
    assert catalog.find("Token-Recycling") is catalog.get("token_recycling")
    assert catalog.find("no_such") is None and catalog.owner("drafters/no_such") is None
    assert catalog.owner("drafters/ADED") is catalog.get("aded")
    assert catalog.owner("drafters/rest") is catalog.get("rasd")


@pytest.mark.parametrize("row", [r for r in ROWS if r.state != WORKS], ids=lambda row: row.name)
def test_what_is_not_built_is_named_by_its_state(row: Row) -> None:
    for kind, spec in row.parts.items():
        name, _ = registry.parse(spec)
        if name not in registry.names(kind):
            with pytest.raises(UnknownName, match=r"not built yet: it belongs to .* that work"):
                registry.get(kind, name)


def test_paper_reads_as_a_reference() -> None:
    paper = catalog.get("rsd").paper
    assert str(paper).startswith("Jeon et al. 2024") and str(paper).endswith("arXiv 2402.14160")


def derive(row: Row, root: Path) -> str:
    """The state that a checkout at `root` shows; looks for files, imports no method."""
    if not any(catalog.is_built(file) for file in row.files):
        return MISSING
    is_whole = all(catalog.is_built(file) for file in row.files) and all(
        registry.is_registered(kind, spec) for kind, spec in row.parts.items()
    )
    return WORKS if is_whole and is_checked(row, root) else PARTIAL


def is_checked(row: Row, root: Path) -> bool:
    """Whether its acceptance check holds a test, and names the row where rows share one file."""
    file = root / row.acceptance
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return "def test_" in text and (not row.check or f'"{row.name}' in text)
