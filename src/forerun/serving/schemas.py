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
NAME = r"^[A-Za-z0-9_.-]{1,64}$"  # of functions and schemas
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(Strict):
    """Drafting, constraints and reporting of a request.

    constraint: one or more constraints of the server. max_nodes: largest draft tree; 0: plain
    decoding. trace: report the source of every token.
    """

    method: str | None = None
    constraint: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    max_nodes: int | None = Field(default=None, ge=0)
    statistics: bool | None = None
    trace: bool | None = None


class LearningRequest(Strict):
    """A change of the learner. share: of time. reset: return to the initial draft."""

    enabled: bool | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    reset: bool = False


class Part(Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


Parts = Annotated[list[Part], Field(fail_fast=True)]  # listing millions of errors takes seconds


class Prediction(Strict):
    """Text that the answer probably repeats in large parts."""

    type: Literal["content"]
    content: str | Parts


class StreamOptions(Strict):
    """include_usage: counts in a last chunk. continuous_usage_stats: counts in every chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonFormat(Strict):
    """A named JSON schema. strict: the schema is always enforced, also with false."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonFormat | None = None


class StructuredOutputs(Strict):
    """vLLM's constraints on the text; one of them."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None


class Function(Strict):
    """A function that the model may call. strict: the schema is always enforced."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """A function, and its arguments as JSON text."""

    name: Text
    arguments: str


class ToolCall(Strict):
    """A call in an earlier message of the assistant."""

    id: Text | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    function_call: Any = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None


class Shared(Strict):
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
    response_format: ResponseFormat | None = None
    # of vLLM
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    min_tokens: Int | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # of forerun
    constraint_sampling: Literal["mask", "asap", "awrs", "smc"] | None = None
    constraint_start: Annotated[str, Field(min_length=1, max_length=256)] | None = None
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
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
