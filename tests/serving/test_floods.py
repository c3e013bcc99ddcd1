"""Long texts, looping templates and signals: one client must not stop the server for others."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import make_tiny

from served import GO, SHORT, Served, command, wait_until

LOOPS = (
    "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "{% if 'bomb' in messages[0].content %}{{ (messages[0].content * 9999999999) | length }}"
    "{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def slow_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long context, a tokenizer that is not byte-level, and a template that loops on demand."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = make_tiny(tmp_path_factory.mktemp("floods") / "tiny", context=512 * 1024)
    path = folder / "tokenizer.json"
    old = json.loads(path.read_text())
    words = sorted(old["model"]["vocab"], key=old["model"]["vocab"].get)
    inner = Tokenizer(models.Unigram([(word, -1.0 - i / 99) for i, word in enumerate(words)], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    state = json.loads(inner.to_str()) | {"added_tokens": old["added_tokens"]}
    path.write_text(json.dumps(state))
    (folder / "chat_template.jinja").write_text(LOOPS)
    return folder


@pytest.fixture(scope="module")
def served(slow_text: Path) -> Iterator[Served]:
    with command(slow_text, "--name", "tiny", "--context", 32768, "--text-timeout", 2) as found:
        yield found


def chat(served: Served, content: str) -> httpx.Response:
    call = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return served.post("/v1/chat/completions", json=call)


def error(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


def test_far_too_long_texts_are_refused_before_they_are_tokenised(served: Served) -> None:
    """Also of a tokenizer without a bound on the characters of a token."""
    for text in ("a b " * 900_000, "\u4e00" * 600_000, " " * 3_600_000):
        refused = error(served.post("/v1/completions", json=GO | {"prompt": text}), 400)
        assert refused["code"] == "context_length_exceeded"
        assert "characters, of which at most" in refused["message"]
    refused = error(chat(served, "a b " * 900_000), 400)
    assert refused["code"] == "context_length_exceeded" and refused["param"] == "messages"


def test_a_text_that_fits_is_tokenised_whole(served: Served) -> None:
    """In a worker process, with the ids that the tokenizer gives here."""
    text = "the cat sat " * 1000
    assert len(text) > 8192
    counts = [
        served.post("/v1/completions", json=GO | {"prompt": part, "max_tokens": 1}).json()
        for part in (text[:6000], text)
    ]
    first, whole = (one["usage"]["prompt_tokens"] for one in counts)
    assert first < whole == pytest.approx(2 * first, rel=0.01)


def test_templates_have_limits_of_time_and_memory(served: Served) -> None:
    assert chat(served, "the cat").is_success
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(chat, served, word) for word in ("loop", "bomb", "loop")]
        assert served.post("/v1/completions", json=SHORT).is_success  # served meanwhile
        answers = [error(one.result(), 400) for one in found]
    assert [one["param"] for one in answers] == ["messages"] * 3
    assert "took more than 2 s" in answers[0]["message"]
    assert chat(served, "the cat").is_success  # with new workers


def test_a_flood_of_long_prompts_leaves_room_for_others(slow_text: Path) -> None:
    body = json.dumps(GO | {"prompt": "the cat sat on the mat " * 170_000, "max_tokens": 1})
    headers = {"Content-Type": "application/json"}
    with command(slow_text, "--name", "tiny", "--text-timeout", 1) as served:
        url, done = f"{served.url}/v1/completions", threading.Event()

        def flood() -> list[int]:
            codes = []
            while not done.is_set():
                codes.append(httpx.post(url, content=body, headers=headers, timeout=60).status_code)
            return codes

        with ThreadPoolExecutor(20) as pool:
            found = [pool.submit(flood) for _ in range(20)]
            for _ in range(3):
                assert served.post("/v1/completions", json=SHORT).is_success
            done.set()
        codes = {code for one in found for code in one.result()}
        assert codes <= {400, 503}
        assert served.post("/v1/completions", json=SHORT).is_success


@pytest.mark.parametrize(
    "content",
    [
        "loop",
        pytest.param("the cat sat on the mat " * 150_000, id="long", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_flood_answers_all_and_ends_in_time(slow_text: Path, content: str) -> None:
    with command(slow_text, "--name", "tiny", "--drain", 1, "--text-timeout", 600) as served:
        assert served.process is not None
        with ThreadPoolExecutor(6) as pool:
            found = [pool.submit(chat, served, content) for _ in range(6)]
            wait_until(lambda: _children(served.process.pid) >= 2)  # a text is worked on
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(60)
            for one in found:
                if one.exception() is None:
                    assert error(one.result(), 503)["code"] in ("shutting_down", "overloaded")
                else:  # it came after the end
                    assert isinstance(one.exception(), httpx.TransportError)
        assert sum(one.exception() is None for one in found) >= 2
        assert served.process.returncode == 0


@pytest.mark.slow  # without a flood: test_signals.py
def test_a_second_signal_ends_at_once(slow_text: Path) -> None:
    with command(slow_text, "--name", "tiny", "--drain", 600, "--text-timeout", 600) as served:
        assert served.process is not None
        with ThreadPoolExecutor(2) as pool:
            pool.submit(chat, served, "loop")
            wait_until(lambda: _children(served.process.pid) >= 2)
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.get("/health").status_code == 503)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 130


def _children(pid: int) -> int:
    """Number of descendants of a process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return len(found) + sum(map(_children, map(int, found)))
