"""Rows of ids that a causal model continues, many at once: a decoding loop over memory that stays where it is.

Keys and values are written in place, and the heads of a group share theirs. Row counts, and how many positions a step
reads, are rounded up to multiples, so a step is one of few functions of static tensors; on CUDA each is captured as a
graph when it is first needed and replayed from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dgraph.errors import InputError

from .conversion import Base

TOP_P, TOP_K = 0.95, 256
ROWS_OF_A_GRAPH, KEYS_OF_A_GRAPH = 256, 128
"""Multiples of rows (on CUDA) and of positions that a step works on."""
LOOK_EVERY = 16
"""Steps between two checks if all rows have ended."""
PREFILL_TOKENS = 32_768
"""Most tokens of prompts, padding too, that one forward takes."""

Product = tuple[Tensor, Tensor | None]
"""Weight and bias of `F.linear`."""
Store = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Number of a layer, new keys and values -> those to attend to; all [n, kv heads, positions, head dim]."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights of a layer.

    Attributes:
        before, between: weights of the norms before the attention and before the MLP, [hidden].
        inputs: weight and bias of queries, keys and values.
        heads: weight of the norm of queries and keys, [heads + kv heads, head dim]; None without one.
        output: weight and bias after the attention.
        wide: weight and bias of gate and up.
        activation: activation of the gate.
        narrow: weight and bias of down.
    """

    before: Tensor
    inputs: Product
    heads: Tensor | None
    output: Product
    between: Tensor
    wide: Product
    activation: Callable[[Tensor], Tensor]
    narrow: Product


