"""Pages of other sites, slow connections and key files: what an attacker without a key may try."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.errors import DataError
from forerun.serving.tenants import Keys
from served import SHORT, Served, command, environment, thread

FRIEND = "https://friend.example:8443"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def keyless(tiny_chat: Path) -> Iterator[Served]:
    """A server without keys that knows one other site and one other name."""
    options = ("--allowed-origins", FRIEND, "--allowed-hosts", "llm.example.org,*.lan.example")
    with command(tiny_chat, "--name", "tiny", *options, "--header-timeout", 1) as served:
        yield served


def post(served: Served, headers: dict[str, str], **request: Any) -> httpx.Response:
    """A completion with some headers."""
    content = request.pop("content", json.dumps(SHORT))
    return httpx.post(
        f"{served.url}/v1/completions", content=content, headers=JSON | headers, timeout=60
    )


def code(answer: httpx.Response, status: int) -> str:
    """The code of an error in OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]["code"]


FOREIGN = (
    "http://evil.example",
    "https://evil.example:8443",
    "http://localhost:3000",
    "null",
    "file://",
    "chrome-extension://abc",
    "https://friend.example",
    f"{FRIEND}.evil.example",
    "",
)


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_other_sites_are_refused(keyless: Served, origin: str) -> None:
    assert code(post(keyless, {"Origin": origin}), 403) == "origin_not_allowed"
    assert "access-control-allow-origin" not in post(keyless, {"Origin": origin}).headers


def test_its_own_page_and_allowed_sites_are_served(keyless: Served) -> None:
    assert post(keyless, {"Origin": keyless.url}).is_success
    answer = post(keyless, {"Origin": FRIEND})
    assert answer.is_success and answer.headers["access-control-allow-origin"] == FRIEND
    assert answer.headers["vary"] == "Origin"
    wrong = post(keyless, {"Origin": FRIEND}, content="{")
    assert wrong.status_code == 400 and wrong.headers["access-control-allow-origin"] == FRIEND


def test_a_form_of_another_site_without_origin_is_refused(keyless: Served) -> None:
    assert code(post(keyless, {"Sec-Fetch-Site": "cross-site"}), 403) == "origin_not_allowed"
    assert post(keyless, {"Sec-Fetch-Site": "same-origin"}).is_success


REBOUND = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example")
REBOUND += ("user@127.0.0.1", "lan.example.evil", "notlan.example")


@pytest.mark.parametrize("host", REBOUND)
def test_a_name_that_was_pointed_here_is_refused(keyless: Served, host: str) -> None:
    """DNS rebinding: host and origin agree, but the name is not ours."""
    rebound = {"Host": host, "Origin": f"http://{host}"}
    assert code(post(keyless, rebound), 403) == "host_not_allowed"
    for path in ("/v1/models", "/metrics", "/"):
        answer = httpx.get(keyless.url + path, headers={"Host": host})
        assert code(answer, 403) == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost:1", "[::1]:8000", "10.0.0.7", "llm.example.org", "a.lan.example:80", "box"]
)
def test_names_of_this_machine_are_served(keyless: Served, host: str) -> None:
    assert post(keyless, {"Host": host}).is_success


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_json_is_read(keyless: Served, kind: str) -> None:
    """Browsers send other types to other sites without asking."""
    assert code(post(keyless, {"Content-Type": kind}), 415) == "unsupported_media_type"
    assert post(keyless, {"Content-Type": "application/json; charset=utf-8"}).is_success


def test_preflight(keyless: Served) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-stainless-lang",
        "Access-Control-Request-Private-Network": "true",
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
        url = keyless.url + path
        answer = httpx.options(url, headers=asked | {"Origin": FRIEND})
        assert answer.status_code == 204
        found = answer.headers
        assert found["access-control-allow-origin"] == FRIEND
        assert "POST" in found["access-control-allow-methods"]
        assert found["access-control-allow-headers"] == "content-type,x-stainless-lang"
        assert found["access-control-allow-private-network"] == "true"
        refused = httpx.options(url, headers=asked | {"Origin": "http://evil.example"})
        assert code(refused, 403) == "origin_not_allowed"
        assert "access-control-allow-origin" not in refused.headers


