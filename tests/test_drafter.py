"""The drafter's module and files: what is trained must be what is decoded, exported and loaded again."""

import dataclasses
import json
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import build_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, Gemma3TextConfig, Olmo2Config, Phi3Config

from common.config import DrafterConfig
from common.drafter import backbone, block_mask, export, rope, spec
from common.drafter.check import tap_notes
from common.drafter.spec import FULL, SLIDING, DrafterSpec
from common.errors import UserError
from common.families import __main__
from common.families.dflash import DFlash
from common.families.registry import check, load_exported, resolve_spec
from common.families.start import make_drafter, target_layer_sources
from common.target.files import read_spec

SHAPE = {"layers": 2, "block_size": 4, "taps": [0, 2], "dtype": "float32"}
T, A, K = 24, 4, 4
QWEN3_8B = DrafterSpec(
    hidden_size=4096, intermediate_size=12288, layers=5, heads=32, kv_heads=8, head_dim=128, layer_types=(FULL,) * 5, window=None,
    block_size=16, mask_token_id=151669, taps=(1, 9, 17, 25, 33), target_layers=36, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=None, max_position_embeddings=40960, attention_bias=False, initializer_range=0.02, bos_token_id=151643,
    eos_token_ids=(151645, 151643),
)  # fmt: skip


def tiny(target, seed=0, **changes):
    """A drafter for the tiny target, its normalisation weights perturbed so that no factor is one."""
    config = DrafterConfig(**SHAPE | changes)
    model = make_drafter(config, resolve_spec(config, read_spec(target), target), target, "cpu", seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5, generator=generator)
            assert parameter.isfinite().all(), name
    return model


def inputs(model, seed=0, rows=T):
    generator = torch.Generator().manual_seed(seed)
    width = model.spec.hidden_size
    return torch.randn(A + 1, width, generator=generator), torch.randn(rows, len(model.spec.taps) * width, generator=generator)


def run(model, embeddings, features, anchors, starts, offset=0):
    """Hidden states of the predicted slots at `anchors`; `starts` is each row token's document start, a negative anchor an empty slot."""
    anchors, starts = np.asarray(anchors, np.int32), np.asarray(starts, np.int32)
    keep, rows = anchors >= 0, len(starts)
    anchor = np.where(keep, anchors, rows).astype(np.int32)
    lo = np.where(keep, starts[np.minimum(anchor, rows - 1)], rows).astype(np.int32)
    mask = block_mask.packet_mask(block_mask.MaskSpec(rows, len(anchors), K), anchor, lo, keep, model.spec.window)
    positions = torch.from_numpy(anchor - lo)[:, None] + torch.arange(K) + offset
    embeddings = embeddings[[*range(len(anchors)), -1]]
    return model(embeddings, positions, features, torch.from_numpy(np.arange(rows, dtype=np.int32) - starts) + offset, mask)


STARTS = [0] * 10 + [10] * 14
KINDS = [{}, {"layer_types": [SLIDING, FULL], "window": 6}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_never_reads_features_at_or_after_its_anchor(tiny_target, kind):
    """A drafter that peeks learns an identity and accepts nothing when it serves."""
    model = tiny(tiny_target, **kind)
    embeddings, features = inputs(model)
    before = run(model, embeddings, features, [3, 9, 14, 20], STARTS)
    features[14:] += 1.0
    after = run(model, embeddings, features, [3, 9, 14, 20], STARTS)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])


def test_close_anchors_do_not_see_each_other(tiny_target):
    """Blocks overlap in positions; the second must not read the first one's answers."""
    model = tiny(tiny_target)
    embeddings, features = inputs(model)
    before = run(model, embeddings, features, [11, 12, 13, 20], STARTS)
    embeddings[1] += 1.0
    after = run(model, embeddings, features, [11, 12, 13, 20], STARTS)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.equal(before[1], after[1])


