"""The state of requests before their first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.runtime.policies import PolicyMix, row_of, settings_spec
from dgraph.runtime.requests import Request, Shape
from dgraph.runtime.sampling.adjustments import adjustments
from dgraph.runtime.sampling.random_numbers import sequence_keys
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.block_causal import BlockCausalState
from dgraph.runtime.state.encode_denoise import EncodeDenoiseState
from dgraph.runtime.state.state_init import StateInit
from dgraph.runtime.state.uniform_noise import UniformNoiseState
from dgraph.spec import ModelSpec


def begin(
    requests: Sequence[Request],
    spec: ModelSpec,
    mixture: PolicyMix,
    shape: Shape,
    *,
    plan: RowPlan | None,
    kv: KVPlan | None,
    device: torch.device,
    adjusts: bool = False,
) -> DecodeState:
    """Make the state of these requests, of the kind that their model needs; without requests, of idle slots.

    Args:
        requests: one for each sequence, in their order; if empty, all slots of the shape are idle.
        spec: the model.
        mixture: the policies of all requests of the batch.
        shape: shape of the batch.
        plan, kv: rows that steps forward, and keys that are kept; see `Batch`.
        device: device of the state. On the host it takes no launches.
        adjusts: some request of the batch adjusts its logits.

    Raises:
        InputError: a policy whose kind is not in the mixture.
    """
    count = len(requests) or shape.slots
    canvas = torch.full((count, shape.columns), spec.mask_id)
    for row, request in zip(canvas, requests, strict=False):
        fixed = [spec.mask_id if token is None else token for token in request.canvas]
        row[: len(request.ids) + len(fixed)] = torch.tensor([*request.ids, *fixed])
    numbers = [(r.index, len(r.ids), r.decoding.max_new_tokens, r.first_length) for r in requests]
    index, lengths, new, first = torch.tensor(numbers or [(0, 0, 1, 1)] * count).to(device).unbind(1)
    init = StateInit(
        canvas.to(device),
        index.clone(),  # each in memory of its own
        lengths.clone(),
        sequences=len(requests),
        max_new_tokens=new,
        first_length=first,
        block=shape.block,
        open=shape.open,
        mask_id=spec.mask_id,
        stop_ids=torch.tensor(spec.eos_ids, dtype=torch.int64, device=device),
        plan=plan,
        kv=kv,
        shift=spec.logit_shift,
        causal=spec.encoding == "causal",
        vocab=spec.vocab,
        most_rows=shape.most_rows,
        most_mixed=shape.mixed,
    )
    state = _kind_of(spec).begin(init)
    write_request_settings(state, mixture, requests)
    if adjusts:
        state.adjust = adjustments([r.decoding for r in requests], count, spec.vocab, device)
    return state


def _kind_of(spec: ModelSpec) -> type[DecodeState]:
    """The kind of state that a model needs."""
    if spec.noise == "uniform":
        return UniformNoiseState
    if spec.next_token:
        return EncodeDenoiseState
    return BlockCausalState if spec.attention == "block_causal" else BidirectionalState


def write_request_settings(state: DecodeState, mixture: PolicyMix, requests: Sequence[Request]) -> None:
    """Write the settings of requests into their state [b]; without requests, only make the tensors for later writes.

    Raises:
        InputError: a policy whose kind is not in the mixture.
    """
    device, count = state.start.device, len(state.start)
    given = [row_of(mixture, request.decoding.rule) for request in requests]
    for name, dtype in settings_spec(mixture.kinds).items():
        values = [settings.get(name, 1) for _, settings in given] or [1] * count
        state.settings[name] = torch.tensor(values, dtype=dtype, device=device)
    if not requests:
        return
    keys = [sequence_keys(r.decoding.seed, torch.tensor([r.index]))[:, 0] for r in requests]
    state.keys = torch.stack(keys).to(device)
    state.counter = torch.tensor([request.steps for request in requests], device=device)
    state.earlier = torch.tensor([request.decoded for request in requests], device=device)
    state.kind = torch.tensor([kind for kind, _ in given], device=device)
    heat = [float(r.decoding.sampling.temperature) for r in requests]
    state.temperature = torch.tensor(heat, dtype=torch.float32, device=device)
    if isinstance(state, BlockCausalState):
        state.set_open([r.decoding for r in requests])
    state.stops_from = torch.tensor([request.stops_from for request in requests], device=device)
