"""The target writes its own training data: what lands in the file must be its words, once each, whatever stops or breaks on the way."""

import itertools
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import Job as ScriptJob
from writing import FLAGS, open_job, rows_of, write_questions

from common.data.chat import Chat, load_tokenizer
from common.errors import UserError
from common.generation.backends import LocalBackend, Reply, Request, Sampling, SeededChoice, advance, nucleus
from common.generation.conversation_file import is_loop
from common.generation.script import Script
from common.target.files import read_spec


@pytest.fixture
def questions(tmp_path):
    return write_questions(tmp_path / "given.jsonl")


def play(dialogue, write):
    """What becomes of a dialogue whose every request is answered by write()."""
    answer = advance(dialogue, None)
    while isinstance(answer, Request):
        answer = advance(dialogue, write())
    return answer


class Canned:
    """A backend whose target says the same to everybody."""

    def __init__(self, *texts, cut=False):
        self.texts, self.cut = texts, cut

    def run(self, jobs, done):
        for row_id, dialogue in jobs:
            texts = itertools.cycle(self.texts)
            yield [(row_id, play(dialogue, lambda texts=texts: Reply(next(texts), 1, self.cut, (1,))))]


def test_a_killed_run_goes_on_to_the_same_rows(tiny_target, tmp_path):
    """A run over a night that starts from scratch, or writes other rows after a kill, is worth nothing."""
    arguments = [
        "synthesize", "--target", tiny_target, "--num", 6, "--max-tokens", 8, "--max-user-tokens", 6, "--batch-size", 2,
        "--keep", "cut", "loop", "--device", "cpu", "--output",
    ]  # fmt: skip
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    with ScriptJob([*arguments, whole], script="prepare_data") as job:
        assert job.wait() == [0], job.output

    with ScriptJob([*arguments, stopped], script="prepare_data", sabotage=kill_at_third_batch) as job:
        assert job.wait() == [-signal.SIGKILL], job.output
    finished = stopped.read_text()
    assert len(finished.splitlines()) == 4
    stopped.write_text(finished[:-20])  # the fourth row's end never reached the disk
    with ScriptJob([*arguments, stopped], script="prepare_data") as job:
        assert job.wait() == [0], job.output
    assert rows_of(stopped) == rows_of(whole) and len(stopped.read_text().splitlines()) == 6


def kill_at_third_batch(rank):
    writes, write = itertools.count(), LocalBackend.write
    LocalBackend.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL) if next(writes) == 4 else write(*args)


def test_rows_depend_on_the_seed_and_their_id_only(tiny_target, tmp_path):
    """Otherwise nobody can make the same data again, on a machine that fits another batch."""
    texts = {}
    for name, changes in {"one": {}, "small batches": {"batch_size": 2}, "other seed": {"seed": 4}}.items():
        job = open_job(tiny_target, tmp_path / f"{name}.jsonl", max_user_tokens=10, **changes)
        assert job.synthesize(5)["kept"] == 5
        texts[name] = {row["id"]: row["messages"] for row in rows_of(tmp_path / f"{name}.jsonl").values()}
    assert texts["one"] == texts["small batches"]
    assert all(texts["one"][i] != texts["other seed"][i] for i in texts["one"])


def test_every_answer_is_the_targets_own_in_the_context_of_the_new_ones(tiny_target, questions, tmp_path):
    """A drafter trained on answers to an older answer learns a text that the target would not write."""
    job = open_job(tiny_target, tmp_path / "out.jsonl", answers="greedy", top_p=0.5, input=questions)
    job.regenerate()
    chat, model = Chat(load_tokenizer(tiny_target)), job.backend.model
    (row,) = [row for row in rows_of(tmp_path / "out.jsonl").values() if len(row["messages"]) == 6]
    assert [m["content"] for m in row["messages"] if m["role"] == "user"] == ["what", "why", "how"]
    cut = False
    for turn in (1, 3, 5):
        ids = chat.prompt(row["messages"][:turn]).tolist()
        for _ in range(FLAGS["max_tokens"]):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == 258:
                break
        prompt = len(chat.prompt(row["messages"][:turn]))
        assert row["messages"][turn]["content"] == chat.tokenizer.decode(ids[prompt:], skip_special_tokens=True)
        cut = cut or ids[-1] != 258
    assert row["cut"] == cut


