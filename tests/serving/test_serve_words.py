"""What `forerun serve` says on the terminal while it starts, runs and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from forerun.utils.jit_cache import NOTICE
from served import environment


def said(folder: Path, **more: str) -> str:
    """All of standard error of a server that answers some requests, good and bad, and ends."""
    call = [sys.executable, "-m", "forerun.cli.main", "serve", str(folder), "--port", "0"]
    call += ["--method", "my-own=none"]
    with subprocess.Popen(
        call, stderr=subprocess.PIPE, text=True, env=environment(**more)
    ) as process:
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"at (http://\S+)/v1", line):
                    ask(found[1])
                    process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, "".join(lines)
        finally:
            process.kill()
    return "".join(lines)


def ask(url: str) -> None:
    """The right key and wrong ones; bodies that are answered and bodies that are not."""
    body = {"prompt": "my own words", "max_tokens": 2}
    keys = ("secret-one", "secret-too", "none")
    with httpx.Client(base_url=url, timeout=60) as client:
        for headers in ({"Authorization": f"Bearer {key}"} for key in keys):
            for change in ({}, {"temperature": -1}, {"prompt": ["my own words", 3]}):
                answer = client.post("/v1/completions", json=body | change, headers=headers)
                assert answer.status_code in (200, 400, 401)
            json_type = headers | {"Content-Type": "application/json"}
            client.post("/v1/completions", content=b'{"my own words', headers=json_type)
        named = body | {"speculation": {"method": "my-own"}}
        headers = {"Authorization": "Bearer secret-one"}
        assert client.post("/v1/completions", json=named, headers=headers).is_success


def test_it_says_what_it_does_and_neither_keys_nor_prompts(tiny_chat: Path) -> None:
    text = said(tiny_chat, FORERUN_API_KEYS="red:secret-one")
    begin, *_, end = text.splitlines()
    assert begin == f"loading {tiny_chat}"
    assert re.search(r"serving '\w+' at http://\S+/v1 \(1 API key\); methods: .*my_own", text)
    assert end == "all requests are answered; goodbye"
    for secret in ("secret-", "my own words"):
        assert secret not in text


@pytest.mark.slow
def test_the_first_start_says_that_it_compiles_and_the_next_does_not(
    tiny_chat: Path, tmp_path: Path
) -> None:
    first, next_ = (said(tiny_chat, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert NOTICE in first and re.search(r"compiled in \d+ s\n", first)
    assert first.index("loading") < first.index(NOTICE) < first.index("serving '")
    assert "compil" not in next_
