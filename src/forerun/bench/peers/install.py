"""Installs the peers, each in its own virtual environment.

    python -m forerun.bench.peers.install [--folder .peers] [--python python3.11] [NAME ...]

Finished environments are kept; failed or interrupted ones are tried again. peers.json in the folder
has the versions of every peer, or why it is skipped; NAME.log has the output of pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from forerun.bench.peers.catalog import CONSTRAINTS, PEERS, Peer
from forerun.errors import UnknownName
from forerun.utils.files import write_whole

DEFAULT_FOLDER = Path(".peers")
STATE = "peers.json"
PRELOAD = "LD_PRELOAD"
PIP = ("-m", "pip", "--disable-pip-version-check")
LIST = (
    "import json, importlib.metadata as m; "
    "names = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}; "
    "print(json.dumps(names))"
)


class InstallError(Exception):
    """A failed step of an installation, with its reason."""


def python_of(folder: Path, name: str) -> Path:
    """The path of the interpreter of a peer's environment."""
    return folder.absolute() / name / "bin" / "python"


def env_of(folder: Path, name: str) -> dict[str, str]:
    """Environment variables of a peer's process, without missing preloaded libraries."""
    home, cache = python_of(folder, name).parent.parent, folder.absolute() / "cache" / name
    found = {key: text.format(home=home, cache=cache) for key, text in PEERS[name].env.items()}
    if not Path(found.get(PRELOAD, "")).is_file():
        found.pop(PRELOAD, None)
    return found


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """The content of peers.json; empty without the file."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def problem(folder: Path, name: str, extra: str = "") -> str | None:
    """Why a peer or its extra package is unusable; None if usable."""
    entry = read_state(folder).get(name, {})
    if "skipped" in entry:
        return f"could not be installed: {entry['skipped']}"
    if not entry or not python_of(folder, name).exists():
        return f"no environment in {folder}; run `make peers`"
    if reason := entry.get("missing", {}).get(extra):
        return f"its package {extra} could not be installed: {reason}"
    return None


def installed(folder: Path) -> dict[str, Any]:
    """Every peer's versions, or the reason why it is skipped."""
    entries = read_state(folder)
    reasons = {name: problem(folder, name) for name in PEERS}
    return {name: reasons[name] or entries[name]["versions"] for name in PEERS}


def install(folder: Path, names: list[str], python: str) -> dict[str, dict[str, Any]]:
    """Installs the named peers; returns the entries of peers.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, start=1):
        peer, entry = PEERS[name], read_state(folder).get(name, {})
        recipe = recipe_hash(peer)
        if "versions" in entry and entry["recipe"] == recipe and python_of(folder, name).exists():
            print(f"peers [{number}/{len(names)}] {name}: ready")
            continue
        print(f"peers [{number}/{len(names)}] {name}: installing (log: {folder / name}.log)")
        start = time.perf_counter()
        try:
            entry = make(folder, name, peer, python)
            state = f"ready after {time.perf_counter() - start:.0f} s"
        except InstallError as reason:
            entry = {"skipped": str(reason)}
            state = f"skipped: {reason}"
        print(f"peers [{number}/{len(names)}] {name}: {state}")
        for extra, why in entry.get("missing", {}).items():
            print(f"peers [{number}/{len(names)}] {name}: without {extra}: {why}")
        write_state(folder, name, {**entry, "recipe": recipe})
    return read_state(folder)


def make(folder: Path, name: str, peer: Peer, python: str) -> dict[str, Any]:
    """Builds or continues one environment. Raises InstallError."""
    own = python_of(folder, name)
    path = os.pathsep.join([str(own.parent), os.environ.get("PATH", "")])
    env = {**os.environ, **peer.build_env, "PATH": path}  # for builds
    env.pop("PYTHONPATH", None)
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(CONSTRAINTS) + "\n")
    with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
        if not works(own):
            call([python, "-m", "venv", "--clear", str(folder / name)], log, env)
        call([str(own), *PIP, "install", "-c", str(pins), *peer.packages], log, env)
        remove(own, peer.removed, log, env)
        missing = add_extras(own, peer, folder / f"{name}.freeze.txt", log, env)
        call([str(own), "-c", peer.probe], log, env)
    return {"python": version_of(own), "versions": versions(own, peer), "missing": missing}


def remove(own: Path, packages: tuple[str, ...], log: IO[str], env: Mapping[str, str]) -> None:
    """Uninstalls dependencies that break an import."""
    if packages:
        call([str(own), *PIP, "uninstall", "-y", *packages], log, env)


def add_extras(
    own: Path, peer: Peer, pins: Path, log: IO[str], env: Mapping[str, str]
) -> dict[str, str]:
    """Tries the extra packages without changing installed ones; extra -> why it failed."""
    missing = {}
    for extra, installs in peer.extras.items():
        pins.write_text(
            "".join(f"{package}=={version}\n" for package, version in everything(own).items())
        )
        try:
            for wanted in installs:
                call([str(own), *PIP, "install", "-c", str(pins), *wanted], log, env)
        except InstallError as reason:
            missing[extra] = str(reason)
    return missing


def call(command: list[str], log: IO[str], env: Mapping[str, str]) -> None:
    """Runs a command with its output in the log. Raises InstallError with the reason."""
    log.write("$ " + " ".join(command) + "\n")
    log.flush()
    start = log.tell()
    try:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
    except OSError as error:
        raise InstallError(f"cannot run {command[0]}: {error.strerror}") from None
    if code:
        with open(log.name, encoding="utf-8", errors="replace") as written:
            written.seek(start)
            raise InstallError(reason_in(written.read()) or f"exit status {code}")


def reason_in(text: str) -> str:
    """The first error of pip, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    return (errors or lines[-1:] or [""])[0][:300]


def works(python: Path) -> bool:
    """Whether an environment has an interpreter with pip."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and not subprocess.run(command, capture_output=True).returncode


def everything(own: Path) -> dict[str, str]:
    """All packages of an environment and their versions."""
    return json.loads(subprocess.run([str(own), "-c", LIST], capture_output=True).stdout)


def versions(own: Path, peer: Peer) -> dict[str, str]:
    """Versions of the requested packages."""
    found = everything(own)
    wanted = [text.partition("==")[0].lower() for text in (*peer.packages, *peer.extras)]
    return {package: found[package] for package in wanted if package in found}


def version_of(own: Path) -> str:
    """The interpreter's version."""
    command = [str(own), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def recipe_hash(peer: Peer) -> str:
    """Hash of the packages, to update old environments."""
    parts = [CONSTRAINTS, peer.packages, sorted(peer.extras.items()), peer.removed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def write_state(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Writes one peer's entry; peers.json is replaced atomically."""
    state = {**read_state(folder), name: entry}
    write_whole(folder / STATE, json.dumps(state, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="forerun.bench.peers.install", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--python", default=shutil.which("python3.11") or sys.executable)
    given = parser.parse_args()
    for name in given.names:
        if name not in PEERS:
            parser.error(str(UnknownName.of("peer", name, PEERS)))
    install(given.folder, given.names or list(PEERS), given.python)


if __name__ == "__main__":
    main()