def test_the_target_is_led_to_write_a_users_turn(tiny_target):
    """Without the user's header before it and the turn's end behind it, it would not write a question."""
    chat = Chat(load_tokenizer(tiny_target))
    spec = SimpleNamespace(eos_token_ids=(256,), max_position_embeddings=512)
    script = Script(chat, spec, 0, answer=Sampling(0, 1, 8), question=Sampling(1, 1, 9), system="Be brief.")
    dialogue = script.synthesize("0", turns=2, topic="rivers")
    question = dialogue.send(None)
    assert (
        chat.tokenizer.decode(question.prompt)
        == "<|im_start|>system\nBe brief.\nThe user writes about: rivers<|im_end|>\n<|im_start|>user\n"
    )
    assert question.stop_ids == (258, 256) and question.sampling.max_tokens == 9
    answer = dialogue.send(Reply(" How long? ", 3, False, None))
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow long?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(answer.prompt) == head
    second = dialogue.send(Reply("Very.", 2, False, None))
    assert chat.tokenizer.decode(second.prompt).endswith(
        "rivers<|im_end|>\n" + head.partition("<|im_end|>\n")[2] + "Very.<|im_end|>\n<|im_start|>user\n"
    )
    last = dialogue.send(Reply("And why?", 3, False, None))
    assert len({request.seed for request in (question, answer, second, last)}) == 4


def test_a_conversation_is_cut_if_any_of_its_turns_is(tiny_target):
    """Else half a question, or a first answer without its end, is trained on as if it were whole."""
    script = Script(Chat(load_tokenizer(tiny_target)), read_spec(tiny_target), 0, Sampling(0, 1, 8), Sampling(1, 1, 8))
    given = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    for make, turns in ((lambda: script.synthesize("0", turns=2), 4), (lambda: script.regenerate("0", given), 2)):
        for cut in range(turns + 1):
            dialogue = make()
            advance(dialogue, None)
            for turn in range(turns):
                row = advance(dialogue, Reply("so", 1, turn == cut, None))
            assert row["cut"] == (cut < turns)


def test_a_prompt_beyond_the_context_is_one_error_row(tiny_target, tmp_path):
    path = tmp_path / "given.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "%s"}]}\n{"prompt": 3}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "tools": [{}]}\n' % ("x" * 600)
    )
    open_job(tiny_target, tmp_path / "out.jsonl", input=path).regenerate()
    errors = rows_of(tmp_path / "out.jsonl.errors.jsonl")
    assert "exceeds the target's 512 positions" in errors["1"]["error"] and "no messages" in errors["2"]["error"]
    assert "tools" in errors["4"]["error"]
    assert list(rows_of(tmp_path / "out.jsonl")) == ["3"]


@pytest.mark.parametrize(
    ("flaw", "texts", "cut"),
    [
        ("empty", ["why", " \n"], False),
        ("cut", ["why", "so"], True),
        ("loop", ["why", "round and round " * 9], False),
        ("duplicate", ["a", "b"], False),
    ],
)
def test_flawed_rows_are_counted_and_kept_apart(tiny_target, tmp_path, flaw, texts, cut):
    """What the filters let through is trained on; what they take without a trace looks like a run that stalls."""
    job = open_job(tiny_target, tmp_path / "out.jsonl", keep=(), max_user_tokens=8)
    job.backend = Canned(*texts, cut=cut)
    with pytest.raises(UserError, match=f"'{flaw}': "):
        job.synthesize(3)
    rejected = rows_of(tmp_path / "out.jsonl.rejected.jsonl")
    assert {row["rejected"] for row in rejected.values()} == {flaw}
    assert job.output.summary() == {"kept": 1 if flaw == "duplicate" else 0, flaw: len(rejected)}
    if flaw != "empty":
        keeping = open_job(tiny_target, tmp_path / "keep.jsonl", keep=(flaw, "duplicate"), max_user_tokens=8)
        keeping.backend = job.backend
        assert keeping.synthesize(3) == {"kept": 3}