def test_empty_slots_are_finite_and_change_nothing(tiny_target):
    """One NaN in an unused slot would poison every gradient of the packet."""
    model = tiny(tiny_target)
    embeddings, features = inputs(model)
    hidden = run(model, embeddings, features, [3, 14, -1, -1], STARTS)
    hidden.square().sum().backward()
    assert hidden.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(hidden[:2], run(model, embeddings, features, [3, 14], STARTS))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(tiny_target, kind):
    """Features of another conversation must not leak into a block: hidden states and gradients are those of separate rows."""
    model = tiny(tiny_target, **kind)
    embeddings, features = inputs(model)
    packed = run(model, embeddings, features, [1, 9, 11, 23], STARTS)
    packed.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    first = run(model, embeddings[[0, 1, -1]], features[:10], [1, 9], [0] * 10)
    second = run(model, embeddings[2:], features[10:], [1, 13], [0] * 14)
    (first.square().sum() + second.square().sum()).backward()
    torch.testing.assert_close(packed, torch.cat((first, second)), atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-3, rtol=1e-4, msg=name)


@pytest.mark.parametrize("offset", [0, 30_500])
@pytest.mark.parametrize("kind", [*KINDS, {"layer_types": [SLIDING, SLIDING], "window": 4}])
def test_cached_decoding_equals_training(tiny_target, kind, offset):
    """What is trained is what is served: every predicted slot, full and sliding layers, far positions, features arriving in pieces."""
    model = tiny(tiny_target, **kind)
    embeddings, features = inputs(model)
    anchors = [1, 5, 17, 23]
    trained = run(model, embeddings, features, anchors, [0] * T, offset)
    cache, done = model.new_cache(), 0
    for j, anchor in enumerate(anchors):
        model.extend(cache, features[done:anchor], torch.arange(done, anchor) + offset)
        drafted = model.draft(cache, embeddings[[j] + [-1] * (K - 1)], torch.arange(anchor, anchor + K) + offset)
        torch.testing.assert_close(drafted[1:], trained[j], atol=1e-5, rtol=1e-5)
        done = anchor