@dataclass(frozen=True, eq=False)
class _Room:
    """Tensors that steps read and write, for a number of rows and of positions.

    Attributes:
        ids: prompts and what follows them, i64[rows, positions].
        start: first position of a row that is no padding, i64[rows].
        ended: bool[rows].
        noise: exponentially distributed, f32[rows, TOP_K].
        position: position of the last token so far, i64[1].
        stop: the token that ends a row, i64[1].
        inverse: inverse of the temperature, f32[1].
        places: 0, 1, ..., i64[positions].
        cos, sin: tables of the rotation by a place, [positions, head dim]; the first half of `sin` is negated.
        keys, values: cached ones of each layer, [rows, kv heads, positions, head dim].
    """

    ids: Tensor
    start: Tensor
    ended: Tensor
    noise: Tensor
    position: Tensor
    stop: Tensor
    inverse: Tensor
    places: Tensor
    cos: Tensor
    sin: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class Writer:
    """A causal model that continues rows of ids; memory and graphs are kept between calls.

    Args:
        base: its weights are copied in `dtype`, or shared if they have it; they must stay as they are.
        dtype: dtype of weights, keys and values; None: bf16 on CUDA, else the model's.
        multiple: row counts are rounded up to one of it; None: 256 on CUDA, else 1.

    Raises:
        InputError: a layer has a sliding window.
    """

    def __init__(self, base: Base, dtype: torch.dtype | None = None, multiple: int | None = None) -> None:
        model = base.model
        self.base, self.device = base, model.device
        self.cuda = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if self.cuda else model.dtype)
        self.multiple = multiple or (ROWS_OF_A_GRAPH if self.cuda else 1)
        attention = model.model.layers[0].self_attn
        self.dim, self.scale = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.eps = model.model.norm.variance_epsilon
        with torch.inference_mode():
            self.embedding = model.model.embed_tokens.weight.to(self.dtype)
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            self.head = self.embedding if tied else model.lm_head.weight.to(self.dtype)
            self.norm = model.model.norm.weight.to(self.dtype)
            self.layers = [self._layer(layer) for layer in model.model.layers]
        self._room: _Room | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream(self.device) if self.cuda else None

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if getattr(attention, "sliding_window", None) is not None:
            raise InputError(
                f"{self.base.name} has layers with a sliding window, so it cannot write dialogues; set "
                f"use_sliding_window to false in its config.json, or give --data instead."
            )
        heads = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, self.heads), (attention.k_norm, self.kv_heads)
            heads = torch.cat([norm.weight.expand(count, -1) for norm, count in norms]).to(self.dtype)
        return _Layer(
            before=layer.input_layernorm.weight.to(self.dtype),
            inputs=self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            heads=heads,
            output=self._joined(attention.o_proj),
            between=layer.post_attention_layernorm.weight.to(self.dtype),
            wide=self._joined(mlp.gate_proj, mlp.up_proj),
            activation=mlp.act_fn,
            narrow=self._joined(mlp.down_proj),
        )

    def _joined(self, *modules: Any) -> Product:
        """Linear modules of one input as one product."""
        weight = torch.cat([module.weight for module in modules]).to(self.dtype)
        has_bias = modules[0].bias is not None
        return weight, torch.cat([module.bias for module in modules]).to(self.dtype) if has_bias else None

    @torch.inference_mode()
    def write(
        self, began: Sequence[list[int]], stop: int, most: int, temperature: float, generator: torch.Generator
    ) -> list[list[int]]:
        """Continue each row: equally many ids, at most `most`; a row that ended has only `stop` from there on.

        A token is drawn as `draw` says.

        Args:
            began: ids that each row begins with, one at least.
            generator: generator of the model's device.
        """
        count, width = len(began), max(map(len, began))
        rows = _up(count, self.multiple)
        room = self._room_for(rows, width + most)
        given = [*began, *[began[0]] * (rows - count)]
        padded = [[stop] * (width - len(row)) + row for row in given]
        room.ids[:rows, :width] = torch.tensor(padded, device=self.device)
        room.start[:rows] = torch.tensor([width - len(row) for row in given], device=self.device)
        room.ended[:count] = False
        room.ended[count:rows] = True
        room.position.fill_(width - 1)
        room.stop.fill_(stop)
        room.inverse.fill_(1 / temperature)
        self._prefill(room, rows, width - 1)
        for made in range(1, most + 1):
            room.noise[:count].exponential_(generator=generator)
            self._run(room, rows, _up(width - 1 + made, KEYS_OF_A_GRAPH))
            if made % LOOK_EVERY == 0 and bool(room.ended[:rows].all()):
                break
        return room.ids[:count, width : width + made].tolist()

    def _room_for(self, rows: int, positions: int) -> _Room:
        """The room; a new one if it is too small, in which nothing is captured yet."""
        had = self._room
        positions = _up(positions, KEYS_OF_A_GRAPH)
        if had is not None:
            if rows <= had.ids.shape[0] and positions <= had.ids.shape[1]:
                return had
            rows, positions = max(rows, had.ids.shape[0]), max(positions, had.ids.shape[1])
        self._graphs.clear()
        self._room = had = None
        self._pool = torch.cuda.graph_pool_handle() if self.cuda else None
        places = torch.arange(positions, device=self.device)
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        cos, sin = (each[0] for each in self.base.model.model.rotary_emb(like, places[None]))
        half = self.dim // 2
        shape = (rows, self.kv_heads, positions, self.dim)
        self._room = _Room(
            ids=places.new_zeros(rows, positions),
            start=places.new_zeros(rows),
            ended=places.new_zeros(rows, dtype=torch.bool),
            noise=torch.ones(rows, min(TOP_K, len(self.head)), device=self.device),
            position=places.new_zeros(1),
            stop=places.new_zeros(1),
            inverse=torch.ones(1, device=self.device),
            places=places,
            cos=cos,
            sin=torch.cat((-sin[:, :half], sin[:, half:]), -1),
            keys=[like.new_zeros(shape) for _ in self.layers],
            values=[like.new_zeros(shape) for _ in self.layers],
        )
        return self._room

    def _prefill(self, room: _Room, rows: int, width: int) -> None:
        """Keys and values of the first positions."""
        if not width:
            return
        size = max(1, PREFILL_TOKENS // width)
        places = room.places[:width]
        for first in range(0, rows, size):
            part = slice(first, min(first + size, rows))
            start = room.start[part, None]

            def store(layer: int, keys: Tensor, values: Tensor, part: slice = part) -> tuple[Tensor, Tensor]:
                room.keys[layer][part, :, :width] = keys
                room.values[layer][part, :, :width] = values
                return keys, values

            seen = (places <= places[:, None]) & (places >= start[:, None])
            self._hidden(room, room.ids[part, :width], (places - start).clamp(min=0), seen, store)

    def _run(self, room: _Room, rows: int, positions: int) -> None:
        """A step: on CUDA by its graph."""
        if not self.cuda:
            self._step(room, rows, positions)
            return
        if (rows, positions) not in self._graphs:
            self._graphs[rows, positions] = self._captured(room, rows, positions)
        self._graphs[rows, positions].replay()

    def _captured(self, room: _Room, rows: int, positions: int) -> torch.cuda.CUDAGraph:
        """Capture the graph of a step.

        A step is run before, since libraries set themselves up in their first. Its writes are taken back or will be
        written again.
        """
        current, side = torch.cuda.current_stream(self.device), self._stream
        before = [(tensor, tensor.clone()) for tensor in (room.position, room.ended)]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._step(room, rows, positions)
        current.wait_stream(side)
        for tensor, value in before:
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="relaxed"):
            self._step(room, rows, positions)
        return graph

    def _step(self, room: _Room, rows: int, positions: int) -> None:
        """Write the next token of the first rows, of which the first positions are read.

        Nothing here waits for the device or depends on values: a CUDA graph captures it.
        """
        ids, start, ended = room.ids[:rows], room.start[:rows, None], room.ended[:rows]
        places = room.places[:positions]
        seen = (places <= room.position) & (places >= start)

        def store(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            all_keys, all_values = room.keys[layer][:rows], room.values[layer][:rows]
            all_keys.index_copy_(2, room.position, keys)
            all_values.index_copy_(2, room.position, values)
            return all_keys[:, :, :positions], all_values[:, :, :positions]

        last = ids.index_select(1, room.position)
        hidden = self._hidden(room, last, room.position - start, seen[:, None], store)
        drawn = draw(F.linear(self._normed(hidden[:, 0], self.norm), self.head), room.inverse, room.noise[:rows])
        drawn = torch.where(ended, room.stop, drawn)
        room.position.add_(1)
        ids.index_copy_(1, room.position, drawn[:, None])
        ended.logical_or_(drawn == room.stop)

    def _hidden(self, room: _Room, ids: Tensor, places: Tensor, seen: Tensor, store: Store) -> Tensor:
        """The last layer's output, [n, t, hidden].

        Args:
            ids: i64[n, t].
            places: places of the ids among those of their row, i64[n, t].
            seen: positions that each id attends to, bool[n, t, positions].
        """
        (n, t), turning = ids.shape, self.heads + self.kv_heads
        group, half = self.heads // self.kv_heads, self.dim // 2
        cos, sin = room.cos[places][:, :, None], room.sin[places][:, :, None]
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        # Finite: what is padding attends to nothing, and must not become NaN.
        bias = bias.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None, None]
        x = F.embedding(ids, self.embedding)
        for number, layer in enumerate(self.layers):
            heads = F.linear(self._normed(x, layer.before), *layer.inputs).view(n, t, -1, self.dim)
            turned, values = heads[:, :, :turning], heads[:, :, turning:]
            if layer.heads is not None:
                turned = F.rms_norm(turned, (self.dim,), eps=self.eps) * layer.heads
            swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
            turned = torch.addcmul(turned * cos, swapped, sin)
            queries = (turned[:, :, : self.heads] * self.scale).view(n, t, self.kv_heads, group, self.dim)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(n, self.kv_heads, group * t, self.dim)
            keys, values = store(number, turned[:, :, self.heads :].transpose(1, 2), values.transpose(1, 2))
            scores = queries @ keys.transpose(2, 3)
            scores.view(n, self.kv_heads, group, t, -1).add_(bias)
            mixed = (scores.softmax(-1) @ values).view(n, self.heads, t, self.dim).transpose(1, 2)
            x = x + F.linear(mixed.reshape(n, t, -1), *layer.output)
            gate, up = F.linear(self._normed(x, layer.between), *layer.wide).chunk(2, -1)
            x = x + F.linear(layer.activation(gate) * up, *layer.narrow)
        return x

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def draw(logits: Tensor, inverse: Tensor, noise: Tensor) -> Tensor:
    """Draw a token for each row, i64[rows], in proportion to its probability among the likeliest tokens.

    These are the fewest that have TOP_P of the probability together, but no more than the k likeliest. Where the k
    likeliest have less than TOP_P, it is these.

    Args:
        logits: [rows, vocab].
        inverse: inverse of the temperature, f32[1].
        noise: exponentially distributed, f32[rows, k].
    """
    probabilities, ids = (logits * inverse).softmax(-1).topk(noise.shape[1])
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= TOP_P, 0.0)
    return ids.gather(1, (kept / noise).argmax(-1, keepdim=True)).squeeze(1)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
