"""Peers that do not fit into memory together: groups, refusals, and what a report makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_bench_harness import Fake, Sums, Words, no_measurements  # noqa: F401 - a fixture

from forerun.bench import cpu_load, hardware_limits, machine, memory_pressure, peer_groups
from forerun.bench.alerts import alerts
from forerun.bench.contestants import CacheDemand
from forerun.bench.formatting import size_text
from forerun.bench.harness import Harness
from forerun.bench.metrics import paired_speed_up
from forerun.bench.planning import ChosenExamples, units
from forerun.bench.ranking import Ranking, incomplete
from forerun.bench.report_summary import context
from forerun.bench.results import Manifest, Record, read_run
from forerun.bench.run_writer import RunWriter
from forerun.bench.unit_prompts import LENGTH_STEP
from forerun.core.sampling import Sampling

GIB = 1 << 30
NO_PRESSURE = memory_pressure.Sample(0, 0.0, 0, 1 << 40)


class Peer(Fake):
    """A contestant in a process of its own, which takes memory while it runs."""

    def __init__(self, name: str, log: list[Any], size: int, act: Callable[..., Any] = id) -> None:
        super().__init__(name, log, act)
        self.size, self.is_open = size, False

    def start(self) -> None:
        super().start()
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self.log.append(("close", self.name))
        self.is_open = False

    def memory_needed(self) -> int:
        return 0 if self.is_open else self.size

    def memory_plan(self) -> dict[str, int]:
        return {"cache_bytes": self.size // 2, "estimate_bytes": self.size}


class Plain(Fake):
    """Plain decoding in this process."""

    host = None

    def memory_needed(self) -> int:
        return 0


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs contestants on four prompts in a machine of 8 GiB, and gives what is in the folder."""
    monkeypatch.setattr(hardware_limits, "read_bandwidth", lambda threads, **options: 12.5)
    monkeypatch.setattr(cpu_load, "wait_until_idle", lambda: None)
    monkeypatch.setattr(memory_pressure, "sample", lambda: NO_PRESSURE)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 0)  # nothing is reserved

    def go(contestants: list[Fake], free: int = 8 * GIB, **options: Any) -> Any:
        def available(device: object) -> int:
            used = sum(one.size for one in contestants if isinstance(one, Peer) and one.is_open)
            assert used <= free
            return free - used

        monkeypatch.setattr(peer_groups, "available_bytes", available)
        part = ChosenExamples("sums", Sums(), [(i, Sums().example(i)) for i in range(4)])
        plan = Manifest(
            "now", "0.1.0", "", "", {"hash": "h"}, "float32", 1, 0, {"n": 4},
            [one.name for one in contestants], {"sums": part.to_dict()},
        )  # fmt: skip
        model: Any = SimpleNamespace(tokenizer=Words(), target=SimpleNamespace(context=1000))
        with RunWriter(tmp_path / "run", plan) as writer:
            how = {"sampling": Sampling(n=4, temperature=0.5, max_new_tokens=100), "seed": 7}
            made = Harness(units([part], 1), contestants, writer, model, **how | options)
            progress = made.run()
        assert progress.done == progress.total and not progress.left.total()
        return read_run(tmp_path / "run")

    return go


def decoded(log: list[Any]) -> list[str]:
    """Who decoded, in order; a closed process as "name|"."""
    named = {"close": lambda entry: f"{entry[1]}|", "warm": lambda entry: ""}
    return list(filter(None, (named.get(entry[0], lambda e: e[0])(entry) for entry in log)))


