"""Train the demo model: tokenizer, weights, scores and the shipped files, from seeds and the standard library's source.

    python tools/train_demo.py tokenizer --output src/strandline/demo
    python tools/train_demo.py train --tokenizer src/strandline/demo --output /path/to/run
    python tools/train_demo.py evaluate --tokenizer src/strandline/demo --weights /path/to/run
    python tools/train_demo.py export --weights /path/to/run --output src/strandline/demo

``train`` needs one large GPU (docs/demo-model.md has the figures). A run that is stopped by ``--seconds`` continues
with ``--weights`` from the step that it saved; momenta start afresh and the learning rate warms up again.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import conversations
import demo_files
import demo_network
import numpy as np
import torch
import torch.nn.functional as F
from demo_network import AttentionLayer, DeltaLayer, DemoModel, Shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from strandline.demo import tasks
from strandline.demo.dialogue import Message
from strandline.demo.facts import make_prose
from strandline.demo.intents import INTENTS

SEED = 20
STEP_TOKENS = 131072
TEXT_WEIGHT = 0.05
# From this share of all steps on, rows have these lengths, with these odds.
CURRICULUM = ((0.0, {256: 1.0}), (0.18, {256: 0.4, 1024: 0.6}), (0.36, {256: 0.3, 1024: 0.25, 4096: 0.45}))
MUON_LR, ADAM_LR = 0.02, 3e-3
WARMUP_STEPS, DECAY_SHARE = 60, 0.35
EVAL_LENGTHS = (128, 256, 512, 1024, 2048, 3072, 4096)

# Data


def library_sources() -> list[str]:
    """The standard library's own modules, sorted, without tests and vendored packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "encodings", "ensurepip"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    return [p.read_text(encoding="utf-8", errors="ignore") for p in files]


