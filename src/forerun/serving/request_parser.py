"""Turns a request's body into a job: prompts as token ids, sampling, method, limits.

Invalid requests are refused here, before anything is queued.
"""

from __future__ import annotations

import re
import secrets
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from forerun.api import Model
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, ConfigError
from forerun.serving.contents import biases, plain_message, plain_text, prompt_list
from forerun.serving.errors import ApiError, bad, unknown
from forerun.serving.jobs import Job
from forerun.serving.methods import Constraints, Methods
from forerun.serving.schemas import (
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Message,
    Shared,
    Speculation,
)
from forerun.serving.settings import Settings
from forerun.serving.structured.fields import Wanted, wanted
from forerun.serving.structured.requests import check_options, for_template, num_chars, with_tools
from forerun.serving.structured.tools import Tools
from forerun.serving.templates import Template, empty
from forerun.serving.tenants import SHARED_TENANT
from forerun.serving.text_workers import SMALL_CHARS, TextWorkers
from forerun.serving.validation_errors import of_validation
from forerun.utils.files import parsed as parsed_json

MIN_CHARS_PER_TOKEN = 16  # of the longest token, in the limit on characters
DEFAULT_TOKENS = 16  # of /v1/completions, as in OpenAI's API; a chat may fill the context
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "n",
)
Validated = TypeVar("Validated", bound=BaseModel)
Body = TypeVar("Body", bound=Shared)


def parse(kind: type[Body], body: bytes) -> Body:
    """The request in a body. Raises ApiError 400 with the first error."""
    request = validated(kind, body)
    for name, neutral in UNSUPPORTED.items():
        value = getattr(request, name, None)
        is_n = name == "best_of" and isinstance(value, int) and value == request.n
        if value is not None and value not in neutral and not is_n:
            raise bad(
                f"{name} is not supported by this server; leave it out", name, "unsupported_value"
            )
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options needs stream to be true", "stream_options")
    return request


def validated(kind: type[Validated], body: bytes) -> Validated:
    """A body by its schema. Raises ApiError 400 with the first error."""
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error, kind) from None
    check_keys(body)
    return found


def check_keys(body: bytes) -> None:
    """Raises ApiError 400 for a key that occurs twice in one object of a valid body."""
    try:
        parsed_json(body.decode())
    except ValueError as error:
        raise bad(f"the body: {error}") from None


