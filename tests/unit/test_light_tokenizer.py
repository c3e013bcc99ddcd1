"""Tokenizers from a record give what transformers gives, and load it for everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from forerun.models.light_tokenizer import LightTokenizer, light_tokenizer, write_record
from forerun.models.render_template import is_simple, render
from forerun.models.tokenizer import Tokenizer
from forerun.utils.paths import cache_folder

TEMPLATES = (  # what templates of real models use
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{% if loop.first and m.role == 'user' %}first {% endif %}{{ m['content'] }}"
    "{% if ns.n == 1 %}{% continue %}{% endif %}.{% endfor %}{{ dict(a=1) }}",
    "{%- if messages[0]['role'] == 'system' -%}\n  {{- messages[0]['content'] }}\n{%- endif %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ documents is none }}",
    "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ {'b': '<', 'a': '\u00fc'} | tojson }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
)
TEMPLATE = (
    "{% for m in messages %}{{ bos_token if bos_token is defined else '-' }}<{{ m.role }}>\n"
    "{{ m.content | trim }}{{ m | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = ("", "Tom has 3 apples.", "<end> in a text", "  ünï\u0301 \u4e16\u754c \n\n x=1")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model with a chat template, and an empty cache."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    made = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def no_load() -> Any:
    raise AssertionError("transformers is not needed here")


def transformers_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def both(folder: Path, load: Callable[[], Any] = no_load) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of transformers, and the one of its record."""
    theirs = Tokenizer.load(folder)
    assert not isinstance(theirs.inner, LightTokenizer)
    ours = light_tokenizer(folder, load)
    assert ours is not None
    return theirs, Tokenizer(ours)


def test_same_ids_texts_and_names(folder: Path) -> None:
    theirs, ours = both(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, special)
            assert ours.encode(text, special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.eos_ids, ours.vocab_size) == (theirs.eos_ids, theirs.vocab_size)
    assert (ours.vocabulary(), ours.specials) == (theirs.vocabulary(), theirs.specials)
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token_id"):
        assert getattr(ours.inner, name) == getattr(theirs.inner, name)
    assert ours.inner.all_special_ids == theirs.inner.all_special_ids


def test_same_chat_text(folder: Path) -> None:
    theirs, ours = both(folder)
    turns = [{"role": "system", "content": " a\n"}, {"role": "user", "content": "<b>&'\u2028"}]
    assert ours.chat_text(turns) == theirs.chat_text(turns)
    assert ours.chat("hi") == theirs.chat("hi")


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_real_models(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    theirs, ours = both(folder, lambda: Tokenizer.load(folder).inner.full())
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    for messages in (turns, turns[1:]):
        assert ours.chat_text(messages) == theirs.chat_text(messages)


def test_what_the_record_does_not_cover_loads_transformers(folder: Path) -> None:
    loaded: list[Any] = []

    def load() -> Any:
        loaded.append(Tokenizer.load(folder).inner._load())
        return loaded[-1]

    theirs, ours = both(folder, load)
    assert not loaded and ours.has_chat_template
    assert ours.inner.convert_ids_to_tokens([1]) == theirs.inner.convert_ids_to_tokens([1])
    assert len(loaded) == 1
    ours.inner.chat_template = theirs.inner.chat_template = "changed {{ messages[0].content }}"
    assert ours.chat_text("hi") == theirs.chat_text("hi") == "changed hi"
    assert len(loaded) == 1


def test_a_second_load_needs_no_transformers(folder: Path) -> None:
    Tokenizer.load(folder)
    assert isinstance(Tokenizer.load(folder).inner, LightTokenizer)
    (folder / "chat_template.jinja").write_text("other")  # any change makes the record void
    assert not isinstance(Tokenizer.load(folder).inner, LightTokenizer)


def test_more_templates_make_a_record_void(folder: Path) -> None:
    Tokenizer.load(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    inner = Tokenizer.load(folder).inner
    assert inner.chat_template == {"default": TEMPLATE, "rag": "rag"}


def test_a_damaged_record_is_ignored(folder: Path) -> None:
    Tokenizer.load(folder)
    (record,) = (cache_folder() / "tokenizers").glob("*.json")
    record.write_text(record.read_text()[:-9])
    assert not isinstance(Tokenizer.load(folder).inner, LightTokenizer)


def test_a_class_that_replaces_parts_of_the_file(folder: Path) -> None:
    """transformers builds parts of some tokenizers itself; the record keeps the result."""
    inner = transformers_tokenizer(folder)
    inner.backend_tokenizer.normalizer = normalizers.Lowercase()
    write_record(folder, inner)
    ours = light_tokenizer(folder, no_load)
    assert ours is not None
    assert ours.encode("TOM has") == inner.encode("TOM has") == inner.encode("tom HAS")


def test_a_class_that_encodes_differently_gets_no_record(folder: Path) -> None:
    inner = transformers_tokenizer(folder)

    class Other(type(inner)):  # type: ignore[misc]
        def encode(self, text: str, **options: Any) -> list[int]:
            return [0]

    inner.__class__ = Other
    write_record(folder, inner)
    assert light_tokenizer(folder, no_load) is None


def test_changes_after_the_load_are_not_recorded(folder: Path) -> None:
    Tokenizer.load(folder).inner.chat_template = None
    assert Tokenizer.load(folder).inner.chat_template == TEMPLATE


def test_only_plain_messages_are_rendered_here() -> None:
    assert is_simple([{"role": "user", "content": "x"}])
    for messages in (
        [],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
        [{"role": "assistant", "content": "x", "reasoning": "y"}],
    ):
        assert not is_simple(messages)


def test_templates_run_in_a_sandbox() -> None:
    from jinja2.exceptions import SecurityError

    source = "{{ messages.append(1) }}"
    with pytest.raises(SecurityError):
        render(source, [{"role": "user", "content": "x"}], {}, False)


def test_the_record_holds_the_template_and_the_names(folder: Path) -> None:
    Tokenizer.load(folder)
    (record,) = (cache_folder() / "tokenizers").glob("*.json")
    found = json.loads(record.read_text())
    assert found["chat_template"] == TEMPLATE
    assert found["special_tokens_map"]["eos_token"] == "<end>"
