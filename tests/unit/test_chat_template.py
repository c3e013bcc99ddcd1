"""Chat templates that raise, have errors, are missing or do not end: one line and status 2."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Call

from forerun.cli import generate_ray, serve_checks
from forerun.errors import ModelError
from forerun.models import chat_template
from forerun.models.chat_template import TemplateError, check_source, rendered
from forerun.models.tokenizer import Tokenizer

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "{{ raise_exception('no such\nmessages') }}": "rejects these messages: no such messages;",
    "{% for m in messages %}": "has an error in line 1:",
    "x\n{{ 'a }}": "has an error in line 2:",
    "{{ messages | nofilter }}": "has an error in line 1: No filter named 'nofilter'",
    "{{ nothing() }}": "fails on these messages (UndefinedError: 'nothing' is undefined)",
    "{{ messages[0].content + 1 }}": "fails on these messages (TypeError: ",
    "{{ messages[9].role.x }}": "fails on these messages (UndefinedError: ",
    ENDLESS: "did not finish within 0.2 s",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "fails on these messages (RecursionError",
}


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)


@pytest.fixture
def with_template(tiny_folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a folder of the tiny model with a chat template."""

    def make(template: str) -> Path:
        folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.mark.parametrize("template", BAD)
def test_errors_of_templates(template: str, with_template: Any) -> None:
    tokenizer = Tokenizer.load(with_template(template))
    with pytest.raises(TemplateError) as caught:
        tokenizer.chat("hi")
    said = str(caught.value)
    assert said.startswith("the model's chat template " + BAD[template]) and "\n" not in said
    assert said.endswith("give the prompt as plain text")
    with pytest.raises(TemplateError):
        check_source(template)


@pytest.mark.parametrize("template", [ENDLESS, "{% set x = messages %}" + ENDLESS * 9])
def test_an_endless_template_is_stopped(template: str, with_template: Any) -> None:
    inner = Tokenizer.load(with_template(template)).inner
    with pytest.raises(TemplateError, match="did not finish"):
        rendered(inner, [{"role": "user", "content": "hi"}])
    for thread in threading.enumerate():
        if thread.name == "chat-template":
            thread.join(10)
            assert not thread.is_alive()


def test_a_template_that_accepts_some_messages_can_be_used() -> None:
    check_source(NO_SYSTEM)
    needs_system = (
        "{{ messages[0].content ~ messages[1].content if messages[0].role == 'system' "
        "else raise_exception() }}"
    )
    check_source(needs_system)


@pytest.mark.parametrize("template", ["", " ", "{# none #}", "You are kind."])
def test_a_template_that_leaves_messages_out_is_refused(template: str) -> None:
    with pytest.raises(TemplateError, match="leaves out the text of user messages"):
        check_source(template)


def test_several_templates_without_a_default(with_template: Any) -> None:
    tokenizer = Tokenizer.load(with_template("x"))
    tokenizer.inner.chat_template = {"a": "x", "b": "y"}
    with pytest.raises(TemplateError, match="multiple chat templates with no default"):
        tokenizer.chat("hi")
    tokenizer.inner.chat_template = {"default": "{{ messages[0].content }}!", "b": "y"}
    assert tokenizer.chat_text("hi") == "hi!"


@pytest.mark.parametrize("template", BAD)
def test_generate(template: str, with_template: Any, refuses: Callable[..., str]) -> None:
    folder = with_template(template)
    said = refuses("generate", "-m", folder, "-p", "hi", "--chat", "--max-new-tokens", 2)
    assert BAD[template] in said
    words = ("generate", "-m", folder, "-p", "hi", "--chat", "--engine", "ray")
    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        inside.setattr(generate_ray, "check", lambda engine, actors: None)
        assert BAD[template] in refuses(*words)


def test_a_missing_template(tiny_folder: Path, refuses: Callable[..., str]) -> None:
    words = ("generate", "-m", tiny_folder, "-p", "hi", "--chat")
    assert f"{tiny_folder} has no chat template; leave out --chat" in refuses(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("chat",),
        ("generate", "-p", "hi", "--chat", "-m"),
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--replicas", "2"),
    ],
)
def test_a_bad_template_is_reported_before_weights_are_loaded(
    words: tuple[str, ...],
    with_template: Any,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("forerun.models.load.load_target", load)
    monkeypatch.setattr("forerun.integrations.ray_batch.ray_module", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    template = next(iter(BAD))
    status, _, err = call(*words, with_template(template))
    assert status == 2 and BAD[template] in err.splitlines()[-1], err


@pytest.mark.parametrize("template", BAD)
def test_a_server_says_how_to_replace_a_bad_template(template: str, with_template: Any) -> None:
    tokenizer = Tokenizer.load(with_template(template))
    check = serve_checks.template_check("model", template=None)
    assert check is not None
    with pytest.raises(TemplateError, match="correct it, or replace it by --chat-template FILE$"):
        check(tokenizer)
    assert serve_checks.template_check("model", template="{{ messages }}") is None


@pytest.mark.parametrize("template", BAD)
def test_chat(
    template: str,
    with_template: Any,
    refuses: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert BAD[template] in refuses("chat", with_template(template))


def test_chat_with_a_role_that_the_template_rejects(
    with_template: Any, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_template(NO_SYSTEM)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    said = refuses("chat", folder, "--system", "Be brief.")
    assert "rejects these messages: System role not supported;" in said


def test_chat_with_a_message_that_the_template_rejects(
    with_template: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piped lines end with status 2 at the first that cannot be answered."""
    folder = with_template("{{ raise_exception('long') if messages|length > 2 else 'hi' }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nthe cat\n"))
    status, out, err = call("chat", folder, "--max-new-tokens", 2)
    assert status == 2 and "2 tokens" in out and "error" not in out
    assert err.splitlines()[-1].startswith("error: the model's chat template rejects these mess")


@pytest.mark.parametrize("template", BAD)
def test_serve_refuses_a_bad_template_at_start(
    template: str, tiny_folder: Path, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    (tmp_path / "bad.jinja").write_text(template)
    words = ("serve", tiny_folder, "--chat-template", tmp_path / "bad.jinja", "--port", 0)
    said = refuses(*words)
    assert f"--chat-template {tmp_path / 'bad.jinja'}: " in said and BAD[template] in said


@pytest.mark.parametrize("template", ["{% for m in messages %}", ENDLESS])
def test_the_reward_model_of_a_search(
    template: str,
    with_template: Any,
    tiny_folder: Path,
    refuses: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = with_template(template)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_labels": 1}
    config = LlamaConfig(vocab_size=288, num_attention_heads=2, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    capsys.readouterr()
    words = ("search", "best_of", "-m", tiny_folder, "-p", "hi", "-n", 2, "--max-new-tokens", 2)
    assert BAD[template] in refuses(*words, "--scorer", f"reward:{folder}")


def test_tasks_use_the_same_rendering(with_template: Any) -> None:
    from forerun.tasks.base import chat_text

    with pytest.raises(ModelError, match="did not finish"):
        chat_text(Tokenizer.load(with_template(ENDLESS)), ["hi"])
