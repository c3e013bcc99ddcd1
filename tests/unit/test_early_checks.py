"""What is checked of options before anything is loaded: read off the methods' own annotations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from forerun import registry
from forerun.cli import options
from forerun.core.roles import Drafter
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.errors import ConfigError, DataError, ModelError, UnknownName
from forerun.models import paths
from forerun.models.tokenizer import Tokenizer
from forerun.registry import Corpus, DrafterName, File, GrowerName, ModelName

PLAIN = {"bool", "int", "float", "str", "None", "tuple", "Any"}


@pytest.mark.parametrize("kind", ["drafter", "verifier", "controller"])
def test_options_that_are_no_plain_values_say_what_they_name(kind: str) -> None:
    """A method that takes an object of some type, or text in its place, says what the text is."""
    for name in registry.names(kind):
        cls = registry.get(kind, name)
        for option, parameter in registry.options(cls).items():
            words = {*re.findall(r"\w+", str(parameter.annotation))}
            if option not in registry.MODEL_OPTIONS and not words <= PLAIN:
                assert option in registry.reference_options(cls), f"{kind} {name}, option {option}"


class Foreign(PromptLookup):
    """A method of another package; it must not be made before a model is loaded."""

    def __init__(
        self,
        *,
        places: tuple[Corpus, ...] = (),
        little: ModelName | None = None,
        others: tuple[DrafterName | Drafter, ...] = (),
        shape: GrowerName = "as it comes",
        notes: File | None = None,
        count: int = 1,
    ) -> None:
        super().__init__()
        if notes is not None and not Path(notes).exists():
            raise DataError(f"there are no notes {notes}")
        if count < 1 or places or little or others:
            raise ConfigError("made")


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = registry.get

    def get(kind: str, name: str) -> type:
        return Foreign if (kind, name) == ("drafter", "foreign") else found(kind, name)

    monkeypatch.setattr(registry, "get", get)
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        (
            "places=a.txt+b.txt",
            DataError,
            "places of drafter 'foreign': there is no file or folder b.txt",
        ),
        ("little=./nowhere", ModelError, "there is no model folder ./nowhere"),
        ("others=foreign+stnd", UnknownName, "did you mean 'stand'"),
        ("shape=gumbl", UnknownName, "did you mean 'gumbel'"),
        ("little=./nowhere,others=stnd", UnknownName, "stnd"),  # what costs nothing comes first
        ("shape=as it comes,count=0", ConfigError, "made"),  # the default is no grower's name
        ("notes=c.txt", DataError, "there are no notes c.txt"),
        ("others=foreign:count=0", ConfigError, "made"),
        ("others=stand+suffix", ConfigError, "made"),  # no part takes long to make
    ],
)
def test_a_method_from_elsewhere_is_checked_too(
    foreign: None, spec: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        options.check_parts(drafter=f"foreign:{spec}")


def test_what_takes_long_to_make_is_not_made(foreign: None, tiny_folder: Path) -> None:
    slow = f"others=stand+draft_model:model={tiny_folder}"
    for spec in ("places=a.txt", f"little={tiny_folder}", slow):
        with pytest.raises(ConfigError, match="made"):
            registry.make("drafter", f"foreign:{spec}")
        options.check_parts(drafter=f"foreign:{spec}")


def test_paths_of_another_machine_are_not_looked_for(foreign: None) -> None:
    for spec in ("places=b.txt", "little=./nowhere", "notes=c.txt", "others=foreign:notes=c.txt"):
        options.check_parts(is_local=False, drafter=f"foreign:{spec}")
    for spec in ("others=stnd", "shape=gumbl", "counts=1", "little=./nowhere,others=stnd"):
        with pytest.raises(UnknownName):
            options.check_parts(is_local=False, drafter=f"foreign:{spec}")
    options.check_model("./nowhere", is_local=False)
    with pytest.raises(UnknownName, match="fp8"):
        options.check_model("./nowhere", "fp8", is_local=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Iterator[list[list[str]]]:
    """A hub whose every repository is the tiny model; what was asked of it."""
    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    paths._fetched.cache_clear()
    yield asked
    paths._fetched.cache_clear()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("reasonr", "did you mean 'reasoner'?"),
        ("drafts", "did you mean 'draft'?"),
        ("owner/name", "check the spelling or the connection"),
    ],
)
def test_a_model_that_no_hub_delivers_may_be_an_embedded_one(
    monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    paths._fetched.cache_clear()
    with pytest.raises(ModelError, match=re.escape(f"provides (no connection); {advice}")):
        options.check_model(name)


def test_of_a_model_on_the_hub_the_weights_come_last(hub: list[list[str]]) -> None:
    options.check_parts(drafter="draft_model:model=owner/name")
    options.check_model("owner/name")
    assert hub == [["config.json"]]
    Tokenizer.load("owner/name")
    assert len(hub) == 2 and "*.safetensors" not in hub[1]
    paths.model_folder("owner/name")
    assert len(hub) == 3 and "*.safetensors" in hub[2]
    options.check_model("other/name", is_local=False)
    assert len(hub) == 3
