"""The FastAPI application and its routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from forerun import __version__
from forerun.serving import errors, playground
from forerun.serving.errors import Json, unknown
from forerun.serving.jobs import Job
from forerun.serving.lanes import GRAMMAR
from forerun.serving.learning import Learning
from forerun.serving.limits import Limits, forget_body
from forerun.serving.metrics import CONTENT_TYPE
from forerun.serving.origins import Origins, check_json
from forerun.serving.replies import ChatReply, CompletionReply
from forerun.serving.request_parser import parse, validated
from forerun.serving.schemas import ChatRequest, CompletionRequest, LearningRequest
from forerun.serving.service import Service


def create_app(service: Service) -> FastAPI:
    """The application of one service; its lifespan starts and stops the engine thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start(asyncio.get_running_loop())
        if service.learning is not None:
            service.learning.start()
        yield
        service.abort()
        service.lanes.close()
        await asyncio.to_thread(service.worker.join, 5.0)  # lets the current step finish
        if service.learning is not None:
            await asyncio.to_thread(service.learning.join, 5.0)  # and the current slice

    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(
        Limits,
        max_body=service.settings.max_body,
        seconds=service.settings.body_timeout,
        on_error=service.metrics.failed,
    )
    app.add_middleware(  # the outermost
        Origins,
        is_open=not len(service.keys),
        hosts=service.settings.allowed_hosts,
        origins=service.settings.allowed_origins,
        on_error=service.metrics.failed,
    )
    errors.install(app, service.metrics.failed)
    _add_completions(app, service)
    _add_models(app, service)
    _add_state(app, service)
    playground.install(app)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, schema: Any, reply: Any) -> Response:
        tenant = service.tenant(request)
        service.worker.check_open()
        check_json(request)
        content = await request.body()
        is_chat = schema is ChatRequest
        prepare = service.intake.chat if is_chat else service.intake.completion

        def read() -> tuple[Any, Job]:
            body = parse(schema, content)
            return body, prepare(body, tenant)

        body, job = await service.lanes.run(len(content), is_chat, read)
        forget_body(request)
        if service.needs_compiling(job):
            await service.lanes.run_in(GRAMMAR, lambda: service.prepare(job))
        name, fingerprint = service.settings.name, service.fingerprint
        exact = service.verifier.lossless
        made = reply(job, body, name, fingerprint, service.token_text, exact)
        return await service.responder.answer(request, job, made)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """A continuation of a prompt."""
        return await answer(request, CompletionRequest, CompletionReply)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """The next message of a conversation."""
        return await answer(request, ChatRequest, ChatReply)


def _add_models(app: FastAPI, service: Service) -> None:
    model = {
        "id": service.settings.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "forerun",
        "max_model_len": service.model.target.context,
        "has_chat_template": service.model.tokenizer.has_chat_template,
        "speculation": service.describe(),
    }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The list with the served model."""
        service.tenant(request)
        return Json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        """One model by name."""
        service.tenant(request)
        if name != model["id"]:
            known = [service.settings.name]
            raise unknown("model", name, known, status=404, param="model", code="model_not_found")
        return Json(model)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 if requests are served, else 503."""
        state = service.worker.state(service.settings.stall)
        found = {
            "status": state,
            "running": service.worker.num_running,
            "waiting": service.worker.num_waiting,
        }
        return Json(found, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters in Prometheus' form, over all tenants."""
        service.check_operator(request)
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    if service.learning is not None:
        _add_learning(app, service, service.learning)


def _add_learning(app: FastAPI, service: Service, learning: Learning) -> None:
    @app.get("/learning")
    async def state(request: Request) -> Response:
        """The state of the learner, over all tenants."""
        service.check_operator(request)
        return Json(learning.describe())

    @app.post("/learning", openapi_extra=_body(LearningRequest))
    async def change(request: Request) -> Response:
        """Switches learning on or off, or returns to the initial draft."""
        service.check_operator(request)
        check_json(request)
        wanted = validated(LearningRequest, await request.body())
        learning.set(enabled=wanted.enabled, share=wanted.share, reset=wanted.reset)
        return Json(learning.describe())


def _body(schema: Any) -> dict[str, Any]:
    """The request body for /openapi.json, as `parse` reads it and not FastAPI."""
    content = {"application/json": {"schema": _inlined(schema.model_json_schema())}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, defs: dict[str, Any] | None = None) -> Any:
    """A JSON schema without references."""
    if isinstance(schema, list):
        return [_inlined(item, defs) for item in schema]
    if not isinstance(schema, dict):
        return schema
    defs = schema.get("$defs", defs or {})
    if "$ref" in schema:
        return _inlined(defs[schema["$ref"].rpartition("/")[2]], defs)
    return {key: _inlined(value, defs) for key, value in schema.items() if key != "$defs"}
