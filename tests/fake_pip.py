"""Stands in for `python -m pip download`, so that no test needs a network.

Put on PYTHONPATH as `pip.py` it is found before the real one. It serves the wheels of a folder and
writes down what it was asked for. A file `mode` there makes it fail: "offline NAME", "hang NAME"
(with half a wheel written), "full", "none".
"""

import os
import shutil
import sys
import time
from pathlib import Path

OFFLINE = """\
WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError': /simple/{0}/
ERROR: Could not find a version that satisfies the requirement {0} (from versions: none)
ERROR: No matching distribution found for {0}
"""


def main() -> int:
    here = Path(os.environ["FAKE_PIP"])
    args = sys.argv[1:]
    with (here / "asked").open("a") as log:
        print(*args, file=log)
    package = args[-1]
    mode, _, only = (here / "mode").read_text().partition(" ")
    wheel = next(here.glob(package.partition("==")[0].replace("-", "_") + "-*.whl"))
    if only in ("", package):
        if mode == "none":
            print(f"{sys.executable}: No module named pip", file=sys.stderr)
            return 1
        if mode == "offline":
            print(OFFLINE.format(package), end="", file=sys.stderr)
            return 1
        if mode == "full":
            text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left"
            print(text, "on device", file=sys.stderr)
            return 1
        if mode == "hang":
            data = wheel.read_bytes()
            (Path(os.environ["TMPDIR"]) / wheel.name).write_bytes(data[: len(data) // 2])
            (here / "pid.part").write_text(str(os.getpid()))
            os.replace(here / "pid.part", here / "pid")
            while True:
                time.sleep(60)
    out = Path(args[args.index("-d") + 1])
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
