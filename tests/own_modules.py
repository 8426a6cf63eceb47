"""Plain modules as people write them: attention and feed-forward network in one spelling after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgraph
from dgraph.testing import TinyModel

HIDDEN, HEADS, LAYERS, VOCAB, POSITIONS = 32, 4, 3, 64, 256
SIZE = HIDDEN // HEADS


@dataclass(frozen=True)
class Kind:
    """One way to write a module.

    Attributes:
        parallel: attention and feed-forward network read one norm, and are added together.
        qkv: how queries, keys and values are made; a name in `SPELLINGS`, or "apart".
        bias: of all linear layers.
        norm: of queries and keys per head: "", "layer" or "rms".
        rotary: positions turn queries and keys; else they are learned.
        kv_heads: heads of keys and values.
        attend: how attention is called; a name in `ATTENDING`.
        ffn: a name in `NETWORKS`.
        names: how layers are held: "layers", "h" (within `transformer`), or "attributes".
        head: of the logits: "tied", "own" or "bias".
    """

    parallel: bool = False
    qkv: str = "chunk"
    bias: bool = True
    norm: str = ""
    rotary: bool = False
    kv_heads: int = HEADS
    attend: str = "transpose"
    ffn: str = "gelu"
    names: str = "layers"
    head: str = "tied"

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "-".join(name if value is True else f"{name}={value}" for name, value in given.items()) or "plain"


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, [b, t, heads, size] each."""


def _heads(b: int, t: int, *values: Tensor) -> Any:
    return tuple(value.view(b, t, -1, SIZE) for value in values)


def _stacked(y: Tensor) -> Tensor:
    return y.view(*y.shape[:2], 3, HEADS, SIZE)


def _by_head(y: Tensor) -> Any:
    return y.view(*y.shape[:2], HEADS, 3 * SIZE).chunk(3, -1)


def _nested(y: Tensor, kv: int) -> Heads:
    q, both = y.split([HIDDEN, 2 * kv * SIZE], -1)
    return _heads(*y.shape[:2], q, *both.chunk(2, -1))


SPELLINGS: dict[str, Callable[[Tensor, int], Any]] = {
    "chunk": lambda y, kv: _heads(*y.shape[:2], *y.chunk(3, -1)),
    "split": lambda y, kv: _heads(*y.shape[:2], *y.split([HIDDEN, kv * SIZE, kv * SIZE], -1)),
    "tensor_split": lambda y, kv: _heads(*y.shape[:2], *y.tensor_split(3, -1)),
    "unbind": lambda y, kv: _stacked(y).unbind(2),
    "index": lambda y, kv: tuple(_stacked(y)[:, :, i] for i in range(3)),
    "permute": lambda y, kv: tuple(_stacked(y).permute(2, 0, 1, 3, 4)[i] for i in range(3)),
    "slices": lambda y, kv: _heads(
        *y.shape[:2], y[..., :HIDDEN], y[..., HIDDEN:-HIDDEN], y.narrow(-1, 2 * HIDDEN, HIDDEN)
    ),
    "by heads": lambda y, kv: y.view(*y.shape[:2], -1, SIZE).split([HEADS, kv, kv], 2),
    "nested": _nested,
    "interleaved": lambda y, kv: _by_head(y),
}


