"""Answers in OpenAI's format, whole or in chunks, with extra fields for speculation."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from forerun.constraints._request import Report
from forerun.engine.stats import Stats
from forerun.serving import traces
from forerun.serving.jobs import End, Job, Piece, TokenCounts
from forerun.serving.schemas import Shared
from forerun.serving.structured.tool_replies import Calls
from forerun.serving.token_text import TokenText


@dataclass
class Reply(ABC):
    """The format of one request's answer."""

    job: Job
    request: Shared
    model: str
    fingerprint: str
    token_text: TokenText
    lossless: bool = True  # of the verifier; if it is not, every answer has `lossless` false
    created: int = field(default_factory=lambda: int(time.time()))
    num_sent: int = 0  # tokens sent in chunks
    calls: dict[int, Calls] = field(default_factory=dict)  # tool calls of each choice
    number: str = field(default_factory=lambda: secrets.token_hex(12))  # shows no count of requests

    prefix = ""  # of response ids
    whole_object = ""
    chunk_object = ""

    @abstractmethod
    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a choice for one piece."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def whole(self, pieces: list[Piece], end: End) -> dict[str, Any]:
        """The whole answer."""
        parts: dict[int, list[Piece]] = {i: [] for i in range(self.job.num_choices)}
        for piece in pieces:
            parts[piece.choice].append(piece)
        choices = [self.choice(i, found) | self.trace(found) for i, found in parts.items()]
        frame = self._frame(self.whole_object, choices)
        return frame | {"usage": usage(end.count)} | self._statistics(end)

    def more(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of one piece."""
        self.num_sent += len(piece.tokens)
        deltas = self.deltas(piece)
        if trace := self.trace([piece]):
            deltas[0] |= trace
        return [self.chunk([one]) for one in deltas]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream."""
        options, frame = self.request.stream_options, self._frame(self.chunk_object, choices)
        if not (options and options.include_usage):
            return frame
        prompt = sum(map(len, self.job.prompts))
        counts = totals(prompt, self.num_sent) if options.continuous_usage_stats else None
        return frame | {"usage": counts}

    def closing(self, end: End) -> list[dict[str, Any]]:
        """Chunks after all text: counts and statistics, if requested."""
        options, extra = self.request.stream_options, self._statistics(end)
        if options and options.include_usage:
            extra["usage"] = usage(end.count)
        return [self._frame(self.chunk_object, []) | extra] if extra else []

    def trace(self, pieces: list[Piece]) -> dict[str, Any]:
        """The trace of some pieces, if requested."""
        updates = [piece.trace for piece in pieces if piece.trace is not None]
        return {"speculation": traces.to_dict(updates, self.token_text.text)} if updates else {}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return frame if self.lossless else frame | {"lossless": False}

    def _statistics(self, end: End) -> dict[str, Any]:
        """Statistics, if requested: ours, and the same under vLLM's names.

        Texts with weights have them without a request, as they mean nothing without.
        """
        is_requested = self.request.speculation and self.request.speculation.statistics
        if not (is_requested or self.job.sampling.constraint_sampling == "awrs"):
            return {}
        total = Stats()
        for stats in end.stats:
            total.add(stats)
        requested = self.job.method  # not used at all if there was no memory for it
        method = requested if requested in end.methods else end.methods[0]
        ours = {"method": method, "max_nodes": self.job.nodes, **total.to_dict()}
        ours["choices"] = [
            {"method": own} | stats.to_dict() | constraint(report)
            for own, stats, report in zip(end.methods, end.stats, end.reports, strict=True)
        ]
        return {"speculation": ours, "metrics": {"speculative_decoding": as_vllm(total)}}


class CompletionReply(Reply):
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(pieces),
            "finish_reason": pieces[-1].finish,
        }

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece.choice, [piece])]

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        rows = [row for piece in pieces for row in zip(piece.tokens, piece.logprobs, strict=True)]
        text = self.token_text.text
        return {
            "tokens": [own for piece in pieces for own in piece.token_texts],
            "token_logprobs": [logprobs[token] for token, logprobs in rows],
            "top_logprobs": [{text(t): value for t, value in row.items()} for _, row in rows],
            "text_offset": [place for piece in pieces for place in piece.begins],
        }


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        finish = pieces[-1].finish
        if self.job.has_tools:
            message |= self._calls(index).message(text, finish or "")
            finish = self._calls(index).finish(finish)
        logprobs = self._logprobs(pieces)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        found, finish = [{"content": piece.text}] if piece.text else [{}], piece.finish
        if self.job.has_tools:
            calls = self._calls(piece.choice)
            found = calls.deltas(piece.text, finish)
            finish = calls.finish(finish)
            if finish or piece.trace or self.job.sampling.logprobs is not None:
                found = found or [{}]
        chunks: list[dict[str, Any]] = [
            {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in found
        ]
        if chunks:
            chunks[0]["logprobs"] = self._logprobs([piece])
            chunks[-1]["finish_reason"] = finish
        return chunks

    def _calls(self, index: int) -> Calls:
        """The tool calls of a choice."""
        s = self.job.sampling
        made = Calls(s.constraint_start, can_stop=bool(s.stop or s.stop_token_ids))
        return self.calls.setdefault(index, made)

    def opening(self) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": ""}
        return [
            self.chunk([{"index": i, "delta": start, "logprobs": None, "finish_reason": None}])
            for i in range(self.job.num_choices)
        ]

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        most = self.job.sampling.logprobs
        if most is None:
            return None
        rows = [row for piece in pieces for row in zip(piece.tokens, piece.logprobs, strict=True)]
        return {"content": [self._row(*row, most) for row in rows], "refusal": None}

    def _row(self, token: int, logprobs: dict[int, float], most: int) -> dict[str, Any]:
        best = sorted(logprobs.items(), key=lambda item: -item[1])[:most]
        top = [self._one(*item) for item in best]
        return self._one(token, logprobs[token]) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.token_text.bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def constraint(report: Report | None) -> dict[str, Any]:
    """What a constraint did to a choice, if it has one. logw is null for a weight of 0."""
    if report is None:
        return {}
    found = {
        "valid": report.valid,
        "logw": report.logw if math.isfinite(report.logw) else None,
        "masks": report.num_masks,
        "tests": report.num_tests,
    }
    notes = {"error": report.error, "missing": report.missing}
    return {"constraint": found | {name: text for name, text in notes.items() if text}}


def usage(count: TokenCounts) -> dict[str, Any]:
    """The `usage` object of OpenAI."""
    return totals(count.prompt, count.completion) | {
        "prompt_tokens_details": {"cached_tokens": count.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": count.accepted_prediction,
            "rejected_prediction_tokens": count.rejected_prediction,
        },
    }


def totals(prompt: int, completion: int) -> dict[str, Any]:
    """The token counts without details, which every chunk of a stream can have."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def as_vllm(stats: Stats) -> dict[str, Any]:
    """The counters of a request under the names that vLLM uses."""
    return {
        "mean_acceptance_length": stats.tau,
        "draft_acceptance_rate": stats.acceptance_rate,
        "num_spec_steps": stats.passes,
        "num_draft_tokens": stats.drafted,
        "num_accepted_draft_tokens": stats.accepted,
        "acceptance_histogram": [
            stats.accepted_at[depth] for depth in range(1, max(stats.accepted_at, default=0) + 1)
        ],
    }
