"""A GGUF file's target must be the same target as a folder: every weight, every token, the rotations; or there must be no folder."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from common.data.chat import Chat, load_tokenizer
from common.errors import UserError
from common.generation import gguf, gguf_file, gguf_tokens
from common.target.files import Tensors, read_spec

BYTES = sorted(ByteLevel.alphabet())
TOKENS = {  # content -> type, as llama.cpp numbers them
    **dict.fromkeys([*BYTES, "aa", "bb", "Ġthink", "ĊĊ", "12", "word"], 1),
    "<|user|>": 3, "<|end|>": 3, "<think>": 4, "aba": 4, "<｜tool▁call｜>": 3, "[PAD0]": 5,
}  # fmt: skip
IDS = {content: i for i, content in enumerate(TOKENS)}


@pytest.fixture(scope="module")
def package():
    pytest.importorskip("accelerate")
    return pytest.importorskip("gguf")


def test_convert_names_the_packages_it_lacks(tmp_path, monkeypatch):
    """Both are optional: a user who needs them must not meet a traceback."""
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf accelerate"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "out")


def test_convert_keeps_a_quantised_models_words(package, tmp_path):
    """A folder that answers otherwise than its GGUF file would give a drafter for another model."""
    write_gguf(package, tmp_path / "model.gguf")
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    assert read_spec(tmp_path / "folder").layers == 2
    embedding = Tensors(tmp_path / "folder").load("model.embed_tokens.weight", torch.float32, "cpu").numpy()
    np.testing.assert_allclose(embedding, numbers_of("token_embd.weight", (len(TOKENS), 32)), atol=0.02)
    prompt = Chat(load_tokenizer(tmp_path / "folder")).prompt([{"role": "user", "content": "a"}]).tolist()
    assert prompt == [IDS["<|user|>"], IDS["a"], IDS["<|end|>"]]
    with pytest.raises(UserError, match="folder exists"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "folder")
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in (3000, len(whole) - 100):
        (tmp_path / "torn.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"torn\.gguf could not be read"):
            gguf.convert(tmp_path / "torn.gguf", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.gguf", "torn.gguf"]


def test_every_token_keeps_its_id_and_its_kind(package, tmp_path):
    """A token that becomes several is a sequence that the target never sees: thoughts and tool calls begin with such tokens."""
    write_gguf(package, tmp_path / "model.gguf")
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    tokenizer = load_tokenizer(tmp_path / "folder")
    for content, i in IDS.items():
        assert tokenizer.convert_ids_to_tokens(i) == content
        if TOKENS[content] in (3, 4):
            assert tokenizer(f"b{content}b", add_special_tokens=False).input_ids == [IDS["b"], i, IDS["b"]]
            assert tokenizer.added_tokens_decoder[i].special == (TOKENS[content] == 3)
    assert tokenizer("aa", add_special_tokens=False).input_ids == [IDS["aa"]]


def test_tokens_that_transformers_leaves_out_are_mended(package, tmp_path):
    """Some versions of transformers lose user-defined tokens; which one converted a file must not change its tokenizer."""
    write_gguf(package, tmp_path / "model.gguf")
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    path = tmp_path / "folder" / "tokenizer.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"added_tokens": [entry for entry in whole["added_tokens"] if entry["content"] == "<|end|>"]}))
    gguf_tokens.mend_tokenizer(gguf_file.GgufFile(tmp_path / "model.gguf"), tmp_path / "folder")
    assert json.loads(path.read_text()) == whole
    whole["model"]["vocab"] |= {"aa": IDS["bb"], "bb": IDS["aa"]}
    path.write_text(json.dumps(whole))
    with pytest.raises(UserError, match=rf"2 tokens would not keep their ids \(the first is {IDS['aa']}, 'aa'\)"):
        gguf_tokens.mend_tokenizer(gguf_file.GgufFile(tmp_path / "model.gguf"), tmp_path / "folder")


def test_added_tokens_of_a_vocabulary_of_pieces_keep_their_ids():
    """Gemma's runs of spaces are tokens of their own: spelled otherwise among the pieces, they would move behind the last one."""
    pieces = [["<unk>", 0.0], ["▁", -1.0], ["▁▁", -2.0], ["a", -3.0]]
    tree = {"version": "1.0", "added_tokens": [], "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}
    gguf_tokens._add_tokens(tree, {2: "  "}, [2, 1, 4, 1])
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    assert tokenizer.id_to_token(2) == "  " and tokenizer.encode("a  a").ids == [3, 2, 3] and tokenizer.get_vocab_size() == 4


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", [":", "Ċ", "Ċ", "12", "w", "o", "r", "d"]),
        ("smollm", [":", "ĊĊ", "1", "2", "w", "o", "r", "d"]),
        ("llama-bpe", [":", "ĊĊ", "12", "word"]),
        ("qwen2", [":", "ĊĊ", "1", "2", "w", "o", "r", "d"]),
    ],
)
def test_text_is_cut_into_words_as_the_file_says(package, tmp_path, pre, tokens):
    """A prompt cut otherwise is another prompt than the one that the target was trained on and a server would read."""
    write_gguf(package, tmp_path / "model.gguf", pre=pre)
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    tokenizer = load_tokenizer(tmp_path / "folder")
    assert tokenizer.convert_ids_to_tokens(tokenizer(":\n\n12word", add_special_tokens=False).input_ids) == tokens


