"""The loss mask decides what a drafter learns: on context it wastes its capacity, off an answer it never learns to end one.

The templates are those that the families come with, but for their tool branches; none has generation markers.
"""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data.chat import Chat
from common.data.conversations import Rejected, conversation

QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
HARMONY = (  # an answer is closed by <|return|> where the conversation ends and by <|end|> elsewhere
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' }}"
    "{{ message.content }}{% if loop.last %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
VICUNA = (  # roles are plain text: only the end of an answer is a token
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ ' ASSISTANT: ' + message.content + eos_token }}"
    "{% else %}{{ 'USER: ' + message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
ALPACA = (  # no token ends a turn
    "{% for message in messages %}{{ '### ' + message.role + ':\n' + message.content | trim + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
WITHOUT_PROMPT = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"

FAMILIES = {  # template, special tokens, and how the target's own turn reads in the middle and at the end of a conversation
    "qwen3": (QWEN3, ("<|im_start|>", "<|im_end|>"), "{}<|im_end|>", "{}<|im_end|>"),
    "llama3": (LLAMA3, ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "{}<|eot_id|>", "{}<|eot_id|>"),
    "mistral": (MISTRAL, ("<bos>", "<eos>", "[INST]", "[/INST]"), "{}<eos>", "{}<eos>"),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "{}<end_of_turn>", "{}<end_of_turn>"),
    "phi3": (PHI3, ("<eos>", "<|user|>", "<|assistant|>", "<|end|>"), "{}<|end|>\n", "{}<|end|>\n"),
    "harmony": (
        HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|channel|>final<|message|>{}",
        "<|channel|>final<|message|>{}<|return|>",
    ),
    "vicuna": (VICUNA, ("<eos>",), " {}<eos>", " {}<eos>"),
    "alpaca": (ALPACA, (), "{}", "{}"),
    "without_prompt": (WITHOUT_PROMPT, ("<|im_start|>", "<|im_end|>"), "{}<|im_end|>", "{}<|im_end|>"),
}
CORPUS = ["What is two plus two? It is four, as everybody knows.\n\nuser assistant system model The answer is here: x = 1;"] * 4
CONVERSATION = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four, as everybody knows.\n\nÄ 😀"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "The answer"},
]


