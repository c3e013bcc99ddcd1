"""Memories of drafters in files: the same drafts come back, for the right tokenizer and tenant."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun import registry
from forerun.api import Model, load
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling
from forerun.drafters.stand import Stand
from forerun.errors import ConfigError
from forerun.models.identity import model_hash, model_name, tokenizer_hash
from forerun.state import drafter_files
from forerun.state.array_file import Origin
from forerun.state.drafter_files import MemoryFile

ORIGIN = Origin("t" * 64, (("tiny", "m" * 64),))


def sequence(tokens: list[int], group: object = 0, tenant: str = "", **sampling: float) -> Sequence:
    return Sequence(
        list(tokens),
        len(tokens),
        Sampling(**sampling),
        SeededDice(0),
        limit=99,
        group=group,
        tenant=tenant,
    )


def taught(seed: int = 0, tenant: str = "", **options: object) -> Stand:
    """A drafter with a random memory of a tenant."""
    drafter, rng = Stand(**{"scope": "tenant", "context": 2, "entries": 4} | options), seed
    memory = drafter.memory(sequence([1], tenant=tenant))
    generator = np.random.default_rng(rng)
    for _ in range(60):
        context = generator.integers(0, 9, generator.integers(1, 4)).tolist()
        memory.update(context, generator.permutation(9)[:5], generator.dirichlet(np.ones(5)))
    drafter.forget(0)  # what is saved serves other groups
    return drafter


def drafts(drafter: Stand, tenant: str = "") -> list[list[int]]:
    """What is drafted after each of nine tokens."""
    seqs = [sequence([token], tenant=tenant, temperature=0.7) for token in range(9)]
    return [
        tree.tokens.tolist()
        for tree in drafter.propose(seqs, [Plan(nodes=6)] * 9, [s.dice for s in seqs])
    ]


# snapshots


def test_a_restored_memory_drafts_the_same() -> None:
    drafter, copy = taught(), Stand(context=2, entries=4)
    copy.restore(drafter.snapshot())
    assert drafts(copy) == drafts(drafter) and any(drafts(drafter))
    counts = copy.snapshot().counts
    assert counts == drafter.snapshot().counts and counts["tokens"] == 60


def test_restoring_forgets_what_was_there() -> None:
    drafter = taught()
    snapshot = drafter.snapshot()
    drafter.restore(snapshot)
    np.testing.assert_array_equal(drafter.snapshot().arrays["counts"], snapshot.arrays["counts"])
    drafter.restore(taught(1).snapshot())
    assert drafts(drafter) == drafts(taught(1))


def test_a_snapshot_that_the_budget_has_no_room_for_loses_the_oldest() -> None:
    drafter = taught(context=4)
    small = Stand(scope="tenant", context=4, entries=4, budget_mb=80 * 48 / 2**20)
    small.restore(drafter.snapshot())
    held = small.snapshot()
    assert held.counts["contexts"] == 36 < drafter.snapshot().counts["contexts"]
    assert held.counts["evicted"] == drafter.snapshot().counts["contexts"] - 36
    near = small.memory(sequence([1]))
    near.update([1, 2], [3], [1.0])
    assert len(near) > 0, "a quarter is left for what is asked first"
    assert small.memory_report()["logit memory"] <= 80 * 48


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"entries": 5}, "entries=5, got one with entries=4; use stand:entries=4"),
        ({"context": 3}, "context=3[+]2[+]1, got one with context=2[+]1; use stand:context=2[+]1"),
        ({"store": "processed"}, "store=processed, got one with store=model"),
    ],
)
def test_other_settings_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        taught(**options).restore(taught().snapshot())


def test_what_cannot_be_kept_is_refused() -> None:
    for spec in ("none", "prompt_lookup"):
        drafter = registry.make("drafter", spec)
        with pytest.raises(ConfigError, match=f"drafter '{spec}' has no state to save"):
            MemoryFile("some.mem", drafter, Origin("", (), ""))
    with pytest.raises(ConfigError, match="scope request ends with its request"):
        Stand(scope="request").keep()
    with pytest.raises(ConfigError, match="is shared by all tenants, not tenant 'a'"):
        Stand(scope="global").keep("a")


# tenants


def test_tenants_share_nothing() -> None:
    drafter = taught(tenant="a")
    assert any(drafts(drafter, "a")) and not any(drafts(drafter, "b")) and not any(drafts(drafter))
    assert drafter.snapshot("b").counts["contexts"] == 0 < drafter.snapshot("a").counts["contexts"]
    drafter.restore(taught(1).snapshot(), "b")
    assert drafts(drafter, "a") == drafts(taught(tenant="a"), "a")
    assert drafts(drafter, "b") == drafts(taught(1))


def test_a_group_of_one_tenant_teaches_later_groups() -> None:
    drafter = Stand(scope="tenant")
    drafter.memory(sequence([1], group="a", tenant="x")).update([1], [2], [1.0])
    drafter.forget("a")
    assert drafter.memory(sequence([1], group="b", tenant="x")).lookup([1])
    assert not drafter.memory(sequence([1], group="b", tenant="y")).lookup([1])


# files


def test_files_bring_back_the_same_drafts(tmp_path: Path) -> None:
    path, drafter = tmp_path / "a.mem", taught()
    saved = MemoryFile(path, drafter, ORIGIN).save()
    copy = Stand(context=2, entries=4)
    loaded = MemoryFile(path, copy, ORIGIN).load()
    assert drafts(copy) == drafts(drafter)
    assert loaded.origin == saved.origin and loaded.to_dict()["counts"]["tokens"] == 60


def test_another_tokenizer_or_tenant_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mem"
    MemoryFile(path, taught(tenant="a"), replace(ORIGIN, tenant="a")).save()
    for origin, said in (
        (replace(ORIGIN, tokenizer="u" * 64, tenant="a"), "learned with another tokenizer"),
        (replace(ORIGIN, tenant="b"), "belongs to tenant 'a', not to tenant 'b'"),
        (
            ORIGIN,
            "to all tenants; .* shared copy with `forerun memory merge .*a.mem --tenant '' --o",
        ),
    ):
        drafter = taught(5)
        with pytest.raises(ConfigError, match=said):
            MemoryFile(path, drafter, origin).load()
        assert drafts(drafter) == drafts(taught(5))  # untouched
    MemoryFile(path, Stand(context=2, entries=4), replace(ORIGIN, tenant="a")).load()


def test_a_shared_memory_may_be_loaded_for_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "a.mem"
    MemoryFile(path, taught(), ORIGIN).save()
    drafter = Stand(context=2, entries=4)
    kept = MemoryFile(path, drafter, replace(ORIGIN, tenant="a"))
    kept.load()
    assert drafts(drafter, "a") == drafts(taught()) and not any(drafts(drafter))
    assert kept.origin.tenant == "a"


def test_what_belongs_to_others_is_not_saved_over(tmp_path: Path) -> None:
    path, bobs = tmp_path / "a.mem", replace(ORIGIN, tenant="bob")
    MemoryFile(path, taught(), ORIGIN).save()
    before = path.read_bytes()
    kept = MemoryFile(path, Stand(context=2, entries=4), bobs)
    kept.load()
    with pytest.raises(ConfigError, match="is shared by all tenants; saving it for tenant 'bob'"):
        kept.save()
    with pytest.raises(ConfigError, match="is shared by all"), kept:
        raise AssertionError("the block must not begin")
    assert path.read_bytes() == before
    kept.path = tmp_path / "bob.mem"
    assert kept.save().origin.tenant == "bob"
    before = kept.path.read_bytes()
    with pytest.raises(ConfigError, match="belongs to tenant 'bob', not to all tenants"):
        MemoryFile(kept.path, taught(), ORIGIN).save()
    assert kept.path.read_bytes() == before


def test_another_model_is_welcome_with_a_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.mem"
    MemoryFile(path, taught(), ORIGIN).save()
    other = replace(ORIGIN, models=(("big", "n" * 64),))
    with caplog.at_level(logging.WARNING, "forerun"):
        kept = MemoryFile(path, Stand(context=2, entries=4), other)
        kept.load()
    assert "was learned from tiny" in caplog.text
    assert kept.save().origin.models == (("tiny", "m" * 64), ("big", "n" * 64))


def test_what_one_part_has_learned_is_saved_in_its_own_form(tmp_path: Path) -> None:
    path = tmp_path / "a.mem"
    for name in ("fuse", "router"):
        both = registry.make("drafter", name, parts=("prompt_lookup", taught()))
        assert MemoryFile(path, both, ORIGIN).save().snapshot.kind == "stand"
        alone, again = Stand(context=2, entries=4), Stand(context=2, entries=4)
        MemoryFile(path, alone, ORIGIN).load()
        assert drafts(alone) == drafts(taught())
        fused = registry.make("drafter", name, parts=("prompt_lookup", again))
        MemoryFile(path, fused, ORIGIN).load()
        assert drafts(again) == drafts(alone)
        held = drafter_files.read(path).snapshot
        assert both.merge([held, held]).counts["tokens"] == 120
    with pytest.raises(ConfigError, match="no part of fuse can be saved"):
        registry.make("drafter", "fuse:parts=prompt_lookup+suffix:scope=group").keep()


def test_chances_come_back_with_a_memory(tmp_path: Path) -> None:
    path, drafter = tmp_path / "a.mem", taught()
    chances = drafter.memory(sequence([1])).acceptance
    chances[True].hits[:] *= 0.5
    MemoryFile(path, drafter, ORIGIN).save()
    copy = Stand(context=2, entries=4)
    MemoryFile(path, copy, ORIGIN).load()
    found = copy.memory(sequence([1])).acceptance
    for drawn in (True, False):
        np.testing.assert_allclose(found[drawn].rates, chances[drawn].rates, rtol=1e-6)


def test_merge_and_cap(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("1", "2", "3"))
    MemoryFile(one, taught(1), ORIGIN).save()
    MemoryFile(two, taught(2), replace(ORIGIN, models=(("other", "o" * 64),))).save()
    merged = drafter_files.merge([one, two], out)
    assert merged.snapshot.counts["tokens"] == 120
    assert [name for name, _ in merged.origin.models] == ["tiny", "other"]
    assert drafter_files.read(out).snapshot.counts == merged.snapshot.counts
    capped = drafter_files.merge([out], out, max_bytes=2500)
    assert drafter_files.read(out).snapshot.nbytes == capped.snapshot.nbytes <= 2500
    MemoryFile(one, taught(1, entries=5), ORIGIN).save()
    with pytest.raises(ConfigError, match="entries=5"):
        drafter_files.merge([one, two], out)
    MemoryFile(one, taught(1), replace(ORIGIN, tokenizer="u" * 64)).save()
    with pytest.raises(ConfigError, match="data of one tokenizer"):
        drafter_files.merge([one, two], out)
    assert drafter_files.read(out).snapshot.nbytes == capped.snapshot.nbytes


def test_merging_says_whose_it_is(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "")[:2]] + [tmp_path / "all"]
    for path, tenant in zip(paths, ("a", "b", ""), strict=True):
        MemoryFile(path, taught(tenant=tenant), replace(ORIGIN, tenant=tenant)).save()
    out = tmp_path / "out"
    assert drafter_files.merge([paths[0], paths[2]], out).origin.tenant == "a"
    with pytest.raises(ConfigError, match="got those of a and b; name the owner"):
        drafter_files.merge(paths, out)
    assert drafter_files.merge(paths, out, tenant="").origin.tenant == ""


def test_draft_shows_what_a_memory_knows(tmp_path: Path) -> None:
    drafter = Stand(scope="tenant", context=2)
    for tokens, token in (([1, 2], 3), ([2, 3], 4)):
        drafter.memory(sequence([1])).update(tokens, [token], [1.0])
    memory = MemoryFile(tmp_path / "a", drafter, ORIGIN).save()
    assert drafter_files.draft(memory, [1, 2], 4).path(1) == [3, 4]


# a real model


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Model:
    return load(tiny_folder, dtype="fp32")


def test_a_models_memory_lives_in_a_file(tiny: Model, tiny_folder: Path, tmp_path: Path) -> None:
    options = {"temperature": 0.5, "seed": 3, "max_new_tokens": 24}
    options["controller"] = "fixed:nodes=8"  # which never rests, so that all tokens are learned
    path = tmp_path / "a.mem"
    with tiny.memory(path):
        first = tiny.generate("the cat sat on", n=4, **options)[0].stats
    fresh = load(tiny_folder, dtype="fp32")
    with fresh.memory(path) as kept:
        second = fresh.generate("the cat sat on", n=4, **options)[0].stats
    assert kept.before and kept.after
    assert kept.before.snapshot.counts["tokens"] == first.generated
    assert kept.after.snapshot.counts["tokens"] == first.generated + second.generated
    assert second.tau > first.tau
    assert kept.after.origin.models == ((tiny_folder.name, model_hash(str(tiny_folder))),)
    assert str(tmp_path) not in repr(kept.after.origin)


def test_greedy_texts_do_not_depend_on_the_memory(tiny: Model, tmp_path: Path) -> None:
    options = {"temperature": 0.0, "max_new_tokens": 30}
    plain = tiny.generate("the dog sat", drafter="none", **options)[0].text
    for _ in range(2):
        with tiny.memory(tmp_path / "g.mem"):
            assert tiny.generate("the dog sat", **options)[0].text == plain


def test_runs_name_their_tenant(tiny: Model) -> None:
    spec, options = "stand:scope=tenant", {"seed": 1, "max_new_tokens": 8}
    tiny.generate("the cat", drafter=tiny.drafter(spec), tenant="a", **options)
    counts = [tiny.drafter(spec).snapshot(tenant).counts["tokens"] for tenant in ("a", "b", "")]
    assert counts == [8, 0, 0]


# identity


def test_hashes_tell_models_and_tokenizers_apart(tiny_folder: Path, tmp_path: Path) -> None:
    from tiny import make_tiny

    twin, other = make_tiny(tmp_path / "twin"), make_tiny(tmp_path / "other", seed=1, vocab=300)
    assert model_hash(str(twin)) == model_hash(str(tiny_folder)) != model_hash(str(other))
    codes = [tokenizer_hash(load(folder).tokenizer) for folder in (tiny_folder, twin, other)]
    assert codes[0] == codes[1] != codes[2]
    assert model_hash("no/such-model-anywhere") == "" and model_name("owner/name") == "owner/name"


def test_large_weights_are_sampled(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tiny import make_tiny

    from forerun.models import identity

    monkeypatch.setattr(identity, "WHOLE", 1000)
    other = make_tiny(tmp_path / "other", seed=1)
    assert model_hash(str(tiny_folder)) == model_hash(str(tiny_folder)) != model_hash(str(other))


def test_a_loaded_model_is_known_by_its_parameters(tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load(AutoModelForCausalLM.from_pretrained(tiny_folder))
    code = model_hash(model.name, model.target)
    assert len(code) == 64 and code == model_hash(model.name, model.target)
    assert model_name(model.name) == "LlamaForCausalLM"
