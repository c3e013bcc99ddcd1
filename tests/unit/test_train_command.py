"""`forerun train` as users meet it: Ctrl-C between two optimizers, lines, surroundings."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forerun import registry
from forerun.cli import _signature
from forerun.cli._progress import Display
from forerun.errors import ConfigError
from forerun.training.loop import Progress
from forerun.training.processes import in_processes
from forerun.training.progress import step_note
from forerun.training.recipes import reasoner
from forerun.utils.signals import delayed_interrupt

SOURCE = Path(__file__).parents[2] / "src"

INTERRUPTED = """
import os, signal, sys
import torch
from forerun.cli.main import main
from forerun.training.language_model import Size
from forerun.training.recipes import reasoner

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
reasoner.SIZES = {"reasoner": Size(hidden=32, layers=1, heads=2, kv_heads=1, inner=48)}
step, calls = torch.optim.AdamW.step, []

def interrupted(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)  # Muon has moved, AdamW has not
    return step(self, *args, **kwargs)

torch.optim.AdamW.step = interrupted
sys.exit(main(["train", "reasoner", *sys.argv[1:]]))
"""


def python(*args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    return subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_ctrl_c_waits_for_the_end_of_a_step(tmp_path, monkeypatch):
    sizes = {"reasoner": reasoner.Size(hidden=32, layers=1, heads=2, kv_heads=1, inner=48)}
    monkeypatch.setattr(reasoner, "SIZES", sizes)
    out = tmp_path / "r u n"
    options = {"threads": 1, "problems": 40, "tokenizer_problems": 30, "micro_batches": 2}
    flags = ["--out", str(out), "--threads", "1", "--problems", "40", "--tokenizer-problems", "30"]
    ended = python("-c", INTERRUPTED, *flags)
    assert ended.returncode == 130, ended.stderr
    call = "forerun train reasoner --threads=1 --problems=40 --tokenizer-problems=30 "
    call += f"--out='{out}' --resume"
    assert f"continue with: {call}\n" in ended.stdout
    line = r"reasoner  0%  step 1  0\.0\d M tokens  [\d,]+ tokens/s  loss \d\.\d+  \d+ (s|min) left"
    assert re.search(line, ended.stdout)

    saved = torch.load(out / "reasoner.pt", weights_only=True)
    assert saved["progress"]["step"] == 3
    (out / "reasoner.pt").rename(tmp_path / "saved.pt")
    _, loop = reasoner.Reasoner(**options).prepare(out, "reasoner")
    batches = loop.recipe.batches(0)
    for _ in range(3):
        loop.step(next(batches), loop.spent())
    for name, p in loop.parameters.items():
        torch.testing.assert_close(saved["parameters"][name], p.detach(), atol=2e-5, rtol=0)


@pytest.fixture
def audible():
    """Ctrl-C raises, even if the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_block_ends_before_ctrl_c_does(audible):
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_ctrl_c_stays_ignored(audible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done: list[int] = []
    with delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_processes_beside_the_first_ignore_ctrl_c(audible):
    heard = list(in_processes(signal.getsignal, [signal.SIGINT] * 2, 2))
    assert heard == [signal.SIG_IGN] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_kernels_and_threads_are_set_before_torch_loads():
    ended = python(
        "-c",
        "import os, sys; from forerun.cli.train import set_up; set_up('cpu')\n"
        "assert 'torch' not in sys.modules\n"
        "import torch; print(torch.get_num_threads())\n"
        "print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])",
    )
    assert ended.stdout.split() == ["1", "8192"], ended.stderr


def test_a_line_every_half_minute_without_a_terminal(capsys):
    now = [0.0]
    display = Display(is_terminal=False, clock=lambda: now[0])
    with display:
        for step in range(1, 101):
            now[0] = float(step)
            progress = Progress(step, float(step), 2000 * step, 1.5)
            display.draw("reasoner", *step_note(progress, step / 100))
        display.draw("data", 0.5, "1/2 shards")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["1", "31", "61", "91", "100"]
    assert lines[1] == (
        "reasoner  31%  step 31  0.06 M tokens  2,000 tokens/s  loss 1.500  69 s left"
    )
    assert lines[-1] == "data  50%  1/2 shards"


def test_bars_on_a_terminal(capsys):
    display = Display(is_terminal=True)
    display.bars.live.transient = False
    with display:
        display.draw("data", 0.5, "1/2 shards")
        display.draw("data", 1.0, "2/2 shards")
    assert "2/2 shards" in capsys.readouterr().out
    assert len(display.tasks) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["reasoner", "--threads", "0"],
        ["reasoner", "--minutes", "-1"],
        ["reasoner", "--resume"],
        ["seal", "--passages", "x", "--minutes", "0"],
        ["acceptance_head", "--batch", "0"],
        ["judge_head", "--swaps", "0"],
    ],
)
def test_bad_input_is_one_line_and_status_2(args, capsys, tmp_path, monkeypatch):
    from forerun.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["train", *args]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_no_option_is_below_its_minimum_in_python_either():
    for name in registry.names("recipe"):
        cls = registry.get("recipe", name)
        given = {
            "seal": {"passages": Path("x")},
            "workbench": {"data": Path("x")},
            "sorted": {"corpus": Path("x")},
        }.get(name, {})
        for option, least in cls.minimums.items():
            with pytest.raises(ConfigError, match=f"{option} must be at least {least}"):
                cls(**given | {option: least - 1})