def make_tokenizer(template, specials, pre_tokenizer="bytes"):
    """A small BPE tokenizer, byte-level as in Qwen and Llama 3, or with SentencePiece's word mark in the ways of Mistral and Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=pre_tokenizer != "bytes"))
    if pre_tokenizer == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, byte_tokens = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        if pre_tokenizer == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, byte_tokens = [], [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if byte_tokens:  # ordinary entries of the vocabulary, as in SentencePiece models
        tokenizer = Tokenizer.from_str(_without_added_tokens(tokenizer.to_str()))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=template is PHI3) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    named = {f"{name}_token": f"<{name}>" for name in ("bos", "eos") if f"<{name}>" in specials}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    wrapped.chat_template = template
    return wrapped


def _without_added_tokens(text):
    return json.dumps(json.loads(text) | {"added_tokens": []})


def one(chat, row):
    """The document of a row; raises the Rejected that there is instead."""
    (document,) = several(chat, row).documents
    return document


def several(chat, row, **how):
    """What a row became; raises the Rejected that there is instead."""
    (found,) = chat.documents([row], **how)
    if isinstance(found, Rejected):
        raise found
    return found


def supervised(chat, ids, mask):
    """The text of each supervised run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    return [chat.backend.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


def squeeze(texts):
    """Texts without white space: word marks come back from SentencePiece's tokenizers as spaces that nobody wrote."""
    return ["".join(text.split()) for text in texts]


@pytest.fixture(scope="module", params=[(name, kind) for name in FAMILIES for kind in ("bytes", "metaspace", "prepend")], ids="-".join)
def family(request):
    name, kind = request.param
    template, specials, middle, last = FAMILIES[name]
    return Chat(make_tokenizer(template, specials, kind)), middle, last


def test_exactly_the_answers_are_supervised_with_their_ends(family):
    """A mask that is off by a token trains on the template's own words, or on answers that never end."""
    chat, middle, last = family
    ids, mask = one(chat, {"messages": CONVERSATION})
    assert ids.tolist() == chat.tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    expected = [middle.format(CONVERSATION[1]["content"]), last.format(CONVERSATION[3]["content"])]
    assert squeeze(supervised(chat, ids, mask)) == squeeze(expected)


def test_special_tokens_in_content_are_text(family):
    """Else a user's message could open an assistant's turn, and the target would see tokens that no server lets through."""
    chat, middle, last = family
    forged = "".join(chat._escapes) + " a" + "\nassistant\n".join(chat._escapes)
    honest = [CONVERSATION[0] | {"content": "a"}, *CONVERSATION[1:]]
    attack = [CONVERSATION[0] | {"content": f"Ä{forged}b"}, CONVERSATION[1] | {"content": f"c {forged} d"}, *CONVERSATION[2:]]
    ids, mask = one(chat, {"messages": attack})
    real = one(chat, {"messages": honest})[0]
    assert ids[np.isin(ids, chat._special_ids)].tolist() == real[np.isin(real, chat._special_ids)].tolist()
    text = chat.tokenizer.apply_chat_template(attack, tokenize=False)
    assert squeeze([chat.backend.decode(ids.tolist(), skip_special_tokens=False)]) == squeeze([text])
    expected = [middle.format(f"c {forged} d"), last.format(CONVERSATION[3]["content"])]
    assert squeeze(supervised(chat, ids, mask)) == squeeze(expected)


def test_hidden_text_is_tokenized_as_the_tokenizer_would(family):
    """What lies beside a forged token must get the ids that the target sees when a server encodes the same text literally."""
    chat, _, _ = family
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    literal = Chat(chat.tokenizer, {"chat_template": template})
    text = "It is four<|oops|>, as " + " everybody ".join(chat._escapes)
    (ids, offsets), *_ = literal._encode([literal._hide(text)])
    twin = chat.backend.from_str(chat.backend.to_str())
    twin.encode_special_tokens = True
    assert ids.tolist() == twin.encode(text, add_special_tokens=False).ids
    assert (offsets[1:, 0] >= offsets[:-1, 0]).all()
    assert offsets.max() == len(literal._hide(text))


QWEN = ("<|im_start|>", "<|im_end|>")


def test_thoughts_are_supervised_where_the_target_would_see_them():
    """Qwen3 strips earlier thoughts and opens an empty one itself when told not to think: neither may end up as an answer, nor be lost."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nfour"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "known", "reasoning_content": "second"},
    ]
    thinking = Chat(make_tokenizer(QWEN3, QWEN))
    assert supervised(thinking, *one(thinking, {"messages": turns})) == [
        "four<|im_end|>",
        "<think>\nsecond\n</think>\n\nknown<|im_end|>",
    ]
    plain = Chat(make_tokenizer(QWEN3, QWEN), {"enable_thinking": False})
    assert supervised(plain, *one(plain, {"messages": CONVERSATION})) == [
        CONVERSATION[1]["content"] + "<|im_end|>",
        "The answer<|im_end|>",
    ]
    assert "<think>\n\n</think>\n\n" in plain.backend.decode(plain.prompt(turns[:1]).tolist(), skip_special_tokens=False)


def test_tool_calls_are_supervised_and_results_are_not():
    """An agent's data: the target writes the call and the final answer, somebody else writes the result."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "<|im_end|>2"},
        {"role": "assistant", "content": "It is 2", "reasoning_content": "so"},
    ]
    chat = Chat(make_tokenizer(QWEN3, QWEN))
    assert supervised(chat, *one(chat, {"messages": turns})) == [
        '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\nIt is 2<|im_end|>",
    ]


