"""Speculative decoding: a drafter proposes a chain or a tree of tokens, the target verifies it in one forward, and the answer is
exactly what the target alone would have written.

Rows of a verification: row 0 is the root, the last token known; row i holds proposed token i-1. A row's position is its depth
below the root plus the root's position. N proposed tokens, R = N + 1 rows, S cached positions, F features of a position, V vocabulary.
Source: block drafting DFlash, arXiv 2602.06036; draft trees as a best-first heap over the slots' marginals (DDTree).
"""

import hashlib
import inspect
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from common.config import UserError
from common.drafter import Drafter, load_exported
from common.objective import build_tree
from common.target_files import Vocabulary


class Proposal(NamedTuple):
    """Proposed tokens and, for each, the row of its parent (0 is the root); parents come before their children."""

    tokens: list
    parents: list


@dataclass
class Answer:
    """What one prompt gave: `accepted[i] + 1` tokens came out of verification i, after the one that prefill gave.

    `matched[i]` drafts of verification i were right and in the answer, out of the first `tried[i]` slots that the answer put to the test.
    """

    prompt: list
    tokens: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    matched: list = field(default_factory=list)
    tried: list = field(default_factory=list)
    seconds: Counter = field(default_factory=Counter)  # by part: prefill, draft, verify; total


class DecodingTarget:
    """A transformers causal LM that verifies rows and gives out the features of its tapped layers.

    Raises: UserError for families whose cache cannot be rolled back, and for taps out of range.
    """

    def __init__(self, model, taps):
        self.model, self.device, self.windows = model, model.device, cache_windows(model)
        # named `cache` since transformers 5.2x
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        layers = model.get_decoder().layers
        if not all(0 <= tap < len(layers) for tap in taps):
            raise UserError(
                f"the drafter taps layers {list(taps)} but this target has layers 0 to {len(layers) - 1}: it belongs to another target"
            )
        self.features = [None] * len(taps)
        for i, tap in enumerate(taps):
            layers[tap].register_forward_hook(lambda _, __, output, i=i: self._take(i, output))

    def vocabulary(self, spec):
        """The model's own embedding and head, scaled and capped as its TargetSpec says."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return Vocabulary.of(spec, embedding.weight, head.weight)

    def _take(self, i, output):
        self.features[i] = (output[0] if isinstance(output, tuple) else output)[0]

    def forward(self, tokens, start, cache, parents=None, last_only=False):
        """Run rows that follow `start` cached positions; `parents` makes them a tree.

        Shapes: logits [R, V] ([1, V] if last_only), features [R, F].
        """
        depths = range(len(tokens)) if parents is None else tree_depths(parents)
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([[start + depth for depth in depths]], device=self.device),
            attention_mask=None if parents is None else self._tree_masks(parents, start),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.cache_argument: cache},
        )
        return output.logits[0, -1:] if last_only else output.logits[0], torch.cat(self.features, dim=-1)

    def _tree_masks(self, parents, start):
        """Additive masks [1, 1, R, S + R] by layer type; families with one type take the mask itself."""
        masks, kind = {}, {"dtype": self.model.dtype, "device": self.device}
        for layer_type, window in self.windows.items():
            hidden = ~tree_mask(parents, start, window).to(self.device)[None, None]
            masks[layer_type] = torch.zeros(hidden.shape, **kind).masked_fill_(hidden, torch.finfo(self.model.dtype).min)
        return masks if len(masks) > 1 else masks.popitem()[1]


def load_target(folder, taps, dtype, device):
    """A folder's causal LM, ready to verify. Raises: UserError if it does not load or cannot verify."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--target {folder} does not load as a causal language model: {str(error).strip().splitlines()[0]}") from None
    return DecodingTarget(model.to(device).eval().requires_grad_(False), taps)


def load_drafter(folder, dtype, device):
    """An exported drafter, ready to draft. Raises: UserError if the folder holds none."""
    spec, tensors = load_exported(folder)
    drafter = Drafter(spec, dtype, device)
    drafter.load_state_dict(tensors)
    return drafter.eval().requires_grad_(False)


