"""Batch generation over Ray: the local engine's samples, in order, whatever dies or is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Call
from ray_jobs import SAMPLING, TEXTS, asked, local, setup, tokens

import forerun
from forerun.cli.main import main
from forerun.engine.generation import Sample
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.integrations import ray_batch
from forerun.integrations.ray_batch import ActorPool
from forerun.integrations.ray_results import PartialResults, partial_of
from forerun.integrations.ray_worker import Request, Worker
from forerun.state import drafter_files


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two processors on this machine."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_niceness", "0")  # the machine may be busy
        ray.init("local", num_cpus=2, object_store_memory=100 << 20, **quiet)
        yield
        ray.shutdown()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "big.jsonl"
    lines = [json.dumps({"prompt": text, "id": f"q{i}"}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_what_an_actor_does_not_find_it_says_itself(
    cluster: None, call: Call, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's machine may lack it, and is not asked."""
    starts: list[ActorPool] = []
    start = ActorPool._start
    monkeypatch.setattr(ActorPool, "_start", lambda pool: [starts.append(pool), start(pool)])
    for flag, value in (("-d", "sam:corpus=nope"), ("--mix", "nope"), ("--style", "nope")):
        words = ("generate", "-p", "x", "-m", tiny_folder, "--engine", "ray", flag, value)
        status, _, err = call(*words)
        said = err.splitlines()[-1]
        assert status == 2 and said.startswith("error: ") and "nope" in said
    assert len(starts) == 3


def test_a_killed_actor_s_prompts_are_redone(cluster: None, tiny_folder: Path) -> None:
    notes: list[str] = []
    with ActorPool(setup(tiny_folder), actors=2, on_note=notes.append) as pool:
        (first,) = pool.pids.values()
        results = pool.results(asked())
        found = [next(results)]
        os.kill(first, signal.SIGKILL)
        found += results
        assert first not in pool.pids.values()
    assert sorted(index for index, _ in found) == list(range(5))
    assert tokens(found) == local(tiny_folder)
    assert len(notes) == 1 and f"actor {first} died during prompts" in notes[0]


class Fatal(Worker):
    """Dies over the prompt of one token."""

    def work(self, asked: Any) -> list[tuple[int, list[Sample]]]:
        if any(one.prompt == [7] for one in asked):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(asked)


class Stillborn(Worker):
    """Dies while it loads, as long as a file is there to say so."""

    def ready(self) -> Any:
        told = Path(self.setup.model) / "die"
        if told.exists():
            told.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().ready()


class Forgetful(Worker):
    """Cannot take up what a memory file held."""

    def keep(self, before: Any) -> None:
        raise ConfigError("this memory does not fit")


@pytest.fixture
def by_value(cluster: None) -> Iterator[None]:
    """Classes of this module travel whole: actors cannot import it."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_an_actor_that_dies_while_it_loads_is_replaced(
    by_value: None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_batch, "Worker", Stillborn)
    (tiny_folder / "die").touch()
    notes: list[str] = []
    with ActorPool(setup(tiny_folder), actors=1, on_note=notes.append) as pool:
        found = list(pool.results(asked()))
    assert tokens(found) == local(tiny_folder)
    assert notes == ["an actor died during loading the model; another actor retries"]


@pytest.mark.slow
def test_an_actor_that_cannot_take_up_a_memory_says_so(
    by_value: None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that starts later than the others."""
    first = ActorPool(setup(tiny_folder, drafter="stand"), actors=2)
    with first as pool, pool.memory(tmp_path / "a.mem", drafter="stand"):
        list(pool.results(asked()[:1]))
        monkeypatch.setattr(ray_batch, "Worker", Forgetful)
        pool._connect()  # the kind of actor that comes next
        pool._start()
        with pytest.raises(ConfigError, match="this memory does not fit"):
            pool._wait()


@pytest.mark.slow
def test_a_prompt_that_kills_every_actor_ends_the_run(
    by_value: None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_batch, "Worker", Fatal)
    whole, found = [*asked(), Request(5, [7], SAMPLING)], []
    with (
        ActorPool(setup(tiny_folder), actors=1, on_note=lambda note: None) as pool,
        pytest.raises(CapacityError, match="3 actors in a row died during prompts 5 to 5"),
    ):
        found.extend(pool.results(whole[3:]))  # what came before is there
        pytest.fail("the run did not end")


