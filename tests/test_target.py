"""What the target gives out is what the drafter will see when it is served: taps, packing and the final state must be exact."""

import numpy as np
import pytest
import torch
from conftest import build_target
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, SmolLM3Config

from common import compile_cache
from common.data.rows import Row
from common.errors import UserError
from common.target import execution
from common.target.adapters import layer_signature
from common.target.attention import VARLEN, register_varlen, varlen_attention
from common.target.model import Target, load_model


def row_of(lengths, padding, vocabulary=256, seed=0):
    tokens = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths) + padding).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sizes = [*lengths, padding]
    document_start = np.concatenate([np.full(size, start) for size, start in zip(sizes, starts, strict=True)]).astype(np.int32)
    return Row(tokens, document_start, np.ones(len(tokens), np.uint8), sum(lengths), len(lengths))


def capture(folder, row, taps, **options):
    model = load_model(folder, torch.device("cpu"), torch.float32)
    subject = Target(model, taps, **options)
    out = torch.full((len(row.tokens), subject.width), float("nan"))
    subject.capture(row, out)
    return out, subject


@pytest.mark.parametrize("tap", range(4))
def test_a_tap_is_the_output_of_its_decoder_layer(tiny_target, tap):
    """Off by one here, and training looks perfect while the server feeds another layer."""
    row = row_of([20], 0)
    out, _ = capture(tiny_target, row, [tap])
    model = load_model(tiny_target, torch.device("cpu"), torch.float32)
    seen = []
    model.model.layers[tap].register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
    with torch.no_grad():
        states = model.model(torch.from_numpy(row.tokens).long()[None], output_hidden_states=True).hidden_states
    expected = states[tap + 1][0] if tap < 3 else seen[0].view(20, -1)  # the last hidden state of transformers is after the norm
    assert torch.equal(out, expected)


@pytest.mark.parametrize("final_hidden", [False, True])
def test_packed_documents_never_see_each_other(tiny_target, final_hidden):
    """Otherwise a document's features depend on its neighbours in the row, which no server will ever repeat."""
    lengths = [1, 2, 17, 7, 30]
    row = row_of(lengths, padding=7)
    packed, subject = capture(tiny_target, row, [0, 2], execution="packed", final_hidden=final_hidden)
    apart, reference = capture(tiny_target, row, [0, 2], execution="per_document", final_hidden=final_hidden)
    assert (subject.execution, reference.execution) == ("packed", "per_document")
    assert torch.isfinite(packed).all() and torch.isfinite(apart).all()
    torch.testing.assert_close(packed[: row.valid], apart[: row.valid], atol=1e-5, rtol=1e-5)
    begin = sum(lengths[:-1])
    single = Row(row.tokens[begin : begin + 30], np.zeros(30, np.int32), row.loss_mask[:30], 30, 1)
    alone, _ = capture(tiny_target, single, [0, 2], final_hidden=final_hidden)
    torch.testing.assert_close(packed[begin : begin + 30], alone, atol=1e-5, rtol=1e-5)


def test_auto_chooses_packed_only_where_it_is_exact(tiny_target, monkeypatch):
    """A family whose packed forward leaks between documents must run one by one, or be refused when packed was asked for."""
    _, subject = capture(tiny_target, row_of([5, 6], 0), [1])
    assert subject.execution == "packed"
    monkeypatch.setattr(execution, "relative_difference", lambda *_: 0.3)
    _, subject = capture(tiny_target, row_of([5, 6], 0), [1])
    assert subject.execution == "per_document"
    with pytest.raises(UserError, match=r"use target\.execution"):
        capture(tiny_target, row_of([5, 6], 0), [1], execution="packed")


def test_a_sliding_window_target_packs_too(tmp_path):
    """Windows count in positions of the document; across a document's start they must not reach back."""
    build_target(tmp_path, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8, use_sliding_window=True)
    row = row_of([12, 25], padding=3)
    packed, _ = capture(tmp_path, row, [1, 3], execution="packed")
    apart, _ = capture(tmp_path, row, [1, 3], execution="per_document")
    torch.testing.assert_close(packed[: row.valid], apart[: row.valid], atol=1e-5, rtol=1e-5)


def test_an_empty_row_leaves_no_old_features(tiny_target):
    """A packet that only fills a round must not carry another packet's features."""
    out, _ = capture(tiny_target, Row.empty(16), [1])
    assert (out == 0).all()


def test_taps_out_of_range_are_refused(tiny_target):
    with pytest.raises(UserError, match=r"layers 0\.\.3"):
        capture(tiny_target, row_of([5], 0), [1, 4])


