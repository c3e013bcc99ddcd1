"""Splitting an answer into content and tool calls, in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.serving.structured.tool_parser import Arguments, Begin, Content, ToolParser
from forerun.serving.structured.tool_replies import Calls

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.from_regex(r"[a-z_.]{1,9}", fullmatch=True), ARGUMENTS), max_size=3)


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def parsed(pieces: list[str], start: str | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the name and arguments of each call."""
    parser, content, calls = ToolParser(start), "", list[tuple[str, str]]()
    for part in [p for piece in pieces for p in parser.feed(piece)] + parser.finish():
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Begin):
            assert part.number == len(calls)
            calls.append((part.name, ""))
        else:
            assert isinstance(part, Arguments) and part.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


@given(st.text(st.sampled_from('a <\n{"}to'), max_size=12), CALLS, st.data())
def test_calls_are_found_whatever_the_pieces(before: str, calls: Any, data: st.DataObject) -> None:
    text = before + "\n".join(call(*one) for one in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, found = parsed(pieces)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == (before.rstrip() if calls else before)
    assert parsed(list(text)) == (content, found)


@given(st.text(st.sampled_from('<tool_call>/{"name": }\n'), max_size=60), st.integers(0, 60))
def test_text_that_is_no_call_is_content(text: str, cut: int) -> None:
    content, calls = parsed([text[:cut], text[cut:]])
    assert calls or content == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('a <tool_call>\n{"nome": 1}\n</tool_call> b', None, []),
        ("<tool_call>" + "x" * 300, None, []),
        ('<tool_call>\n{"name": "f"', None, []),  # cut before it is clear which function
        ('<tool_call>\n{"name": "f", "arguments": {"a": "}<', "", [("f", '{"a": "}<')]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
        (call("f", {"a": '"}\\'}) + "\n then", "\n then", [("f", json.dumps({"a": '"}\\'}))]),
        ("<tool_call>no " + call("f", {}), "<tool_call>no", [("f", "{}")]),
        (call("f", {}).replace(":", ":" + " " * 300), None, []),  # the head is too long for a call
        (call("</tool_call>", {}), None, []),
    ],
)
def test_cut_and_odd_texts(text: str, content: str | None, calls: Any) -> None:
    for pieces in ([text], list(text)):
        assert parsed(pieces) == (text if content is None else content, calls)


def test_calls_begin_after_the_start_text_only() -> None:
    thought, real = call("thought", {}), call("f", {"a": 1})
    text = f"{thought}</think>\n{real}"
    for pieces in ([text], list(text)):
        assert parsed(pieces, "</think>") == (f"{thought}</think>", [("f", '{"a": 1}')])


def test_the_finish_reason_says_whether_a_call_is_whole() -> None:
    for text, reason, expected in (
        (call("f", {}), "stop", "tool_calls"),
        (call("f", {}), "length", "length"),
        (call("f", {})[:-20], "stop", "stop"),
        ("text", "stop", "stop"),
    ):
        calls = Calls()
        calls.message(text, reason)
        assert calls.finish(reason) == expected


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "cut", "content", "arguments", "finish"),
    [
        # in the head, in the arguments, right behind them, in the markup of the end
        ("stop", '"f", ', '<tool_call>\n{"name": ', [], "stop"),
        ("stop", '1, "b', '<tool_call>\n{"name": "f", "arguments": {"a": ', [], "stop"),
        ("stop", "}\n", "", ['{"a": 1, "b": 2}'], "tool_calls"),
        ("stop", "</tool_call>", "", ['{"a": 1, "b": 2}'], "tool_calls"),
        ("length", '1, "b', "", ['{"a": '], "length"),
    ],
)
def test_a_stopped_call_is_content(
    reason: str, cut: str, content: str, arguments: list[str], finish: str, is_streamed: bool
) -> None:
    """A client never gets a call without the end of its arguments with the reason `stop`."""
    whole = call("f", {"a": 1, "b": 2})
    text = whole[: whole.index(cut)]
    for before in ("", whole + "\n"):
        calls = Calls(can_stop=True)
        if is_streamed:
            deltas = [d for letter in before + text for d in calls.deltas(letter, None)]
            deltas += calls.deltas("", reason)
            found = dict[int, str]()
            for delta in deltas:
                for one in delta.get("tool_calls", ()):
                    more = one["function"]["arguments"]
                    found[one["index"]] = found.get(one["index"], "") + more
            given = "".join(delta.get("content") or "" for delta in deltas), list(found.values())
        else:
            message = calls.message(before + text, reason)
            made = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
            given = message["content"] or "", made
        first = ['{"a": 1, "b": 2}'] if before else []
        assert given == (("\n" if before and content else "") + content, first + arguments)
        assert calls.finish(reason) == finish


def test_calls_are_streamed_piece_by_piece_without_stop_strings() -> None:
    calls = Calls()
    begin = calls.deltas('<tool_call>\n{"name": "f", "arguments": {"a": ', None)
    assert [one["tool_calls"][0]["function"] for one in begin] == [
        {"name": "f", "arguments": ""},
        {"arguments": '{"a": '},
    ]
