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

from forerun.cli.train import RECIPES, Display, check
from forerun.errors import ConfigError
from forerun.training.loop import Progress
from forerun.training.processes import in_processes
from forerun.training.recipes import reasoner
from forerun.utils.signals import uninterrupted

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


def test_ctrl_c_waits_for_the_end_of_a_step(tmp_path, monkeypatch):
    sizes = {"reasoner": reasoner.Size(hidden=32, layers=1, heads=2, kv_heads=1, inner=48)}
    monkeypatch.setattr(reasoner, "SIZES", sizes)
    plan = reasoner.Plan(tmp_path / "r u n", threads=1, num_problems=40, num_tokenizer_problems=30)
    plan.problems.tokenizer()  # not the command's 6000 problems

    flags = ["--out", str(plan.out), "--threads", "1", "--problems", "40"]
    ended = python("-c", INTERRUPTED, *flags)
    assert ended.returncode == 130, ended.stderr
    call = f"forerun train reasoner --out='{plan.out}' --problems=40 --threads=1 --resume"
    assert f"continue with: {call}\n" in ended.stdout
    line = r"reasoner  0%  step 1  0\.0\d M tokens  [\d,]+ tokens/s  loss \d\.\d+  \d+ min left"
    assert re.search(line, ended.stdout)

    saved = torch.load(plan.out / "reasoner.pt", weights_only=True)
    assert saved["progress"]["step"] == 3
    (plan.out / "reasoner.pt").rename(tmp_path / "saved.pt")
    whole = reasoner.Plan(
        plan.out, threads=1, num_problems=40, num_tokenizer_problems=30, micro_batches=2
    )
    _, loop = reasoner.prepare(whole, "reasoner")
    batches = loop.recipe.batches(0)
    for _ in range(3):
        loop._step(next(batches), loop.spent())
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
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_ctrl_c_stays_ignored(audible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done: list[int] = []
    with uninterrupted():
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


def test_a_line_every_half_minute_where_nobody_looks(capsys):
    now = [0.0]
    display = Display(is_terminal=False, clock=lambda: now[0])
    with display:
        on_step = display.events().on_step
        for step in range(1, 101):
            now[0] = float(step)
            on_step("reasoner", Progress(step, float(step), 2000 * step, 1.5), step / 100)
        display.draw("data", 0.5, "1/2 shards")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["1", "31", "61", "91", "100"]
    assert lines[1] == (
        "reasoner  31%  step 31  0.06 M tokens  2,000 tokens/s  loss 1.500  1 min left"
    )
    assert lines[-1] == "data  50%  1/2 shards"


def test_bars_where_somebody_looks(capsys):
    display = Display(is_terminal=True)
    display.bars.live.transient = False
    with display:
        display.draw("data", 0.5, "1/2 shards")
        display.draw("data", 1.0, "2/2 shards")
    assert "2/2 shards" in capsys.readouterr().out
    assert len(display.tasks) == 1


@pytest.mark.parametrize("args", [["nothing"], ["reasoner", "--threads", "0"]])
def test_bad_input_is_one_line_and_status_2(args, capsys):
    from forerun.cli.main import main

    assert main(["train", *args]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


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
    assert f"recipe '{name}' has no {flag[0]}; it takes --" in said and "--problems" in said
    assert option not in RECIPES[name].options and not folder.exists()


def test_every_option_belongs_to_a_recipe_and_is_a_field_of_its_plan(tmp_path):
    """What a recipe takes reaches its plan; what the command offers, some recipe takes."""
    import dataclasses
    import inspect

    from forerun.cli import train
    from forerun.training.recipes import acceptance_head, judge_head

    plans = {"reasoner": reasoner, "acceptance_head": acceptance_head, "judge_head": judge_head}
    renamed = {"problems": {"num_problems", "num_texts"}, "held_out": {"num_held_out"}}
    for name, module in plans.items():
        fields = {field.name for field in dataclasses.fields(module.Plan)}
        for option in RECIPES[name].options - {"resume"}:
            assert renamed.get(option, {option}) & fields, (name, option)
    offered = inspect.signature(train.command).parameters.keys() - {"ctx", "name"}
    assert offered == set().union(*(recipe.options for recipe in RECIPES.values()))
    with pytest.raises(ConfigError, match="has no --device, --threads; it takes --out, --problems"):
        check("judge_head", {"threads": 1, "device": "cpu"})


def test_unset_options_are_the_plans_own(tmp_path):
    from forerun.cli.train import _plan
    from forerun.training.recipes import acceptance_head, judge_head

    assert _plan(judge_head.Plan, {"out": tmp_path}) == judge_head.Plan(tmp_path)
    given = {"out": tmp_path, "problems": 7, "minutes": 0.5, "resume": True}
    found = _plan(acceptance_head.Plan, given, problems="num_texts")
    assert found == acceptance_head.Plan(tmp_path, num_texts=7, minutes=0.5)