@pytest.mark.parametrize("kind", KINDS)
def test_projecting_the_mask_token_once_changes_nothing(tiny_target, kind):
    """The first layer computes a row for each anchor and one for all masked slots; its twin computes them all."""
    model, twin = tiny(tiny_target, **kind), tiny(tiny_target, **kind)
    embeddings, features = inputs(model)
    anchors = [3, 9, 14, 20]
    fast = run(model, embeddings, features, anchors, STARTS)
    all_rows = torch.cat([embeddings[[j] + [-1] * (K - 1)] for j in range(A)])
    blocks, few = twin._blocks, []

    def every_row_computed(x, positions, contexts, masks, slots, distinct, predicted):
        few.append(len(x))
        return blocks(all_rows, positions, contexts, masks, slots, predicted=predicted)

    twin._blocks = every_row_computed
    slow = run(twin, embeddings, features, anchors, STARTS)
    assert few == [A + 1]
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    weights = torch.randn(fast.shape, generator=torch.Generator().manual_seed(9))
    for hidden in (fast, slow):
        (hidden * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_checkpointed_layers_give_equal_gradients(tiny_target):
    model, twin = tiny(tiny_target), tiny(tiny_target, activation_checkpointing=True)
    embeddings, features = inputs(model)
    for m in (model, twin):
        run(m, embeddings, features, [3, 9, 14, 20], STARTS).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_rotary_and_norms_are_float32_inside():
    """In bfloat16 positions beyond 256 share their angles: the drafter would lose all sense of distance on long chats."""
    spec = dataclasses.replace(QWEN3_8B, hidden_size=32, intermediate_size=32, heads=2, kv_heads=1, head_dim=16, layers=1, taps=(0,))
    model = backbone.Drafter(spec, torch.bfloat16, "cpu").to(torch.bfloat16)
    rope = model._rope(torch.tensor([30_001]))
    exact = torch.cos(30_001 * 1e6 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    torch.testing.assert_close(rope[0, 0, 0].double(), exact, atol=2e-3, rtol=0)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        norm = model.norm.weight.fill_(1.0) * x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(model.norm(x).double(), norm, atol=0, rtol=2**-8)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ],
)
def test_scaled_frequencies_equal_the_fields_own(scaling):
    """Engines build their tables from rope_scaling: other frequencies here would break every drafter for such a target."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(head_dim=128, rope_parameters={**scaling, "rope_theta": 1e6}, max_position_embeddings=40960)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    frequencies, on_tables = rope.inverse_frequencies(128, 1e6, scaling, max_position_embeddings=40960)
    torch.testing.assert_close(frequencies, expected)
    assert on_tables == pytest.approx(factor)


def test_the_8b_drafter_has_the_published_keys_and_size():
    shapes = DFlash().exported_shapes(QWEN3_8B)
    assert len(shapes) == 58
    assert sum(np.prod(s) for s in shapes.values()) == 1_048_626_432
    parts = export.split(QWEN3_8B, backbone.Drafter(QWEN3_8B, torch.bfloat16, "meta").state_dict())
    assert {name: tuple(part.shape) for name, part in parts.items()} == shapes
    assert shapes["fc.weight"] == (4096, 5 * 4096) and shapes["layers.4.self_attn.k_proj.weight"] == (1024, 4096)


def exported(model, target, folder):
    return DFlash().export(folder, model.state_dict(), model.spec, read_spec(target), "float32", "float32")


def test_a_drafter_without_features_has_none_wherever_it_starts(tiny_target, tmp_path):
    """The ablation would train blind and be served with the features of the drafter it started from."""
    folder = exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    config = DrafterConfig(**SHAPE, init=str(folder), zero_features=True)
    model = make_drafter(config, resolve_spec(config, read_spec(tiny_target), tiny_target), tiny_target, "cpu", 0)
    assert not model.fc.weight.any() and model.norm.weight.any()


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_back_bitwise(tiny_target, tmp_path, kind):
    """The file that is served must compute what was trained, to the last bit."""
    model = tiny(tiny_target, **kind)
    spec, tensors = load_exported(exported(model, tiny_target, tmp_path / "export"))
    assert spec == dataclasses.replace(model.spec, window=model.spec.window if kind else None)
    twin = backbone.Drafter(spec, torch.float32, "cpu")
    twin.load_state_dict(tensors)
    embeddings, features = inputs(model)
    assert torch.equal(run(model, embeddings, features, [3, 9, 14, -1], STARTS), run(twin, embeddings, features, [3, 9, 14, -1], STARTS))


def test_an_export_replaces_the_old_one_whole(tiny_target, tmp_path):
    exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    exported(tiny(tiny_target, seed=5), tiny_target, tmp_path / "export")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]
    assert torch.equal(load_exported(tmp_path / "export")[1]["fc.weight"], tiny(tiny_target, seed=5).fc.weight)


def test_exported_config_is_read_by_transformers(tiny_target, tmp_path):
    from transformers import AutoConfig

    model = tiny(tiny_target, layer_types=[SLIDING, FULL], window=6)
    config = AutoConfig.from_pretrained(exported(model, tiny_target, tmp_path / "export"))
    assert config.layer_types == [SLIDING, FULL] and config.sliding_window == 6 and config.head_dim == 8
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.dflash_config["target_layer_ids"] == [0, 2] and config.block_size == config.dflash_config["block_size"] == 4


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_drafters_of_other_trainers_load(tiny_target, tmp_path):
    """`model.` prefixes, the block size in either place, and taps left to the convention."""
    model = tiny(tiny_target, taps=[1], layers=1)
    folder = exported(model, tiny_target, tmp_path / "export")
    tensors = {f"model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    for level in ("top", "inside"):
        edit(folder, lambda c, level=level: (c.pop("block_size", None), c["dflash_config"].pop("block_size", None)))
        edit(folder, lambda c, level=level: (c if level == "top" else c["dflash_config"]).update(block_size=4))
        edit(folder, lambda c: (c.pop("rope_parameters", None), c["dflash_config"].pop("feature_dtype", None)))
        spec, loaded = load_exported(folder)
        assert spec == model.spec
        assert all(torch.equal(loaded[k], v) for k, v in model.state_dict().items())
    config = DrafterConfig(layers=1, block_size=8, dtype="float32", init=str(folder))
    spec = resolve_spec(config, read_spec(tiny_target), tiny_target)
    assert spec == dataclasses.replace(model.spec, block_size=8)
    assert torch.equal(make_drafter(config, spec, tiny_target, "cpu", 0).fc.weight, model.fc.weight)


def test_init_from_the_targets_tapped_layers(tiny_target):
    config = DrafterConfig(**SHAPE, init="target_layers")
    model = make_drafter(config, resolve_spec(config, read_spec(tiny_target), tiny_target), tiny_target, "cpu", 0)
    target, parts = load_file(tiny_target / "model.safetensors"), export.split(model.spec, model.state_dict())
    for layer, tap in enumerate(model.spec.taps):
        for name in ("self_attn.k_proj", "self_attn.q_norm", "mlp.up_proj", "input_layernorm"):
            assert torch.equal(parts[f"layers.{layer}.{name}.weight"], target[f"model.layers.{tap}.{name}.weight"])
    assert torch.equal(parts["norm.weight"], target["model.norm.weight"])


SMALL_FAMILY = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
FROM_LAYERS = {  # family: tensors copied of 23, and where some come from: (name, rows, offset), None for none
    "gemma3": (Gemma3TextConfig, 23, {
        "input_layernorm": ("input_layernorm", slice(None), 1.0),
        "post_attention_layernorm": ("pre_feedforward_layernorm", slice(None), 1.0),
        "self_attn.q_norm": ("self_attn.q_norm", slice(None), 1.0),
    }),
    "phi3": (Phi3Config, 19, {
        "self_attn.k_proj": ("self_attn.qkv_proj", slice(32, 48), 0.0),
        "mlp.up_proj": ("mlp.gate_up_proj", slice(48, 96), 0.0),
        "self_attn.q_norm": None,
    }),
    "olmo2": (Olmo2Config, 15, {"input_layernorm": None, "post_attention_layernorm": None, "self_attn.q_norm": None}),
    "cohere": (CohereConfig, 10, {"input_layernorm": None, "self_attn.q_proj": None, "mlp.down_proj": ("mlp.down_proj", slice(None), 0.0)}),
}  # fmt: skip


@pytest.mark.parametrize("family", FROM_LAYERS)
def test_a_part_starts_from_what_has_its_role_in_the_target_or_from_nothing(tmp_path, family):
    """Names alone would start Gemma's norms at zero, take the norm behind attention for the one before the MLP, and leave Phi-3's
    projections random without a word."""
    kind, count, expected = FROM_LAYERS[family]
    target = AutoModelForCausalLM.from_config(kind(**SMALL_FAMILY))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.uniform_(-1, 1)
    target.save_pretrained(tmp_path)
    config = DrafterConfig(**SHAPE | {"mask_token": 60}, init="target_layers")
    spec = resolve_spec(config, read_spec(tmp_path), tmp_path)
    sources = target_layer_sources(spec, tmp_path)
    assert (sum(source is not None for source in sources.values()), len(sources)) == (count, 23)
    model, saved = make_drafter(config, spec, tmp_path, "cpu", 0), load_file(tmp_path / "model.safetensors")
    parts = export.split(model.spec, model.state_dict())
    for name, source in expected.items():
        for layer, tap in enumerate(spec.taps):
            assert (sources[f"layers.{layer}.{name}.weight"] is None) == (source is None)
            if source is not None:
                tensor, rows, offset = source
                assert torch.equal(parts[f"layers.{layer}.{name}.weight"], saved[f"model.layers.{tap}.{tensor}.weight"][rows] + offset)


def test_equal_seeds_start_equal_replicas(tiny_target):
    """Averaging assumes that all replicas start identical."""
    config = DrafterConfig(**SHAPE)
    spec = resolve_spec(config, read_spec(tiny_target), tiny_target)
    one, same, other = (make_drafter(config, spec, tiny_target, "cpu", seed).fc.weight for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_taps_spread_as_published():
    assert spec.auto_taps(5, 36) == (1, 9, 17, 25, 33)
    assert spec.auto_taps(1, 28) == (14,)


def resolve(target, used_ids=(), **changes):
    return resolve_spec(DrafterConfig(**SHAPE | changes), read_spec(target), target, used_ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": [0, 4]}, r"drafter\.taps=\[0, 4\].*0\.\.3"),
        ({"taps": [2, 1]}, "strictly increasing"),
        ({"taps": "auto", "layers": 5}, r"4 target layers are too few for 5 taps.*drafter\.taps"),
        ({"mask_token": 258}, "mask_token=258 is the target's token for the end of a text"),
        ({"mask_token": 256}, "mask_token=256 is the tokenizer's padding"),
        ({"mask_token": 272}, r"mask_token=272 is no row .*0\.\.271"),
        ({"mask_token": "<|nothing|>"}, "is no token of the target's tokenizer.*mask_token=auto"),
        ({"mask_token": "<|im_start|>", "used_ids": [257]}, "occurs in the data"),
        ({"heads": 3, "kv_heads": 2}, "must be a multiple"),
        ({"layer_types": [SLIDING, FULL], "window": 3}, "shorter than a block"),
    ],
)
def test_what_cannot_be_trained_or_served_is_refused(tiny_target, changes, words):
    with pytest.raises(UserError, match=words):
        resolve(tiny_target, **changes)


def test_any_token_of_the_vocabulary_may_be_named(tiny_target):
    """A GGUF's unused tokens are no added tokens, and a user knows them by name: as the vocabulary spells it, or as it is read."""
    names = json.loads((tiny_target / "tokenizer.json").read_text())["model"]["vocab"]
    assert resolve(tiny_target, mask_token="~").mask_token_id == names["~"]
    assert resolve(tiny_target, mask_token=" ").mask_token_id == resolve(tiny_target, mask_token="Ġ").mask_token_id == names["Ġ"]
    assert resolve(tiny_target, mask_token="<|im_start|>").mask_token_id == 257
    with pytest.raises(UserError, match="mask_token=~ occurs in the data"):
        resolve(tiny_target, mask_token="~", used_ids=[names["~"]])