def cache_windows(model):
    """The window of each layer type of a model (None: full attention).

    Raises: UserError for recurrent, chunked, compressed or shared caches: a rejected draft could not be taken back.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or []
    try:
        kinds = {type(layer): layer for layer in DynamicCache(config=config).layers}
    except Exception:  # the family brings a cache of its own
        kinds = {}
    rolls_back = set(kinds) <= {DynamicLayer, DynamicSlidingWindowLayer} and not getattr(model, "_is_stateful", False)
    if not kinds or not rolls_back or getattr(config, "attention_chunk_size", None):
        raise UserError(
            f"target family {config.model_type}: its cache ({', '.join(sorted(set(layer_types))) or 'no attention layers'}) cannot drop "
            "rejected drafts; use a target of full or sliding-window attention layers"
        )
    return {
        "sliding_attention" if issubclass(kind, DynamicSlidingWindowLayer) else "full_attention": getattr(layer, "sliding_window", None)
        for kind, layer in kinds.items()
    }


def new_cache():
    """A cache that keeps every position, of sliding layers too: their window lies in the mask, so any rejected row can be dropped."""
    return DynamicCache()


def keep_rows(cache, start, rows):
    """Of the rows verified after `start`, keep `rows` (ascending, row 0 first) and drop the others."""
    end = start + len(rows)
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            if rows[-1] != len(rows) - 1:
                states[..., start:end, :] = states[..., [start + row for row in rows], :]
            setattr(layer, name, states[..., :end, :])


def tree_depths(parents):
    """Depth of every row below the root: [R]."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def tree_mask(parents, start, window=None):
    """Who sees whom: a row sees all cached positions, its ancestors and itself, and of these only the last `window` positions.

    Shapes: bool [R, S + R].
    """
    ancestors_RR = np.eye(len(parents) + 1, dtype=bool)
    for row, parent in enumerate(parents, 1):
        ancestors_RR[row] |= ancestors_RR[parent]
    visible = torch.cat([torch.ones(len(parents) + 1, start, dtype=torch.bool), torch.from_numpy(ancestors_RR)], dim=1)
    if window is not None:
        positions_R = start + torch.tensor(tree_depths(parents))
        visible &= positions_R[:, None] - torch.cat([torch.arange(start), positions_R]) < window
    return visible


class Chooser:
    """Chooses the target's token: the argmax, or at a temperature a sample by Gumbel noise drawn from (seed, position) alone.

    A draft is accepted iff it equals the choice. Plain decoding meets the same noise at the same position, so both write the same answer.
    """

    def __init__(self, temperature=0.0, seed=0):
        self.temperature, self.seed = temperature, seed

    def __call__(self, logits_RV, positions):
        """Tokens chosen from each row's logits; positions are those of the tokens chosen."""
        return self.scores(logits_RV, positions).argmax(-1).tolist()

    def scores(self, logits_RV, positions):
        """What the choice is the argmax of."""
        if self.temperature == 0:
            return logits_RV
        noise = {position: self._noise(position, logits_RV) for position in set(positions)}
        return logits_RV.float() / self.temperature + torch.stack([noise[position] for position in positions])

    def _noise(self, position, like):
        digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=7).digest()
        generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest))
        return -torch.empty(like.shape[-1], device=like.device).exponential_(generator=generator).log()


class BlockDrafter:
    """Proposes with a trained drafter: a chain of each slot's best token, or a tree of the `tree_budget` likeliest prefixes."""

    def __init__(self, drafter, vocabulary, mask_token_id, block_size, tree_budget=None):
        self.drafter, self.vocabulary, self.tree_budget = drafter, vocabulary, tree_budget
        self.masks = [mask_token_id] * (block_size - 1)

    def begin(self):
        self.cache = self.drafter.new_cache()

    def extend(self, features_NF, start):
        """Take in the target's features of the positions from `start` on."""
        self.drafter.extend(self.cache, features_NF, torch.arange(start, start + len(features_NF), device=features_NF.device))

    def propose(self, token, position):
        """Proposal below a known token whose own features are not known yet."""
        device = self.vocabulary.embedding.device
        ids = torch.tensor([token, *self.masks], device=device)
        hidden = self.drafter.draft(self.cache, self.vocabulary.embed(ids), torch.arange(position, position + len(ids), device=device))
        logits = self.vocabulary.logits(hidden[1:])
        if self.tree_budget is None:
            return Proposal(logits.argmax(-1).tolist(), list(range(len(self.masks))))
        return propose_tree(torch.log_softmax(logits.float(), dim=-1), self.tree_budget)


