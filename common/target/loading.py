"""Loads a causal language model as transformers does, and refuses one that is not wholly there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from common.errors import UserError
from common.target.adapters import first_layer_only, first_line
from common.target.placement import Placement, load_placed

MISMATCHED, UNKNOWN = "of another shape", "unknown"
OTHER_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower", "mtp")
"""Parts of a checkpoint that a text model does not have."""


def load_causal_lm(
    folder: str | Path, dtype: torch.dtype, where: torch.device | Placement, flag: str, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """A frozen causal language model from a folder of safetensors, or what a placement names of it, on its device or devices.

    `flag` is how the user named the folder.

    Raises: UserError if it does not load, or if a tensor is missing, of another shape, or unknown: transformers would fill it at random
    or leave it out, with a warning at most.
    """
    model, problems = _load(folder, dtype, where, flag, trust_remote_code, **options)
    if problems:
        raise UserError(
            f"{flag}={folder} does not hold the model of its config.json: {'; '.join(problems)}. Fetch or convert the checkpoint again"
        )
    return model


def load_first_layer(folder: str | Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """The same with its first layer alone: all of its vocabulary. Families whose tensors depend on the number of layers come whole.

    Raises: UserError if a tensor of these is missing.
    """
    flag = "target.path"
    model, problems = _load(folder, dtype, device, flag, trust_remote_code, first_layer_only)
    if any(MISMATCHED in problem for problem in problems):
        return load_causal_lm(folder, dtype, device, flag, trust_remote_code)
    if problems := [problem for problem in problems if UNKNOWN not in problem]:
        raise UserError(f"{folder} has no head or no embedding that transformers finds: {'; '.join(problems)}; fetch it again")
    return model


def _load(
    folder: str | Path,
    dtype: torch.dtype,
    where: torch.device | Placement,
    flag: str,
    trust_remote_code: bool,
    changed: Callable[[PreTrainedConfig], PreTrainedConfig] = lambda config: config,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """The model of the folder's config, changed, and what is wrong with it by transformers' loading report. Raises: UserError."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is an error here
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        model, report = load_placed(
            folder,
            changed(config),
            Placement(where) if isinstance(where, torch.device) else where,
            trust_remote_code,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # so that the report names them
            **options,
        )
    except Exception as error:  # the code and files of any family: transformers raises many kinds
        raise UserError(f"{flag}={folder} does not load as a causal language model: {first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False), loading_problems(report)


def loading_problems(report: dict[str, Any]) -> list[str]:
    """What transformers' loading report says that no user should have to find out later, in words."""
    problems = []
    unknown = [key for key in report.get("unexpected_keys", ()) if not set(key.split(".")) & set(OTHER_TOWERS)]
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in report.get("mismatched_keys", ())]
    for what, keys in (
        ("missing", report.get("missing_keys", ())),
        (MISMATCHED, mismatched),
        (UNKNOWN, unknown),
    ):
        if keys := sorted(keys):
            problems.append(f"{len(keys)} tensors {what} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})")
    return problems + [str(message).splitlines()[0] for message in report.get("error_msgs", ())]
