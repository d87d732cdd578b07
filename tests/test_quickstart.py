"""The embedded target and its conversations: what the first command of a new user rests on."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.data.chat import Chat, load_tokenizer
from common.data.store import TokenStore
from common.data.written import packed_otherwise
from common.generation.conversation_file import is_loop

FOLDER = Path(__file__).resolve().parent.parent / "launch" / "quickstart"
MASK = "<|mask|>"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER / "target")


def conversations(name):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(FOLDER / name, "rt") as file:
        return [json.loads(line)["messages"] for line in file]


def prompts(rows):
    return {json.dumps(messages[:turn]) for messages in rows for turn in range(1, len(messages), 2)}


def test_folder_stays_small():
    """Else every clone of the repository carries the weight."""
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if "__pycache__" not in file.parts) <= 8e6


def test_heldout_asks_nothing_that_was_trained_on():
    """Else the quickstart's acceptance length would be memory."""
    assert not prompts(conversations("train.jsonl.gz")) & prompts(conversations("heldout.jsonl"))


@pytest.mark.parametrize(("store", "source"), [("train", "train.jsonl.gz"), ("heldout", "heldout.jsonl")])
def test_stores_hold_the_conversations(tokenizer, store, source):
    """Else a rebuilt target would train on the answers of the one before."""
    packed, chat, rows = TokenStore.open(FOLDER / store), Chat(tokenizer), conversations(source)
    packed.check_target(FOLDER / "target", len(tokenizer))
    assert len(packed) == len(rows)
    for i in range(0, len(rows), len(rows) // 16):
        ids, _ = packed.document(i)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(rows[i], tokenize=False)
        assert ids[: len(chat.prompt(rows[i][:1]))].tolist() == list(chat.prompt(rows[i][:1]))


@pytest.mark.parametrize("store", ["train", "heldout"])
def test_stores_were_packed_with_the_targets_own_template(tokenizer, store):
    """Else the README's second command ends with an error about a template that nobody changed."""
    packed_with = TokenStore.open(FOLDER / store).packed_with
    assert packed_with and packed_otherwise(Chat(tokenizer), packed_with) == []


def test_mask_token_never_occurs_in_data(tokenizer):
    """Else the drafter would take a known token for an unknown slot."""
    mask = tokenizer.convert_tokens_to_ids(MASK)
    assert mask not in (tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    assert not any(mask in TokenStore.open(FOLDER / store).used_ids for store in ("train", "heldout"))


def test_answers_are_the_targets_own():
    """Else held-out tau in training would not be that of real decoding. A text is greedy if each token is the likeliest one there."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    store = TokenStore.open(FOLDER / "heldout")
    for i in range(16):
        ids, mask = map(torch.from_numpy, store.document(i))
        with torch.no_grad():
            likeliest = model(ids[None].long()).logits[0].argmax(-1)
        answered = mask[1:].bool()
        assert torch.equal(likeliest[:-1][answered], ids[1:][answered].long())


def test_answers_do_not_loop(tokenizer):
    """Else a drafter could score by repeating, and the answers would be no pleasure to read."""
    answers = [m["content"] for name in ("train.jsonl.gz", "heldout.jsonl") for row in conversations(name) for m in row[1::2]]
    loops = sum(is_loop(tokenizer(answer).input_ids) for answer in answers)
    assert loops <= 0.05 * len(answers)
