"""A token store gives back what was written, appears whole or not at all, and a damaged or foreign one is refused in words."""

import json
from collections import Counter

import numpy as np
import pytest

from common.data.store import StoreWriter, TokenStore, vocabulary_digest
from common.errors import UserError
from common.trees import digest

META = {"vocab_size": 1000, "target": "a/b"}


def write_store(folder, lengths=(5, 3, 8), seed=0):
    draw = np.random.default_rng(seed)
    with StoreWriter(folder, dict(META)) as writer:
        for i, length in enumerate(lengths):
            writer.add(draw.integers(0, 999, length), draw.integers(0, 2, length), source=f"s{i % 2}")
    return folder


def test_a_store_gives_back_what_was_written(tmp_path):
    """A token or mask bit that moves on its way to disk is a wrong label."""
    draw = np.random.default_rng(0)
    written = [(draw.integers(0, 999, n), draw.integers(0, 2, n)) for n in (1, 7, 300, 2)]
    with StoreWriter(tmp_path / "store", META | {"note": "kept"}) as writer:
        for i, (ids, mask) in enumerate(written):
            writer.add(ids, mask, source="ab"[i % 2])
    store = TokenStore.open(tmp_path / "store")
    for i, (ids, mask) in enumerate(written):
        assert store.document(i)[0].tolist() == ids.tolist()
        assert store.document(i)[1].tolist() == mask.tolist()
    assert store.lengths.tolist() == [1, 7, 300, 2]
    assert [store.source_names[s] for s in store.source_of] == ["a", "b", "a", "b"]
    assert store.meta["note"] == "kept" and store.meta["tokens"] == 310
    assert store.meta["supervised_tokens"] == sum(int(mask.sum()) for _, mask in written)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_equal_data_have_equal_fingerprints(tmp_path):
    """Ranks compare fingerprints: two copies of one store must agree, and one other token must show."""
    one, same, other = (TokenStore.open(write_store(tmp_path / n, seed=s)).fingerprint for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert one == same != other


def test_another_mask_has_another_fingerprint(tmp_path):
    """The mask is half of the data: a resume with other supervised tokens must not pass for the same run."""
    prints = set()
    for name, mask in (("a", [0, 1, 1]), ("b", [1, 1, 1])):
        with StoreWriter(tmp_path / name, dict(META)) as writer:
            writer.add([1, 2, 3], mask)
        prints.add(TokenStore.open(tmp_path / name).fingerprint)
    assert len(prints) == 2


def test_an_interrupted_pack_leaves_the_old_store(tmp_path):
    """Stopping a long pack half way must neither lose the store that was there nor leave half of one."""
    before = TokenStore.open(write_store(tmp_path / "store")).fingerprint
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "store", dict(META)) as writer:
        writer.add([1, 2], [0, 1])
        raise KeyboardInterrupt
    assert TokenStore.open(tmp_path / "store").fingerprint == before
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    write_store(tmp_path / "store", seed=1)
    assert TokenStore.open(tmp_path / "store").fingerprint != before


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    """`--output .` must not delete the user's work."""
    (tmp_path / "thesis.tex").write_text("years")
    for folder in (tmp_path, tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "store"):
        with pytest.raises(UserError, match="name another folder"):
            StoreWriter(folder, {})
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize(("ids", "mask"), [([1000], [1]), ([-1], [1]), ([], []), ([1, 2], [1]), ([1], [2]), ([[1]], [[1]])])
def test_a_document_that_cannot_be_trained_on_is_refused(tmp_path, ids, mask):
    """An id beyond the embedding would surface hours later as a CUDA assertion."""
    with pytest.raises(UserError), StoreWriter(tmp_path / "store", META) as writer:
        writer.add(ids, mask)


def test_damage_is_found_when_the_store_is_opened_or_read(tmp_path):
    """A cut copy, a flipped bit or a forged meta.json ends in a sentence, and never in memory asked for on its word."""
    folder = write_store(tmp_path / "store", lengths=range(1, 40))
    pristine = {path.name: path.read_bytes() for path in folder.iterdir()}
    originals = [TokenStore.open(folder).document(i) for i in range(39)]
    draw = np.random.default_rng(0)
    found = Counter()
    for _ in range(400):
        name = str(draw.choice(list(pristine)))
        data = bytearray(pristine[name])
        match draw.integers(3):
            case 0:
                data[draw.integers(len(data))] ^= 1 << draw.integers(8)
            case 1:
                data = data[: draw.integers(len(data))]
            case 2:
                data += bytes(int(draw.integers(1, 50)))
        (folder / name).write_bytes(bytes(data))
        try:
            store = TokenStore.open(folder)
            documents = [store.document(i) for i in range(len(store))]
            same = all((a == b).all() for one, two in zip(documents, originals, strict=True) for a, b in zip(one, two, strict=True))
            found["unseen" if not same else "harmless"] += 1
            assert same or name in ("tokens.bin", "mask.bin")  # a token that became another valid token is beyond an index check
        except UserError:
            found["refused"] += 1
        (folder / name).write_bytes(pristine[name])
    assert found["refused"] > 300


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 2**60, "tokens": 2**62},
        {"documents": 0, "tokens": 0},
        {"documents": -1},
        {"documents": "3"},
        {"documents": 1e400},
        {"tokens": True},
        {"source_names": 5},
        {"source_names": []},
        {"vocab_size": "many"},
        {"used_ids": ""},
        {"used_ids": "no hex"},
        {"version": 2},
    ],
    ids=str,
)
def test_a_forged_meta_is_refused_though_its_digest_fits(tmp_path, change):
    """Stores are copied from machine to machine and from person to person."""
    folder = write_store(tmp_path / "store")
    meta = json.loads((folder / "meta.json").read_text()) | change
    del meta["digest"]
    (folder / "meta.json").write_text(json.dumps(meta | {"digest": digest(meta)}))
    with pytest.raises(UserError, match="damaged"):
        TokenStore.open(folder)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '"a"', "[" * 100000, "\x00", '{"version": 1}'])
def test_a_meta_that_is_none_is_refused(tmp_path, text):
    folder = write_store(tmp_path / "store")
    (folder / "meta.json").write_text(text)
    with pytest.raises(UserError, match="damaged"):
        TokenStore.open(folder)


def test_no_store_says_how_to_write_one(tmp_path):
    with pytest.raises(UserError, match=r"prepare_data.py pack"):
        TokenStore.open(tmp_path)


def test_a_store_for_another_target_is_refused(tmp_path):
    """The most common silent mistake: data packed with one tokenizer, trained with another model."""
    folder, target = tmp_path / "store", tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    with StoreWriter(folder, META | {"vocabulary_digest": vocabulary_digest((target / "tokenizer.json").read_text())}) as writer:
        writer.add([0, 20], [1, 1])
    store = TokenStore.open(folder)
    store.check_target(target, 21)
    with pytest.raises(UserError, match=r"holds token 20.*has 20 rows"):
        store.check_target(target, 20)
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1, "b": 0}}}))
    with pytest.raises(UserError, match="another tokenizer"):
        store.check_target(target, 21)
