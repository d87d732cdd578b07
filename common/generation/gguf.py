"""A GGUF file becomes a folder of safetensors that transformers, the trainer and the evaluation read."""

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.cli import check_input, writing
from common.errors import UserError
from common.generation.gguf_file import GgufFile, check_weights, rope_parameters
from common.generation.gguf_tokens import mend_tokenizer
from common.locks import OutputLock
from common.target.loading import load_causal_lm, loading_problems


def convert(file: str | Path, folder: str | Path, dtype: str = "bfloat16") -> None:
    """Turn a GGUF file into a folder of safetensors, tokenizer and chat template that holds every weight and every token of the file.

    Raises: UserError if packages are missing, the file cannot be read, the folder exists, is full, or being written by
    another command, or anything would be lost; no folder is left.
    """
    file, folder = Path(file), Path(folder)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"convert needs {' and '.join(missing)} to read GGUF files: pip install {' '.join(missing)}")
    check_input("--gguf", str(file), again=True)
    if folder.exists():
        raise UserError(f"--output {folder} exists; choose another folder")
    part = folder.with_name(f".{folder.name}.partial")
    with writing("--output", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = OutputLock("--output", folder)
        try:
            shutil.rmtree(part, ignore_errors=True)
            _write(file, part, getattr(torch, dtype))
            if not (part / "chat_template.jinja").exists():
                print(f"{file} carries no chat template: give {folder}/chat_template.jinja one before packing conversations")
            part.rename(folder)
        except SafetensorError as error:
            raise UserError(f"--output {folder} cannot be written ({error}); make room there, or name another one") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
            lock.drop()


def _write(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the folder, and compare what was written with the file."""
    try:
        original = GgufFile(file)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # the readers raise many kinds; the user needs one sentence
        raise UserError(f"--gguf {file} could not be read: {' '.join(str(error).split())[:300]}; fetch it again") from None
    if problems := loading_problems(report):
        raise UserError(f"--gguf {file}: transformers cannot read all of it: {'; '.join(problems)}; use the original safetensors")
    config = copy.deepcopy(model.config)
    del config.quantization_config  # the weights are plain now, and only a model that never was quantised can be saved
    text = config.get_text_config()
    scaled = rope_parameters(original, text)
    as_read = scaled == getattr(text, "rope_parameters", None)
    if not as_read:
        text.rope_parameters = scaled
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mend_tokenizer(original, folder)
    written = load_causal_lm(folder, dtype, torch.device("cpu"), "--output")
    check_weights(original, written)
    _check_logits(file, model if as_read else plain, written)


@torch.no_grad()
def _check_logits(file: Path, before: PreTrainedModel, after: PreTrainedModel) -> None:
    ids = torch.arange(64)[None] * 97 % before.config.get_text_config().vocab_size
    difference = (before.eval()(ids).logits - after.eval()(ids).logits).abs().max().item()
    if difference != 0:
        raise UserError(f"--gguf {file}: the written folder's logits differ by {difference:.3g}; use the original safetensors")