class Moody:
    """A backend that writes nothing for the conversations named."""

    def __init__(self, *silent):
        self.silent = silent

    def run(self, jobs, done):
        for row_id, dialogue in jobs:
            if row_id in done:
                continue
            reply = Reply("" if row_id in self.silent else row_id, 1, False, (1,))
            yield [(row_id, play(dialogue, lambda reply=reply: reply))]


def test_a_flawed_last_row_is_made_up_for(tiny_target, tmp_path):
    """Rows are the same every time: a round of one flawed row must not end this run and every later one."""
    job = open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=8)
    job.backend = Moody("00000002", "00000003")
    assert job.synthesize(3) == {"kept": 3, "empty": 2}
    assert list(rows_of(tmp_path / "out.jsonl")) == ["00000000", "00000001", "00000004"]


def test_a_file_that_somebody_else_began_is_left_alone(tiny_target, questions, tmp_path):
    output = tmp_path / "mine.jsonl"
    output.write_text('{"messages": []}')
    with pytest.raises(UserError, match=r"mine\.jsonl exists and was not begun by this command"):
        open_job(tiny_target, output, input=questions)
    assert output.read_text() == '{"messages": []}'
    with pytest.raises(UserError, match=r"--output .* cannot be written \(Is a directory\)"):
        open_job(tiny_target, tmp_path, input=questions)


def test_nothing_usable_is_an_error(tiny_target, tmp_path):
    """A shell's `&& pack` would go on with an empty file."""
    given = tmp_path / "given.jsonl"
    given.write_text("{bad\n")
    with pytest.raises(UserError, match=r"no conversation is usable \(\{'kept': 0, 'error': 1\}\)"):
        open_job(tiny_target, tmp_path / "out.jsonl", input=given).regenerate()
    with pytest.raises(UserError, match=r"--max-tokens 512 leaves no room for a prompt: this target has 512 positions"):
        open_job(tiny_target, tmp_path / "b.jsonl", input=given, max_tokens=512)


def test_other_settings_do_not_mix_into_a_file(tiny_target, tmp_path):
    """Rows of two temperatures in one file cannot be told apart afterwards."""
    open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4).synthesize(2)
    with pytest.raises(UserError, match=r"begun with other settings \(answer.temperature was 1.0, is 0.5.*seed was 3, is 9\)"):
        open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4, temperature=0.5, seed=9)
    topics = tmp_path / "topics.txt"
    topics.write_text("rivers\n")
    with pytest.raises(UserError, match=r"\(topics was None, is '\w+', turns was 1, is 3\)"):
        open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4, topics=topics, turns=3)


def test_a_loop_is_told_from_a_list():
    assert is_loop(list(range(20)) * 3) and is_loop([7] * 18) and is_loop([*range(100), *[1, 2] * 10])
    assert not is_loop([]) and not is_loop(list(range(20)) * 2) and not is_loop([x for i in range(30) for x in (1, 2, 3, 4, i)])


def test_the_nucleus_is_that_of_a_sort():
    """A wrong nucleus writes text the user did not ask for, and nobody would notice."""
    probabilities_BV = torch.softmax(3 * torch.randn(64, 500, generator=torch.Generator().manual_seed(0)), -1)
    for top_p in (0.1, 0.5, 0.95):
        sorted_BV, order_BV = probabilities_BV.sort(-1, descending=True)
        kept_BV = sorted_BV.cumsum(-1) - sorted_BV < top_p
        expected_BV = torch.zeros_like(sorted_BV).scatter_(1, order_BV, sorted_BV * kept_BV)
        torch.testing.assert_close(nucleus(probabilities_BV, top_p), expected_BV, rtol=0, atol=0)


def test_draws_follow_the_distribution(tiny_target):
    scores = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0]))
    requests = [Request((1,), Sampling(1.0, 0.94, 1), (), seed) for seed in range(4000)]
    choice = SeededChoice(requests, 1, "cpu")(torch.zeros(4000, 1, dtype=torch.long), scores.expand(4000, -1)).argmax(-1)
    share = np.bincount(choice, minlength=6) / 4000
    np.testing.assert_allclose(share, np.array([0.5, 0, 0.3, 0.15, 0, 0]) / 0.95, atol=0.03)
    assert share[[1, 4, 5]].sum() == 0
