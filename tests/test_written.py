"""What a target wrote is what its drafter learns: text does not give the tokens back, so rows carry them and packing takes them."""

import json
import shutil
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCABULARY_ROWS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from writing import open_job, rows_of, write_questions

from common.data.chat import Chat, load_tokenizer
from common.data.preparing import describe_counts, pack
from common.data.store import TokenStore
from common.data.written import token_ids
from common.generation.backends import Reply, Sampling, advance
from common.generation.script import Script
from common.target.files import read_spec

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END, MERGED = 258, 259
UNUSED = [f"<unused{i}>" for i in range(VOCABULARY_ROWS - 1 - MERGED)]  # else a random target writes ids that are no tokens
ASCII = [i for i, name in enumerate(BYTES) if name.isascii() and name.isalnum()]


def write_tokenizer(folder, pair):
    """The tiny target's tokenizer of bytes, with one merge of the pair: text that holds it always comes back as the merged token."""
    vocabulary = {name: i for i, name in enumerate([*BYTES, *SPECIAL_TOKENS, "".join(pair), *UNUSED])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[pair]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def regenerate(target, folder, name):
    job = open_job(target, folder / f"{name}.jsonl", answers="greedy", max_tokens=40, input=write_questions(folder / "given.jsonl"))
    job.regenerate()
    return rows_of(folder / f"{name}.jsonl")


def answers_of(row):
    return [s["ids"][begin:end] for s in row["token_ids"]["sequences"] for begin, end in s["answers"]]


@pytest.fixture(scope="module")
def target(tiny_target, tmp_path_factory):
    """The tiny target with a tokenizer that makes one token of two letters that the target likes to write one by one."""
    folder = tmp_path_factory.mktemp("written")
    pairs = Counter()
    for row in regenerate(tiny_target, folder, "plain").values():
        for ids in answers_of(row):
            pairs.update(pair for pair in pairwise(ids) if set(pair) <= set(ASCII))
    (first, second), _ = pairs.most_common(1)[0]
    shutil.copytree(tiny_target, folder / "target")
    write_tokenizer(folder / "target", (BYTES[first], BYTES[second]))
    return folder / "target"


@pytest.fixture(scope="module")
def rows(target, tmp_path_factory):
    return list(regenerate(target, tmp_path_factory.mktemp("rows"), "own").values())


def packed(target, folder, rows, **options):
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = pack([str(folder / "rows.jsonl")], str(target), str(folder / "store"), **options)
    return summary, TokenStore.open(folder / "store")


def documents(store):
    return [tuple(array.tolist() for array in store.document(i)) for i in range(len(store))]


def text_only(rows):
    return [{key: value for key, value in row.items() if key != "token_ids"} for row in rows]


def test_every_supervised_token_is_the_one_that_the_target_decodes(target, rows, tmp_path):
    """Trained on other tokens, a drafter learns sequences that are never served, and held-out tau is not that of decoding."""
    summary, store = packed(target, tmp_path / "written", rows)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for i in range(len(store)):
        ids, mask = (torch.from_numpy(array).long() for array in store.document(i))
        with torch.no_grad():
            decoded = model(ids[None]).logits[0, :-1].argmax(-1)
        supervised = mask[1:].bool()
        assert torch.equal(decoded[supervised], ids[1:][supervised])
    assert store.meta["supervised_tokens"] == sum(row["tokens"] for row in rows), "every token that was written, once"
    assert summary["written"] == summary["accepted"] == len(rows)
    again, from_text = packed(target, tmp_path / "text", text_only(rows))
    assert again["written"] == 0 and again["tokenized"] == {"no token ids": len(rows)}
    assert documents(from_text) != documents(store), "the text must come back as other tokens for this test to be one"


def test_an_answers_context_is_the_one_it_was_written_in(target, tmp_path):
    """The next turn's prompt is the text of the earlier answers, tokenized anew: where that changes them, they are context, not answers."""
    chat = Chat(load_tokenizer(target))
    merged = chat.backend.id_to_token(MERGED)
    replies = [  # the first comes back from its text, the second as the merged token, the last is written as that
        Reply(merged[0], 2, False, (BYTES.index(merged[0]), END)),
        Reply(merged, 3, False, (*map(BYTES.index, merged), END)),
        Reply(merged, 2, False, (MERGED, END)),
    ]
    given = [{"role": role, "content": "so?"} for _ in replies for role in ("user", "assistant")]
    dialogue = Script(chat, read_spec(target), 0, answer=Sampling(0, 1, 8)).regenerate("0", given)
    answer, prompts = advance(dialogue, None), []
    for reply in replies:
        prompts.append(list(answer.prompt))
        answer = advance(dialogue, reply)
    assert [message["content"] for message in answer["messages"][1::2]] == [reply.text for reply in replies]
    assert prompts[2][: len(prompts[1])] == prompts[1] and list(replies[1].ids) != prompts[2][len(prompts[1]) :][:3]
    (first, first_mask), (second, second_mask) = documents(packed(target, tmp_path / "store", [answer])[1])
    assert first == [*prompts[1], *replies[1].ids] and second == [*prompts[2], *replies[2].ids]
    supervised = [*range(len(prompts[0]), len(prompts[0]) + 2), *range(len(prompts[1]), len(first))]
    assert np.flatnonzero(first_mask).tolist() == supervised
    assert np.flatnonzero(second_mask).tolist() == [*range(len(prompts[2]), len(second))]


def test_the_share_of_answers_that_change_is_measured(target, rows, tmp_path):
    """The figure tells a user whether rows without ids are worth writing again."""
    summary, _ = packed(target, tmp_path / "store", rows)
    chat, differing = Chat(load_tokenizer(target)), 0
    for row in rows:
        written, said = answers_of(row), [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        for ids, text in zip(written, said, strict=True):
            differing += chat.backend.encode(text, add_special_tokens=False).ids != ids[: len(ids) - (ids[-1] == END)]
    assert (summary["compared_answers"], summary["differing_answers"]) == (sum(len(answers_of(row)) for row in rows), differing)
    assert 0 < differing < summary["compared_answers"]
    assert f"of {summary['compared_answers']} written answers comes back as other tokens" in describe_counts(summary)


def change_ids(**changes):
    return lambda row: row["token_ids"].update(changes)


def edit_message(row):
    row["messages"][1]["content"] += "!"


def sequence(ids, answers):
    return change_ids(sequences=[{"ids": ids, "answers": answers}])


MISFITS = [
    ("no token ids", lambda row: row.pop("token_ids")),
    ("written with another vocabulary", change_ids(vocabulary_digest="0")),
    ("written with other added tokens", change_ids(added_tokens_digest="0")),
    ("written with another chat template or other --chat-template-kwargs", change_ids(template_digest="0")),
    ("messages changed after they were written", edit_message),
    ("an id beyond the tokenizer's vocabulary", sequence([1, 2, VOCABULARY_ROWS], [[1, 3]])),
    *[
        ("damaged token ids", change)
        for change in (
            lambda row: row.update(token_ids=3),
            lambda row: row["token_ids"].pop("template_digest"),
            lambda row: row["token_ids"].pop("sequences"),
            change_ids(sequences=[]),
            change_ids(sequences=[[1, 2]]),
            sequence([1, -2, 2], [[1, 3]]),
            sequence([1, 2.5, 2], [[1, 3]]),
            sequence([1, "2", 2], [[1, 3]]),
            sequence([1, 2**70, 2], [[1, 3]]),
            sequence([[1, 2]], [[0, 1]]),
            sequence([], []),
            sequence([1, 2, 3], []),
            sequence([1, 2, 3], [[1]]),
            sequence([1, 2, 3], [[1, 4]]),
            sequence([1, 2, 3], [[2, 1]]),
            sequence([1, 2, 3, 4, 5], [[3, 5], [1, 3]]),
        )
    ],
]


@pytest.mark.parametrize(("reason", "change"), MISFITS)
def test_ids_that_do_not_fit_are_not_used_and_are_counted(target, rows, tmp_path, reason, change):
    """Ids of another template or vocabulary are other words; taken without a check they would train on garbage."""
    row, good = json.loads(json.dumps(rows[0])), rows[1]
    change(row)
    summary, store = packed(target, tmp_path / "store", [row, good])
    _, from_text = packed(target, tmp_path / "text", text_only([row]))
    assert summary["tokenized"] == {reason: 1} and summary["written"] == 1 and summary["accepted"] == 2
    assert documents(store)[: len(from_text)] == documents(from_text)
    assert f"1 were tokenized from their text: 1 x {reason}" in describe_counts(summary)


def test_other_template_arguments_are_another_template(target, rows, tmp_path):
    """A thinking model's ids must not be packed by somebody who asked for conversations without thoughts."""
    summary, _ = packed(target, tmp_path / "store", rows, chat_template_kwargs={"enable_thinking": False})
    assert summary["written"] == 0
    assert list(summary["tokenized"]) == ["written with another chat template or other --chat-template-kwargs"]


def test_the_sequences_of_a_conversation_are_held_out_together(target, rows, tmp_path):
    """The later sequence holds the earlier one's text: on both sides, validation would be a memory test."""
    several = [row for row in rows if len(row["token_ids"]["sequences"]) > 1]
    for seed in range(4):
        summary, store = packed(target, tmp_path / "store", several, heldout=1, seed=seed)
        apart = documents(TokenStore.open(summary["heldout"]["folder"]))
        lengths = [len(row["token_ids"]["sequences"]) for row in several]
        assert len(apart) in lengths and len(apart) + len(store) == sum(lengths)
        assert len({tuple(ids[: ids.index(END)]) for ids, _ in apart}) == 1, "all begin with one and the same question"


def test_a_sequence_grows_only_over_the_ids_that_were_written(target):
    """One id that a prompt changes makes an answer context; a sequence that grew over it would supervise what nobody wrote."""
    chat, row = Chat(load_tokenizer(target)), {"messages": []}
    grown = token_ids(chat, row, [((1, 2), (3, 4)), ((1, 2, 3, 4, 5), (6,)), ((1, 2, 3, 9, 5, 6, 7), (8,))])["sequences"]
    assert grown == [
        {"ids": [1, 2, 3, 4, 5, 6], "answers": [[2, 4], [5, 6]]},
        {"ids": [1, 2, 3, 9, 5, 6, 7, 8], "answers": [[7, 8]]},
    ]


def test_documents_are_cut_one_by_one(target, rows, tmp_path):
    """--max-tokens must not drop a conversation whose first sequence still holds an answer, nor keep a sequence without any."""
    row = next(row for row in rows if len(row["token_ids"]["sequences"]) > 1)
    first, second = (s["answers"][0][0] for s in row["token_ids"]["sequences"][:2])
    limit = first + 2
    assert limit < second
    summary, store = packed(target, tmp_path / "store", [row], max_tokens=limit)
    assert (summary["accepted"], summary["truncated"], len(store)) == (1, 1, 1)
    ids, mask = store.document(0)
    assert ids.tolist() == row["token_ids"]["sequences"][0]["ids"][:limit] and np.flatnonzero(mask).tolist() == [first, first + 1]