SMALL = dict(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=1, sliding_window=8,
)  # fmt: skip
OWN_ATTENTION = {
    "sinks and windows": lambda **more: GptOssConfig(**SMALL | more, num_local_experts=4, num_experts_per_tok=2),
    "a cap and windows": lambda **more: Gemma2Config(**SMALL | more, attn_logit_softcapping=2.0),
}


def build(config, folder, seed=0):
    """Write a random model of a family, its norms, biases and sinks random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder)


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_with_sinks_caps_and_windows_keeps_them_in_packed_rows(tmp_path, family):
    """gpt-oss and Gemma2 without their sinks or caps are other models, by a tenth: the drafter would learn from a stranger's features."""
    build(OWN_ATTENTION[family](), tmp_path)
    row = row_of([12, 25, 3], padding=3)
    model = load_model(tmp_path, torch.device("cpu"), torch.float32)
    subject = Target(model, [0, 3])
    subject._use(execution.Way("packed", VARLEN))
    packed = torch.zeros(len(row.tokens), subject.width)
    subject.capture(row, packed)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    seen = []
    for tap in (0, 3):
        whole.model.layers[tap].register_forward_hook(lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output))
    for begin, end in row.spans():
        seen.clear()
        with torch.no_grad():
            whole(torch.from_numpy(row.tokens[begin:end]).long()[None], use_cache=False)
        torch.testing.assert_close(packed[begin:end], torch.cat([x.view(end - begin, -1) for x in seen], -1), atol=2e-5, rtol=2e-5)


def test_layers_share_a_compiled_kernel_only_where_all_their_settings_agree():
    """SmolLM3's layers without rotary embedding are of one type with the others; under their kernel they would rotate, or not start."""
    config = SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1, 1])
    layers = AutoModelForCausalLM.from_config(config).model.layers
    first, without, third, fourth = (layer_signature(layer) for layer in layers)
    assert first == third == fourth != without


def test_layers_that_do_not_compile_run_as_they_are(tmp_path, monkeypatch):
    """A family whose layers cannot be compiled would end the run at its first row instead of taking a little longer."""

    def broken(*inputs):
        raise compile_cache.KernelError("nothing compiles today")

    build(OWN_ATTENTION["sinks and windows"](), tmp_path)
    row = row_of([12, 25], padding=3)
    expected, _ = capture(tmp_path, row, [0, 3])
    monkeypatch.setattr(compile_cache, "handle", lambda *_, **__: broken)
    subject = Target(load_model(tmp_path, torch.device("cpu"), torch.float32), [0, 3])
    found = torch.zeros(len(row.tokens), subject.width)
    subject.warm(row, found)
    assert torch.equal(found[: row.valid], expected[: row.valid])
    assert subject.execution == "packed" and subject.fallbacks == ["layers are not compiled: nothing compiles today"]


def test_packed_attention_refuses_what_it_does_not_know():
    """An argument that is swallowed changes every feature, and half precision is too coarse to show it."""
    register_varlen()
    query = torch.zeros(1, 2, 4, 8)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UserError, match="position_bias"):
        varlen_attention(torch.nn.Module(), query, query, query, None, cu_seq_lens_q=bounds, max_length_q=4, position_bias=query)
    with pytest.raises(UserError, match="document lengths"):
        varlen_attention(torch.nn.Module(), query, query, query, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length attention runs on CUDA only")
@pytest.mark.parametrize("family", ["plain", *OWN_ATTENTION])
def test_variable_length_attention_equals_one_by_one(tmp_path, family):
    """The fast path of every real run: no farther from float32 than its slow twin is in the same precision."""
    if family == "plain":
        build_target(tmp_path, head_dim=64)
    else:
        build(OWN_ATTENTION[family](head_dim=64), tmp_path)
    row, device = row_of([1, 2, 100, 61, 300], padding=48), torch.device("cuda")

    def features(dtype, execution):
        subject = Target(load_model(tmp_path, device, dtype), [0, 2], execution)
        assert subject.execution == execution
        out = torch.zeros(len(row.tokens), subject.width, dtype=dtype, device=device)
        subject.capture(row, out)
        return out[: row.valid].float()

    truth = features(torch.float32, "per_document")
    assert (features(torch.float32, "packed") - truth).norm() < 1e-4 * truth.norm()
    packed, apart = ((features(torch.bfloat16, execution) - truth).norm() for execution in ("packed", "per_document"))
    assert packed < 1.2 * apart < 0.05 * truth.norm()
