"""Every script of benchmarks/ runs: all are imported in one process, each does real, tiny work.

A script without a row in RUNS or APART fails. Its run is a process of its own at the smallest size;
what is asserted is what it prints, not how fast anything is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NUMBER = r"-?\d[\d,]*(\.\d+)?"
SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """A script with its options; {data} is the folder of real data, {out} an empty one.

    rows: how lines begin that have to be printed, patterns, each with a number behind it.
    """

    script: str
    options: str
    rows: tuple[str, ...]


RUNS = (
    Run(
        "aded",
        "--problems 1 --samples 1 --nodes 4 --corpus 20",
        (r"corpus problems:", r"defaults", r"c1 0\b", r"reward expected"),
    ),
    Run(
        "budget_curves",
        "--problems 1 --samples 1 --only stand,draft_model",
        (r"stand \| \d", r"draft_model \| \d"),
    ),
    Run(
        "decode",
        "--params 5M --rounds 1 --repeats 1 --context 8 --threads 1",
        (r"step\b", r"tree 64", r"transformers over step"),
    ),
    Run(
        "draft_length",
        "--problems 1 --samples 1",
        (
            r"fixed:nodes=8,depth=8",
            r"additive:nodes=20",
            r"acceptance_head:threshold=0.9",
            r"\S+: target pass",
        ),
    ),
    Run(
        "draft_times",
        "--tokens 1300 --runs 1",
        (r"prompt_lookup", r"suffix", r"rasd", r"stand", r"auto", r"cascade", r"fuse"),
    ),
    Run(
        "drafters",
        "--examples 1 --tokens 8 --threads 1 --methods plain;stand",
        (r"plain \|", r"stand \|"),
    ),
    Run(
        "entropy_switch",
        "--problems 2 --timed 1",
        (r"the token itself \|", r"switched at 1.0, stand \|", r"5, 10 \|"),
    ),
    Run(
        "fm_index",
        "--tokens 20000 --queries 20 --data {data}",
        (r"build: FM-index", r"count \|", r"locate one \|", r"extract 100 tokens \|"),
    ),
    Run(
        "gpu",
        "--smoke --out {out}",
        (
            r"\| a \| passes, llama, fp16: largest error",
            r"\| b \| tiny: c\(4\)",
            r"\| c \| stand over plain",
            r"\| d \| stand: a step without timers",
            r"\| e \| tiny: trained",
            r"\| f \| passed",
        ),
    ),
    Run(
        "index",
        "--tokens 20000 --queries 20 --threads 1 --corpus {data}/corpora",
        (r"forerun: built", r"forerun +ntd cold", r"forerun +infgram_many", r"searchsorted"),
    ),
    Run(
        "int8",
        "--params 5M --rounds 1 --threads 1",
        (r"5M, 1 rows, pass: .*int8", r"5M, 17 rows, linears: .*int8:128"),
    ),
    Run(
        "int8",
        "--law --problems 1 --samples 1 --threads 1",
        (r"auto: KL 0.00000", r"int8: KL", r"int8:128: KL"),
    ),
    Run(
        "interpolation",
        "--windows 2 --data-dir {data}",
        (r"problems \| [\d,]+ \|", r"python \| alone", r"python \| two weights:"),
    ),
    Run(
        "lossy",
        "--problems 1 --samples 1 --positions 1 --length 20 --tables rules judge reflective",
        (r"0.6 \| typical", r"0.0 \| judge:delta=0.0", r"0.6 \| reflective:weight=0.5"),
    ),
    Run(
        "many_rows",
        "--shapes 64x64 --rows 2 64 --rounds 1 --threads 1",
        (r"64x64 bf16", r"2  ", r"64  "),
    ),
    Run(
        "memory",
        "--contexts 2000 --vocab 8000 --sizes 1000 --problems 1",
        (r"draft, 256-node", r"observe a step", r"verify one 64-node .*recursive", r"16  one for"),
    ),
    Run(
        "rest",
        "--tokens 20000 --queries 20",
        (r"20000 tokens: built", r"text: p50", r"dense: p50", r"match"),
    ),
    Run(
        "rule_costs",
        "--vocab 1000 --rounds 4",
        (r"temperature \.6 \|", r"laws given \|", r"block \| chain \|", r"3 without \|"),
    ),
    Run(
        "seal",
        "--minutes 0.05 --questions 2 --out {out} --book {data}/corpora/sherlock.txt.gz",
        (r"BM25 \|", r"SEAL, intersective \|", r"free, intersective \|", r"SEAL: \d+ n-grams"),
    ),
    Run(
        "serving",
        "--clients 1 --requests 1 --rounds 1 --max-tokens 4",
        (
            r"1 default",
            r"1 plain",
        ),
    ),
    Run(
        "stand",
        "--problems 1 --tokens 8 --threads 1",
        (r"as it is \|", r"tree: template, fitted \|", r"learns from the prompt \|"),
    ),
    Run(
        "stand",
        "--mode table --problems 1 --tokens 8 --threads 1",
        (r"prompt lookup \|", r"STAND \|", r"token recycling \|"),
    ),
    Run(
        "stand",
        "--accuracy 1 --tokens 8 --threads 1",
        (r"plain \|", r"STAND \|", r"difference \|"),
    ),
    Run(
        "style",
        "--tokens 8 --data-dir {data}",
        (r"don_quixote:", r"plain +0.00", r"floored +1.00", r"paper +1.00"),
    ),
    Run(
        "real",
        "--model reasoner --tasks gsm8k --modes greedy batched --methods plain,auto --examples 1 "
        "--max-new-tokens 6 --data-dir {data} --out {out}",
        (r"\| `plain` \|", r"\| `auto` \|", r"\| `auto:batch=8` \|", r"`auto` over plain: gsm8k"),
    ),
    Run(
        "real_drafts",
        "--model reasoner --minutes 0.1 --prompts 24 --answer 8 --calibration 12 --examples 1 "
        "--modes greedy --tasks gsm8k,mbpp --data-dir {data} --out {out}",
        (r"\| pretrain \|", r"\| align \|", r"\| `plain` \|", r"\| `draft_model:\S+/trimmed` \|"),
    ),
    Run(
        "stand_misses",
        "--models reasoner --answers 2 --tokens 8 --data-dir {data} --drafters stand suffix",
        (r"\| `stand` \| 16 \|", r"\| `suffix` \| 16 \|", r"\| all \|"),
    ),
    Run(
        "start",
        "--models reasoner --warm 1",
        (r"\| reasoner \| cold \|", r"\| reasoner \| warm \|", r"read reasoner:"),
    ),
    Run(
        "suffix",
        "--tokens 5000 --rounds 5",
        (r"own and shared memory, up to +5000", r"draft, at most 64", r"observe a step"),
    ),
    Run(
        "superposed",
        "--prompts 1 --corpus 20 --tokens 2",
        (r"superposed ", r"superposed, a = 0", r"nucleus, batch", r"beam", r"law "),
    ),
    Run(
        "tree_pass",
        "--params 5M --contexts 32 --nodes 1 4 --rounds 1 --repeats 1 --threads 1",
        (r"5M, ", r"\w+ context +32 nodes +0:", r"\w+ context +32 nodes +4:"),
    ),
    Run(
        "verification",
        "--problems 2 --samples 1 --length 48 --temperatures 0.6",
        (r"0.6 \| 8 \|", r"0.6 \| chain of 8", r"0.6 \| beam 4x4"),
    ),
    Run(
        "verification",
        "--problems 1 --samples 1 --length 1 --temperatures 0.6 --tables position chain rules",
        (r"means over", r"0.6 \| 16 \|", r"0.6 \| chain of 8 .*\| - ± - \| - \| - \|"),
    ),
)
APART = {  # scripts that no run starts by itself
    "index_peer": "needs a Python that has infini-gram",
    "index_timing": "is a part of index and index_peer",
    "scripts": "is a part of all",
    "vllm_plugin": "needs the peers' environment (make peers)",
    "vllm_worker": "is run by vllm_plugin in that environment",
}
IMPORT_ALL = """
import io, sys
from contextlib import redirect_stdout
from pathlib import Path
from runpy import run_path
for file in sorted(Path(sys.argv[1]).glob("*.py")):
    sys.argv, out = [file.name, "--help"], io.StringIO()
    sys.path[0] = str(file.parent)
    try:
        with redirect_stdout(out):
            run_path(str(file), run_name="__main__")
    except SystemExit as end:
        print(file.stem, end.code or 0, "usage" in out.getvalue())
    else:
        print(file.stem, 0, None)
