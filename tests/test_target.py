"""What the target gives out is what the drafter will see when it is served: taps, packing and the final state must be exact."""

import numpy as np
import pytest
import torch
from conftest import build_target

from common.data.rows import Row
from common.errors import UserError
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
        states = model(torch.from_numpy(row.tokens).long()[None], output_hidden_states=True).hidden_states
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
    monkeypatch.setattr(Target, "_packed_difference", lambda self: 0.3)
    _, subject = capture(tiny_target, row_of([5, 6], 0), [1])
    assert subject.execution == "per_document"
    with pytest.raises(UserError, match="per_document"):
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length attention runs on CUDA only")
def test_variable_length_attention_equals_one_by_one(tmp_path):
    """The fast path of every real run: no farther from float32 than its slow twin is in the same precision."""
    build_target(tmp_path, head_dim=64)
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