def test_a_server_with_keys_is_protected_by_them(tiny_model: Any) -> None:
    """Other names and clients with an origin are served; a browser's preflight is not."""
    with thread(tiny_model, Keys([("red", "secret")])) as served:
        headers = {"Authorization": "Bearer secret", "Host": "llm.example.com"}
        assert post(served, headers | {"Origin": "http://other.example"}).is_success
        asked = {"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
        assert code(httpx.options(f"{served.url}/v1/completions", headers=asked), 403)


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_connections_that_send_nothing_or_half_a_head_are_closed(keyless: Served) -> None:
    with connect(keyless) as silent, connect(keyless) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert silent.recv(100) == b""
        answer = slow.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 408") and b'"timeout_error"' in answer
        while slow.recv(1000):  # and it ends
            pass


MALFORMED = {
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "length": (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
    "long path": (b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", 431),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_http_gets_an_error_in_json(keyless: Served, kind: str) -> None:
    sent, status = MALFORMED[kind]
    with connect(keyless) as client:
        answer = b""
        with suppress(ConnectionError):  # closed before all was sent
            client.sendall(sent[:70_000])
            while piece := client.recv(10_000):
                answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head.lower()
    assert b"content-length: %d" % len(body) in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "not valid HTTP/1.1: " in error["message"]


def test_malformed_http_after_an_answer_gets_one_too(keyless: Served) -> None:
    with connect(keyless) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(10_000)
        client.sendall(b"?\r\n\r\n")
        assert client.recv(10_000).startswith(b"HTTP/1.1 400 Bad Request")


def test_a_head_that_drips_is_closed_although_bytes_come(keyless: Served) -> None:
    with connect(keyless) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        client.settimeout(0.05)
        for number in range(1000):
            try:
                client.sendall(f"X-{number}: 1\r\n".encode())
                if client.recv(100).startswith(b"HTTP/1.1 408"):
                    return
            except TimeoutError:
                continue
        raise AssertionError("the connection stayed open")


def test_a_second_request_on_a_connection_has_a_limit_too(keyless: Served) -> None:
    with connect(keyless) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTT")
        assert client.recv(10_000).startswith(b"HTTP/1.1 408")


LINES = ("red:", ":key", "red:a:b", "red: a key", "key # ours", '"key"', "red=key", "re d:key")
LINES += ("red:sécret", "red\x00:key", "export KEY", "key\x07")


@pytest.mark.parametrize("line", LINES)
def test_malformed_lines_of_a_key_file_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"good-key\n{line}\n", "utf-8")
    with pytest.raises(DataError, match="line 2 of the API keys must be TENANT:KEY or KEY"):
        Keys.load(path)


def test_good_lines_of_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfred : sk-a_b.c~d+e/f==\r\n\r\n# comment\r\nplain\r\n")
    keys = Keys.load(path)
    assert keys.tenant("Bearer sk-a_b.c~d+e/f==") == "red"
    assert keys.tenant("bearer plain") == "key 4"


@pytest.mark.parametrize(
    ("mode", "warns"),
    [
        (0o644, True),
        pytest.param(0o660, True, marks=pytest.mark.slow),
        pytest.param(0o600, False, marks=pytest.mark.slow),
    ],
)
def test_a_key_file_that_others_may_read_gets_a_warning(
    tmp_path: Path, mode: int, warns: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("red:secret\n")
    path.chmod(mode)
    call = [sys.executable, "-m", "forerun", "serve", tmp_path / "none", "--api-keys", path]
    ended = subprocess.run(
        [*map(str, call), "--port", "0"], capture_output=True, text=True, env=environment()
    )
    assert (f"mode {mode:o}" in ended.stderr and "chmod 600" in ended.stderr) == warns
    assert "secret" not in ended.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (("--allowed-origins", "friend.example"), "--allowed-origins must be SCHEME://HOST"),
        (("--allowed-origins", "http://a.example/path"), "--allowed-origins must be SCHEME://HOST"),
        (("--allowed-hosts", "http://a.example"), "--allowed-hosts must be names without"),
        (("--allowed-hosts", ""), "--allowed-hosts is empty: got ''; give a value or leave it out"),
        (("--allowed-hosts", "a", "--allowed-hosts", " ,"), "--allowed-hosts is empty: got ' ,'"),
        (("--allowed-origins", ""), "--allowed-origins is empty"),
        (("--chat-template", os.devnull), "leaves out the text of user messages"),
        (("--header-timeout", "0"), "--header-timeout must be more than 0 seconds"),
        (("--operator", "ops"), "--operator must be a tenant of the API keys, got 'ops'"),
    ],
)
def test_bad_options_are_refused_at_the_start(words: tuple[str, str], says: str) -> None:
    call = [sys.executable, "-m", "forerun", "serve", *words]
    ended = subprocess.run(call, capture_output=True, text=True, env=environment())
    assert ended.returncode == 2 and says in ended.stderr
    assert "Traceback" not in ended.stderr