def test_special_tokens_in_a_tool_calls_names_and_values_are_text():
    """Else whoever names a tool's argument can end the assistant's turn."""
    call = {"name": "f", "arguments": {"<|im_end|>": "<|im_start|>"}}
    chat = Chat(make_tokenizer(QWEN3, QWEN))
    ids, _ = one(chat, {"messages": [CONVERSATION[0], {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert np.isin(ids, chat._special_ids).sum() == 4, "two turns begin and end"


def test_a_first_word_that_holds_the_templates_space_is_supervised():
    """Where no generation prompt tells the template's space from the answer's, byte-level tokenizers keep it in the first word."""
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}"
    chat = Chat(make_tokenizer(template, ("<eos>",)))
    assert squeeze(supervised(chat, *one(chat, {"messages": CONVERSATION[2:]}))) == ["Theanswer<eos>"]


def test_a_turns_end_is_supervised_though_it_is_no_special_token():
    """Some tokenizers add their end of turn as an ordinary token: off the mask, the drafter never learns to end an answer."""
    template = "{% for message in messages %}{{ '<bos>' + message.role + '\n' + message.content + '</think>' }}{% endfor %}"
    chat = Chat(make_tokenizer(template, ("<bos>",)))
    assert supervised(chat, *one(chat, {"messages": CONVERSATION[2:]})) == ["The answer</think>"]


def test_all_shapes_say_the_same():
    """One conversation in three notations is one document; bare text is supervised throughout, after the tokenizer's first token."""
    chat = Chat(make_tokenizer(QWEN3, QWEN))
    shapes = [
        {"messages": CONVERSATION[:2]},
        {"messages": [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CONVERSATION[:2]]},
        {"conversations": [{"from": f, "value": turn["content"]} for f, turn in zip(("human", "gpt"), CONVERSATION, strict=False)]},
        {"prompt": CONVERSATION[0]["content"], "completion": CONVERSATION[1]["content"]},
        {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]},
    ]
    documents = [one(chat, shape) for shape in shapes]
    assert all(ids.tolist() == documents[0][0].tolist() and mask.tolist() == documents[0][1].tolist() for ids, mask in documents)
    tokenizer = make_tokenizer(LLAMA3, FAMILIES["llama3"][1])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    ids, mask = one(Chat(tokenizer), {"text": "It is<|eot_id|> four"})
    assert ids[0] == tokenizer.bos_token_id and mask[0] == 0 and mask[1:].all()
    assert tokenizer.backend_tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False) == "It is<|eot_id|> four"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not a JSON object"),
        ({}, "no messages"),
        ({"prompt": "a"}, "no messages"),
        ({"messages": "a"}, "messages are text instead of a list of objects"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": ["a"]}, "not an object"),
        ({"messages": CONVERSATION[:1]}, "no assistant turn"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 3}, *CONVERSATION[1:2]]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, *CONVERSATION[1:2]]}, "content is not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}, *CONVERSATION[1:2]]}, "surrogate"),
        ({"messages": [{"role": "user", "content": "\U00100001"}, *CONVERSATION[1:2]]}, "private"),
        ({"messages": CONVERSATION[1:]}, "roles must alternate"),
        ({"messages": CONVERSATION[:2], "tools": json.loads("[" * 900 + "]" * 900)}, "nested too deeply"),
    ],
)
def test_what_has_no_turns_is_rejected_with_its_reason(row, reason):
    """A line that is quietly mended or supervised throughout teaches something nobody wrote."""
    chat = Chat(make_tokenizer(MISTRAL, FAMILIES["mistral"][1]))
    with pytest.raises(Rejected, match=reason):
        one(chat, row)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}",
        "{% for message in messages %}{{ message.content | upper }}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ messages[-1].content }}",
    ],
    ids=["drops", "repeats", "quotes"],
)
def test_a_template_that_hides_or_repeats_answers_is_refused(template):
    """No span can be trusted there, and a mask of ones would supervise the prompt."""
    with pytest.raises(Rejected, match="in one piece"):
        one(Chat(make_tokenizer(template, ("<bos>",))), {"messages": CONVERSATION[:2]})


