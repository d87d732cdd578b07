"""Quantised checkpoints: what transformers loads is trained for, and its embedding and head are the model's own whatever holds them."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.errors import UserError
from common.target.execution import relative_difference, trial_row
from common.target.files import read_spec
from common.target.model import Target, load_model
from common.target.vocabulary import check_files, load_vocabulary

BLOCK, LARGEST = 128, 448.0  # of a scale's block of weights, and of the type's numbers
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def write_twins(folder, kept=()):
    """Write a random model as Qwen publishes fp8 (weights with a scale for each block), and the same numbers unquantised."""
    torch.manual_seed(0)
    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    config = Qwen3Config(**shape, vocab_size=256, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(folder / "plain")
    plain, small = load_file(folder / "plain" / "model.safetensors"), {}
    for name, weight in plain.items():
        small[name] = weight
        if ("_proj" in name or "lm_head" in name) and not any(part in name for part in kept):
            rows, columns = (size // BLOCK for size in weight.shape)
            blocks = weight.view(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
            quantised = (blocks / scale).to(torch.float8_e4m3fn)
            small[name] = quantised.view(weight.shape)
            small[name.replace("weight", "weight_scale_inv")] = scale.view(rows, columns)
            plain[name] = (quantised.float() * scale).view(weight.shape)
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    (folder / "fp8").mkdir()
    save_file(small, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, FP8 | {"modules_to_not_convert": list(kept)})
    return folder / "fp8", folder / "plain"


def write_config(folder, quantisation):
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "fp8" / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def features(folder, device, dtype):
    subject = Target(load_model(folder, device, dtype), [0, 2])
    return subject.features(trial_row(256), subject.way).float().cpu()


@pytest.mark.parametrize("kept", [("lm_head",), ()], ids=["plain head", "quantised head"])
def test_a_quantised_target_gives_what_its_numbers_give(tmp_path, kept):
    """Most large targets are published in fp8; their features, and the head that drafters share, must be those of the numbers there."""
    pytest.importorskip("accelerate", reason="transformers reads fp8 with accelerate, which .ci/run installs")
    cpu = torch.device("cpu")
    quantised, plain = write_twins(tmp_path, kept)
    check_files(read_spec(quantised), torch.float32, cpu)
    ours, theirs = (load_vocabulary(read_spec(folder), torch.float32, "cpu") for folder in (quantised, plain))
    torch.testing.assert_close(ours.head, theirs.head)
    assert torch.equal(ours.embedding, theirs.embedding)
    torch.testing.assert_close(*(features(folder, cpu, torch.float32) for folder in (quantised, plain)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp8 is computed on CUDA only; elsewhere it is dequantised")
def test_an_fp8_target_on_cuda_is_close_to_its_dequantised_twin(tmp_path):
    """Its products are rounded to eight bits: features may differ by that, and not by a scale that was left out."""
    quantised, plain = write_twins(tmp_path, ("lm_head",))
    one, other = (features(folder, torch.device("cuda"), torch.bfloat16) for folder in (quantised, plain))
    assert relative_difference(one, other, 128) < 0.15


@pytest.mark.parametrize(("method", "package"), [("gptq", "optimum"), ("awq", "gptqmodel"), ("compressed-tensors", "compressed_tensors")])
def test_a_package_that_is_missing_is_named(tmp_path, method, package):
    """Lost otherwise: a stack of transformers' frames instead of what to install."""
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    write_twins(tmp_path)
    write_config(tmp_path, {"quant_method": method, "bits": 4, "group_size": 128, "version": "gemm"})
    with pytest.raises(UserError, match=package.replace("_", "-")):
        load_model(tmp_path / "fp8", torch.device("cpu"), torch.float32)
