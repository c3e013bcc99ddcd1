"""A drafter that fails, or has no room, costs its drafts and nothing else."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun
from forerun.core.records import Plan
from forerun.core.roles import Drafter
from forerun.drafters.base import PerSequence
from forerun.drafters.draft_model import DraftModel
from served import SHORT, TEXT, check_clean, scripted, thread


class Shaky(PerSequence):
    """A drafter that fails half the time, wherever it is called."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.random = inner, np.random.default_rng(3)

    def _shake(self) -> None:
        if self.random.random() < 0.5:
            raise RuntimeError("the drafter fell over")

    def start(self, seq: Any) -> None:
        self.inner.start(seq)
        self._shake()

    def draft(self, seq: Any, plan: Plan, dice: Any) -> Any:
        self._shake()
        return self.inner.propose([seq], [plan], [dice])[0]

    def observe(self, step: Any) -> None:
        self.inner.observe(step)
        self._shake()

    def finish(self, seq: Any) -> None:
        self.inner.finish(seq)
        self._shake()


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_drafter_that_fails_costs_drafts_and_one_warning(
    tiny_chat: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = scripted(tiny_chat, TEXT)
    with thread(model, max_seqs=4) as served, ThreadPoolExecutor(8) as pool:
        (guarded,) = [
            part
            for name, part in served.server.service.worker._batch.dispatcher.by_name.items()
            if name == "stand"
        ]
        guarded.drafter = Shaky(guarded.drafter)
        body = SHORT | {"temperature": temperature, "max_tokens": 40}
        body["speculation"] = {"method": "stand", "statistics": True}
        with caplog.at_level(logging.WARNING):
            found = list(pool.map(lambda _: served.post("/v1/completions", json=body), range(12)))
        assert {answer.status_code for answer in found} == {200}
        expected = model.tokenizer.decode((3 * model.target.script)[:40])
        assert {answer.json()["choices"][0]["text"] for answer in found} == {expected}
        told = [answer.json()["speculation"] for answer in found]
        counted = sum(one["failures"] for one in told)
        assert served.metric("forerun:drafter_failures_total") == counted > 12
        assert served.metric("forerun:engine_faults_total") == 0
        assert served.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        check_clean(served)
    warned = [record for record in caplog.records if "drafter" in record.getMessage()]
    assert len(warned) == 1 and "continues without the failed drafts" in warned[0].getMessage()


def test_a_draft_model_without_room_costs_its_drafts_only(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Target and draft are asked for room together: what one takes the other has not."""
    model = forerun.load(str(tiny_chat))
    methods = {"two": f"draft_model:model={tiny_chat}"}
    spec = {"method": "two", "statistics": True}
    body = SHORT | {"ignore_eos": True, "speculation": spec}
    # as large as its target it would not be tried in a short text, as that could never pay
    monkeypatch.setattr(DraftModel, "draft_seconds", lambda self, nodes, num=1: 0.0)
    with thread(model, methods=methods, max_seqs=2) as served:
        batch = served.server.service.worker._batch
        target, draft = model.target.cache, batch.dispatcher.by_name["two"].drafter.runner.cache
        for cache in (target, draft):  # as if nothing had been measured
            cache.slots.clear()
            cache._hold(cache.data[:, :0, :0])
        longest = len(model.tokenizer.encode("go")) + SHORT["max_tokens"]
        need = target.check_room(2, longest)
        assert need == draft.check_room(2, longest) > 0

        free = need + need // 2
        monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: free)
        told = served.post("/v1/completions", json=body | {"n": 2}).json()["speculation"]
        assert draft.nbytes == 0 and "no memory for drafts of two" in caplog.text
        assert told["method"] == "none" and [c["method"] for c in told["choices"]] == ["none"] * 2
        told = served.post("/v1/completions", json=body).json()["speculation"]
        assert draft.nbytes > 0, "a smaller request is drafted for again"
        assert told["method"] == told["choices"][0]["method"] == "two"
        check_clean(served)
