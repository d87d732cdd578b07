"""What chat templates do beside showing a conversation: they drop thoughts and system messages, close turns in two ways, call tools.

The templates are short ones that behave as those of the families that they are named after.
"""

import json

import pytest
from test_chat import QWEN, QWEN3, make_tokenizer, several, squeeze, supervised

from common.data import chat as chat_module
from common.data.chat import Chat
from common.data.conversations import Rejected
from common.errors import UserError

R1 = (  # thoughts are cut off every answer, and a server opens them itself
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
MISTRAL = (  # the system message stands in the last user's, where that is the last; tools must be called before they answer
    "{{ bos_token }}{% set ns = namespace(called=false) %}{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{% set ns.called = true %}{{ '[TOOL_CALLS]' + (m.tool_calls | tojson) + eos_token }}"
    "{% else %}{% set ns.called = false %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
HARMONY = (  # an answer is closed by <|return|> at the conversation's end and by <|end|> elsewhere, a call by <|call|>
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|start|>functions.f to=assistant<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{% elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.tool_calls %}{% set ns.called = true %}{{ '<|start|>assistant to=functions.f<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{% set ns.called = false %}"
    "{% if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
SPECIALS = {
    R1: ("<bos>", "<eos>", "<|User|>", "<|Assistant|>"),
    MISTRAL: ("<bos>", "<eos>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    HARMONY: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    QWEN3: QWEN,
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "four"}}}]
TOOLS = [user("It is"), assistant("", tool_calls=CALL), {"role": "tool", "content": "as 4"}, assistant("known")]
THOUGHTS = [user("a"), assistant("<think>\nfirst\n</think>\n\nfour"), user("b"), assistant("<think>\nsecond\n</think>\n\nknown")]


def chat_of(template, kind="bytes", **kwargs):
    return Chat(make_tokenizer(template, SPECIALS[template], kind), kwargs)


def texts(chat, row, **how):
    """(whole text, supervised texts) of each document of a row, and what became of the row."""
    found = several(chat, row, **how)
    decode = [chat.backend.decode(ids.tolist(), skip_special_tokens=False) for ids, _ in found.documents]
    return [(text, supervised(chat, *document)) for text, document in zip(decode, found.documents, strict=True)], found


def test_thoughts_that_a_template_drops_are_kept_one_answer_a_document():
    """An R1 that is trained on answers without thoughts never sees what it is served with: a prompt that opens a thought."""
    chat = chat_of(R1)
    _, whole = texts(chat, {"messages": THOUGHTS})
    assert whole.unserved == 2 and whole.lost == {"thoughts": sum(len(chat.backend.encode(t).ids) for t in ("first", "second"))}
    documents, split = texts(chat, {"messages": THOUGHTS}, split_turns=True)
    assert split.unserved == 0 and split.lost == {}
    assert documents[0][1] == ["first\n</think>\n\nfour<eos>"]
    assert documents[1][1] == ["second\n</think>\n\nknown<eos>"]
    for turn, (ids, mask) in zip((1, 3), split.documents, strict=True):
        assert ids[: mask.argmax()].tolist() == chat.prompt(THOUGHTS[:turn]).tolist()
    apart = [THOUGHTS[0], assistant("four", reasoning_content="first")]
    assert texts(chat, {"messages": apart}, split_turns=True)[0] == documents[:1]
    with pytest.raises(Rejected, match="no answer has the thoughts"):
        several(chat, {"messages": [user("a"), assistant("four")]}, split_turns=True)


def test_thoughts_of_earlier_turns_are_counted_or_kept():
    """Qwen3 shows the last turn's thoughts alone: half of what it wrote would be missing from the loss without a word."""
    chat = chat_of(QWEN3)
    (whole,), counts = texts(chat, {"messages": THOUGHTS})
    assert whole[1] == ["four<|im_end|>", "<think>\nsecond\n</think>\n\nknown<|im_end|>"] and set(counts.lost) == {"thoughts"}
    documents, counts = texts(chat, {"messages": THOUGHTS}, split_turns=True)
    assert documents[0][1] == ["<think>\nfirst\n</think>\n\nfour<|im_end|>"] and documents[1][1] == whole[1][1:] and not counts.lost


def test_an_empty_thought_of_the_template_is_context():
    """The target never wrote it: a drafter that learns it proposes an empty thought where the target thinks."""
    row = {"messages": [user("a"), assistant("known")]}
    chat = chat_of(QWEN3)
    (document,), counts = texts(chat, row)
    assert "<think>\n\n</think>\n\nknown" in document[0] and document[1] == ["known<|im_end|>"] and counts.unserved == 1
    assert texts(chat_of(QWEN3, enable_thinking=False), row)[1].unserved == 0
    own = {"messages": [user("a"), assistant("<think>\n\n</think>\n\nknown")]}
    assert texts(chat, own)[0][0][1] == ["<think>\n\n</think>\n\nknown<|im_end|>"]


@pytest.mark.parametrize("kind", ["bytes", "prepend"])
def test_a_system_message_that_a_template_drops_is_counted_or_kept(kind):
    """Mistral shows it only to a user who speaks last: trained on whole conversations, the drafter never sees it."""
    chat = chat_of(MISTRAL, kind)
    row = {"messages": [{"role": "system", "content": "everybody"}, user("It is"), assistant("four"), user("x"), assistant("known")]}
    (whole,), counts = texts(chat, row)
    assert "everybody" not in whole[0] and set(counts.lost) == {"system messages"}
    documents, counts = texts(chat, row, split_turns=True)
    assert len(documents) == 2 and all("everybody" in text for text, _ in documents) and not counts.lost
    assert [squeeze(answers) for _, answers in documents] == [["four<eos>"], ["known<eos>"]]
    for turn, (ids, mask) in zip((2, 4), several(chat, row, split_turns=True).documents, strict=True):
        assert ids[: mask.argmax()].tolist() == chat.prompt(row["messages"][:turn]).tolist()


def test_a_templates_space_before_an_answers_own_is_no_token():
    """SentencePiece gives an answer's first word a space of its own: no server's prompt and no answer holds the lone one before it."""
    chat = chat_of(MISTRAL, "prepend")
    ids, mask = several(chat, {"messages": [user("It is"), assistant("The answer")]}).documents[0]
    pieces = [chat.backend.id_to_token(int(i)) for i in ids]
    assert pieces[pieces.index("[/INST]") + 1] == "▁Th" and mask[pieces.index("[/INST]") + 1]


@pytest.mark.parametrize(
    ("template", "call", "last"), [(MISTRAL, "[TOOL_CALLS]", "known<eos>"), (HARMONY, "to=functions.f", "known<|return|>")]
)
@pytest.mark.parametrize("split", [False, True])
def test_tools_may_be_called(template, call, last, split):
    """An agent's conversations were rejected where a template insists that a call comes before its result."""
    chat = chat_of(template)
    documents, counts = texts(chat, {"messages": TOOLS}, split_turns=split)
    answers = [answer for _, found in documents for answer in found]
    assert len(answers) == 2 and call in answers[0] and answers[0].endswith(("<eos>", "<|call|>")) and answers[1].strip().endswith(last)
    assert not counts.lost and counts.unserved == 0
    long = TOOLS * 150
    assert len(texts(chat, {"messages": long})[0][0][1]) == 300, "a pattern for each kind of turn, not a rendering for each turn"


def test_an_end_that_the_target_does_not_write_is_context():
    """harmony's earlier answers end in <|end|>, the model in <|return|>: on <|end|> the drafter learns an end that never comes."""
    chat = chat_of(HARMONY)
    row = {"messages": [user("a"), assistant("four"), user("b"), assistant("known", thinking="as")]}
    (whole,), _ = texts(chat, row)
    assert whole[1] == [
        "<|channel|>final<|message|>four",
        "<|channel|>analysis<|message|>as<|end|><|start|>assistant<|channel|>final<|message|>known<|return|>",
    ]
    documents, _ = texts(chat, row, split_turns=True)
    assert documents[0][1] == ["<|channel|>final<|message|>four<|return|>"] and documents[1][1] == whole[1][1:]


def test_what_else_is_left_out_is_counted_by_kind():
    """A template without tools drops calls and results in silence."""
    template = "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = Chat(make_tokenizer(template, QWEN))
    call = [{"function": {"name": "f", "arguments": {"x": "model"}}}]
    row = {
        "messages": [{"role": "system", "content": "everybody"}, user("x"), assistant("", tool_calls=call), *TOOLS[2:]],
        "tools": [{"function": {"name": "answer"}}],
    }
    _, counts = texts(chat, row)
    assert set(counts.lost) == {"system messages", "tool calls", "tools' results", "tools' descriptions"}


def test_messages_may_be_json_in_a_string():
    """Tables of data sets hold lists as text."""
    chat = chat_of(QWEN3)
    listed, text = ({"messages": value, "tools": value and "[]"} for value in (THOUGHTS, json.dumps(THOUGHTS)))
    assert texts(chat, text)[0] == texts(chat, listed)[0]


@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
    ids=["nested ranges", "a macro that calls itself"],
)
def test_a_template_that_never_ends_ends_the_run(loop, monkeypatch):
    """One such template held up a job for ever, without a word."""
    monkeypatch.setattr(chat_module, "RENDERING_S", 0.2)
    chat = Chat(make_tokenizer(loop + QWEN3, QWEN))
    with pytest.raises(UserError, match=r"computes for more than 0\.2 s on 1 short messages"):
        several(chat, {"messages": THOUGHTS})
    long = Chat(make_tokenizer("{% if messages | length > 4 %}" + loop + "{% endif %}" + QWEN3, QWEN))
    with pytest.raises(Rejected, match=r"computes for more than 0\.2 s"):
        several(long, {"messages": [user("x" * 11_000), *THOUGHTS]})