def propose_tree(logprobs_KV, budget):
    """The `budget` likeliest prefixes under the product of the slots' marginals, as a Proposal."""
    best = logprobs_KV.topk(min(budget, logprobs_KV.shape[-1]), dim=-1)
    tokens = best.indices.tolist()
    nodes = build_tree(best.values.cpu(), budget)
    return Proposal([tokens[depth - 1][rank] for _, depth, rank in nodes], [parent + 1 for parent, _, _ in nodes])


def accepted_path(proposal, choices):
    """Rows from the root down along the target's choices."""
    child, path = {}, [0]
    for row, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), 1):
        child.setdefault((parent, token), row)
    while (row := child.get((path[-1], choices[path[-1]]))) is not None:
        path.append(row)
    return path


def cut(tokens, stop, room):
    """Tokens up to and including the first stop token, at most `room` of them."""
    tokens = tokens[:room]
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[:end]


@torch.no_grad()
def speculate(target, proposer, prompt, stop, max_new_tokens, choose):
    """Answer a prompt (token ids) by speculative decoding; the tokens are those of `decode`."""
    answer, cache, lap = Answer(prompt), new_cache(), _stopwatch(target.device)
    logits, features = target.forward(prompt, 0, cache, last_only=True)
    answer.tokens = choose(logits, [len(prompt)])
    proposer.begin()
    proposer.extend(features, 0)
    lap(answer.seconds, "prefill")
    while len(answer.tokens) < max_new_tokens and answer.tokens[-1] not in stop:
        start = len(prompt) + len(answer.tokens) - 1
        proposal = proposer.propose(answer.tokens[-1], start)
        lap(answer.seconds, "draft")

        is_chain = proposal.parents == list(range(len(proposal.parents)))
        depths = tree_depths(proposal.parents)
        rows = [answer.tokens[-1], *proposal.tokens]
        logits, features = target.forward(rows, start, cache, None if is_chain else proposal.parents)
        choices = choose(logits, [start + depth + 1 for depth in depths])
        path = accepted_path(proposal, choices)
        keep_rows(cache, start, path)
        emitted = cut([choices[row] for row in path], stop, max_new_tokens - len(answer.tokens))
        lap(answer.seconds, "verify")

        proposer.extend(features[: len(path)] if is_chain else features[path], start)
        answer.tokens += emitted
        answer.accepted.append(len(emitted) - 1)
        answer.matched.append(min(len(path) - 1, len(emitted)))
        answer.tried.append(min(len(path), len(emitted), max(depths)))
        lap(answer.seconds, "draft")
    answer.seconds["total"] = sum(answer.seconds.values())
    return answer


@torch.no_grad()
def decode(target, prompt, stop, max_new_tokens, choose):
    """Answer a prompt by plain decoding, one token per forward, with the family's own cache: the reference."""
    answer, cache, lap = Answer(prompt), DynamicCache(config=target.model.config), _stopwatch(target.device)
    rows, start = prompt, 0
    while len(answer.tokens) < max_new_tokens and not (answer.tokens and answer.tokens[-1] in stop):
        logits, _ = target.forward(rows, start, cache, last_only=True)
        start += len(rows)
        answer.tokens += choose(logits, [start])
        rows = answer.tokens[-1:]
    lap(answer.seconds, "total")
    return answer


@torch.no_grad()
def first_difference(target, answer, reference, choose):
    """(place, gap) of the first token that differs: by how much the target's own scores prefer one over the other.

    In half precision the gap is a rounding; in float32 there should be no difference at all.
    """
    pairs = zip(answer.tokens, reference.tokens, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return None
    text = answer.prompt + answer.tokens[:place]
    logits, _ = target.forward(text, 0, new_cache(), last_only=True)
    scores = choose.scores(logits, [len(text)])[0].float()
    return place, float((scores[answer.tokens[place]] - scores[reference.tokens[place]]).abs())


def _stopwatch(device):
    """A function that adds the seconds since its last call to a part's counter, the device's work included."""
    last = time.perf_counter()

    def lap(seconds, part):
        nonlocal last
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        seconds[part] += now - last
        last = now

    return lap
