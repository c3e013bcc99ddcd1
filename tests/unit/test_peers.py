"""Peers: the protocol, failures, contestants and the law check, all with fake workers."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun.bench import method_names
from forerun.bench.contestants import PeerError, Setup, SkippedPeer
from forerun.bench.peers import catalog, install, law, make, parse
from forerun.bench.peers import peer as peer_module
from forerun.bench.peers.catalog import Mode, Peer
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.scoring import MAX_ERROR_LINES
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.tasks.base import Example

# A worker whose "model" is a fixed law over four tokens; its mode says what is wrong with it.
FAKE = """
import os, random, subprocess, sys, time

LAW = [0.4, 0.3, 0.2, 0.1]

class Worker:
    packages = ("pip", "no-such-package")

    def __init__(self):
        self.loads, self.resets = [], 0

    def load(self, **fields):
        print("loading to stdout")
        os.write(1, b"raw bytes to stdout\\n")
        subprocess.run(["echo", "a child prints"])
        if fields["mode"] == "cannot":
            raise NotImplementedError("no such format")
        if fields["mode"] == "lacks":
            import no_such_package_at_all
        self.loads.append(fields)

    def reset(self, **fields):
        self.resets += 1

    def run(self, mode, prompt, sampling, batch, options):
        if mode == "dies":
            print("last words", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if mode == "sleeps":
            child = subprocess.Popen(["sleep", "600"])
            print("children", os.getpid(), child.pid, file=sys.stderr)
            sys.stderr.flush()
            time.sleep(600)
        if mode == "raises":
            print("builtins.MemoryError: no room", file=sys.stderr)
            for i in range(30):
                print(f"there appear to be {i} leaked objects", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        if mode == "fails":
            raise ValueError("bad weather")
        greedy = mode == "greedy"
        samples = []
        for seed in sampling["seeds"]:
            dice = random.Random(seed)
            token = 0 if greedy else dice.choices(range(4), LAW)[0]
            samples.append({"tokens": [token] * sampling["max_new_tokens"], "finish": "length"})
        told = [self.loads, self.resets, sys.path, os.environ.get("PYTHONPATH"),
                os.environ["OMP_NUM_THREADS"], sampling, prompt]
        return {"samples": samples, "told": told}
"""
LAW = np.array([0.4, 0.3, 0.2, 0.1])
FIELDS = {"prompt": [5, 6], "batch": False, "options": {}}
LOADED = {"model": "m", "dtype": "float32", "threads": 1, "context": 8, "cache": "", "draft": None}


def asked(n: int = 1, max_new_tokens: int = 2) -> dict:
    """Sampling as it is sent."""
    return {"temperature": 1.0, "seeds": list(range(n)), "max_new_tokens": max_new_tokens}


def until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether a condition came true before a time that it never takes."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def is_running(pid: int) -> bool:
    """Whether a process computes or sleeps; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except OSError:
        return []
    return found + [each for child in found for each in descendants(child)]


@contextmanager
def interrupted_when(process: WorkerProcess, text: str) -> Iterator[None]:
    """Ctrl-C as soon as a worker has printed a text."""

    def interrupt() -> None:
        if until(lambda: text in process.tail()):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def printed_pids(process: WorkerProcess) -> list[int]:
    """The process ids in what the fake printed."""
    line = next(line for line in process.stderr if line.startswith("children"))
    return [int(word) for word in line.split()[1:]]


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """The file of the fake worker."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def process(fake: Path) -> Iterator[WorkerProcess]:
    """A running fake worker."""
    worker = WorkerProcess(Path(sys.executable), fake, threads=3)
    yield worker
    worker.close()


@pytest.fixture
def contestant(
    fake: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], peer_module.PeerContestant]]:
    """Makes contestants whose peer is the fake, in an environment without packages."""
    modes = {name: Mode() for name in ("plain", "greedy", "dies", "fails", "cannot")}
    known = Peer(packages=(), modes=modes, probe="")
    monkeypatch.setitem(catalog.PEERS, "fake", known)
    monkeypatch.setattr(peer_module, "WORKERS", fake.parent)
    folder = tmp_path / "peers"
    (folder / "fake" / "bin").mkdir(parents=True)
    (folder / "fake" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    install.write_state(folder, "fake", {"versions": {}, "recipe": ""})
    setup = Setup(tiny_folder, "auto", 2, None, folder)
    made: list[peer_module.PeerContestant] = []

    def new(name: str) -> peer_module.PeerContestant:
        made.append(peer_module.PeerContestant(parse(name), name, setup))
        return made[-1]

    yield new
    for one in made:
        one.close()


@pytest.fixture
def sharing(
    contestant: Callable[[str], peer_module.PeerContestant], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], peer_module.PeerContestant]:
    """The same where all modes of the peer are of one process."""
    monkeypatch.setitem(catalog.PEERS, "fake", replace(catalog.PEERS["fake"], shares_model=True))
    return contestant


class TestProtocol:
    def test_versions_of_installed_packages_only(self, process: WorkerProcess) -> None:
        told = process.request("hello", 30)
        assert list(told["versions"]) == ["pip"] and told["python"].startswith("3.")

    def test_fields_arrive_and_what_is_printed_does_not_disturb(
        self, process: WorkerProcess
    ) -> None:
        assert process.request("load", 30, mode="plain", options={"k": 2}, **LOADED)["seconds"] > 0
        got = process.request("run", 30, mode="plain", sampling=asked(2), **FIELDS)
        assert [len(sample["tokens"]) for sample in got["samples"]] == [2, 2]
        assert got["seconds"] > 0 and got["prefill_seconds"] is None
        loads, resets, _, _, threads, sampling, prompt = got["told"]
        assert loads == [{"mode": "plain", "options": {"k": 2}, **LOADED}] and resets == 1
        assert threads == "3" and prompt == [5, 6] and sampling["seeds"] == [0, 1]
        process.close()  # after which all is read
        printed = process.tail()
        for text in ("loading to stdout", "raw bytes to stdout", "a child prints"):
            assert text in printed

    def test_the_environment_is_the_peers_own(
        self, fake: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        worker = WorkerProcess(Path(sys.executable), fake, threads=1)
        got = worker.request("run", 30, mode="plain", sampling=asked(), **FIELDS)
        worker.close()
        _, _, path, python_path, *_ = got["told"]
        assert python_path is None and not any("workers" in folder for folder in path)
        assert str(fake.parent) not in path

    def test_first_tokens_and_memory(self, process: WorkerProcess) -> None:
        got = process.request("first_tokens", 30, mode="greedy", sampling=asked(5), **FIELDS)
        assert got["tokens"] == [0] * 5
        if sys.platform == "linux":
            run = process.request("run", 30, mode="plain", sampling=asked(), **FIELDS)
            assert run["memory"]["process"] > 1 << 20


class TestFailures:
    def test_an_error_is_told_and_the_worker_lives(self, process: WorkerProcess) -> None:
        with pytest.raises(PeerError) as caught:
            process.request("run", 30, mode="fails", sampling=asked(), **FIELDS)
        *_, raised, last = str(caught.value).splitlines()
        assert (raised, last) == ("ValueError: bad weather", f"fake failed in run: {raised}")
        assert process.request("run", 30, mode="plain", sampling=asked(), **FIELDS)["samples"]

    def test_what_cannot_be_is_skipped(self, process: WorkerProcess) -> None:
        with pytest.raises(SkippedPeer, match="no such format"):
            process.request("load", 30, mode="cannot", options={}, **LOADED)

    def test_a_missing_package_is_named_with_the_fix(self, process: WorkerProcess) -> None:
        said = "its environment lacks the package no_such_package_at_all; run `make peers`"
        with pytest.raises(SkippedPeer, match=f"^{said}$"):
            process.request("load", 30, mode="lacks", options={}, **LOADED)

    def test_a_killed_worker_may_have_lacked_memory(self, process: WorkerProcess) -> None:
        process.request("hello", 30)
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(PeerError, match=r"\(signal SIGKILL, as when memory is short\)$"):
            process.request("run", 30, mode="plain", sampling=asked(), **FIELDS)

    def test_death_tells_status_and_last_lines(self, process: WorkerProcess) -> None:
        with pytest.raises(
            PeerError, match=r"last words\n.*died during run \(exit status 3\): last words$"
        ):
            process.request("run", 30, mode="dies", sampling=asked(), **FIELDS)
        assert not process.is_alive
        with pytest.raises(PeerError, match="died during hello"):
            process.request("hello", 30)

    def test_an_exception_is_told_beside_what_followed_it(self, process: WorkerProcess) -> None:
        with pytest.raises(PeerError) as caught:
            process.request("run", 30, mode="raises", sampling=asked(), **FIELDS)
        lines = str(caught.value).splitlines()
        assert lines[:2] == ["builtins.MemoryError: no room", "..."]
        assert lines[-2].startswith("there appear to be 29 ")
        assert lines[-1].endswith("died during run (exit status 1): builtins.MemoryError: no room")
        assert len(lines) <= MAX_ERROR_LINES

    def test_silence_ends_the_worker(self, process: WorkerProcess) -> None:
        process.request("hello", 30)
        with pytest.raises(PeerError, match="no answer to run in 0.2 s"):
            process.request("run", 0.2, mode="sleeps", sampling=asked(), **FIELDS)
        assert not process.is_alive

    def test_a_worker_that_computes_is_ended_at_once_with_its_children(
        self, process: WorkerProcess
    ) -> None:
        with interrupted_when(process, "children"), pytest.raises(KeyboardInterrupt):
            process.request("run", 600, mode="sleeps", sampling=asked(), **FIELDS)
        pids = printed_pids(process)
        process.close(patience=600)  # is not waited for
        assert not process.is_alive
        assert until(lambda: not any(map(is_running, pids)))

    def test_no_worker_outlives_a_parent_that_was_killed(self, fake: Path) -> None:
        code = (
            "import sys; from pathlib import Path; "
            "from forerun.bench.peers.client import WorkerProcess\n"
            f"worker = WorkerProcess(Path(sys.executable), Path({str(fake)!r}))\n"
            f"worker.request('run', 600, mode='sleeps', sampling={asked()!r}, **{FIELDS!r})\n"
        )
        parent = subprocess.Popen([sys.executable, "-c", code])
        try:
            assert until(lambda: len(descendants(parent.pid)) == 2)
            pids = descendants(parent.pid)
        finally:
            parent.kill()
            parent.wait()
        assert until(lambda: not any(map(is_running, pids)))

    def test_a_missing_interpreter(self, fake: Path) -> None:
        with pytest.raises(PeerError, match="cannot start /no/such/python: No such .*`make peers`"):
            WorkerProcess(Path("/no/such/python"), fake)

    def test_a_worker_that_cannot_be_imported(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.py"
        path.write_text("import no_such_module_at_all")
        worker = WorkerProcess(Path(sys.executable), path)
        with pytest.raises(PeerError, match="No module named 'no_such_module_at_all'"):
            worker.request("hello", 30)


class TestContestant:
    def test_a_run_is_decoded_by_the_checkpoints_tokenizer(self, contestant) -> None:
        one = contestant("fake")
        one.start()
        assert list(one.versions())[0] == "python"
        sampling = Sampling(n=3, max_new_tokens=4, seed=7)
        one.warm_up(Example("a", "the cat", ""), sampling)
        outcome = one.run(Example("a", "the cat", ""), sampling)
        assert [sample.tokens for sample in outcome.samples] == [4, 4, 4]
        assert [len(tokens) for tokens in one.tokens] == [4, 4, 4]
        for tokens, sample in zip(one.tokens, outcome.samples, strict=True):
            assert sample.text == one.tokenizer.decode([t for t in tokens if t])  # 0 ends a text
            assert sample.finish == "length" and sample.passes is None
        assert outcome.seconds > 0
        one.close()

    def test_what_is_asked(self, contestant) -> None:
        one = contestant("fake")
        sent = one._run_fields("the cat", Sampling(temperature=0.6, top_k=5, n=2, seed=3))
        assert sent["prompt"] == one.tokenizer.encode("the cat") and sent["mode"] == "plain"
        assert sent["sampling"]["seeds"] == [3, 4] and sent["sampling"]["ends"] == [0]
        room = 128 - len(sent["prompt"])
        assert sent["sampling"]["max_new_tokens"] == room  # 512 asked, context 128
        assert one._run_fields([1, 2], Sampling(ignore_eos=True))["sampling"]["ends"] == []
        with pytest.raises(SkippedPeer, match="repetition_penalty"):
            one._run_fields("the cat", Sampling(repetition_penalty=1.2))
        with pytest.raises(PeerError, match="no room"):
            one._run_fields([1] * 128, Sampling())

    def test_modes_of_one_peer_have_processes_of_their_own(self, contestant) -> None:
        one, two = contestant("fake"), contestant("fake:greedy")
        one.start()
        two.start()
        assert one._process() is not two._process()
        one.close()
        assert two.first_tokens([1], Sampling(), 3) == [0, 0, 0]
        two.close()

    def test_modes_share_a_process_where_the_peer_can(self, sharing) -> None:
        one, two = sharing("fake"), sharing("fake:greedy")
        one.start()
        two.start()
        process = one._process()
        assert two._process() is process
        loads, *_ = process.request("run", 30, **one._run_fields([1], Sampling()))["told"]
        assert [fields["mode"] for fields in loads] == ["plain", "greedy"]
        one.close()
        assert process.is_alive
        two.close()
        assert not process.is_alive and not peer_module._shared

    def test_the_run_goes_on_after_a_death_and_restarts_are_counted(self, contestant) -> None:
        one = contestant("fake:dies")
        one.start()
        for restarts in range(4):
            with pytest.raises(PeerError, match="died during run"):
                one.run(Example("a", "the cat", ""), Sampling(max_new_tokens=2))
            assert one.restarts == restarts
        one.close()

    @pytest.mark.slow
    def test_who_shares_a_worker_that_died_begins_anew(self, sharing) -> None:
        one, two = sharing("fake"), sharing("fake:dies")
        one.start()
        two.start()
        example, sampling = Example("a", "the cat", ""), Sampling(max_new_tokens=2)
        for _ in range(4):  # however often the other one breaks
            with pytest.raises(PeerError, match="died during run"):
                two.run(example, sampling)
            assert one.run(example, sampling).samples
        assert (one.restarts, two.restarts) == (4, 3)
        one.close()
        two.close()

    def test_what_cannot_load_is_skipped_and_ended(self, contestant) -> None:
        with pytest.raises(SkippedPeer, match="no such format"):
            contestant("fake:cannot").start()
        assert not peer_module._shared

    def test_without_an_environment(self, tiny_folder: Path, tmp_path: Path) -> None:
        setup = Setup(tiny_folder, "auto", 1, None, tmp_path)
        with pytest.raises(SkippedPeer, match="no environment in .*make peers"):
            make("vllm:ngram", setup).start()
        install.write_state(tmp_path, "vllm", {"skipped": "no wheel"})
        with pytest.raises(SkippedPeer, match="could not be installed: no wheel"):
            method_names.make("vllm", None, setup).start()  # type: ignore[arg-type]

    def test_it_is_told_the_device_or_cannot_run_there(self, contestant, monkeypatch) -> None:
        one = contestant("fake:plain")
        monkeypatch.setattr(one, "setup", replace(one.setup, device="cuda:0"))
        with pytest.raises(SkippedPeer, match="runs on cpu, the model is on cuda:0; .*cpu"):
            one.start()
        assert one._load_fields()["device"] == "cuda:0"
        assert catalog.PEERS["transformers"].devices == ("cpu", "cuda")

    def test_a_draft_of_another_vocabulary(self, contestant, monkeypatch) -> None:
        modes = {"plain": Mode(), "draft": Mode(needs_draft=True)}
        monkeypatch.setitem(catalog.PEERS, "fake", Peer((), modes, ""))
        with pytest.raises(SkippedPeer, match="different vocabulary"):
            contestant("fake:draft").start()


class TestBounds:
    @pytest.mark.parametrize(
        ("sampling", "said"),
        [
            (Sampling(seed=10**30), "peers take seed up to 4611686018427387904, got 1000000000"),
            (
                Sampling(top_k=2**31),
                "peers take top_k up to 2147483647, got 2147483648",
            ),
        ],
    )
    def test_what_their_integers_cannot_hold_is_refused_before(
        self, sampling: Sampling, said: str
    ) -> None:
        method_names.check_sampling(["plain", "stand:nodes=4"], sampling)  # ours can
        with pytest.raises(ConfigError, match=said):
            method_names.check_sampling(["plain", "vllm:batch"], sampling)
        method_names.check_sampling(["vllm"], Sampling(seed=2**62, top_k=2**31 - 1))

    def test_options_too(self) -> None:
        assert parse("vllm:ngram:tokens=2147483647").options["tokens"] == 2**31 - 1
        for value in (2**31, 10**30, 0, "x"):
            with pytest.raises(ConfigError, match="takes a whole number from 1 to 2147483647, got"):
                parse(f"vllm:ngram:tokens={value}")


def test_passes_of_a_text_that_vllm_cut_are_not_too_few() -> None:
    count = runpy.run_path(str(catalog.WORKERS / "vllm.py"))["count_difference"]
    depths = [4, 4, 3, 3, 2, 2, 2, 2, 2, 2]  # 4 drafts; accepted before the text was cut at 27
    after = {"drafts": 9, "draft_tokens": 38, "accepted_tokens": 46}
    before = {"drafts": 5, "draft_tokens": 10, "accepted_tokens": 20}
    found = count(before, after | {"accepted_tokens_per_pos": depths}, 27)
    assert found == {"passes": 5, "drafted": 28, "accepted": 26, "per_position": depths}
    assert count(before, after, 60)["passes"] == 60 - 26  # most passes had no draft
    assert count({}, {"accepted_tokens": 26}, 27)["passes"] == 1  # a version that tells no drafts


def test_unread_logits_are_not_kept_by_llama_cpp() -> None:
    """Its own array has a row for each token of a batch, and fails behind the last one."""
    unused = runpy.run_path(str(catalog.WORKERS / "llama_cpp.py"))["IgnoredLogits"]()
    unused[600:603, :].reshape(-1)[::] = np.zeros(3 * 7)
    assert vars(unused) == {}


class TestLaw:
    def test_a_sampler_passes_and_a_greedy_one_does_not(self, contestant) -> None:
        for name, passed in (("fake", True), ("fake:greedy", False)):
            one = contestant(name)
            one.start()
            found = law.check_law(one, LAW, [1], Sampling(temperature=1.0), n=400)
            one.close()
            assert found.passed is passed and found.num_bins == 4 and not found.is_vacuous
        assert found.p_value < 1e-50

    def test_a_sampler_of_another_temperature_does_not_pass(self, contestant) -> None:
        sharp = LAW**2 / (LAW**2).sum()
        one = contestant("fake")
        one.start()
        assert not law.check_law(one, sharp, [1], Sampling(temperature=0.5), n=400).passed
        cut = np.array([4, 3, 2, 0]) / 9  # as if top_k = 3 had been asked for
        found = law.check_law(one, cut, [1], Sampling(top_k=3), n=400)
        one.close()
        assert found.p_value == 0.0 and found.num_excluded > 0

    def test_too_narrow_a_law_says_so(self, contestant) -> None:
        one = contestant("fake:greedy")
        one.start()
        found = law.check_law(one, np.array([1.0, 0, 0, 0]), [1], Sampling(), n=50)
        assert found.is_vacuous and found.passed
        with pytest.raises(PeerError, match="token ids below 0"):
            law.check_law(one, np.zeros(0), [1], Sampling(), n=5)
        with pytest.raises(ConfigError, match="above 0"):
            law.check_law(one, LAW, [1], Sampling(temperature=0.0))
        one.close()

    def test_whole_texts(self, tiny_folder: Path) -> None:
        model = forerun.load(str(tiny_folder))
        prompt = model.tokenizer.encode("the cat sat")
        sampled = Sampling(temperature=1.0, n=12, max_new_tokens=60, seed=3, ignore_eos=True)
        [result] = model.generate([prompt], sampled, drafter="none")
        texts = [sample.tokens for sample in result.samples]
        assert law.check_texts(model, prompt, texts, sampled).passed
        [greedy] = model.generate([prompt], temperature=0.0, max_new_tokens=60, ignore_eos=True)
        found = law.check_texts(model, prompt, [greedy.samples[0].tokens] * 12, sampled)
        assert not found.passed and found.p_value < 1e-9
        assert law.first_difference(model, prompt, greedy.samples[0].tokens) == (60, 0.0)
        length, gap = law.first_difference(model, prompt, texts[0])
        assert length < 60 and gap > 0

    def test_the_widest_beginning(self, tiny_folder: Path) -> None:
        model = forerun.load(str(tiny_folder))
        text = model.tokenizer.encode("the cat sat on the mat and the dog")
        best = law.widest(model, [text], Sampling())
        assert best == text[: len(best)] and len(best) >= 4
        widths = [law._entropy(law.first_law(model, text[:i], Sampling())) for i in range(4, 9)]
        assert law._entropy(law.first_law(model, best, Sampling())) >= max(widths) - 1e-6
