"""Make the quickstart's target and its conversations: grammar -> tokenizer -> training -> the target's own answers.

    python launch/quickstart/make_target.py --device cuda

Writes `target/` (Qwen3 weights in bfloat16, tokenizer, chat template), `train.jsonl.gz` and `heldout.jsonl`. What the held-out
conversations ask for never occurs in the target's training, only its parts do.
"""

import argparse
import gzip
import itertools
import json
import math
import random
import shutil
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent

END, PAD, MASK = "<|im_end|>", "<|endoftext|>", "<|mask|>"
SPECIAL = [PAD, "<|im_start|>", END, MASK, "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 1024
SHAPE = dict(
    hidden_size=160, intermediate_size=448, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
HELDOUT_SHARE = 0.1
MAX_NEW_TOKENS = 320


class Entry(dict):
    """A named bundle of phrases: `{town}` formats as its name, `{town[look]}` as a phrase."""

    def __init__(self, name, phrases):
        super().__init__(phrases)
        self.name = name

    def __str__(self):
        return self.name


def fill(template, slots):
    """Replace slots until none is left (phrases may hold slots again)."""
    while "{" in template:
        template = template.format_map(slots)
    return template[0].upper() + template[1:]


def write_answer(sentences, slots):
    chosen = (s if isinstance(s, str) else s["say"][str(slots[s["by"]])] for s in sentences)
    return " ".join(fill(sentence, slots) for sentence in chosen)


class Grammar:
    """Every conversation that `grammar.yaml` can produce, split by what is asked for: a combination of entries is in one part only."""

    def __init__(self, path, seed):
        tree = yaml.safe_load(path.read_text())
        self.kinds = tree["kinds"]
        self.parts = {}
        shuffle = random.Random(seed).shuffle
        for name, kind in self.kinds.items():
            tables = [[Entry(str(key), phrases) for key, phrases in tree[table].items()] for table in kind["slots"].values()]
            combinations = [dict(zip(kind["slots"], entries, strict=True)) for entries in itertools.product(*tables)]
            shuffle(combinations)
            cut = round(len(combinations) * HELDOUT_SHARE)
            self.parts[name] = {"heldout": combinations[:cut], "train": combinations[cut:]}

    def converse(self, part, kinds, rng):
        """One conversation as messages: a question, and for two out of three a second one that leans on the first."""
        name = rng.choice(kinds)
        kind, slots = self.kinds[name], rng.choice(self.parts[name][part])
        turns = [kind] + ([rng.choice(kind["more"])] if rng.random() < 2 / 3 else [])
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": fill(rng.choice(turn["questions"]), slots)})
            messages.append({"role": "assistant", "content": write_answer(turn["answer"], slots)})
        return messages

    def distinct(self, part, kinds, count, rng):
        """`count` conversations without a repetition."""
        found = {}
        while len(found) < count:
            messages = self.converse(part, kinds, rng)
            found[json.dumps(messages)] = messages
        return list(found.values())


def make_tokenizer(texts, folder):
    """A byte-level BPE, small enough that rarer words fall into several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD, "clean_up_tokenization_spaces": False}
    settings = names | {"padding_side": "left", "model_max_length": SHAPE["max_position_embeddings"], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder)


def train(model, corpus_NT, steps, batch, lr, seed):
    """AdamW on random batches of right-padded conversations; warm-up, then cosine to zero. Returns the last hundred steps' loss in nats."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        labels_BT = corpus_NT[torch.randint(len(corpus_NT), (batch,), generator=generator)].to(model.device, torch.long)
        loss = model(input_ids=labels_BT.clamp(min=0), labels=labels_BT).loss  # -100 pads behind the text: a causal model needs no mask
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return torch.stack(losses[-100:]).mean().item()


@torch.no_grad()
def answer(model, tokenizer, prompts, batch):
    """The target's greedy answers to rendered prompts; longest prompts first, so that a batch holds similar lengths."""
    answers = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        encoded = tokenizer([prompts[i] for i in chosen], padding=True, return_tensors="pt").to(model.device)
        written = model.generate(**encoded, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)[:, encoded.input_ids.shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(written), strict=True):
            answers[i] = text
    return answers


def rewrite(model, tokenizer, conversations, batch):
    """Put the target's own answers in place of the grammar's, turn by turn. Returns (conversations, ended, equal to the grammar's)."""
    rewritten = [[] for _ in conversations]
    ended, equal = [], []
    for turn in range(0, max(map(len, conversations)), 2):
        rows = [i for i, messages in enumerate(conversations) if len(messages) > turn]
        for i in rows:
            rewritten[i].append(conversations[i][turn])
        prompts = [tokenizer.apply_chat_template(rewritten[i], tokenize=False, add_generation_prompt=True) for i in rows]
        for i, text in zip(rows, answer(model, tokenizer, prompts, batch), strict=True):
            content, end, _ = text.partition(END)
            rewritten[i].append({"role": "assistant", "content": content})
            ended.append(bool(end))
            equal.append(content == conversations[i][turn + 1]["content"])
    return rewritten, sum(ended) / len(ended), sum(equal) / len(equal)


def make_target(grammar, args):
    """Tokenizer and weights, from conversations of every kind, into `target/`."""
    target = args.output / "target"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    rng = random.Random(args.seed)
    corpus = [grammar.converse("train", list(grammar.kinds), rng) for _ in range(args.corpus)]
    tokenizer = make_tokenizer((m["content"] for messages in corpus for m in messages), target)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in corpus]
    padded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    corpus_NT = padded.input_ids.masked_fill(padded.attention_mask == 0, -100)
    torch.manual_seed(args.seed)
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SHAPE, **ids)).to(args.device)
    print(f"{len(corpus)} conversations, {int(padded.attention_mask.sum())} tokens; {model.num_parameters()} parameters", flush=True)
    torch.set_float32_matmul_precision("high")
    loss = train(model, corpus_NT, args.steps, args.batch, args.lr, args.seed)
    torch.set_float32_matmul_precision("highest")
    print(f"loss {loss:.4f} nats in the last hundred steps", flush=True)
    model.to(torch.bfloat16).save_pretrained(target)


