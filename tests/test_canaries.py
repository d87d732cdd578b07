"""The known bugs of this field, planted one at a time: each must make the parity tests fail.

Lost otherwise: the parity tests themselves. A test that cannot see a shifted position protects nobody from one.
"""

import pytest
import test_attention
import test_drafter
import test_objective
import test_target
import torch
from test_train_equals_serve import build_pair, check_export, check_hidden, check_replay

from common.drafter import block_mask
from common.drafter.backbone import Drafter
from common.drafter.rope import rotations
from common.drafter.spec import FULL
from common.objective.blocks import build_blocks
from common.target.model import Target
from common.training import learner


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), [FULL, FULL])


def tap_index_off_by_one(plant):
    healthy = Target.__init__
    plant(Target, "__init__", lambda self, model, taps, **options: healthy(self, model, [tap + 1 for tap in taps], **options))


def mask_lets_the_anchor_in(plant):
    healthy = block_mask.visible
    plant(block_mask, "visible", lambda spec, anchor, lo, keep, window: healthy(spec, anchor + 1, lo, keep, window))


def positions_shifted_by_one(plant):
    healthy = build_blocks

    def planted(*arguments):
        blocks = healthy(*arguments)
        blocks.positions_AK += 1
        return blocks

    plant(learner, "build_blocks", planted)


def context_not_normalised(plant):
    healthy = Drafter._contexts

    def contexts(self, *arguments):
        norm, self.hidden_norm = self.hidden_norm, torch.nn.Identity()
        try:
            return healthy(self, *arguments)
        finally:
            self.hidden_norm = norm

    plant(Drafter, "_contexts", contexts)


def wrong_mask_id(plant):
    healthy = build_blocks
    plant(learner, "build_blocks", lambda row, anchor, keep, size, mask, *rest: healthy(row, anchor, keep, size, mask + 1, *rest))


def rotary_in_bfloat16(plant):
    def rope(self, positions):
        return rotations((positions.bfloat16()[:, None] * self.frequencies.bfloat16()).float(), 1.0)

    plant(Drafter, "_rope", rope)


def labels_shifted_by_one(plant):
    healthy = build_blocks

    def planted(*arguments):
        blocks = healthy(*arguments)
        blocks.labels_AJ = blocks.labels_AJ.roll(-1, dims=1)
        return blocks

    for user in (learner, test_objective):
        plant(user, "build_blocks", planted)


def document_start_forgotten(plant):
    healthy = block_mask.visible
    plant(block_mask, "visible", lambda spec, anchor, lo, keep, window: healthy(spec, anchor, lo * 0, keep, window))


CAUGHT_BY = {
    tap_index_off_by_one: ["hidden", "replay", "target's taps"],
    mask_lets_the_anchor_in: ["hidden", "replay", "mask by hand", "cached decoding"],
    positions_shifted_by_one: ["hidden"],
    context_not_normalised: ["export"],
    wrong_mask_id: ["hidden"],
    rotary_in_bfloat16: ["export", "rotary"],
    labels_shifted_by_one: ["replay", "labels by hand"],
    document_start_forgotten: ["hidden", "mask by hand"],
}


@pytest.fixture
def checks(pair, tiny_target, tmp_path):
    return {
        "hidden": lambda: check_hidden(pair),
        "replay": lambda: check_replay(pair),
        "export": lambda: check_export(pair, tmp_path),
        "target's taps": lambda: test_target.test_a_tap_is_the_output_of_its_decoder_layer(tiny_target, 1),
        "mask by hand": lambda: test_attention.test_predicate_equals_the_mask_drawn_by_hand(None, test_attention.FULL),
        "cached decoding": lambda: test_drafter.test_cached_decoding_equals_training(tiny_target, {}, 0),
        "rotary": test_drafter.test_rotary_and_norms_are_float32_inside,
        "labels by hand": test_objective.test_labels_stop_at_the_documents_end_and_at_the_first_unsupervised_token,
    }


@pytest.mark.parametrize("bug", CAUGHT_BY, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, checks, monkeypatch):
    bug(monkeypatch.setattr)
    for name in CAUGHT_BY[bug]:
        with pytest.raises(AssertionError):
            checks[name]()
            pytest.fail(f"{bug.__name__} passes {name!r}", pytrace=False)


def test_without_a_bug_nothing_is_caught(checks):
    for check in checks.values():
        check()
