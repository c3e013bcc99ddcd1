"""Options of our proposers for vLLM, and where they reach into it."""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_loop import CONTEXT, Loop, V, make, params

from forerun.core.forward_batch import ForwardBatch
from forerun.errors import ConfigError, UnknownName
from forerun.integrations import vllm, vllm_taps

__all__ = ["make"]  # a fixture
ROOT = Path(__file__).parents[2]


class TestOptions:
    def test_reach_the_drafter(self, make: Any) -> None:
        assert make("stand", options="entries=3,scope=tenant").drafter.drafter.entries == 3
        with pytest.raises(ConfigError, match="scope"):
            make("stand", options="scope=moon")

    def test_that_chains_fix_are_refused(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="option branches of suffix must be"):
            make("suffix", options="branches=true")

    def test_unknown_ones_are_named(self, make: Any) -> None:
        with pytest.raises(UnknownName, match="entries"):
            make("stand", options="entris=3")

    def test_a_pass_of_our_own_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="vLLM runs the model"):
            vllm.VllmTarget(V, CONTEXT).forward(ForwardBatch([], []))


class TestTaps:
    def test_the_entry_point_is_there(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        module, _, name = project["entry-points"][vllm_taps.GROUP]["forerun"].partition(":")
        assert getattr(importlib.import_module(module), name) is vllm_taps.register

    def test_the_extra_pins_tested_releases(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        pins = [line.partition("==")[2] for line in project["optional-dependencies"]["vllm"]]
        assert pins and set(pins) <= set(vllm_taps.TESTED_RELEASES)

    def test_without_the_entry_point(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(vllm_taps, "_permitted", set())
        with caplog.at_level(logging.WARNING, "forerun"):
            assert not vllm_taps.open_taps(1)
        assert "drafts are deterministic" in caplog.text
        vllm_taps.register()
        assert not vllm_taps.open_taps(2)
        assert "2 workers" in caplog.text

    def test_other_releases_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))
        with pytest.raises(ConfigError, match=r"tested with vLLM 0\.32\.0.*this is vLLM 0\.99\.1"):
            vllm_taps.check_release()
        tested = SimpleNamespace(__version__=f"{vllm_taps.TESTED_RELEASES[0]}+cpu")
        monkeypatch.setitem(sys.modules, "vllm", tested)
        vllm_taps.check_release()

    def test_other_drafters_are_left_alone(self) -> None:
        sample = Loop._sample
        vllm_taps.wrap(Loop)
        assert Loop._sample is sample  # once
        loop = Loop(SimpleNamespace(), chaos=False)  # type: ignore[arg-type]
        loop.add("0", params())
        loop.input_batch.req_ids = ["0"]
        metadata = SimpleNamespace(num_draft_tokens=[1], draft_token_ids=torch.tensor([0]))
        assert loop._get_spec_decode_draft_probs(metadata) is None
        assert len(loop._sample(torch.zeros(2, V), metadata)[0]) in (1, 2)