def test_the_command_resumes_and_merges_memories(
    cluster: None, call: Call, tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out, memory = tmp_path / "results.jsonl", tmp_path / "a.mem"
    words = ["generate", "-m", tiny_folder, "-f", prompts, "-n", 2, "-t", 0.8, "--ignore-eos"]
    words += ["--max-new-tokens", 10, "--drafter", "stand", "--out", out, "--memory", memory]
    words += ["--engine", "ray", "--actors", 2, "--json"]
    status, printed, err = call(*words, "--seed", 5)
    assert status == 0 and "5 of 5 prompts" in err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert printed == out.read_text()
    places = [(line["id"], line["prompt_index"], line["index"]) for line in lines]
    assert places == [(f"q{i}", i, k) for i in range(5) for k in (0, 1)]
    assert drafter_files.read(memory).snapshot.counts["tokens"] == 100

    done = {i: [line for line in lines if line["prompt_index"] == i] for i in (0, 3)}
    _unfinish(out, done, words)
    status, printed, err = call(*words)  # the seed is that of the run that it goes on with
    assert status == 0 and "2 of 5 prompts were finished before" in err
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt_index"] for line in again] == [i for i in range(5) for _ in "ab"]
    assert [line for line in again if line["prompt_index"] in done] == done[0] + done[3]
    assert {line["seed"] for line in again} == {5}
    assert drafter_files.read(memory).snapshot.counts["tokens"] == 160  # the three that were left


def _unfinish(out: Path, done: dict[int, list[dict[str, Any]]], words: list[Any]) -> None:
    """Makes the partial file of a run that was stopped after some prompts."""
    headers: list[dict[str, Any]] = []
    out.unlink()
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda self: headers.append(self.header) or _stop()  # noqa: E731
        patch.setattr(PartialResults, "_resume", keep)
        assert main([*map(str, words), "--seed", "5"]) == 2
    held = [{"prompt_index": i, "samples": samples} for i, samples in done.items()]
    partial_of(out).write_text("".join(json.dumps(line) + "\n" for line in [*headers, *held]))


def _stop() -> None:
    raise DataError("stopped here")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_finished(
    cluster: None, call: Call, tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out, plain = tmp_path / "results.jsonl", ActorPool.results

    def stopped(self: ActorPool, whole: Any) -> Iterator[Any]:
        results = plain(self, whole)
        yield next(results)
        raise KeyboardInterrupt

    words = ["generate", "-m", tiny_folder, "-f", prompts, "--max-new-tokens", 10, "--seed", 5]
    words += ["--engine", "ray", "--out", out, "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActorPool, "results", stopped)
        status, _, err = call(*words)
    assert status == 130 and not out.exists()
    assert "the same command resumes the run" in err
    kept = partial_of(out).read_text().splitlines()[1:]
    assert 1 <= len(kept) <= 3
    status, _, err = call(*words)
    assert status == 0 and f"{len(kept)} of 5 prompts were finished before" in err
    assert len(out.read_text().splitlines()) == 5 and not partial_of(out).exists()


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_ends_the_command_and_its_cluster(tmp_path: Path) -> None:
    """The real command in a process group of its own; the signal goes to all of the group."""
    pytest.importorskip("ray", reason="ray is not installed")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"Problem: Ann has {i} boxes.\nSolution:\n"} for i in range(60)]
    source.write_text("\n".join(map(json.dumps, lines)))
    call = [sys.executable, "-m", "forerun.cli.main", "generate", "-f", source, "-n", 4]
    call += ["--max-new-tokens", 200, "--ignore-eos", "-t", 0.8, "--engine", "ray", "--out", out]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(Path(forerun.__file__).parents[1])}
    process = subprocess.Popen(
        [*map(str, call), "--json", "--seed", "5"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    kept = partial_of(out)
    while process.poll() is None and (not kept.exists() or kept.read_bytes().count(b"\n") < 4):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "interrupted:" in said and "the same command resumes the run" in said
    assert "Traceback" not in said
    done = [json.loads(line) for line in kept.read_text().splitlines()][1:]
    assert 3 <= len(done) < 60 and all(len(one["samples"]) == 4 for one in done)
    assert not out.exists()