def _transposed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def _folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in the batch, as `rearrange(x, "b t h d -> (b h) t d")`."""
    b, t = q.shape[:2]
    q, k, v = (x.permute(0, 2, 1, 3).reshape(b * HEADS, t, SIZE) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v)
    return y.reshape(b, HEADS, t, SIZE).permute(0, 2, 1, 3).reshape(b, t, HIDDEN)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    return _transposed(q, k, v)


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def expand(x: Tensor) -> Tensor:
        b, t, n, d = x.shape
        return x[:, :, :, None].expand(b, t, n, HEADS // n, d).reshape(b, t, HEADS, d)

    return _transposed(q, expand(k), expand(v))


ATTENDING: dict[str, Callable[..., Tensor]] = {
    "transpose": _transposed,
    "grouped": lambda q, k, v: _transposed(q, k, v, enable_gqa=True),
    "repeated": _repeated,
    "expanded": _expanded,
    "folded": _folded,
}


class Gelu(nn.Module):
    def __init__(self, bias: bool, approximate: str = "none"):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 64, bias=bias), nn.Linear(64, HIDDEN, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SwiGLU(nn.Module):
    def __init__(self, bias: bool, gate_first: bool = True):
        super().__init__()
        self.both, self.down = nn.Linear(HIDDEN, 96, bias=bias), nn.Linear(48, HIDDEN, bias=bias)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(first) * second if self.gate_first else first * F.silu(second))


NETWORKS: dict[str, Callable[[bool], nn.Module]] = {
    "gelu": Gelu,
    "tanh": lambda bias: Gelu(bias, "tanh"),
    "swiglu": SwiGLU,
    "gate last": lambda bias: SwiGLU(bias, False),
}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [b, t, heads, size], turned by halves."""
    angles = positions[..., None].float() * 0.5 ** torch.arange(SIZE // 2).float()
    angles = torch.cat([angles, angles], -1)[:, :, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Layer(nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.kind, kv = kind, kind.kv_heads * SIZE
        self.norm = nn.LayerNorm(HIDDEN)
        if not kind.parallel:
            self.norm2 = nn.LayerNorm(HIDDEN)
        if kind.qkv == "apart":
            self.q, self.k, self.v = (nn.Linear(HIDDEN, n, bias=kind.bias) for n in (HIDDEN, kv, kv))
        elif kind.qkv == "kv":
            self.q, self.kv = nn.Linear(HIDDEN, HIDDEN, bias=kind.bias), nn.Linear(HIDDEN, 2 * kv, bias=kind.bias)
        else:
            self.qkv = nn.Linear(HIDDEN, HIDDEN + 2 * kv, bias=kind.bias)
        if kind.norm:
            made = nn.LayerNorm if kind.norm == "layer" else nn.RMSNorm
            self.q_norm, self.k_norm = made(SIZE), made(SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=kind.bias)
        self.ffn = NETWORKS[kind.ffn](kind.bias)

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.kind.qkv == "apart":
            q, k, v = _heads(b, t, self.q(x), self.k(x), self.v(x))
        elif self.kind.qkv == "kv":
            q, k, v = _heads(b, t, self.q(x), *self.kv(x).chunk(2, -1))
        else:
            q, k, v = SPELLINGS[self.kind.qkv](self.qkv(x), self.kind.kv_heads)
        if self.kind.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.kind.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        return self.out(ATTENDING[self.kind.attend](q, k, v))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind.parallel:
            h = self.norm(x)
            return x + self.attend(h, positions) + self.ffn(h)
        x = x + self.attend(self.norm(x), positions)
        return x + self.ffn(self.norm2(x))


class Net(nn.Module):
    """input_ids i64[b, t], position_ids i64[b, t] -> logits f32[b, t, VOCAB]."""

    def __init__(self, kind: Kind, layer: Callable[[Kind], nn.Module] = Layer):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        if not kind.rotary:
            self.pos = nn.Embedding(POSITIONS, HIDDEN)
        made = [layer(kind) for _ in range(LAYERS)]
        if kind.names == "layers":
            self.layers = nn.ModuleList(made)
        elif kind.names == "h":
            self.transformer = nn.ModuleDict({"h": nn.ModuleList(made)})
        elif kind.names == "stages":
            self.stages = nn.ModuleList([nn.ModuleList(made[:1]), nn.ModuleList(made[1:])])
        else:
            for i, each in enumerate(made):
                setattr(self, f"layer{i}", each)
        self.norm = nn.LayerNorm(HIDDEN)
        if kind.head != "tied":
            self.head = nn.Linear(HIDDEN, VOCAB, bias=kind.head == "bias")
        self.eval()

    @property
    def all_layers(self) -> list[Any]:
        if self.kind.names == "layers":
            return list(self.layers)
        if self.kind.names == "h":
            return list(self.transformer["h"])  # type: ignore[arg-type]
        if self.kind.names == "stages":
            return [layer for stage in self.stages for layer in stage]  # type: ignore[attr-defined]
        return [getattr(self, f"layer{i}") for i in range(LAYERS)]

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.emb(input_ids)
        if not self.kind.rotary:
            x = x + self.pos(position_ids)
        for layer in self.all_layers:
            x = layer(x, position_ids)
        x = self.norm(x)
        return F.linear(x, self.emb.weight) if self.kind.head == "tied" else self.head(x)


def spec_of(kind: Kind, **facts: Any) -> dgraph.ModelSpec:
    known: dict[str, Any] = {
        "family": f"own-{kind}",
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": HEADS,
        "kv_heads": kind.kv_heads,
        "head_dim": SIZE,
        "vocab": VOCAB,
        "mask_id": VOCAB - 1,
        "eos_ids": (VOCAB - 2,),
        "pad_id": 0,
        "block_length": 8,
        "attention": "bidirectional",
        "logit_shift": 0,
        "max_positions": POSITIONS,
        "dtype": torch.float32,
    }
    return dgraph.ModelSpec(**(known | facts))


def own(kind: Kind, module: nn.Module | None = None, **facts: Any) -> TinyModel:
    """A module as a model that checks of methods take."""
    name = f"own-{kind}"
    return TinyModel(name, dgraph.Model(name, module or Net(kind), spec_of(kind, **facts)))


@torch.no_grad()
def decoded(tiny: TinyModel, prompt: list[int], new: int, threshold: float) -> list[int]:
    """Block by block in plain PyTorch: a step commits each masked position above the threshold, and the surest one."""
    spec = tiny.model.spec
    canvas = torch.tensor([*prompt, *[spec.mask_id] * new])
    positions = torch.arange(len(canvas))[None]
    for start in range(len(prompt), len(canvas), spec.block_length):
        block = slice(start, min(start + spec.block_length, len(canvas)))
        while (masked := canvas[block] == spec.mask_id).any():
            logits = tiny.model.module(canvas[None], positions)[0][block]
            logits[:, spec.mask_id] = -torch.inf
            confidence, tokens = logits.softmax(-1).max(-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            commits = (confidence > threshold) | (torch.arange(len(tokens)) == confidence.argmax())
            canvas[block] = torch.where(commits, tokens, canvas[block])
        if set(canvas[block].tolist()) & set(spec.eos_ids):
            break
    out = canvas[len(prompt) :].tolist()
    return out[: next((i for i, token in enumerate(out) if token in spec.eos_ids), len(out))]