def write_conversations(grammar, args):
    """Questions of the grammar, answered by the target as it is stored."""
    tokenizer = AutoTokenizer.from_pretrained(args.output / "target")
    model = Qwen3ForCausalLM.from_pretrained(args.output / "target", dtype=torch.float32).to(args.device).eval()
    rng = random.Random(args.seed + 1)
    for part, name, count in ("heldout", "heldout.jsonl", args.heldout), ("train", "train.jsonl.gz", args.train):
        conversations, ended, equal = rewrite(model, tokenizer, grammar.distinct(part, args.kinds, count, rng), batch=512)
        text = "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations).encode()
        (args.output / name).write_bytes(gzip.compress(text, mtime=0) if name.endswith(".gz") else text)
        print(f"{name}: {count} conversations, {ended:.2%} of the answers end, {equal:.2%} are the grammar's own", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of the target")
    parser.add_argument("--corpus", type=int, default=20_000, help="conversations the target learns from")
    parser.add_argument("--batch", type=int, default=128, help="conversations per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--train", type=int, default=1800, help="conversations for the drafter")
    parser.add_argument("--heldout", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["trip", "animal"], help="what the drafter's conversations are about")
    parser.add_argument("--keep-target", action="store_true", help="write conversations with the target that is there")
    args = parser.parse_args()
    started = time.time()
    grammar = Grammar(HERE / "grammar.yaml", args.seed)
    if not args.keep_target:
        make_target(grammar, args)
        print(f"target made, {time.time() - started:.0f} s", flush=True)
    write_conversations(grammar, args)
    print(f"conversations written, {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
