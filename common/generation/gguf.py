"""A GGUF file becomes a folder of safetensors that transformers, the trainer and the evaluation read."""

import copy
import importlib.util
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import UserError


def convert(file, folder, dtype="bfloat16"):
    """Turn a GGUF file into a folder of safetensors, tokenizer and chat template, and check that both give the same logits.

    Raises: UserError if packages are missing, the file cannot be read, the folder exists, or the logits differ.
    """
    file, folder = Path(file), Path(folder)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"convert needs {' and '.join(missing)} to read GGUF files: pip install {' '.join(missing)}")
    if not file.is_file():
        raise UserError(f"--gguf {file}: no such file")
    if folder.exists():
        raise UserError(f"--output {folder} exists; choose another folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # the reader raises many kinds; the user needs one sentence
        raise UserError(f"--gguf {file} could not be read: {' '.join(str(error).split())[:300]}") from None
    config = copy.deepcopy(model.config)
    del config.quantization_config  # the weights are plain now, and only a model that never was quantised can be saved
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    plain.save_pretrained(part)
    tokenizer.save_pretrained(part)
    _same_logits(model, AutoModelForCausalLM.from_pretrained(part, dtype=model.dtype).eval(), file)
    if not (part / "chat_template.jinja").exists():
        print(f"{file} carries no chat template: give {folder}/chat_template.jinja one before packing conversations")
    part.rename(folder)


@torch.no_grad()
def _same_logits(before, after, file):
    ids = torch.arange(64)[None] * 97 % before.config.get_text_config().vocab_size
    difference = (before(ids).logits - after(ids).logits).abs().max().item()
    if difference != 0:
        raise UserError(f"{file}: the converted folder's logits differ by {difference:.3g} from the file's; do not use it")