def library_sentences(sources: list[str]) -> list[str]:
    sentences = []
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            continue
        documented = (n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        for text in filter(None, (ast.get_docstring(n) for n in documented)):
            sentences += [s for s in re.split(r"\n\s*\n|(?<=[.!?])\s+", text) if 20 < len(s) < 200]
    return [" ".join(s.split()) for s in sentences]


@dataclass
class Mixture:
    """Draws training rows; one per worker process."""

    tokenizer: Tokenizer
    sources: list[str]
    sentences: list[str]

    @classmethod
    def load(cls, folder: Path) -> Mixture:
        sources = library_sources()
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), sources, library_sentences(sources))

    def prose(self, rng: Random) -> str:
        return rng.choice(self.sentences) if rng.random() < 0.3 else make_prose(rng)

    def text(self, rng: Random, length: int) -> str:
        if rng.random() < 0.03:
            source = rng.choice(self.sources)
            start = rng.randrange(max(1, len(source) - 4 * length))
            return source[start : start + 5 * length] + demo_files.END_OF_TEXT
        return render(conversations.make_conversation(rng, int(length * rng.uniform(0.9, 1.0)), prose=self.prose))

    def batch(self, seed: str, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        rng = Random(seed)
        ids = np.full((rows, length), demo_files.SPECIAL_TOKENS.index(demo_files.END_OF_TEXT), dtype=np.int16)
        weights = np.zeros((rows, length), dtype=np.float16)
        encoded = self.tokenizer.encode_batch([self.text(rng, length) for _ in range(rows)])
        for row, encoding in enumerate(encoded):
            tokens = np.array(encoding.ids[:length], dtype=np.int16)
            ids[row, : len(tokens)] = tokens
            weights[row, : len(tokens)] = self.reply_weights(tokens)
        return ids, weights

    def reply_weights(self, tokens: np.ndarray) -> np.ndarray:
        start, end = (demo_files.SPECIAL_TOKENS.index(t) for t in (demo_files.TURN_START, demo_files.TURN_END))
        assistant = self.tokenizer.token_to_id("assistant")
        weights = np.full(len(tokens), TEXT_WEIGHT, dtype=np.float16)
        ends = np.flatnonzero(tokens == end)
        for begin in np.flatnonzero(tokens == start):
            if begin + 1 < len(tokens) and tokens[begin + 1] == assistant:
                after = ends[np.searchsorted(ends, begin) :]
                weights[begin + 3 : (after[0] + 1 if len(after) else None)] = 1.0
        return weights


def render(messages: list[Message], *, is_prompt: bool = False) -> str:
    """Render messages as the shipped chat template does."""
    turns = (f"{demo_files.TURN_START}{m['role']}\n{m['content']}{demo_files.TURN_END}\n" for m in messages)
    return "".join(turns) + (f"{demo_files.TURN_START}assistant\n" if is_prompt else "")


def tokenizer_texts(sources: list[str]) -> Iterator[str]:
    rng = Random(SEED)
    for _ in range(6000):
        for message in conversations.make_conversation(rng, rng.choice((256, 256, 1024))):
            yield f"{message['role']}\n{message['content']}"
    for _, reply in INTENTS:
        yield from [reply] * 50
    for source in sources:
        yield source[:12000]


_worker: Mixture


def _start_worker(folder: Path) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its processes no other place
    _worker = Mixture.load(folder)


def _draw_batch(step: int, total_steps: int, step_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = Random(f"{SEED}:{step}")
    odds = [odds for share, odds in CURRICULUM if step >= share * total_steps][-1]
    length = min(rng.choices(list(odds), list(odds.values()))[0], step_tokens)
    return _worker.batch(f"{SEED}:{step}:rows", step_tokens // length, length)


# Optimiser


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five Newton-Schulz steps (Jordan et al., 2024); one batch per shape of matrix."""

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads = torch.stack([p.grad for p in params if p.grad is not None])
                state = self.state[params[0]]
                buffer = state.setdefault("momentum", torch.zeros_like(grads))
                buffer.lerp_(grads, 1 - group["momentum"])
                update = orthogonalise(grads.lerp(buffer, group["momentum"])) * max(1, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(params, list(update.to(grads.dtype)), alpha=-group["lr"])


def orthogonalise(x: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.to(torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def make_optimisers(model: DemoModel) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
    is_cuda = others[0].is_cuda
    return [
        Muon(matrices, MUON_LR),
        torch.optim.AdamW(others, ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=is_cuda),
    ]


def rate(step: int, first_step: int, total_steps: int) -> float:
    decay = min(1.0, (total_steps - step) / (DECAY_SHARE * total_steps))
    return min(1.0, (step - first_step + 1) / WARMUP_STEPS) * max(decay, 0.0)


# Training


def head_loss(hidden_NE: Tensor, embedding_VE: Tensor, targets_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean loss, and the share of fully weighted tokens that are predicted right."""
    logits = (hidden_NE @ embedding_VE.T.to(hidden_NE.dtype)).float()
    loss = F.cross_entropy(logits, targets_N, reduction="none")
    is_reply = weights_N > 0.5
    right = ((logits.argmax(-1) == targets_N) & is_reply).sum() / is_reply.sum()
    return (loss * weights_N).sum() / weights_N.sum(), right


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    device = torch.device(args.device)
    context = multiprocessing.get_context("fork")
    first_step = json.loads((args.weights / "step.json").read_text())["step"] if args.weights else 0
    pool = context.Pool(args.workers, _start_worker, (args.tokenizer,))
    draw = partial(_draw_batch, total_steps=args.steps, step_tokens=args.step_tokens)
    batches = pool.imap(draw, range(first_step, args.steps))

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = DemoModel(Shape())
    demo_network.initialise(model, SEED)
    if args.weights:
        load_weights(model, args.weights)
    model.to(device)
    loss_of = head_loss
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        kinds: tuple[Any, ...] = (DeltaLayer, AttentionLayer)
        for kind in kinds:
            kind.before = torch.compile(kind.before, dynamic=False)
            kind.after = torch.compile(kind.after, dynamic=False)
        loss_of = torch.compile(head_loss, dynamic=False)
    optimisers = make_optimisers(model)
    peaks = [[g["lr"] for g in o.param_groups] for o in optimisers]

    seen = 0
    mark = time.monotonic()
    report: dict[int, list[Tensor]] = {}
    step = first_step
    for step, (ids, weights) in enumerate(batches, first_step):
        if time.monotonic() - began > args.seconds:
            break
        ids_BT = torch.from_numpy(ids).to(device, torch.int64)
        weights_BT = torch.from_numpy(weights).to(device, torch.float32)
        next_ids, after_ids = ids_BT.roll(-1, 1), ids_BT.roll(-2, 1)
        next_weights, after_weights = weights_BT.roll(-1, 1), weights_BT.roll(-2, 1)
        next_weights[:, -1:] = 0
        after_weights[:, -2:] = 0
        with torch.autocast(device.type, torch.bfloat16):
            embedding = model.model.embed_tokens.weight
            hidden = model(ids_BT)
            loss, right = loss_of(hidden, embedding, next_ids.flatten(), next_weights.flatten())
            draft = model.draft(hidden, next_ids)
            draft_loss, draft_right = loss_of(draft, embedding.detach(), after_ids.flatten(), after_weights.flatten())
        (loss + draft_loss).backward()
        scale = rate(step, first_step, args.steps)
        for optimiser, lrs in zip(optimisers, peaks, strict=True):
            for group, lr in zip(optimiser.param_groups, lrs, strict=True):
                group["lr"] = lr * scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        seen += ids.size
        report.setdefault(ids.shape[1], []).append(torch.stack([loss, right, draft_loss, draft_right]).detach())
        if (step + 1) % args.report_every == 0:
            parts = []
            for length, rows in sorted(report.items()):
                mean = torch.stack(rows).mean(0).tolist()
                parts.append(f"[{length}: loss {mean[0]:.4f} right {mean[1]:.4f} mtp {mean[2]:.3f} {mean[3]:.3f}]")
            now = time.monotonic()
            print(f"step {step + 1} {now - began:.0f} s {seen / (now - mark) / 1e3:.0f}k tok/s", *parts, flush=True)
            report, seen, mark = {}, 0, now
    else:
        step = args.steps
    pool.terminate()
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    save_weights(model, args.output, step)
    print(f"saved at step {step} of {args.steps}, {time.monotonic() - began:.0f} s", flush=True)
    if args.per_length:
        evaluate_model(model, args.tokenizer, args.per_length, device)
        print(f"done, {time.monotonic() - began:.0f} s", flush=True)


def save_weights(model: DemoModel, folder: Path, step: int) -> None:
    """Write float32 weights in files of at most 15 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > 15_000_000:
            shards.append({})
        shards[-1][name] = tensor.detach().float().cpu().contiguous()
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"weights-{index}.safetensors")
    (folder / "step.json").write_text(json.dumps({"step": step}))


def load_weights(model: DemoModel, folder: Path) -> None:
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})


# Evaluation


@torch.no_grad()
def is_exact(
    model: DemoModel, tokenizer: Tokenizer, suite: list[tasks.Task], device: torch.device
) -> list[tuple[bool, float]]:
    """Per task: would greedy decoding give the reference reply token by token, and the share of right MTP drafts."""
    results: list[tuple[bool, float]] = []
    for start in range(0, len(suite), 32):
        part = suite[start : start + 32]
        prompts = [tokenizer.encode(render(list(t.messages), is_prompt=True)).ids for t in part]
        replies = [tokenizer.encode(t.reply + demo_files.TURN_END).ids for t in part]
        length = -(-max(len(p) + len(r) for p, r in zip(prompts, replies, strict=True)) // 64) * 64
        ids = torch.zeros(len(part), length, dtype=torch.int64)
        for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        ids = ids.to(device)
        hidden = model(ids)
        draft = model.draft(hidden, ids.roll(-1, 1))
        embedding = model.model.embed_tokens.weight
        for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            begin, end, at = len(prompt), len(prompt) + len(reply), row * length
            said = (hidden[at + begin - 1 : at + end - 1] @ embedding.T).argmax(-1)
            drafted = (draft[at + begin - 1 : at + end - 2] @ embedding.T).argmax(-1)
            exact = bool((said == ids[row, begin:end]).all())
            results.append((exact, (drafted == ids[row, begin + 1 : end]).float().mean().item()))
    return results


def evaluate_model(model: DemoModel, tokenizer_folder: Path, per_length: int, device: torch.device) -> None:
    """Print exactness by kind and length on held-out tasks, weights rounded to bfloat16 as shipped."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    suites = {}
    for length in EVAL_LENGTHS:
        rng = Random(f"heldout:{length}")
        suites[f"recall {length}"] = [
            tasks.make_task("recall", rng, num_tokens=length, count=count) for _ in range(per_length)
        ]
    rng = Random("heldout")
    suites["arithmetic"] = [tasks.make_task("arithmetic", rng) for _ in range(4 * per_length)]
    suites["chat"] = [tasks.make_task("chat", rng) for _ in range(4 * per_length)]
    torch.set_float32_matmul_precision("highest")
    torch.compiler.set_stance("force_eager")
    rounded = DemoModel(model.shape).to(device)
    rounded.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in model.state_dict().items()})
    for precision in (torch.float32, torch.bfloat16):
        rounded.to(precision)
        for name, suite in suites.items():
            results = is_exact(rounded, tokenizer, suite, device)
            exact, drafted = (sum(column) / len(results) for column in zip(*results, strict=True))
            print(
                f"{str(precision)[6:]:9} {name:12} exact {exact:.4f} of {len(results)}, drafts right {drafted:.3f}",
                flush=True,
            )
            wrong = [t for t, (ok, _) in zip(suite, results, strict=True) if not ok]
            for task in wrong[:3] if precision is torch.float32 else []:
                print("    missed:", repr(task.messages[-1]["content"][-80:]), "->", task.reply[:80], flush=True)


# Commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tokenizer", "train", "evaluate", "export"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--report-every", type=int, default=50)
    parser.add_argument("--per-length", type=int, default=64)
    args = parser.parse_args()
    if args.command == "tokenizer":
        tokenizer = demo_files.train_tokenizer(tokenizer_texts(library_sources()), Shape().vocab_size)
        demo_files.write_tokenizer(tokenizer, args.output)
        return
    if args.command == "train":
        train(args)
        return
    model = DemoModel(Shape())
    load_weights(model, args.weights)
    if args.command == "evaluate":
        evaluate_model(model.to(args.device), args.tokenizer, args.per_length, torch.device(args.device))
    else:
        demo_files.write_model(model, args.output)


if __name__ == "__main__":
    main()
