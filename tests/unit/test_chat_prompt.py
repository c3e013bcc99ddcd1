"""How a conversation becomes a prompt: the model's chat template, or the embedded models' form."""

from __future__ import annotations

import logging

import pytest

import forerun
from forerun.errors import ModelError

QUESTION = "Ann has 12 pens. Ben has 3 times as many pens as Ann. How many pens do they have?"
FORM = f"Problem: {QUESTION}\nSolution:\n"


@pytest.fixture(scope="module")
def reasoner() -> forerun.Model:
    return forerun.load()


def test_the_embedded_model_gets_a_question_in_its_form(reasoner: forerun.Model) -> None:
    assert reasoner.chat_prompt(QUESTION) == FORM
    assert reasoner.chat_prompt(FORM) == FORM, "a prompt in that form stays as it is"


def test_chat_answers_as_generate_does_with_the_form(reasoner: forerun.Model) -> None:
    how = {"temperature": 0.6, "max_new_tokens": 24, "seed": 3, "n": 2}
    (expected,) = reasoner.generate(FORM, **how)
    found = reasoner.chat(QUESTION, **how)
    assert [s.tokens for s in found.samples] == [s.tokens for s in expected.samples]


def test_a_template_makes_the_prompt_of_messages(reasoner: forerun.Model) -> None:
    inner = reasoner.tokenizer.inner
    inner.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    try:
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        text = "user: one\nassistant: two\n"
        assert reasoner.chat_prompt(messages) == reasoner.tokenizer.encode(text, special=False)
    finally:
        inner.chat_template = None


def test_messages_without_a_template_are_refused(reasoner: forerun.Model) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        reasoner.chat([{"role": "user", "content": "Hello."}])


def test_other_text_for_the_embedded_model_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = forerun.load()
    with caplog.at_level(logging.WARNING, "forerun"):
        model.generate(FORM, max_new_tokens=1)
        assert not caplog.records
        for _ in range(2):
            model.generate("What is 17 + 25?", max_new_tokens=1)
    assert [r.message for r in caplog.records if "model.chat" in r.message][1:] == []
    assert "use model.chat(text)" in caplog.text
