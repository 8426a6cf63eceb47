"""Static batches in plain eager PyTorch, as the public code of Fast-dLLM decodes LLaDA with its dual cache.

    python -m benchmarks.eager_loop --commits benchmarks/traces/text.json

What an engine's tokens per second are held against (`benchmarks.engine_load` has the engine's on the same requests). A
batch is padded to its longest prompt and its longest response. Every block begins with a forward of the whole canvas,
which writes all keys; the other steps forward the block. A block is over when that of the slowest sequence is. Beside
the public code this loop is given three advantages: the head multiplies the rows of the block alone, confidences are
float32 (there float64), and padding is not masked, so that attention is a plain fused call.

Blocks of a batch cost the same, so that `--blocks` of them are timed and the batch is taken to have `--tokens` / block
of that. Weights are random; how many tokens each step commits is the trace's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.runs import Run, add_run
from dgraph.bench.arrivals import Lengths, Request, drawn
from dgraph.bench.load import shape_of
from dgraph.bench.traces import Trace, read_trace
from dgraph.families import Model


class PlainLlama:
    """A Llama whose rows all see all positions, over keys [layers][b, heads, positions, head_dim] that stay.

    Args:
        module: transformers' LlamaForCausalLM; its weights are used.
        batch, positions: of the keys.
    """

    def __init__(self, module: torch.nn.Module, batch: int, positions: int):
        config = module.config
        self.model, self.head = module.model, module.lm_head
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.hidden_size // self.heads
        weight = self.head.weight
        shape = (batch, self.kv_heads, positions, self.dim)
        self.keys = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in self.model.layers]
        self.values = [torch.empty_like(keys) for keys in self.keys]
        theta = config.rope_parameters["rope_theta"]
        rates = theta ** (-torch.arange(0, self.dim, 2, device=weight.device).float() / self.dim)
        angles = torch.outer(torch.arange(positions, device=weight.device).float(), rates).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)

    def forward(self, ids: Tensor, begin: int) -> Tensor:
        """Hidden states [b, n, d] of positions begin to begin + n, whose keys are written first."""
        end = begin + ids.shape[1]
        cos, sin = self.cos[begin:end], self.sin[begin:end]
        h = self.model.embed_tokens(ids)
        for layer, keys, values in zip(self.model.layers, self.keys, self.values, strict=True):
            attention = layer.self_attn
            x = layer.input_layernorm(h)
            q, k, v = (
                project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            keys[:, :, begin:end], values[:, :, begin:end] = k, v
            mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=self.heads != self.kv_heads)
            h = h + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Of hidden states."""
        return self.head(self.model.norm(h))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def block(model: PlainLlama, canvas: Tensor, begin: int, size: int, counts: Tensor, mask: int) -> int:
    """Decode one block of every sequence, in place.

    Args:
        canvas: ids [b, positions].
        counts: of each sequence the tokens that its steps commit, i64[b, steps].

    Returns:
        The steps that it took.
    """
    part = canvas[:, begin : begin + size]
    for step, count in enumerate(counts.T):
        h = model.forward(canvas, 0)[:, begin : begin + size] if step == 0 else model.forward(part, begin)
        logits = model.logits(h).float()
        logits[..., mask] = -torch.inf  # random weights would choose it at times
        confidence, token = logits.softmax(-1).max(-1)
        confidence = torch.where(part == mask, confidence, -torch.inf)
        rank = confidence.argsort(1, descending=True).argsort(1)
        part.copy_(torch.where((rank < count[:, None]) & (part == mask), token, part))
        if not bool((part == mask).any()):
            return step + 1
    raise RuntimeError("the steps of a block commit fewer tokens than it has.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["llada-8b"], default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--commits", type=Path, required=True, help="a trace: how many tokens each step commits")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 64], help="sequences; too many are skipped")
    parser.add_argument("--prompt", default="uniform:64-2048")
    parser.add_argument("--tokens", default="uniform:32-512")
    parser.add_argument("--blocks", type=int, default=3, help="that are timed; the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    add_run(parser)
    args = parser.parse_args(arguments)
    device, trace = torch.device(args.device), read_trace(args.commits)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    title = f"{args.commits.name}: {trace.steps:.1f} steps per block in the mean"
    columns = ["sequences", "positions", "blocks", "s/block", "steps/block", "ms/step after the first", "tok/s"]
    rows: list[list[str | int | float]] = []
    with Run(args, f"Eager static batches of {args.shape}", arguments is None) as run:
        with run.stage("weights"):
            model = shape_of(args.shape, device, dtype, args.layers, trace.block)
        for batch in args.batch:
            if run.late(f"{batch} sequences"):
                continue
            requests = drawn([0.0] * batch, Lengths(args.prompt), Lengths(args.tokens, "--tokens"), args.seed)
            try:
                rows.append([batch, *measured(model, trace, requests, args.blocks)])
            except torch.OutOfMemoryError:
                rows.append([batch, "out of memory", *["-"] * 5])
            run.arm(title, columns, rows)
            if device.type == "cuda":
                torch.cuda.empty_cache()


@torch.no_grad()
def measured(model: Model, trace: Trace, requests: Sequence[Request], repeat: int) -> list[float]:
    """Positions, blocks, seconds and steps of a block, milliseconds of a step after the first, tokens per second."""
    size, spec = trace.block, model.spec
    longest, new = max(r.prompt for r in requests), max(r.new for r in requests)
    blocks = -(-new // size)
    positions = longest + blocks * size
    plain = PlainLlama(model.module.model, len(requests), positions)
    device = plain.head.weight.device
    draw = torch.Generator().manual_seed(0)
    canvas = torch.randint(10, spec.vocab // 2, (len(requests), positions), generator=draw).to(device)
    canvas[:, longest:] = spec.mask_id
    seconds, steps = [], []
    for number in range(repeat + 1):  # the first warms up
        begin = longest + number % blocks * size
        canvas[:, begin : begin + size] = spec.mask_id
        counts = _counts(trace, len(requests), number).to(device)
        started = time.perf_counter()
        steps.append(block(plain, canvas, begin, size, counts, spec.mask_id))
        seconds.append(time.perf_counter() - started)
    part, reuse = canvas[:, longest : longest + size], []
    for _ in range(10):
        started = time.perf_counter()
        plain.logits(plain.forward(part, longest)).float().softmax(-1).max(-1)[1].sum().item()
        reuse.append(time.perf_counter() - started)
    each, tokens = statistics.median(seconds[1:]), sum(r.new for r in requests)
    return [positions, blocks, each, statistics.mean(steps[1:]), 1e3 * statistics.median(reuse), tokens / each / blocks]


def _counts(trace: Trace, batch: int, number: int) -> Tensor:
    """Tokens that each step commits in the block of each sequence, i64[b, steps]; the shorter ones end in zeros."""
    histories = [trace.histories[(7 * i + number) % len(trace.histories)] for i in range(batch)]
    longest = max(map(len, histories))
    counts = [[len(step.committed) for step in h] + [0] * (longest - len(h)) for h in histories]
    return torch.tensor(counts)


if __name__ == "__main__":
    main()
