"""What an operator sees of a server: metrics that dashboards know, logs that tell no secrets."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.serving.tenants import Keys
from served import SHORT, TEXT, Served, scripted, thread


def test_dashboards_find_vllm_s_metrics_and_they_agree(drafting: Served) -> None:
    """Names, types and labels as vLLM has them; the counts are those of the statistics."""
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, Any]:
        text = httpx.get(f"{drafting.url}/metrics").text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(families: dict[str, Any], name: str) -> float:
        samples = families[f"vllm:{name}"].samples
        return sum(one.value for one in samples if one.name == f"vllm:{name}_total")

    before = read()
    call = {"prompt": "the cat sat on the mat and the cat sat on", "max_tokens": 60, "seed": 1}
    call |= {"n": 2, "temperature": 0, "ignore_eos": True}
    call |= {"speculation": {"method": "prompt_lookup", "statistics": True}}
    told = drafting.post("/v1/completions", json=call).json()
    after = read()
    grown = {
        name: value(after, name) - value(before, name)
        for name in (
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos",
            "prompt_tokens",
            "generation_tokens",
            "request_success",
        )
    }
    accepted = grown["spec_decode_num_accepted_tokens"]
    assert accepted == told["speculation"]["accepted"] > 0
    assert grown["spec_decode_num_accepted_tokens_per_pos"] == accepted
    assert grown["spec_decode_num_draft_tokens"] == told["speculation"]["drafted"]
    passes = told["metrics"]["speculative_decoding"]["num_spec_steps"]  # those without a draft, too
    assert 0 < grown["spec_decode_num_drafts"] <= passes
    assert grown["generation_tokens"] == 120 and grown["request_success"] == 2
    for name, kind in (
        ("num_requests_running", "gauge"),
        ("num_requests_waiting", "gauge"),
        ("time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "histogram"),
        ("e2e_request_latency_seconds", "histogram"),
        ("prefix_cache_queries", "counter"),
        ("prefix_cache_hits", "counter"),
    ):
        family = after[f"vllm:{name}"]
        assert family.type == kind
        assert {"model_name", "engine"} <= family.samples[0].labels.keys()
    positions = [
        one.labels["position"]
        for one in after["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
        if "position" in one.labels
    ]
    assert {"0", "1", "2"} <= set(positions)


def test_neither_keys_nor_prompts_are_logged(
    tiny_chat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes well or wrong, at any level of logging."""
    model = scripted(tiny_chat, TEXT)
    keys = Keys.read(["red:secret-one"])
    with caplog.at_level(logging.DEBUG), thread(model, keys) as served:
        whole = model.target.forward

        def fail(batch: Any) -> Any:
            if any(len(seq.tokens) > 30 for seq in batch.seqs):
                raise RuntimeError("a kernel has failed")
            return whole(batch)

        model.target.forward = fail
        said = "my own words, which nobody else may read, however this request may end"
        good = {"Authorization": "Bearer secret-one"}
        for headers in (good, {"Authorization": "Bearer secret-too"}, {}):
            for body in (SHORT | {"prompt": said}, SHORT, SHORT | {"prompt": [said, 3]}):
                served.post("/v1/completions", json=body, headers=headers)
            served.post("/v1/completions", content=f'{{"{said}', headers=headers)
        page = httpx.get(f"{served.url}/metrics", headers=good).text
        assert re.search(r"^forerun:engine_faults_total\S* [1-9]", page, re.MULTILINE)
    assert "a kernel has failed" in caplog.text  # the cause is there
    for secret in ("secret-one", "secret-too", "my own words"):
        assert secret not in caplog.text
