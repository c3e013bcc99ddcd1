"""Request schemas: the parameters of OpenAI and vLLM, and `speculation`.

Unknown fields are errors. UNSUPPORTED lists OpenAI fields that this server lacks, with the values
that have no effect. Fields that do not change the text are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=4096)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1024)]
Bias = Annotated[float, Field(ge=-100, le=100)]  # OpenAI's range
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(_Strict):
    """Drafting, constraints and reporting of a request.

    constraint: one or more constraints of the server. max_nodes: largest draft tree; 0: plain
    decoding. trace: report the source of every token.
    """

    method: str | None = None
    constraint: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    max_nodes: int | None = Field(default=None, ge=0)
    statistics: bool | None = None
    trace: bool | None = None


class Part(_Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


Parts = Annotated[list[Part], Field(fail_fast=True)]  # listing millions of errors takes seconds


class Prediction(_Strict):
    """Text that the answer probably repeats in large parts."""

    type: Literal["content"]
    content: str | Parts


class StreamOptions(_Strict):
    """include_usage: counts in a last chunk. continuous_usage_stats: counts in every chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None


class Shared(_Strict):
    """Parameters of both kinds of completion; null means the default."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    prediction: Prediction | None = None
    # of vLLM
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    min_tokens: Int | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    # of forerun
    banned_tokens: Ids | None = None
    speculation: Speculation | None = None
    # accepted, no effect on the text
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class CompletionRequest(Shared):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: Int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class ChatRequest(Shared):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