def test_an_unknown_way_to_cut_words_is_told(package, tmp_path, capsys):
    """What this command cannot check the user has to."""
    write_gguf(package, tmp_path / "model.gguf", pre="superbpe")
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    assert "cuts text into words as 'superbpe'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"rename": {"blk.1.attn_q.weight": "blk.1.attn_query.weight"}},
        {"rename": {"blk.1.attn_q.weight": "blk.7.attn_q.weight"}},
        {"rename": {"output_norm.weight": "output_normal.weight"}},
        {"leave_out": ["blk.0.ffn_up.weight"]},
        {"leave_out": "all"},
        {"extra": {"blk.0.attn_q.bias": (32,)}},
    ],
    ids=str,
)
def test_a_file_that_cannot_be_read_whole_is_refused(package, tmp_path, change, capfd):
    """transformers fills what it does not find with random numbers and says so in passing: a day's conversations would be noise."""
    write_gguf(package, tmp_path / "model.gguf", **change)
    with pytest.raises(UserError, match=r"model\.gguf"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_other_number_is_found(package, tmp_path, dtype):
    """The comparison with the file is what the command's success rests on."""
    write_gguf(package, tmp_path / "model.gguf")
    file = gguf_file.GgufFile(tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).to(dtype)
    gguf_file.check_weights(file, model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] += 0.25
    name = r"model\.layers\.1\.mlp\.down_proj\.weight"
    with pytest.raises(UserError, match=rf"1 of 20 weights.*\({name}\).*1 of its 20 tensors would be lost \(blk\.1\.ffn_down\.weight\)"):
        gguf_file.check_weights(file, model)


def test_rotations_that_llama_slows_down_are_kept_or_refused(package, tmp_path):
    """Without them a Llama 3 answers well at first and loses itself later: nobody would look for the cause in the conversion."""
    factors = 1 / llama3_frequencies(32.0)
    write_gguf(package, tmp_path / "model.gguf", rope_freqs=factors)
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), plain / factors, rtol=1e-4)
    assert factors.max() > 31 and factors.min() == 1
    write_gguf(package, tmp_path / "other.gguf", rope_freqs=factors**0.5)
    write_gguf(package, tmp_path / "yarn.gguf", scaling="yarn")
    for name in ("other", "yarn"):
        with pytest.raises(UserError, match="scales rotations"):
            gguf.convert(tmp_path / f"{name}.gguf", tmp_path / "none")


def llama3_frequencies(factor):
    """What is left of each frequency. Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    left = []
    for frequency in 500000.0 ** -(np.arange(0, 8, 2) / 8):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        left.append(1 if wavelength < 8192 / 4 else 1 / factor if wavelength > 8192 else (1 - smooth) / factor + smooth)
    return np.array(left)


def write_gguf(package, path, rename=(), leave_out=(), extra=(), rope_freqs=None, scaling=None, pre="gpt-2"):
    """A llama of two layers with Q8_0 matrices, a tokenizer of bytes and a chat template."""
    file = package.GGUFWriter(path, "llama")
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_block_count(2)
    file.add_feed_forward_length(64)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(500000.0)
    if scaling:
        file.add_rope_scaling_type(package.RopeScalingType(scaling))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(list(TOKENS))
    file.add_token_types(list(TOKENS.values()))
    file.add_token_merges(["a a", "b b", "Ċ Ċ", "1 2"])
    file.add_tokenizer_pre(pre)
    file.add_bos_token_id(IDS["<|user|>"])
    file.add_eos_token_id(IDS["<|end|>"])
    file.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|end|>")
    shapes = {"token_embd": (len(TOKENS), 32), "output_norm": (32,)}
    layer = {
        "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_norm": (32,),
        "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()} | dict(extra)
    for name, shape in shapes.items():
        if leave_out == "all" or name in leave_out:
            continue
        values, kind, name = numbers_of(name, shape), package.GGMLQuantizationType.Q8_0, dict(rename).get(name, name)
        if len(shape) == 1:
            file.add_tensor(name, values)
        else:
            file.add_tensor(name, package.quants.quantize(values, kind), raw_dtype=kind)
    if rope_freqs is not None:
        file.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def numbers_of(name, shape):
    return np.random.default_rng(list(name.encode())).standard_normal(shape, dtype=np.float32)
