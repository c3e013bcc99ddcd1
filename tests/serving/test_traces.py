"""Traces: how every token came, told to those who ask and to nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from forerun.core.records import Verdict
from forerun.core.tree import EMPTY, chain
from forerun.serving.traces import BONUS, CORRECTED, PLAIN, Trace
from served import Served, scripted, thread

PROMPT = {"prompt": "a b a b a b a b", "max_tokens": 40, "temperature": 0}
DRAFTED = {"method": "prompt_lookup", "statistics": True}


def streamed(server: Served, **request: Any) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"stream": True, **request}, timeout=60
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_kinds_of_own_tokens() -> None:
    trace = Trace("small")
    trace.add(chain([5, 6]), Verdict([0, 1], 7), 3, 0)  # accepted whole
    trace.add(chain([5, 6]), Verdict([0], 8), 2, 3)  # 6 was rejected
    trace.add(EMPTY, Verdict([], 9), 1, 5)
    trace.add(chain([5, 6]), Verdict([0, 1], 7), 1, 6)  # the text ended within the draft
    news = trace.take_update("abcdefg", list(range(7)), 0)
    assert [round.kind for round in news.rounds][:3] == [BONUS, CORRECTED, PLAIN]
    assert [round.num_tokens for round in news.rounds] == [3, 2, 1, 1]
    kinds = [span.drafter or span.kind for span in news.spans]
    assert kinds == ["small", "small", BONUS, "small", CORRECTED, PLAIN, "small"]
    assert trace.take_update("abcdefg", list(range(7)), 7).rounds == []


@pytest.mark.parametrize("stop", [None, ["zz"]])  # with a stop string, text is held back
def test_spans_are_the_text_and_steps_are_the_counts(chat: Served, stop: Any) -> None:
    chunks = streamed(chat, **PROMPT, stop=stop, speculation=DRAFTED | {"trace": True})
    told = [c["choices"][0] for c in chunks if c["choices"]]
    for choice in told:
        assert "".join(s["text"] for s in choice["speculation"]["spans"]) == choice["text"]
    steps = [step for choice in told for step in choice["speculation"]["steps"]]
    counts = chunks[-1]["speculation"]
    assert len(steps) == counts["passes"]
    assert sum(step["generated"] for step in steps) == counts["generated"]
    assert sum(len(step["tokens"]) for step in steps) == counts["drafted"]
    assert sum(len(step["accepted"]) for step in steps) == counts["accepted"]
    for step in steps:
        parents = np.array(step["parents"])
        assert (parents < np.arange(len(parents))).all()
        assert [parents[node] for node in step["accepted"]] == [-1, *step["accepted"]][:-1] or (
            not step["accepted"]
        )


@pytest.mark.parametrize("stop", [None, ["zzzz"], ["z"], ["on the m"]])
def test_whole_answers_tell_the_same_in_whole_tokens(tiny_chat: Path, stop: Any) -> None:
    text = "the cat sat on the mat and the dog sat on the log "
    request = {"prompt": "go", "max_tokens": 60, "temperature": 0, "seed": 3, "logprobs": 0}
    request |= {"speculation": DRAFTED | {"trace": True}, "stop": stop}
    with thread(scripted(tiny_chat, text), controller="fixed") as served:
        whole = served.post("/v1/completions", json=request).json()["choices"][0]
        told = [c["choices"][0] for c in streamed(served, **request) if c["choices"]]
    assert any(len(span["text"]) > 2 for span in whole["speculation"]["spans"])
    for part in ("steps", "spans"):
        found = [one for choice in told for one in choice["speculation"][part]]
        assert whole["speculation"][part] == found
    assert "".join(s["text"] for s in whole["speculation"]["spans"]) == whole["text"]
    for choice in told[:-1]:  # in the last one a stop string may cut a token
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("speculation", [None, DRAFTED, DRAFTED | {"trace": False}])
def test_others_see_nothing(chat: Served, speculation: Any) -> None:
    known = {"index", "text", "logprobs", "finish_reason"}
    for chunk in streamed(chat, **PROMPT, speculation=speculation):
        assert all(set(choice) == known for choice in chunk["choices"])
    whole = chat.post("/v1/completions", json=PROMPT | {"speculation": speculation}).json()
    assert set(whole["choices"][0]) == known


def test_predictions_have_a_name_of_their_own(chat: Served) -> None:
    text = chat.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]
    request = PROMPT | {"prediction": {"type": "content", "content": text}}
    request["speculation"] = DRAFTED | {"trace": True}
    choice = chat.post("/v1/completions", json=request).json()["choices"][0]
    assert "prediction" in {
        drafter for s in choice["speculation"]["steps"] for drafter in s["drafters"]
    }


def test_the_page_loads_nothing_else(chat: Served) -> None:
    answer = httpx.get(chat.url + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "/*style*/" not in answer.text and "/*script*/" not in answer.text
    assert "src=" not in answer.text and "@import" not in answer.text
    assert "/" not in httpx.get(chat.url + "/openapi.json").json()["paths"]
