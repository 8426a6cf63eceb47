"""What a graph holds and calls, as text."""

from __future__ import annotations

from dataclasses import replace

from dgraph.lowering.contents import contents
from dgraph.passes import QuantizeWeights
from dgraph.testing.models import models


def test_layers_that_are_alike_share_lines() -> None:
    (tiny,) = models(None, "sdar")
    lines = contents(tiny.graph).split("\n")
    layers = tiny.model.spec.layers
    assert lines == sorted(set(lines))
    assert {f"weight: f32[32, 48]  x {layers}", "weight: f32[97, 32]  x 2", "input: i64[b, t]  x 2"} <= set(lines)
    assert f"linear(f32[b, t, 48], f32[32, 48]): f32[b, t, 32]  x {layers}" in lines
    assert not [line for line in lines if "getitem" in line or "proj" in line]


def test_it_says_how_weights_are_stored_and_which_rows_are_rounded() -> None:
    (tiny,) = models(None, "sdar")
    how = QuantizeWeights("int8", which=("*.0.mlp.down_proj.weight",))
    made = tiny, tiny.quantised(how), tiny.quantised(replace(how, activations=True))
    plain, stored, rounded = (set(contents(one.graph).split("\n")) for one in made)
    assert {"weight: i8[32, 48]  x 1", "weight: f32[32, 1]  x 1", "weight: f32[32, 48]  x 3"} <= stored - plain
    assert rounded - stored == {"dgraph.round_rows(f32[b, t, 48], int8): f32[b, t, 48]  x 1"}
