"""Families whose checkpoints bring modelling code of their own for a native class under other names.

Nothing of that code is run: the config is translated, the parameters are renamed, and the native class holds the
tensors. A model object that such code made is adopted the same way, its tensors shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dgraph.errors import CheckpointError
from dgraph.families import Model
from dgraph.families.adapters import Adapter
from dgraph.families.weights import weights_of
from dgraph.models.adapters import read_adapter
from dgraph.models.checkpoint import WithOwnKeys, build_native, open_weights, read_folder, restore_buffers
from dgraph.models.matching import match
from dgraph.models.native import PREFIX, Forward, config_of, native_spec
from dgraph.models.objects import architectures_of, describing, source_of
from dgraph.models.rotation import check_rotation
from dgraph.models.tiny import FACTS as TINY_FACTS
from dgraph.models.tiny import build_tiny


def as_it_is(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A config that has the native class's keys already."""
    return config


@dataclass(frozen=True, eq=False)
class RemoteCodeFamily:
    """One family, described by its differences from its native class.

    Attributes:
        name, summary: of the family.
        remote: the class of its own code, as config.json's `architectures` and model objects name it.
        native: the class of transformers that computes the same, e.g. "LlamaForCausalLM".
        facts: fields of `ModelSpec` of the published checkpoints; they hold where a config is silent. A block length or
            an attention of None: checkpoints differ in it, so the caller is asked.
        translate: its config (and its folder's path, "" for a model object) to one in the native class's keys;
            raises CheckpointError, with the key's name, for a value that the native class cannot represent.
        stored: a native parameter's name to its own.
        tiny: keys of the native class's config in which a tiny model of the family differs from others'.
        hints: see `dgraph.families.Model`.
        alike: see `dgraph.families.Family`.
    """

    name: str
    summary: str
    remote: str
    native: str
    facts: Mapping[str, Any]
    translate: Callable[[dict[str, Any], str], dict[str, Any]] = as_it_is
    stored: Callable[[str], str] = str
    tiny: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    alike: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """See `Family.architectures`."""
        return (self.remote,)

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        """See `Family.adopt`."""
        if type(model).__name__ != self.remote or not isinstance(model, nn.Module):
            return None
        source = f"this {self.remote}'s config"
        config = self._translated(config_of(model), "", source)
        native = self.build(config, source)
        tensors = model.state_dict(keep_vars=True)
        what = f"this {self.remote} does not fit {self.native.removesuffix('ForCausalLM')}"
        advice = "Its config and its parameters do not belong together."
        names = match(native, self._stored(native, tensors), tensors, what, advice)
        trained = [p for p in model.parameters() if p.requires_grad]
        native.load_state_dict({mine: tensors[name] for mine, (name,) in names.items()}, assign=True, strict=False)
        native.tie_weights()
        model.requires_grad_(False)  # a parameter that is assigned asks for gradients
        for parameter in trained:
            parameter.requires_grad_(True)
        first = next(model.parameters())
        restore_buffers(native, native.config, first.device)
        return self.model(self.name, native, config, first.dtype, **facts)

    def build(self, config: Mapping[str, Any], source: str) -> Any:
        """The native class on the meta device; see `build_native`."""
        return build_native(self.native, config, source)

    def model(self, name: str, native: Any, config: Mapping[str, Any], dtype: torch.dtype, **facts: Any) -> Model:
        """A filled native model with its facts."""
        spec = native_spec(WithOwnKeys(native.config, config), self.name, dtype, self.facts, **facts)
        return Model(name, Forward(native.eval()), spec, None, PREFIX, self.hints)

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`."""
        native = build_tiny(self.build, self.tiny, seed)
        return self.model(f"tiny random {self.name}", native, {}, torch.float32, **TINY_FACTS)

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family.open`."""
        if self.remote not in architectures_of(folder):
            return None
        found, source = read_folder(folder), source_of(folder)
        config = self._translated(found.config, str(folder), source)
        native = self.build(config, source)
        weights, dtype = open_weights(native, folder, found.base, dtype, device, self._stored)
        model = self.model(folder.name, native, config, dtype, **facts)
        return replace(model, tokenizer=found.tokenizer, weights=weights)

    def read_adapter(self, model: Model, folder: Path) -> Adapter:
        """A low-rank adapter for the linear layers of a model of this family; see `dgraph.models.adapters`."""
        parameters = weights_of(model.module, model.prefix)
        layers = {name: p for name, p in parameters.items() if ".layers." in name and p.dim() == 2}
        return read_adapter(folder, {self.stored(name): (name, p) for name, p in layers.items()})

    def _stored(self, native: nn.Module, there: Container[str]) -> dict[str, list[str]]:
        return {name: [self.stored(name)] for name in native.state_dict()}

    def _translated(self, config: dict[str, Any], folder: str, source: str) -> dict[str, Any]:
        check_rotation(config, source)
        with describing(source, self.remote):
            try:
                return self.translate(config, folder)
            except CheckpointError as error:
                raise CheckpointError(f"{source}: {error}") from None


@dataclass(frozen=True, eq=False)
class Variants:
    """One family of several native classes, which are trained and published alike.

    Attributes:
        name, summary, alike: of the family; see `RemoteCodeFamily`.
        kinds: one for each native class, under the family's name.
    """

    name: str
    summary: str
    kinds: tuple[RemoteCodeFamily, ...]
    alike: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """See `Family.architectures`."""
        return tuple(name for kind in self.kinds for name in kind.architectures)

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        """See `Family.adopt`."""
        return next(filter(None, (kind.adopt(model, **facts) for kind in self.kinds)), None)

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`: one of the first kind."""
        return self.kinds[0].random(seed)

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family.open`."""
        return next(filter(None, (kind.open(folder, dtype, device, **facts) for kind in self.kinds)), None)


def named(config: Mapping[str, Any], folder: str, pattern: str) -> re.Match[str] | None:
    """The nearest match of a pattern in a part of a checkpoint's path; facts that no key has stand in its name.

    The name may stand anywhere in the path: a hub's cache has it above the folder. The path that an object was loaded
    from (`_name_or_path`) serves, too. Case is passed over.

    Args:
        config: config of the checkpoint.
        folder: its path; "" for a model object.
        pattern: pattern to search for.
    """
    places = re.split(r"[/\\]", f"{config.get('_name_or_path') or ''}/{folder}")
    return next(filter(None, (re.search(pattern, place, re.IGNORECASE) for place in reversed(places))), None)


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The keys that stand below one of a config; none where it is absent or null.

    Raises:
        CheckpointError: it is no object.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointError(f"{key} is {found!r}, expected an object of keys.")
    return dict(found or {})


def require(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], native: str) -> None:
    """Refuse a config whose `key` has a value that the native class cannot represent.

    Args:
        allowed: values that it can; None among them if the key may be absent or null.
        native: the class, for the message.

    Raises:
        CheckpointError: the message names the key, the value and what is expected.
    """
    value = config.get(key)
    if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in allowed):
        wanted = " or ".join(repr(good) for good in allowed if good is not None) or "none"
        raise CheckpointError(f"{key} is {value!r}, expected {wanted}: {native} cannot represent anything else.")


def require_size(config: Mapping[str, Any], key: str) -> None:
    """Raise `CheckpointError`, with the key's name, for a value that is no whole number above 0, nor absent or null."""
    size = config.get(key)
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{key} is {size!r}, expected a whole number, at least 1.")