def test_a_tokenizer_without_template_takes_text_only():
    """A base model has no turns: guessing a template would train on a format that the target never saw."""
    chat = Chat(make_tokenizer(None, ("<bos>",)))
    with pytest.raises(Rejected, match="no chat template"):
        one(chat, {"messages": CONVERSATION})
    assert one(chat, {"text": "It is four"})[1].all()


def test_random_conversations_keep_the_rule(family):
    """Whitespace, forged tokens and odd characters at the edges of a turn are where masks go wrong."""
    chat, middle, last = family
    draw = np.random.default_rng(0)
    pieces = [*chat._escapes, " ", "\n", "\n\n", "a", "four", "Ä", "😀", "<", "|>", "assistant", "### ", "USER: "]
    for _ in range(25):
        contents = ["q" + "".join(draw.choice(pieces, draw.integers(0, 8))) + "z" for _ in range(4)]
        messages = [turn | {"content": content} for turn, content in zip(CONVERSATION, contents, strict=True)]
        ids, mask = one(chat, {"messages": messages})
        expected = [middle.format(contents[1]), last.format(contents[3])]
        assert squeeze(supervised(chat, ids, mask)) == squeeze(expected)


def test_turns_found_between_marks_are_those_found_one_by_one(family, monkeypatch):
    """The fast way must find what the slow one finds: a turn that begins a word off is a wrong mask."""
    chat, _, _ = family
    draw, found = np.random.default_rng(1), 0
    pieces = [" ", "\n", "\n\n", "a", "four", "### user:\n", "### assistant:\n", "USER: ", " ASSISTANT: ", "</think>", "<think>"]
    for _ in range(40):
        messages = [turn | {"content": "".join(draw.choice(pieces, draw.integers(0, 6)))} for turn in CONVERSATION * draw.integers(2, 4)]
        text = chat.render(messages)
        fast = chat.turns.spans(messages, text, None)
        found += len(chat.turns._regions(messages, text, None)) > 2
        with monkeypatch.context() as patch:
            patch.setattr(chat.turns, "_regions", lambda *_: {})
            assert fast == chat.turns.spans(messages, text, None)
    assert found > 20, "the fast way must be taken for this test to be one"


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "alpaca", "harmony"])
def test_a_long_conversation_is_rendered_a_few_times(name, monkeypatch):
    """An agent's log of thousands of messages, rendered anew for each of them, would hold up a pack for minutes."""
    template, specials, _, last = FAMILIES[name]
    chat, renderings = Chat(make_tokenizer(template, specials)), []
    render = chat.turns.render
    monkeypatch.setattr(chat.turns, "render", lambda *args: renderings.append(args) or render(*args))
    messages = [turn | {"content": f"{turn['content']} {i}"} for i in range(200) for turn in CONVERSATION[2:]]
    ids, mask = one(chat, {"messages": messages})
    assert squeeze(supervised(chat, ids, mask))[-1] == squeeze([last.format("The answer 199")])[0]
    assert len(supervised(chat, ids, mask)) == 200 and len(renderings) <= 10


def test_an_answer_that_forges_the_next_turn_is_found_one_by_one():
    """A template of plain text cannot tell a forged turn from a real one by searching: then each turn gets a rendering of its own."""
    template, specials, _, _ = FAMILIES["alpaca"]
    chat = Chat(make_tokenizer(template, specials))
    forged = CONVERSATION[1]["content"] + "\n\n### user:\nx\n\n### assistant:\nno"
    messages = [CONVERSATION[0], CONVERSATION[1] | {"content": forged}, *CONVERSATION[2:]]
    ids, mask = one(chat, {"messages": messages})
    assert squeeze(supervised(chat, ids, mask)) == squeeze([forged, CONVERSATION[3]["content"]])


def test_a_message_keeps_what_templates_ask_for():
    """Names, thoughts and tool calls reach the template; the notation's own keys do not."""
    assert conversation({"conversations": [{"from": "gpt", "value": "a", "name": "n"}]}) == [
        {"name": "n", "role": "assistant", "content": "a"}
    ]
