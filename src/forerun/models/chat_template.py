"""Renders chat templates. A template is a program of the model's author: it may fail or not end."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from forerun.errors import ModelError, in_a_line

MAX_SECONDS = 5.0  # for one rendering, which usually takes milliseconds
STOP_SECONDS = 0.05  # between attempts to stop a rendering
MAX_STOPS = 20

Messages = list[dict[str, Any]]
TRIALS: tuple[Messages, ...] = (  # a usable template accepts at least one of them
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
)


class TemplateError(ModelError):
    """A chat template is missing, has an error, does not end, or rejects the messages."""


class _Stop(BaseException):
    """Raised in the thread of a rendering that takes too long."""


def rendered(inner: Any, messages: Messages, **options: Any) -> str:
    """The text of messages in the template of a transformers tokenizer.

    options: of `apply_chat_template`. Raises TemplateError.
    """
    _import(inner, messages, options)
    max_seconds, work = MAX_SECONDS, _Rendering(inner, messages, options)
    try:
        is_done = work.finished.wait(max_seconds)
    finally:
        work.stop()
    if work.text is not None:
        return work.text
    if not is_done or work.error is None:
        raise TemplateError(
            f"the model's chat template did not finish within {max_seconds:g} s; correct the "
            "template, or give the prompt as plain text"
        )
    raise TemplateError(_message(work.error)) from work.error


def check_template(
    inner: Any, trials: tuple[Messages, ...] = TRIALS, *, shows: str = "", **options: Any
) -> None:
    """Raises TemplateError for a template that accepts none of the `trials`.

    shows: text in lower case that a rendering must hold.
    """
    errors = []
    for messages in trials:
        try:
            if shows in rendered(inner, messages, **options).casefold():
                return
            raise TemplateError(
                "the chat template leaves out the text of user messages; write "
                "{{ message['content'] }} where it belongs"
            )
        except TemplateError as error:
            errors.append(error)
    raise errors[0]


def check_source(source: str) -> None:
    """Raises TemplateError for a template that accepts none of the trials, or leaves them out."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    inner = PreTrainedTokenizerFast(tokenizer_object=empty, **names)
    inner.chat_template = source
    check_template(inner, shows="hello", add_generation_prompt=True)


def _import(inner: Any, messages: Messages, options: dict[str, Any]) -> None:
    """Imports what a rendering needs, so that its time limit does not include that."""
    import jinja2.ext  # noqa: F401

    can_render = getattr(inner, "can_render", None)  # of a light tokenizer
    if can_render is None or not can_render(messages, **options):
        import transformers.utils.chat_template_utils  # noqa: F401

        if can_render is not None:
            inner.full()


def _message(error: BaseException) -> str:
    """What went wrong, and what to do."""
    from jinja2 import TemplateError as JinjaError
    from jinja2 import TemplateSyntaxError

    said, fix = in_a_line(error), "or give the prompt as plain text"
    if isinstance(error, TemplateSyntaxError):
        return (
            f"the model's chat template has an error in line {error.lineno}: {error.message}; "
            f"correct the template, {fix}"
        )
    if type(error) is JinjaError:  # raise_exception of the template
        return (
            f"the model's chat template rejects these messages: {said}; change the messages, {fix}"
        )
    return (
        f"the model's chat template fails on these messages ({type(error).__name__}: {said}); "
        f"correct the template, {fix}"
    )


class _Rendering:
    """One rendering in a thread of its own, which can be stopped between two bytecodes."""

    def __init__(self, inner: Any, messages: Messages, options: dict[str, Any]) -> None:
        self.text: str | None = None
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._is_over = False
        self._lock = threading.Lock()
        self._work = inner, messages, options
        self._thread = threading.Thread(target=self._run, daemon=True, name="chat-template")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._render()
            with self._lock:  # from here on nothing is raised in this thread
                self._is_over = True
        except _Stop:
            self._is_over = True
        self.finished.set()

    def _render(self) -> None:
        inner, messages, options = self._work
        try:
            self.text = str(inner.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Ends the thread, if it still runs. A single long operation cannot be interrupted."""
        for _ in range(MAX_STOPS):
            if self._is_over or not self._thread.is_alive():
                return
            if self._lock.acquire(timeout=STOP_SECONDS):
                try:
                    self._interrupt()
                finally:
                    self._lock.release()
            self.finished.wait(STOP_SECONDS)

    def _interrupt(self) -> None:
        """Raises _Stop in the thread, which holds the lock where that must not happen."""
        if not self._is_over:
            ident, kind = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_Stop)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)