class Intake:
    """Turns requests into jobs for one model."""

    def __init__(
        self,
        model: Model,
        methods: Methods,
        settings: Settings,
        can_predict: bool = True,
        constraints: Constraints | None = None,
        texts: TextWorkers | None = None,
    ) -> None:
        self.model, self.methods, self.settings = model, methods, settings
        self.constraints = constraints or Constraints(model, {})
        self.can_predict = can_predict  # whether the verifier accepts copied drafts
        self._texts = texts
        self.max_chars = max_chars(model)
        self.template = Template(model.tokenizer, settings.name, self._render)

    def completion(self, request: CompletionRequest, tenant: str) -> Job:
        """The job of /v1/completions. Raises ApiError."""
        self._check_model(request.model)
        given = prompt_list(request.prompt)
        self._check_samples(request.n or 1, len(given))  # before tokenising
        with self._deadline():
            prompts = [self._tokens(prompt) for prompt in given]
        job = self._job(request, prompts, request.max_tokens, request.logprobs, tenant, "prompt")
        self._constrain(job, wanted(request))
        return job

    def chat(self, request: ChatRequest, tenant: str) -> Job:
        """The job of /v1/chat/completions. Raises ApiError."""
        self._check_model(request.model)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        most = request.max_completion_tokens
        most = request.max_tokens if most is None else most
        self._check_samples(request.n or 1, 1)
        tools = Tools.of(request)
        own = wanted(request)
        with self._deadline():
            prompts = [self._chat_tokens(request.messages, tools)]
        job = self._job(request, prompts, most, logprobs, tenant, "messages")
        self._constrain(job, own, tools)
        return job

    def _constrain(self, job: Job, own: Wanted | None, tools: Tools | None = None) -> None:
        """Adds the request's constraint and tools. Raises ApiError 400."""
        job.wanted, job.has_tools = own, tools is not None
        if tools is not None:
            job.wanted, job.wanted_parts = with_tools(tools, own)
        is_constrained = job.wanted is not None or bool(self.constraints.hard(job.constraints))
        check_options(job.sampling, is_constrained, self.constraints.samplings)

    def _job(
        self,
        request: Shared,
        prompts: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        tenant: str,
        source: str,
    ) -> Job:
        """source: the request's field with the prompts."""
        longest = max(map(len, prompts))
        is_new = getattr(request, "max_completion_tokens", None) is not None
        limit = "max_completion_tokens" if is_new else "max_tokens"
        length = self._check_context(longest, max_tokens, source, limit)
        self._check_memory((request.n or 1) * len(prompts), longest + length)
        spec = request.speculation or Speculation()
        method, nodes = self.methods.choose(spec.method), self._nodes(spec.max_nodes)
        prediction = self._prediction(request)
        if nodes == 0 or (spec.method and self.methods.specs[method] == "none"):
            prediction = []  # plain decoding is requested
        seed = secrets.randbits(62) if request.seed is None else request.seed % 2**64
        return Job(
            prompts,
            self._sampling(request, length, logprobs),
            seed,
            method,
            tenant,
            cache_tenant=SHARED_TENANT if self.settings.share_prefixes else tenant,
            is_seeded=request.seed is not None,
            nodes=nodes,
            constraints=self.constraints.choose(spec.constraint),
            prediction=prediction,
            streams=bool(request.stream),
            traces=bool(spec.trace),
        )

    def _sampling(self, request: Shared, length: int, logprobs: int | None) -> Sampling:
        given = {name: getattr(request, name) for name in PLAIN}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_k") == -1:  # vLLM: off
            given["top_k"] = 0
        vocab = self.model.target.vocab_size
        for name in ("stop_token_ids", "banned_tokens"):
            if (most := max(getattr(request, name) or (), default=0)) >= vocab:
                raise bad(f"{name} has token {most}, but ids end at {vocab - 1}", name)
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        try:
            sampling = Sampling(
                **given,
                logit_bias=biases(request.logit_bias or {}, vocab),
                banned_tokens=tuple(request.banned_tokens or ()),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                stop=stops,
                min_new_tokens=request.min_tokens or 0,
                max_new_tokens=length,
                seed=None if request.seed is None else request.seed % 2**64,
                logprobs=logprobs,
                constraint_sampling=request.constraint_sampling or "mask",
                constraint_start=request.constraint_start,
            )
        except ConfigError as error:
            first = re.split(r"[ =]", str(error), maxsplit=1)[0]
            param = RENAMED.get(first, first if first in type(request).model_fields else None)
            text = str(error)
            for ours, theirs in RENAMED.items():
                text = text.replace(ours, theirs)
            raise bad(text, param) from None
        self._check_choice(sampling)
        return sampling

    def _check_choice(self, sampling: Sampling) -> None:
        """Raises ApiError 400 if all tokens are forbidden at the start of an answer."""
        forbidden, vocab = {*sampling.banned_tokens}, self.model.target.vocab_size
        named = "banned_tokens"
        if sampling.min_new_tokens:
            ends = () if sampling.ignore_eos else self.model.tokenizer.eos_ids
            forbidden |= {*sampling.stop_token_ids, *ends}
            named += " and the end tokens that min_tokens delays"
        if len(forbidden) >= vocab:
            raise bad(
                f"no token is allowed: {named} are all {vocab} tokens of this model; allow some",
                "banned_tokens",
            )

    def _nodes(self, asked: int | None) -> int | None:
        most = self.settings.max_nodes
        if asked is not None and asked > most:
            raise bad(
                f"speculation.max_nodes is {asked}, but this server allows at most {most}",
                "speculation.max_nodes",
            )
        return asked

    def _prediction(self, request: Shared) -> list[int]:
        """Ids of the predicted output, cut to the context."""
        if request.prediction is None:
            return []
        if not self.can_predict:
            raise bad("the verifier of this server cannot judge predictions", "prediction")
        text = plain_text(request.prediction.content, "prediction.content")
        context, most = self.model.target.context, self.model.token_bounds.max_bytes
        text = text[: min(context * most, self.max_chars) if most else self.max_chars]
        return self._ids(text, special=False)[:context]

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            raise unknown(
                "model",
                name,
                [self.settings.name],
                status=404,
                param="model",
                code="model_not_found",
            )

    def _check_samples(self, n: int, num_prompts: int) -> None:
        if n > (most := self.settings.max_seqs):
            raise bad(f"n is {n}, but this server runs at most {most} sequences at once", "n")
        if n * num_prompts > (most := self.settings.max_samples):
            raise bad(
                f"{num_prompts} prompts times n = {n} are {n * num_prompts} sequences, but a "
                f"request may have {most}; send several requests",
                "n",
            )

    def _check_context(self, longest: int, max_tokens: int | None, source: str, limit: str) -> int:
        """The number of tokens to generate. Raises ApiError 400 if they do not fit."""
        context, note = self.model.target.context, ""
        if max_tokens is None and source == "prompt":
            max_tokens, note = DEFAULT_TOKENS, " (the default of max_tokens)"
        if longest >= context:
            raise self._too_long(f"the prompt has {longest} tokens", source)
        if max_tokens is not None and longest + max_tokens > context:
            raise bad(
                f"this model's context is {context} tokens, but the prompt has {longest} and "
                f"{max_tokens} are to be generated{note}, {longest + max_tokens} in all; ask "
                f"for at most {context - longest}, or shorten the prompt",
                limit,
                "context_length_exceeded",
            )
        return context - longest if max_tokens is None else max_tokens

    def _too_long(self, what: str, source: str) -> ApiError:
        """The error for a prompt that leaves no room for an answer."""
        return bad(
            f"this model's context is {self.model.target.context} tokens, prompt and answer "
            f"together, but {what}; shorten it",
            source,
            "context_length_exceeded",
        )

    def _check_memory(self, count: int, length: int) -> None:
        """Raises ApiError 400 for a request that does not fit even alone."""
        try:
            self.model.target.check_room(min(count, self.settings.max_seqs), length)
        except CapacityError as error:
            raise bad(str(error), "n", "out_of_memory") from None

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        vocab = self.model.target.vocab_size
        if isinstance(prompt, list) and len(prompt) > self.max_chars:
            raise self._too_long(f"the prompt has {len(prompt)} tokens", "prompt")
        tokens = self._encode(prompt, "prompt") if isinstance(prompt, str) else prompt
        if not tokens or prompt == "":
            raise bad("the prompt is empty; give it at least one token", "prompt")
        for at, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise bad(
                    f"the prompt has token {token} at position {at}; ids of this model are 0 to "
                    f"{vocab - 1}; use this model's tokenizer",
                    "prompt",
                )
        return list(tokens)

    def _chat_tokens(self, messages: list[Message], tools: Tools | None) -> list[int]:
        found = [plain_message(i, message) for i, message in enumerate(messages)]
        template = getattr(self.model.tokenizer.inner, "chat_template", "")
        found, listed = for_template(found, tools, template)
        self._check_chars(num_chars(found, listed), "messages")
        tokens = self._encode(self.template.text(found, listed), "messages", special=False)
        if not tokens:
            raise empty(found)
        return tokens

    def _encode(self, text: str, source: str, special: bool = True) -> list[int]:
        """Ids of a text. Raises ApiError before tokenising a text that is far too long."""
        if (least := self.model.token_bounds.min_tokens(text)) >= self.model.target.context:
            raise self._too_long(f"the prompt has {least} tokens or more", source)
        self._check_chars(len(text), source)
        return self._ids(text, special)

    def _check_chars(self, count: int, source: str) -> None:
        """Raises ApiError 400 for a text with more characters than a context of long tokens."""
        if count > self.max_chars:
            raise self._too_long(
                f"the prompt has {count} characters, of which at most {self.max_chars} are read",
                source,
            )

    def _ids(self, text: str, special: bool) -> list[int]:
        """Ids of a text; a long one is tokenised in a worker process."""
        if self._texts is None or len(text) <= SMALL_CHARS:
            return self.model.tokenizer.encode(text, special=special)
        return self._texts.call("encode", text, special)

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The text of messages in the chat template, rendered in a worker process."""
        if self._texts is None:
            return self.model.tokenizer.chat_text(messages, tools)
        template = getattr(self.model.tokenizer.inner, "chat_template", None)
        return self._texts.call("chat_text", template, messages, tools)

    def _deadline(self) -> AbstractContextManager[None]:
        """A block with one time limit for all texts."""
        return nullcontext() if self._texts is None else self._texts.deadline()


def max_chars(model: Model) -> int:
    """Characters of a text that is tokenised at all: a context of the longest tokens.

    Tokenizers may map any number of characters to one token (spaces, unknown characters), so this
    refuses some texts that would fit.
    """
    longest = max(map(len, model.tokenizer.vocabulary()), default=0)
    return model.target.context * max(longest, MIN_CHARS_PER_TOKEN)
