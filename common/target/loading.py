"""Loads a causal language model as transformers does, and refuses one that is not wholly there."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from common.errors import UserError
from common.target.placement import Placement, load_placed

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
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is an error here
    try:
        placement = Placement(where) if isinstance(where, torch.device) else where
        model, report = load_placed(
            folder,
            placement,
            trust_remote_code,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # so that the report names them
            **options,
        )
    except Exception as error:  # the code and files of any family: transformers raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{flag}={folder} does not load as a causal language model: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)
    if problems := loading_problems(report):
        raise UserError(
            f"{flag}={folder} does not hold the model of its config.json: {'; '.join(problems)}. Fetch or convert the checkpoint again"
        )
    return model.eval().requires_grad_(False)


def loading_problems(report: dict[str, Any]) -> list[str]:
    """What transformers' loading report says that no user should have to find out later, in words."""
    problems = []
    unknown = [key for key in report.get("unexpected_keys", ()) if not set(key.split(".")) & set(OTHER_TOWERS)]
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in report.get("mismatched_keys", ())]
    for what, keys in (
        ("missing", report.get("missing_keys", ())),
        ("of another shape", mismatched),
        ("unknown", unknown),
    ):
        if keys := sorted(keys):
            problems.append(f"{len(keys)} tensors {what} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})")
    return problems + [str(message).splitlines()[0] for message in report.get("error_msgs", ())]
