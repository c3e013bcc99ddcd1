"""`forerun train` under torchrun: the first process runs the recipe, the others train along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.training import processes

SOURCE = Path(__file__).parents[2] / "src"
SHORT = "--max-tokens 8 --share 0.9 --layers 1 --probe-steps 1 --micro-tokens 256 --gamma 2"

GROUPS = """
import os
import torch
import torch.distributed as dist
from forerun.training import processes

def add(value):
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item()

rank = int(os.environ["RANK"])
torchrun = processes.join_torchrun(rank, 2, rank, 2)
if rank:
    processes.follow(torchrun)
else:
    try:
        for value in (1, 2):
            with processes.process_group(2, add, (value,)):
                print("sum", add(value))
        with processes.process_group(2, add, (3,)):
            raise ValueError
    except ValueError:
        pass
    finally:
        processes.release(torchrun)
"""


def start(*words: Any, under_torchrun: bool = True) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2] if under_torchrun else []
    return subprocess.Popen(
        [sys.executable, *map(str, [*launcher, *words])],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error of a process that must end by itself."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def call(target: Path, prompts: Path) -> list[Any]:
    """Words of a short training of a draft."""
    words = ["-m", "forerun", "train", "draft", "--model", target, "--prompts", prompts]
    return [*words, *SHORT.split()]


def test_groups_follow_each_other_and_an_error_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    status, out, err = finish(start(script))
    assert status == 0, err
    assert out.splitlines() == ["sum 2", "sum 4"]


def test_a_mistake_is_said_once_and_ends_all_processes(tmp_path: Path) -> None:
    words = ["-m", "forerun", "train", "draft", "--share", 7, "--out", tmp_path / "out"]
    status, out, err = finish(start(*words))
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1 and out == "", err
    assert said == ["error: share must be above 0 and below 1, got 7.0; e.g. 0.1"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_torchrun_trains_as_threads_do(call: list[Any], tmp_path: Path) -> None:
    call = [*call, "--max-steps", 4, "--out"]
    runs = {
        "torchrun": start(*call, tmp_path / "torchrun"),
        "threads": start(*call, tmp_path / "threads", "--threads", 2, under_torchrun=False),
    }
    for name, process in runs.items():
        status, out, err = finish(process)
        assert status == 0 and "error" not in err, err
        assert out.count("modelled speed-up") == 1
        assert (tmp_path / name / "model.safetensors").exists()
    for phase in ("pretrain", "align"):
        one, two = (
            torch.load(tmp_path / name / "state" / f"{phase}.pt", weights_only=True)["parameters"]
            for name in runs
        )
        assert one and all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
def test_ctrl_c_saves(call: list[Any], tmp_path: Path) -> None:
    process = start(*call, "--max-steps", 10**6, "--out", tmp_path / "out")
    assert process.stdout
    assert any(line.startswith("pretrain") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 1 and "error: " not in err and "interrupted" not in err
    assert out.count("continue with: torchrun ... -m forerun train draft --model=") == 1
    assert (tmp_path / "out" / "state" / "pretrain.pt").exists()


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of torchrun, with this process as the first of two."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(processes, "_torchrun", None)
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (names | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, str(value))
    return dist.PrefixStore("forerun", store)


def test_torchrun_decides_the_number_of_processes(
    first: dist.Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "draft", "--threads", "3", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--threads 3 is not the number of torchrun's processes, 2; leave it out" in said
    assert first.get("work 0") == b"", "the others have ended"


@pytest.mark.parametrize("words", [["--help"], ["draft", "--help"], ["nothing"]])
def test_what_trains_nothing_ends_the_others(first: dist.Store, words: list[str]) -> None:
    assert main(["train", *words]) in (0, 2)
    assert first.get("work 0") == b""


def test_a_process_has_the_gpu_of_its_rank_on_its_machine(
    first: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    processes.join_torchrun(3, 4, 1, 2)
    assert processes.my_device("cuda") == torch.device("cuda", 1)
    assert processes.num_processes("cuda", 4) == 4
    with pytest.raises(ConfigError, match="by 4 processes; start torchrun with 2"):
        processes.check_shares(2, 4)