def test_the_start_of_a_text_is_no_mask_token(tiny_target):
    """It begins every prompt of such a target: the drafter could not tell an unknown slot from a beginning."""
    target = dataclasses.replace(read_spec(tiny_target), bos_token_id=260)
    with pytest.raises(UserError, match="mask_token=260 is the target's token for the start of a text"):
        resolve_spec(DrafterConfig(**SHAPE, mask_token=260), target, tiny_target)


def test_heads_alone_are_all_key_and_value_heads(tiny_target):
    spec = resolve(tiny_target, heads=3)
    assert (spec.heads, spec.kv_heads) == (3, 3)


def test_the_automatic_mask_token_has_no_other_meaning(tiny_target):
    """259 is the first row of the embedding that the tokenizer cannot produce."""
    assert resolve(tiny_target).mask_token_id == 259
    assert resolve(tiny_target, used_ids=[259, 260]).mask_token_id == 261
    with pytest.raises(UserError, match="finds no unused row"):
        resolve(tiny_target, used_ids=range(272))


def test_the_last_layer_as_tap_warns(tiny_target):
    with pytest.warns(UserWarning, match="last layer"):
        resolve(tiny_target, taps=[0, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(tiny_target)


def test_a_drafter_for_another_target_is_refused(tiny_target, tmp_path):
    folder = exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    build_target(tmp_path / "other", hidden_size=48)
    with pytest.raises(UserError, match=r"made for another target.*32.*48"):
        resolve(tmp_path / "other", init=str(folder))
    with pytest.raises(UserError, match=r"drafter\.layers=3 but .* has 2"):
        resolve(tiny_target, init=str(folder), layers=3)


def test_files_that_are_no_drafter_are_refused(tiny_target, tmp_path):
    folder = exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")

    def refused(name, words, tensors=tensors, change=lambda config: None):
        shutil.copytree(folder, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
        edit(tmp_path / name, change)
        with pytest.raises(UserError, match=words):
            load_exported(tmp_path / name)

    refused("maps", "vocabulary of its own.*d2t", tensors | {"d2t": torch.zeros(3)})
    refused("small", "vocabulary of its own.*draft_vocab_size", change=lambda c: c.update(draft_vocab_size=100))
    refused("missing", "fc.weight is missing", {k: v for k, v in tensors.items() if k != "fc.weight"})
    refused("extra", "markov.weight is unknown", tensors | {"markov.weight": torch.zeros(3)})
    refused("shape", "norm.weight is .*not", tensors | {"norm.weight": torch.zeros(3)})
    refused("field", "lacks 'mask_token_id'", change=lambda c: c["dflash_config"].pop("mask_token_id"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 0}, {"hidden_size": None}, {"rms_norm_eps": "x"}, {"max_position_embeddings": -1},
        {"block_size": 2.5, "dflash_config": {"mask_token_id": 1}}, {"dflash_config": "text"}, {"rope_parameters": "text"},
        {"rope_parameters": None, "rope_theta": None}, {"rope_parameters": None, "rope_scaling": "text"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_of_wrong_types_is_refused_in_words(tiny_target, tmp_path, change):
    folder = exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    edit(folder, lambda config: config.update(change))
    with pytest.raises(UserError, match=r"config\.json: \w+=.* must be a (JSON object|whole number|number)"):
        check(folder, read_spec(tiny_target))


def broken(folder, config_change, inner_change, words, target):
    edit(folder, lambda c: (c.update(config_change), c["dflash_config"].update(inner_change)))
    errors = check(folder, read_spec(target)).errors
    assert any(words in error for error in errors), errors


@pytest.mark.parametrize(
    ("config_change", "inner_change", "words"),
    [
        ({"block_size": 8}, {}, "block_size is 8 at top level and 4 in dflash_config"),
        ({}, {"mask_token_id": 258}, "mask_token_id=258 is the target's token for the end of a text"),
        ({}, {"mask_token_id": 400}, "mask_token_id=400 is no row"),
        ({}, {"target_layer_ids": [1, 4]}, "must be strictly increasing target layers in 0..3"),
        ({}, {"target_layer_ids": [1]}, "fc.weight is (32, 64), not (32, 32)"),
        ({"rope_theta": 5e5}, {}, "rope_theta and rope_scaling do not say"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, "architectures"),
        ({"architectures": None}, {}, "architectures=None must be"),
        ({"model_type": "x"}, {}, "model_type='x' must be 'qwen3'"),
        ({"num_target_layers": 5}, {}, "made for another target"),
    ],
)
def test_the_export_gate_names_what_an_engine_would_trip_over(tiny_target, tmp_path, config_change, inner_change, words):
    """Each of these loads somewhere without a word and then accepts nothing."""
    folder = exported(tiny(tiny_target), tiny_target, tmp_path / "export")
    assert check(folder, read_spec(tiny_target)).errors == []
    broken(folder, config_change, inner_change, words, tiny_target)


def test_the_gate_says_per_engine_what_is_refused_or_ignored(tiny_target, tmp_path, capsys):
    folder = exported(tiny(tiny_target, layer_types=[SLIDING, FULL], window=6), tiny_target, tmp_path / "export")
    __main__.main(["check", str(folder), "--target", str(tiny_target)])
    said = capsys.readouterr().out
    assert "num_speculative_tokens=3" in said and "V2_MODEL_RUNNER" in said and "missing ones stay uninitialised" in said
    assert said.endswith("loader-ready\n")
    edit(folder, lambda c: c.update(block_size=8))
    with pytest.raises(UserError, match="1 errors"):
        __main__.main(["check", str(folder), "--target", str(tiny_target)])


def test_nothing_is_exported_that_fails_the_gate(tiny_target, tmp_path):
    """An export that replaced a good one and cannot be loaded would cost the run its drafter."""
    model = tiny(tiny_target)
    folder = exported(model, tiny_target, tmp_path / "export")
    spec = dataclasses.replace(model.spec, mask_token_id=258)
    with pytest.raises(UserError, match=r"cannot be exported.*mask_token_id=258"):
        DFlash().export(folder, model.state_dict(), spec, read_spec(tiny_target), "float32", "float32")
    assert load_exported(folder)[0] == model.spec


def test_swiglu_keeps_gate_and_up_and_computes_exact_gradients():
    """The hand-written backward pass must be the derivative, or every MLP learns something else."""
    generator = torch.Generator().manual_seed(0)
    gate_up, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((5, 12), (4, 6)))
    assert torch.autograd.gradcheck(backbone.SwiGLU.apply, (gate_up, weight))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA alone")
@pytest.mark.parametrize(("width", "dtype", "tolerance"), [(1500, torch.float32, 1e-5), (2048, torch.bfloat16, 1e-2)])
def test_swiglu_kernel_equals_its_twin(width, dtype, tolerance):
    """The twin is what the other tests see; training on a GPU runs the kernel."""
    gradient, gate_up = torch.randn(7, width, dtype=dtype), torch.randn(7, 2 * width, dtype=dtype)
    expected = backbone.swiglu_backward(gradient.double(), gate_up.double())
    for one, other in zip(backbone.swiglu_backward(gradient.cuda(), gate_up.cuda()), expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("architecture", "can"),
    [("Qwen3ForCausalLM", ["vLLM", "llama.cpp"]), ("Olmo3ForCausalLM", ["vLLM"]), ("Gemma3ForCausalLM", []), (None, [])],
)
def test_the_gate_says_which_engines_can_tap_the_target(tmp_path, architecture, can):
    """Lost otherwise: a drafter trained for days for a target that no engine can serve it with."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]} if architecture else {}))
    notes = tap_notes(SimpleNamespace(folder=tmp_path))
    assert [engine for engine, (note,) in notes.items() if note.split()[2] == "can"] == can
    assert {note.split()[1] for (note,) in notes.values()} == {"0.32", "b11434"}
