"""A GGUF file's target must be the same target as a folder."""

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from common.data.chat import Chat, load_tokenizer
from common.errors import UserError
from common.generation import gguf
from common.target.files import Tensors, read_spec


def test_convert_names_the_packages_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf accelerate"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "out")


def test_convert_keeps_a_quantised_models_words(tmp_path):
    """A folder that answers otherwise than its GGUF file would give a drafter for another model."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(gguf, tmp_path / "model.gguf")
    gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    assert read_spec(tmp_path / "folder").layers == 2
    embedding = Tensors(tmp_path / "folder").load("model.embed_tokens.weight", torch.float32, "cpu").numpy()
    np.testing.assert_allclose(embedding, gguf_tensor("token_embd.weight", (260, 32)), atol=0.02)
    assert Chat(load_tokenizer(tmp_path / "folder")).prompt([{"role": "user", "content": "a"}]).tolist() == [258, 97 - 33, 259]
    with pytest.raises(UserError, match="folder exists"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "folder")
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in (3000, len(whole) - 100):
        (tmp_path / "torn.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"torn\.gguf could not be read"):
            gguf.convert(tmp_path / "torn.gguf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def write_gguf(gguf, path):
    """A llama of two layers with Q8_0 matrices, a tokenizer of bytes and a chat template."""
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_block_count(2)
    file.add_feed_forward_length(64)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([*sorted(ByteLevel.alphabet()), "aa", "bb", "<|user|>", "<|end|>"])
    file.add_token_types([1] * 258 + [3, 3])
    file.add_token_merges(["a a", "b b"])
    file.add_bos_token_id(258)
    file.add_eos_token_id(259)
    file.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|end|>")
    shapes = {"token_embd": (260, 32), "output_norm": (32,)}
    layer = {
        "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_norm": (32,),
        "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    for name, shape in shapes.items():
        values, kind = gguf_tensor(f"{name}.weight", shape), gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 1:
            file.add_tensor(f"{name}.weight", values)
        else:
            file.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def gguf_tensor(name, shape):
    return np.random.default_rng(list(name.encode())).standard_normal(shape, dtype=np.float32)