"""
SKIPPED = 77  # as for automake: what a script needs is not here
LACKING = (  # script with options, what it then says in a line
    ("fm_index --data no", "no/tokenizers/phi3/tokenizer.json.gz; give --data a folder"),
    ("index --corpus no", "there is no no; give --corpus a folder"),
    ("seal --book no/book.txt", "there is no no/book.txt; give --book a text"),
    ("style --data-dir no", "no/models/stories260K/stories260K.bin; give --data-dir a folder"),
    ("vllm_plugin --peers no", "no environment in no; run `make peers`"),
)
PACKAGES = (  # script, packages without which it does nothing
    ("seal", "bm25s"),
    ("serving", "httpx"),
    ("serving", "uvicorn"),
)
WITHOUT = """
import sys
from pathlib import Path
from runpy import run_path
sys.modules[sys.argv[2]] = None
sys.argv[:] = sys.argv[1:2]
sys.path[0] = str(Path(sys.argv[0]).parent)
run_path(sys.argv[0], run_name="__main__")
"""
STAND_IN = """#!/bin/sh
echo "ran $(basename "$0") $*"
case "$1" in */{name}.py) exit {status};; esac
"""
NO_OPTIONS = {"index_peer", "index_timing", "scripts", "vllm_worker"}  # parts of other scripts


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A child process with forerun as these tests have it, one thread, a cache of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def scripts() -> set[str]:
    return {file.stem for file in FOLDER.glob("*.py")}


def test_every_script_has_a_row() -> None:
    runs = {run.script for run in RUNS}
    assert not runs & APART.keys()
    assert runs | APART.keys() == scripts(), "give a new script a row in RUNS, or APART a reason"


def test_every_script_can_be_imported_and_has_options(tmp_path: Path) -> None:
    done = python("-W", "error::SyntaxWarning", "-c", IMPORT_ALL, str(FOLDER), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [f"{name} 0 {None if name in NO_OPTIONS else True}" for name in sorted(scripts())]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("call", "said"),
    [pytest.param(*one, id=one[0], marks=SLOW if n else ()) for n, one in enumerate(LACKING)],
)
def test_a_script_without_its_data_says_so_and_ends_with_a_status_of_its_own(
    call: str, said: str, tmp_path: Path
) -> None:
    name, *words = call.split()
    done = python(str(FOLDER / f"{name}.py"), *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (SKIPPED, ""), done.stderr
    assert done.stderr.startswith("skipped: ") and done.stderr.count("\n") == 1
    assert said in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "package"),
    [pytest.param(*one, marks=SLOW if one[0] == "seal" else ()) for one in PACKAGES],
)
def test_a_script_without_its_package_says_so(name: str, package: str, tmp_path: Path) -> None:
    done = python("-c", WITHOUT, str(FOLDER / f"{name}.py"), package, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (SKIPPED, ""), done.stderr
    assert done.stderr.startswith(f"skipped: it needs the package {package}; pip install ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("status", [0, SKIPPED, 3])
def test_make_bench_goes_on_after_what_was_skipped_and_stops_at_failures(
    status: int, tmp_path: Path
) -> None:
    """With stand-ins for Python and forerun: nothing is measured."""
    (tmp_path / "bin").mkdir()
    for program in ("python", "forerun"):
        (tmp_path / "bin" / program).write_text(STAND_IN.format(name="index", status=status))
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / ".ready").touch()
    words = ["make", "-C", str(FOLDER.parent), "--no-print-directory", "bench", f"VENV={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    ran = [line for line in lines if line.startswith("ran python")]
    skipped = [line for line in lines if "skipped" in line]
    if status == 3:
        assert done.returncode and ran[-1].endswith("index.py") and "Error 3" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert len(ran) == len(scripts() - NO_OPTIONS)
    assert lines[len(lines) - 1 - len(skipped)] == "ran forerun demo"
    assert skipped == ["bench: skipped benchmarks/index.py"] * (status == SKIPPED)


@SLOW
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.script} {run.options}"[:40])
def test_a_run_prints_its_rows(run: Run, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data = request.getfixturevalue("data_dir") if "{data}" in run.options else None
    words = run.options.format(data=data, out=tmp_path / "out").split(" ")
    done = python(str(FOLDER / f"{run.script}.py"), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in run.rows:
        assert re.search(rf"^\W*{row}.*?{NUMBER}", done.stdout, re.MULTILINE), (row, done.stdout)
    assert not re.findall(r"(?i)(?<![\w.])[+-]?(?:nan|inf)(?![\w-])", done.stdout), done.stdout
