"""An index built and searched on Ray: the files and the answers of one process, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_files import data, numbers_file, write_lines

from forerun.cli.main import main
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.integrations import ray_index
from forerun.integrations.ray_index import RayIndex, ShardSearcher
from forerun.ngrams.index.build import build
from forerun.ngrams.index.build.build import Options
from forerun.ngrams.index.build.documents import Reading
from forerun.ngrams.index.query.engine import Index

IDS = Reading("tokens", is_ids=True)
PARTS = Options(tokenizer="ids", reading=IDS, shards=3, part=100, overlap=500)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return numbers_file(tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers on this machine."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_niceness", "0")
        ray.init("local", num_cpus=2, object_store_memory=100 << 20, **quiet)
        yield ray
        ray.shutdown()


# what needs no cluster


def test_pieces_run_elsewhere_make_the_same_files(numbers: Path, tmp_path: Path) -> None:
    """`call` gets every piece with arguments that travel; what it is given is all they need."""
    import pickle

    names = []

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        names.append(function.__name__)
        return pickle.loads(pickle.dumps(function(*arguments)))

    build.build(tmp_path / "local", [numbers], PARTS)
    build.build(tmp_path / "called", [numbers], PARTS, call=call)
    assert data(tmp_path / "called") == data(tmp_path / "local")
    assert set(names) == {"sort_piece", "merge_slice", "shard_info"}
    lines = write_lines(tmp_path / "t.jsonl", [{"text": f"to be {i}"} for i in range(20)])
    for name, other in (("a", None), ("b", call)):
        build.build(tmp_path / name, [lines], Options(tokenizer="bytes", shards=2), call=other)
    assert data(tmp_path / "a") == data(tmp_path / "b") and "encode" in names


def test_a_tokenizer_that_differs_on_a_worker_is_refused() -> None:
    from forerun.ngrams.index.build.tokenize import encode

    with pytest.raises(DataError, match="'bytes' has another vocabulary on"):
        encode("bytes", "0" * 32, ["text"])


def test_a_folder_that_a_worker_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist on .* share under the same path"):
        ray_index._run(tmp_path / "elsewhere", print, ())
    assert ray_index._run(tmp_path, sum, ([1, 2],)) == 3


def test_unknown_engines_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["index", "build", str(tmp_path), str(tmp_path), "--engine", "rayy"]) == 2
    assert "did you mean 'ray'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="actors must be at least 1"):
        RayIndex.open(tmp_path, actors=0)


# on a cluster of two workers


def asked(index: Index) -> list[Any]:
    """Answers to all kinds of queries, single and in batches."""
    rng = np.random.default_rng(1)
    queries = [rng.integers(0, 6, int(n)).tolist() for n in rng.integers(0, 7, 40)]
    queries += [[], [index.separator, 1], [3, index.separator], [9]]
    found: list[Any] = [index.count_many(queries).tolist()]
    for q in queries[::4]:
        found += [index.count(q), index.find(q), index.prob(q, 1), index.longest_suffix(q)]
        found += [index.infgram_prob(q, 2), index.prob(q, index.separator)]
    followed = [index.ntd(q) for q in queries[::4]] + [index.ntd(q, 3) for q in queries[::4]]
    followed += [*index.infgram_many(queries), *map(index.infgram_ntd, queries[::4])]
    found += [(n.ids.tolist(), n.counts.tolist(), n.suffix_length) for n in followed]
    ranges = index.find_cnf([[[1]], [[2, 3]]])
    found += [ranges.count, [part.tolist() for part in ranges.ranges]]
    return [*found, index.search([1, 2], seed=3)]


@pytest.mark.slow
def test_a_build_on_ray_is_that_of_one_process(
    cluster: Any, numbers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.build(tmp_path / "local", [numbers], PARTS)
    seen = []
    manifest = ray_index.build(
        tmp_path / "ray", [numbers], PARTS, report=lambda *row: seen.append(row)
    )
    assert data(tmp_path / "ray") == data(tmp_path / "local")
    assert ("merge", manifest.tokens, manifest.tokens) in seen
    texts = write_lines(tmp_path / "t.jsonl", [{"text": f"one two {i}"} for i in range(50)])
    for engine in ("local", "ray"):
        words = ["index", "build", tmp_path / f"cli-{engine}", texts, "--shards", 2]
        words += ["--engine", engine, "--workers", 2]
        assert main([str(word) for word in words]) == 0
    assert data(tmp_path / "cli-ray") == data(tmp_path / "cli-local")
    capsys.readouterr()


def deadly(mark: Path, is_always: bool = False) -> Callable[[str], list[int]]:
    """A tokenizer whose process is killed over its first text, once."""

    def encode(text: str) -> list[int]:  # made here: travels by its code, not by its name
        if is_always or not mark.exists():
            with mark.open("a") as file:
                file.write("died\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return list(text.encode())

    return encode


@pytest.mark.slow
def test_a_killed_tokenising_task_is_run_again(cluster: Any, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "t.jsonl", [{"text": f"to be {i}"} for i in range(20)])
    mark = tmp_path / "mark"
    build.build(tmp_path / "local", [lines], Options(tokenizer="bytes"))
    ray_index.build(tmp_path / "ray", [lines], Options(tokenizer=deadly(mark)))
    tokens = [name for name in data(tmp_path / "local") if name.split(".")[0] != "tokenizer"]
    assert mark.read_text() == "died\n"
    assert all(data(tmp_path / "ray")[name] == data(tmp_path / "local")[name] for name in tokens)
    mark.unlink()
    with pytest.raises(CapacityError, match="3 processes in a row died on the same"):
        ray_index.build(tmp_path / "never", [lines], Options(tokenizer=deadly(mark, True)))
    assert mark.read_text() == "died\n" * 3
    with pytest.raises(DataError, match="interrupted"):
        Index.open(tmp_path / "never")


def dying_at(name: str, mark: Path) -> Callable[..., Any]:
    """What tasks run, but the process of the first task of that name is killed as it begins."""
    whole = ray_index._run

    def run(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if function.__name__ == name:
            with suppress(FileExistsError):
                mark.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return whole(folder, function, arguments)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sort_piece", "merge_slice"])
def test_a_killed_sorting_task_is_run_again(
    cluster: Any, numbers: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(tmp_path / "local", [numbers], PARTS)
    monkeypatch.setattr(ray_index, "_run", dying_at(name, tmp_path / "mark"))
    ray_index.build(tmp_path / "ray", [numbers], PARTS)
    assert (tmp_path / "mark").exists()
    assert data(tmp_path / "ray") == data(tmp_path / "local")


@pytest.mark.slow
def test_actors_answer_as_one_process_and_come_back(
    cluster: Any, numbers: Path, tmp_path: Path
) -> None:
    build.build(tmp_path / "ix", [numbers], PARTS)
    expected = asked(Index.open(tmp_path / "ix"))
    with RayIndex.open(tmp_path / "ix", actors=2) as index:
        assert index.numbers == [[0, 2], [1]]
        assert asked(index) == expected
        (first, second) = cluster.get([actor.pid.remote() for actor in index.actors])
        os.kill(first, signal.SIGKILL)
        assert asked(index) == expected
        again, other = cluster.get([actor.pid.remote() for actor in index.actors])
        assert other == second and again != first
    assert index.actors == []


def test_an_actor_answers_for_its_shards(numbers: Path, tmp_path: Path) -> None:
    build.build(tmp_path / "ix", [numbers], PARTS)
    whole, part = Index.open(tmp_path / "ix"), ShardSearcher(tmp_path / "ix", [0, 2], True)
    flat, starts = whole._flat([[1], [2, 3]])
    found = whole._batch("find_many", flat, starts, 2)
    assert np.array_equal(part.call("_batch", "find_many", flat, starts, 2), found[[0, 2]])
    assert part.pid() == os.getpid()
