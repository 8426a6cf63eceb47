"""Budgets of key-value pairs per layer: an average, divided over the layers by published rules.

Every function gives a tuple with a number of pairs per KV head for each layer. Its sum is never above the average times
the number of layers. All round down, and the remainder is not used. Shares are taken in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from dgraph.errors import InputError


def uniform(layers: int, average: int) -> tuple[int, ...]:
    """The same for every layer.

    Raises:
        InputError: a number out of range.
    """
    _check_size(layers, average)
    return (average,) * layers


def maskkv(average: int, importance: Sequence[float], boundary: int = 1, beta: float = 0.4) -> tuple[int, ...]:
    """A base for every layer; the rest to the outer and to the middle layers, by how much they change hidden states.

    MaskKV (arXiv 2510.09309), Eq. 9 and appendix A.9, algorithm 2. The base is floor(beta * average). The rest of all
    layers together is divided between the two groups by the sums of their importance; the outer group's part is rounded
    down. Each part is divided equally between the layers of its group, rounded down. Without any importance the rest is
    divided equally.

    Args:
        average: pairs per head, averaged over the layers.
        importance: of each layer, 1 - the mean cosine of its input and output hidden states; at least 0.
        boundary: number of layers at either end that are the outer group. The paper names the first and the last layer,
            but gives no size of the group. At least 0; half of the layers or more: all are outer.
        beta: the share of the average that is the base, in [0, 1].

    Raises:
        InputError: a number out of range, or no layer.
    """
    layers = len(importance)
    _check_size(layers, average)
    _check_share("beta", beta)
    _check_values("importance", importance, least=0)
    if type(boundary) is not int or boundary < 0:
        raise InputError(f"boundary must be an integer of at least 0, the layers at either end, got {boundary!r}.")
    base = math.floor(beta * average)
    outer = [layer < boundary or layer >= layers - boundary for layer in range(layers)]
    count = sum(outer)
    sums = [math.fsum(s for s, out in zip(importance, outer, strict=True) if out == group) for group in (True, False)]
    rest = (average - base) * layers
    if not sum(sums):
        return uniform(layers, average)
    of_outer = rest if count == layers else min(rest, math.floor(rest * sums[0] / sum(sums)))
    share = {True: of_outer // max(count, 1), False: (rest - of_outer) // max(layers - count, 1)}
    return tuple(base + share[out] for out in outer)


def pyramid(layers: int, average: int, beta: float = 20) -> tuple[int, ...]:
    """An arithmetic sequence from the first layer, which keeps most, to the last.

    PyramidKV, section 4.2: the last layer keeps average / beta, and the first one 2 * average - average / beta. The
    layers between lie on a line, so that the mean is the average. Each number is exact before it is rounded down. A
    single layer keeps the average.

    Args:
        layers: number of layers.
        average: pairs per head, averaged over the layers.
        beta: ratio of the average to the last layer's pairs; at least 1 (then all keep the same).

    Raises:
        InputError: a number out of range.
    """
    _check_size(layers, average)
    if not _is_number(beta) or beta < 1:
        raise InputError(
            f"beta must be a number of at least 1 (the average over the last layer's pairs), got {beta!r}."
        )
    if layers == 1:
        return (average,)
    last = average / Fraction(beta)
    first = 2 * average - last
    return tuple(math.floor(first - (first - last) * layer / (layers - 1)) for layer in range(layers))


def squeeze(average: int, similarity: Sequence[float], share: float = 0.4, groups: int = 3) -> tuple[int, ...]:
    """Fewer pairs for the layers whose attention changes hidden states least; the others share the rest.

    SqueezeAttention, algorithm 1: layers are clustered by their similarity in one dimension; those of the cluster of
    highest similarity keep floor(share * average), the others an equal part of the rest, rounded down. The clusters
    minimise the sum of squared distances to their means (k-means, solved exactly, so that no start matters; of equally
    good ones the lower bounds win). Equal similarities are never parted: with fewer values than `groups` there are
    that many clusters, and with one value all layers keep the average.

    Args:
        average: pairs per head, averaged over the layers.
        similarity: of each layer, the mean cosine of hidden states before and after its attention.
        share: the share of the average that the least important layers keep, in [0, 1].
        groups: clusters, at least 2.

    Raises:
        InputError: a number out of range, or no layer.
    """
    layers = len(similarity)
    _check_size(layers, average)
    _check_share("share", share)
    _check_values("similarity", similarity)
    if type(groups) is not int or groups < 2:
        raise InputError(f"groups must be an integer of at least 2, got {groups!r}.")
    least = _highest_cluster(similarity, groups)
    if least <= min(similarity):
        return uniform(layers, average)
    small = math.floor(share * average)
    count = sum(value >= least for value in similarity)
    large = (average * layers - small * count) // (layers - count)
    return tuple(small if value >= least else large for value in similarity)


def _highest_cluster(values: Sequence[float], groups: int) -> float:
    """The lowest value of the highest of `groups` clusters in one dimension, or of fewer if there are fewer values."""
    ordered = sorted(values)
    starts = [0, *(i for i in range(1, len(ordered)) if ordered[i] > ordered[i - 1])]
    ends = [*starts[1:], len(ordered)]
    best = {end: (_spread(ordered[:end]), 0) for end in ends}  # by end: the spread, and where the last cluster starts
    for _ in range(min(groups, len(starts)) - 1):
        best = {
            end: min((best[start][0] + _spread(ordered[start:end]), start) for start in best if start < end)
            for end in ends
            if end > min(best)
        }
    return ordered[best[len(ordered)][1]]


def _spread(values: Sequence[float]) -> float:
    """Sum of squared distances to the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _check_size(layers: int, average: int) -> None:
    if type(layers) is not int or layers < 1:
        raise InputError(f"a budget needs at least one layer, got {layers!r}.")
    if type(average) is not int or average < 0:
        raise InputError(f"average must be an integer of at least 0, in pairs per KV head, got {average!r}.")


def _check_share(name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a number in [0, 1], got {value!r}.")


def _check_values(name: str, values: Sequence[float], least: float = -math.inf) -> None:
    for layer, value in enumerate(values):
        if not _is_number(value) or value < least:
            bound = "" if least == -math.inf else f" of at least {least}"
            raise InputError(f"{name} must be a finite number{bound} for each layer, got {value!r} for layer {layer}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