@pytest.mark.parametrize(
    ("name", "flag", "option"),
    [
        ("judge_head", ["--resume"], "resume"),
        ("judge_head", ["--minutes", "3"], "minutes"),
        ("judge_head", ["--threads", "2"], "threads"),
        ("acceptance_head", ["--held-out", "9"], "held_out"),
        ("acceptance_head", ["--draft-minutes", "9"], "draft_minutes"),
    ],
)
def test_a_recipe_refuses_options_that_it_does_not_have(name, flag, option, capsys, tmp_path):
    """Before anything is loaded or written."""
    from forerun.cli.main import main

    folder = tmp_path / "new"
    assert main(["train", name, "--out", str(folder), *flag]) == 2
    said = capsys.readouterr().err
    assert f"No such option: {flag[0]}" in said or f"{flag[0]} belongs to" in said
    assert option not in registry.options(registry.get("recipe", name)) and not folder.exists()


@pytest.mark.parametrize("name", ["acceptance_head", "judge_head", "reasoner", "seal"])
def test_help_describes_every_option_of_the_constructor(name, capsys):
    from forerun.cli.main import main

    cls = registry.get("recipe", name)
    assert main(["train", name, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "seed" in registry.options(cls)
    shown = {p.name for p in _signature.parameters(cls, hidden=frozenset())}
    for option in shown:
        assert f"--{option.replace('_', '-')}" in said
        assert _signature.descriptions(cls)[option].rstrip(".") in said
    assert ("--resume" in said) == cls.can_resume


def test_the_list_of_recipes_imports_none(capsys):
    ended = python("-X", "importtime", "-m", "forerun", "train", "--help")
    assert ended.returncode == 0
    for name in registry.names("recipe"):
        assert f" {name} " in ended.stdout
    assert re.search(r"\| +typer$", ended.stderr, re.MULTILINE)
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


def test_options_reach_the_recipe():
    cls = registry.get("recipe", "judge_head")
    values = {"problems": 20, "sources": [0, 2], "recall": 0.5, "target": "reasoner", "seed": None}
    judge = cls(**_signature.given(cls, values))
    assert (judge.problems, judge.sources, judge.recall) == (20, (0, 2), 0.5)
    assert (judge.target, judge.swaps) == ("reasoner", 6)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["acceptance_haed"], "did you mean 'acceptance_head'"),
        (["judge_head", "--problmes", "3"], "--problems"),
        (["judge_head", "--sources", "a+b"], "Invalid value for '--sources'"),
        (["seal"], "Missing option '--passages'"),
        (["--problems", "x", "judge-head"], "Invalid value for '--problems'"),
    ],
)
def test_mistakes_name_what_was_meant(args, said, capsys):
    from forerun.cli.main import main

    assert main(["train", *args]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1


def test_a_new_recipe_needs_no_command(tmp_path, monkeypatch, capsys):
    """A module in the folder of recipes is a command, with its own options."""
    from forerun.cli.main import main
    from forerun.training import recipes

    (tmp_path / "echo.py").write_text(
        '"""Repeats a word."""\n\nfrom dataclasses import dataclass\n'
        "from forerun.training.recipes.base import Recipe\n\n\n"
        "@dataclass(kw_only=True, eq=False)\nclass Echo(Recipe):\n"
        '    """Repeats.\n\n    word: what is repeated.\n    times: how often.\n    """\n\n'
        '    word: "str" = "a"\n    times: "int" = 2\n\n'
        "    def train(self, out, *, resume=False, watch=None):\n"
        "        return [f'{out.name} {self.word * self.times}']\n"
    )
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    registry._own_modules.cache_clear()
    try:
        assert main(["train", "--help"]) == 0 and "Repeats a word." in capsys.readouterr().out
        assert main(["train", "echo", "--times", "3", "--out", str(tmp_path / "o")]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "o aaa"
    finally:
        registry._own_modules.cache_clear()


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        ("recipes.seal", "Plan", r"Seal\(passages"),
        ("recipes.reasoner", "run", r"Reasoner\(\.\.\.\)\.train"),
        ("recipes.acceptance_head", "Plan", "AcceptanceHead"),
        ("recipes.judge_head", "run", "JudgeHead"),
        ("export", "export", "save"),
        ("language_model", "LanguageModelRecipe", r"LanguageModel\("),
    ],
)
def test_old_names_say_what_to_use(module, name, new):
    with pytest.raises(ImportError, match=f"{name} was renamed in this release; use {new}"):
        exec(f"from forerun.training.{module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from forerun.training.{module} import nothing")
