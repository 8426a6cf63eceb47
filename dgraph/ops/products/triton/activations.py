"""Activations of gated units, as kernels compute them on sums that they hold."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, SILU: tl.constexpr):
    """Compute act(gate) * up in fp32: silu, or gelu by tanh."""
    if SILU:
        found = gate * tl.sigmoid(gate) * up
    else:  # 1 + tanh(z) = 2 sigmoid(2 z)
        found = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    return found