def test_what_fits_runs_together_and_ends_after_its_last_prompt(run: Any, log: list[Any]) -> None:
    manifest, records = run([Plain("plain", log), Peer("a", log, GIB), Peer("b", log, GIB)])
    turns = ["plain", "a", "b"], ["b", "a", "plain"]
    assert decoded(log) == [*turns[0], *turns[1], *turns[1], "plain", "a", "a|", "b", "b|"]
    assert {record.group for record in records} == {0}
    assert manifest.peer_memory == {
        name: {"cache_bytes": GIB // 2, "estimate_bytes": GIB, "group": 0} for name in "ab"
    }


def test_what_does_not_fit_is_measured_later_with_plain_decoding_again(
    run: Any, log: list[Any]
) -> None:
    peers = [Peer("a", log, 3 * GIB), Peer("b", log, 6 * GIB), Peer("c", log, 4 * GIB)]
    said: list[str] = []
    manifest, records = run([Plain("plain", log), *peers], notice=said.append)
    groups = {name: manifest.peer_memory[name]["group"] for name in "abc"}
    assert groups == {"a": 0, "b": 1, "c": 0}
    assert (
        "b needs 6.0 GiB of memory (3.0 GiB of cache), 5.0 GiB are free: it is measured after the "
        "other peers"
    ) in said
    by_group = {g: {r.method for r in records if r.group == g} for g in (0, 1)}
    assert by_group == {0: {"plain", "a", "c"}, 1: {"plain", "b"}}
    assert sum(r.method == "plain" for r in records) == 8  # every prompt in both groups
    later = [r for r in records if r.group == 1]
    assert records[-8:] == later and {later[i].method for i in (0, 1)} == {"plain", "b"}
    assert [r.index for r in later] == [0, 0, 1, 1, 2, 2, 3, 3]  # the two alternate on every prompt
    assert len({record.order for record in records}) == len(records)


def test_what_never_fits_is_left_out_with_numbers(run: Any, log: list[Any]) -> None:
    manifest, records = run([Plain("plain", log), Peer("a", log, 9 * GIB), Peer("b", log, GIB)])
    assert manifest.peers["a"] == (
        "it needs 9.0 GiB of memory (4.5 GiB of cache), 8.0 GiB are free; end other programs, or "
        "use a smaller model, -n or --max-new-tokens"
    )
    assert {record.method for record in records} == {"plain", "b"}
    assert {record.group for record in records} == {0}


def test_a_run_that_ended_early_keeps_its_groups(run: Any, log: list[Any]) -> None:
    def stops(peer: Fake, example: Any) -> None:
        if peer.runs == 3:
            raise KeyboardInterrupt

    sizes = {"a": 6 * GIB, "b": 6 * GIB}
    first = [Peer("a", log, sizes["a"]), Peer("b", log, sizes["b"], stops)]
    with pytest.raises(KeyboardInterrupt):
        run([Plain("plain", log), *first])
    assert not any(peer.is_open for peer in first)  # Ctrl-C leaves no worker
    again: list[Any] = []
    manifest, records = run(
        [Plain("plain", again), Peer("a", again, sizes["a"]), Peer("b", again, sizes["b"])]
    )
    assert manifest.peer_memory["b"]["group"] == 1 and not incomplete(manifest, records)
    assert not any(entry[:2] in (("warm", "a"), ("a", "s0")) for entry in again)  # is not started
    assert len(records) == 4 * 4  # plain twice, a and b


def test_a_cache_is_sized_from_the_run(run: Any, log: list[Any]) -> None:
    class Same(Peer):
        """In the process of the other one of its class."""

        host = "both"

    one, many, same = Peer("one", log, GIB), Same("many", log, GIB), Same("same", log, GIB)
    many.is_batched = True
    run([Plain("plain", log), one, many, same])
    # the prompts have 4 tokens, answers up to 100; in whole blocks of LENGTH_STEP
    assert one.demand == CacheDemand(1, LENGTH_STEP)
    assert many.demand == same.demand == CacheDemand(4, LENGTH_STEP)


def test_a_peer_that_no_longer_fits_goes_on_in_a_later_group(run: Any, log: list[Any]) -> None:
    """It started together with another one, and less memory is free when the run goes on."""

    def stops(peer: Fake, example: Any) -> None:
        if peer.runs == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Plain("plain", log), Peer("a", log, 3 * GIB, stops), Peer("b", log, 3 * GIB)])
    again: list[Any] = []
    peers = [Peer("a", again, 3 * GIB), Peer("b", again, 3 * GIB)]
    manifest, records = run([Plain("plain", again), *peers], free=5 * GIB)
    assert manifest.peer_memory["b"]["group"] == 1 and not incomplete(manifest, records)
    of_b = {r.index: r.group for r in records if r.method == "b"}
    assert of_b == {0: 0, 1: 0, 2: 0, 3: 1}  # nothing is measured twice
    plain = [(r.index, r.group) for r in records if r.method == "plain"]
    assert sorted(plain) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]


def test_sizes_in_messages() -> None:
    sizes = {0: "0 MiB", -5: "0 MiB", 14 << 20: "14 MiB", GIB: "1.0 GiB", 3 * GIB // 2: "1.5 GiB"}
    assert {size: size_text(size) for size in sizes} == sizes


def timed(records: list[Record], seconds: dict[tuple[str, int], float]) -> list[Record]:
    """The records with other times, by method and group."""
    return [
        replace(r, seconds=seconds[r.method, r.group], prefill_seconds=0.01, limits=None)
        for r in records
    ]


def test_speeds_are_compared_within_a_group(run: Any, log: list[Any]) -> None:
    """In the second group all took twice as long: a machine that became slower in between."""
    peers = [Peer("a", log, 6 * GIB), Peer("b", log, 6 * GIB)]
    manifest, records = run([Plain("plain", log), *peers])
    times = {("plain", 0): 2.0, ("a", 0): 1.0, ("plain", 1): 4.0, ("b", 1): 1.0}
    ranking = Ranking(manifest, timed(records, times))
    by_name = {entry.method: entry for entry in ranking.entries}
    assert by_name["a"].speed and by_name["a"].speed.ratio == pytest.approx(2.0)
    assert by_name["b"].speed and by_name["b"].speed.ratio == pytest.approx(4.0)
    over = ranking.over(by_name["b"], by_name["a"])
    assert over and over.ratio == pytest.approx(2.0)  # by their own plain decoding
    assert paired_speed_up(by_name["b"].timed, by_name["a"].timed) is None
    best = ranking.best()
    assert best is by_name["b"]
    assert "in 2 interleaved groups" in context(manifest)
    (line,) = [line for line in alerts(manifest, records) if "for lack of memory" in line]
    assert "2 groups for lack of memory, each interleaved with plain decoding: a; b." in line


def test_what_is_missing_of_plain_decoding_in_a_later_group(run: Any, log: list[Any]) -> None:
    peers = [Peer("a", log, 6 * GIB), Peer("b", log, 6 * GIB)]
    manifest, records = run([Plain("plain", log), *peers])
    lost = [r for r in records if (r.method, r.group) == ("plain", 1)][:1]
    assert incomplete(manifest, [r for r in records if r not in lost]).endswith("missing: plain 1")
    gone = replace(manifest, peers={**manifest.peers, "b": "broke"})
    first = [r for r in records if r.group == 0]
    assert not incomplete(gone, first)  # group 1 has no peer left
