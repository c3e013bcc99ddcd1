"""A `with` around what a drafter learns: it begins and ends whole, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
from test_memories import ORIGIN, drafts, sequence, taught

from forerun import registry
from forerun.api import Model, load
from forerun.drafters.stand import Stand
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.state import array_file, drafter_files
from forerun.state.drafter_files import MemoryFile
from forerun.utils.locks import FairLock


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Model:
    return load(tiny_folder, dtype="fp32")


def test_around_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.mem"
    with MemoryFile(path, taught(), ORIGIN) as kept:
        assert kept.before is None
    assert kept.after and kept.after.snapshot.counts["tokens"] == 60
    for _ in range(3):  # the same drafter again and again: nothing counts twice
        with MemoryFile(path, kept.drafter, ORIGIN):
            pass
    assert drafter_files.read(path).snapshot.counts["tokens"] == 60
    created = drafter_files.read(path).origin.created
    with (
        pytest.raises(KeyboardInterrupt),
        MemoryFile(path, Stand(context=2, entries=4), ORIGIN) as kept,
    ):
        kept.drafter.memory(sequence([1])).update([1], [2], [1.0])
        raise KeyboardInterrupt
    held = drafter_files.read(path)
    assert held.snapshot.counts["tokens"] == 61 and held.origin.created == created


def test_what_is_kept_of_a_tenant_changes_nothing_for_others_or_later(tmp_path: Path) -> None:
    drafter = Stand()
    mine, theirs = sequence([1], "g", tenant="a"), sequence([1], "g2", tenant="b")
    with MemoryFile(tmp_path / "a.mem", drafter, replace(ORIGIN, tenant="a")):
        drafter.memory(mine).update([1], [2], [1.0])
        other = drafter.memory(sequence([1], "h", tenant="a"))
        assert other.fallback is drafter.memory(mine).fallback
        assert drafter.memory(sequence([1], "h2", tenant="b")) is not drafter.memory(theirs)
    assert drafter.memory(sequence([1], "h", tenant="a")) is not drafter.memory(mine)
    assert not len(drafter.memory(sequence([1], "new", tenant="a")))
    with MemoryFile(tmp_path / "a.mem", drafter, replace(ORIGIN, tenant="a")):
        assert len(drafter.memory(sequence([1], "later", tenant="a")).fallback) == 1


def test_who_runs_when_a_block_begins_or_ends_goes_on(tmp_path: Path) -> None:
    drafter, seq, other = Stand(), sequence([1], "g"), sequence([1], "g2", tenant="b")
    drafter.start(seq)
    drafter.start(other)
    drafter.memory(seq).update([1], [2], [1.0])
    theirs = drafter.memory(other)
    with MemoryFile(tmp_path / "a.mem", drafter, ORIGIN) as kept:
        drafter.memory(seq).update([1], [3], [1.0])
    assert kept.after and kept.after.snapshot.counts["tokens"] == 1, "since the block began"
    assert drafter.memory(seq).fallback is None and drafter.memory(other) is theirs
    drafter.finish(seq)
    drafter.finish(other)
    drafter.keep()
    assert drafter.snapshot().counts["tokens"] == 0


def test_a_second_block_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    drafter, one, two = taught(), tmp_path / "one.mem", tmp_path / "two.mem"
    with MemoryFile(one, drafter, ORIGIN):
        with pytest.raises(ConfigError, match=r"open with file .*one.mem; end that `with` first"):
            MemoryFile(two, drafter, ORIGIN).__enter__()
        with MemoryFile(two, drafter, replace(ORIGIN, tenant="b")):
            pass
    assert drafter_files.read(one).snapshot.counts["tokens"] == 60
    with MemoryFile(one, drafter, ORIGIN):
        pass


@pytest.mark.parametrize("options", [{"context": 3}, {}])
@pytest.mark.parametrize("how", ["load", "with"])
def test_a_refused_file_changes_nothing(tmp_path: Path, options: dict, how: str) -> None:
    """One of other settings or of another tokenizer, for a drafter or for a whole of several."""
    path, drafter, seq = tmp_path / "a.mem", Stand(), sequence([1], "g")
    origin = ORIGIN if options else replace(ORIGIN, tokenizer="u" * 64)
    MemoryFile(path, taught(**options | {"entries": 10}), origin).save()
    whole = registry.make("drafter", "fuse", parts=("prompt_lookup", drafter))
    drafter.start(seq)
    memory = drafter.memory(seq)
    memory.update([1], [2], [1.0])
    for one in (drafter, whole):
        kept = MemoryFile(path, one, ORIGIN)
        with pytest.raises(ConfigError, match="another tokenizer|context=3"):
            kept.load() if how == "load" else kept.__enter__()
        assert drafter.memory(seq) is memory and len(memory) == 1
        assert drafter.memory(seq).fallback is None and not one.kept


def test_what_was_loaded_stays_loaded_where_a_block_is_refused(tmp_path: Path) -> None:
    path, drafter = tmp_path / "a.mem", Stand(context=2, entries=4)
    MemoryFile(path, taught(), ORIGIN).save()
    (kept := MemoryFile(path, drafter, ORIGIN)).load()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut off"):
        kept.__enter__()
    assert drafts(drafter) == drafts(taught()) and drafter.kept == {""}


def test_what_a_block_could_not_save_another_file_takes(tmp_path: Path) -> None:
    folder, drafter, seq = tmp_path / "gone", Stand(), sequence([1], "g")
    folder.mkdir()
    failing = pytest.raises(CapacityError)
    with failing as caught, MemoryFile(folder / "a.mem", drafter, ORIGIN):
        drafter.memory(seq).update([1], [2], [1.0])
        rmtree(folder)  # with its lock
    assert "until a file is loaded: save it first with" in caught.value.__notes__[0]
    assert MemoryFile(tmp_path / "a.mem", drafter, ORIGIN).save().snapshot.counts["tokens"] == 1
    with MemoryFile(tmp_path / "b.mem", drafter, ORIGIN):
        pass
    assert drafter.memory(seq).fallback is None and not drafter.kept


def test_nobody_waits_while_a_file_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, free = FairLock(), list[bool]()

    def is_free() -> bool:
        if is_mine := turns.acquire(blocking=False):
            turns.release()
        return is_mine

    def watched(does: Callable[..., object]) -> Callable[..., object]:
        def watch(*given: object) -> object:
            with ThreadPoolExecutor(1) as other:
                free.append(other.submit(is_free).result(10))
            return does(*given)

        return watch

    for name in ("read", "write"):
        monkeypatch.setattr(array_file, name, watched(getattr(array_file, name)))
    for _ in range(2):
        with MemoryFile(tmp_path / "a.mem", taught(), ORIGIN, turns):
            pass
    assert free == [True] * 3


def test_saving_by_hand_what_was_not_kept_is_refused(tiny: Model, tmp_path: Path) -> None:
    options = {"temperature": 0.0, "max_new_tokens": 9, "drafter": "stand"}
    memory = tiny.memory(path := tmp_path / "a.mem", drafter="stand")
    tiny.generate("the cat", **options)
    with pytest.raises(ConfigError, match="generate inside `with model.memory"):
        memory.save()
    assert not path.exists()
    assert tiny.drafter("stand").memory(sequence([1])).fallback is None
    with tiny.memory(path, drafter="stand"):
        tiny.generate("the cat", **options)
    memory.load()
    tiny.generate("the dog", **options)
    assert memory.save().snapshot.counts["tokens"] > 9
    assert len(repr(memory.save())) < 1000, "no arrays"


def test_threads_save_and_generate_side_by_side(tiny: Model, tmp_path: Path) -> None:
    options = {"max_new_tokens": 9, "drafter": "stand:entries=8", "n": 2}

    def save(number: int) -> int:
        with tiny.memory(tmp_path / "a.mem", drafter="stand:entries=8", tenant="t") as kept:
            tiny.generate("the dog", tenant="t", **options)
        return kept.after.snapshot.counts["tokens"]

    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(tiny.generate, "the cat", tenant="t", **options) for _ in range(20)]
        counts = [save(number) for number in range(20)]
        for text in texts:
            text.result(60)
    assert counts == sorted(counts) and counts[0] > 0


def test_an_error_on_saving_does_not_hide_what_ended_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ZeroDivisionError) as caught, MemoryFile(folder / "a.mem", taught(), ORIGIN):
        rmtree(folder)
        raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "a.mem was not saved: cannot write" in note and "until a file is loaded" in note
    assert "was not saved" in caplog.text
    folder.mkdir()
    cannot = pytest.raises(CapacityError, match="cannot write")  # alone it is raised itself
    with cannot, MemoryFile(folder / "a.mem", taught(), ORIGIN):
        rmtree(folder)


def test_a_file_that_cannot_be_loaded_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.mem"
    MemoryFile(path, taught(), ORIGIN).save()
    cut = path.read_bytes()[:-1]
    path.write_bytes(cut)
    with pytest.raises(DataError, match="cut off"), MemoryFile(path, taught(1), ORIGIN):
        raise AssertionError("the block must not begin")
    assert path.read_bytes() == cut
    with (
        pytest.raises(DataError, match="no folder"),
        MemoryFile(tmp_path / "x" / "y", taught(), ORIGIN),
    ):
        raise AssertionError("the block must not begin")
