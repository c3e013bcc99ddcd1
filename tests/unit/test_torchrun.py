"""`forerun train` under torchrun: the first process runs the recipe, the others train along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.training import processes, torchrun

SOURCE = Path(__file__).parents[2] / "src"
SHORT = "--max-tokens 8 --share 0.9 --layers 1 --probe-steps 1 --micro-tokens 256 --gamma 2"

GROUPS = """
import os
import torch
import torch.distributed as dist
from forerun.training import processes, torchrun

def add(value):
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item()

rank = int(os.environ["RANK"])
others = torchrun.join(rank, 2, rank, 2)
if rank:
    processes.follow(others)
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
        others.release()
"""


class Started:
    """A process that has to end by itself. Its errors go to a file, so that no pipe gets full."""

    def __init__(self, *words: Any, under_torchrun: bool = True) -> None:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2] if under_torchrun else []
        self.errors = TemporaryFile("w+")  # noqa: SIM115  (closed by `finish`)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, [*launcher, *words])],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Status, standard output and standard error."""
        try:
            out = self.process.communicate(timeout=300)[0]
        finally:
            self.process.kill()
        with self.errors as errors:
            errors.seek(0)
            return self.process.returncode, out, errors.read()

    def interrupt_in(self, title: str) -> None:
        """Sends Ctrl-C when a line of progress begins with a title."""
        assert self.process.stdout
        try:
            assert any(line.startswith(title) for line in self.process.stdout)
            self.process.send_signal(signal.SIGINT)
        except BaseException:
            self.process.kill()
            raise


@pytest.fixture
def call(target: Path, prompts: Path) -> list[Any]:
    """Words of a short training of a draft."""
    words = ["-m", "forerun", "train", "draft", "--model", target, "--prompts", prompts]
    return [*words, *SHORT.split()]


def test_groups_follow_each_other_and_an_error_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    status, out, err = Started(script).finish()
    assert status == 0, err
    assert out.splitlines() == ["sum 2", "sum 4"]


def test_a_mistake_is_said_once_and_ends_all_processes(tmp_path: Path) -> None:
    words = ["-m", "forerun", "train", "draft", "--share", 7, "--out", tmp_path / "out"]
    status, out, err = Started(*words).finish()
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1 and out == "", err
    assert said == ["error: share must be above 0 and below 1, got 7.0; e.g. 0.1"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_torchrun_trains_as_threads_do(call: list[Any], tmp_path: Path) -> None:
    call = [*call, "--max-steps", 4, "--out"]
    runs = {
        "torchrun": Started(*call, tmp_path / "torchrun"),
        "threads": Started(*call, tmp_path / "threads", "--threads", 2, under_torchrun=False),
    }
    for name, run in runs.items():
        status, out, err = run.finish()
        assert status == 0 and "error" not in err, err
        assert out.count("modelled speed-up") == 1
        assert (tmp_path / name / "model.safetensors").exists()
    for phase in ("pretrain", "align"):
        one, two = (
            torch.load(tmp_path / name / "state" / f"{phase}.pt", weights_only=True)["parameters"]
            for name in runs
        )
        assert one and one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
def test_ctrl_c_saves(call: list[Any], tmp_path: Path) -> None:
    run = Started(*call, "--max-steps", 10**6, "--out", tmp_path / "out")
    run.interrupt_in("pretrain")
    status, out, err = run.finish()
    assert status == 1 and "error: " not in err and "interrupted" not in err
    assert out.count("continue with: torchrun ... -m forerun train draft --model=") == 1
    assert (tmp_path / "out" / "state" / "pretrain.pt").exists()


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of torchrun, with this process as the first of two."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(torchrun, "_current", None)
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (names | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, str(value))
    return dist.PrefixStore("forerun", store)


def test_torchrun_decides_the_number_of_processes(
    first: dist.Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "draft", "--threads", "3", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "torchrun started 2 processes, and draft with these options trains in 3; start 3" in said
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
    torchrun.join(3, 4, 1, 2)
    assert processes.my_device("cuda") == torch.device("cuda", 1)
    assert processes.num_processes("cuda", 4) == 4
    with pytest.raises(ConfigError, match="by 4 processes; use 2, or --micro-batches 4"):
        processes.check_shares(2, 4)
