"""`dgraph` as a model of lm-evaluation-harness, for its tasks that generate text.

    python -m dgraph.evaluate.harness run --model dgraph --model_args pretrained=tiny_sdar,recipe=focus,alpha=1.5 \\
        --tasks my_task --include_path ./tasks

is the harness's own command line, with this model in it. In Python, call `register()` before `lm_eval.simple_evaluate`.

Tasks that compare log-likelihoods are refused: see `NO_LIKELIHOOD`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgraph.api import CompiledModel, optimize
from dgraph.errors import InputError, warn
from dgraph.families import load
from dgraph.runtime.policies import chosen_policy
from dgraph.runtime.request_checks import room_of
from dgraph.settings import torch_dtype

NAME = "dgraph"
MAX_GEN_TOKS = 256
"""Default length limit, for tasks that name none, as in the harness."""
TOGETHER = 16
"""Default number of prompts that are decoded together."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the length limit; the first one that is given counts, as in the harness."""
NO_LIKELIHOOD = (
    "a diffusion model fills in masked tokens in any order, so no single forward gives the log-likelihood of a text, "
    "only a bound averaged over random maskings does, which dgraph does not compute. Take the generating variant of "
    "the task (generate_until)."
)


@dataclass(frozen=True)
class Request:
    """Generation settings of a task. Contexts with equal settings share batches.

    Attributes:
        limit: most new tokens.
        until: stop strings.
        temperature: temperature of the draws; None if the task does not say.
    """

    limit: int = MAX_GEN_TOKS
    until: tuple[str, ...] = ()
    temperature: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Request:
        """The request in a task's generation_kwargs.

        Raises:
            InputError: a limit below 1, or a stop string of another type.
        """
        given = [settings[name] for name in LIMITS if settings.get(name) is not None]
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        if not all(isinstance(text, str) for text in until):
            raise InputError(f"until must be a list of texts, got {until!r}.")
        limit = int(given[0]) if given else MAX_GEN_TOKS
        if limit < 1:
            raise InputError(f"{LIMITS[0]} must be at least 1, got {limit}.")
        # As in the harness: do_sample decides, and a temperature without it means sampling.
        said = settings.get("temperature")
        temperature = 0.0 if settings.get("do_sample") is False else None if said is None else float(said)
        return cls(limit, tuple(text for text in until if text), temperature)


@dataclass
class Adapter:
    """Answers requests of the harness, without any of its classes.

    Attributes:
        program: the model under a recipe.
        batch: prompts that are decoded together.
        settings: further arguments of `CompiledModel.generate`: policy, seed.
    """

    program: CompiledModel
    batch: int = TOGETHER
    settings: Mapping[str, Any] = field(default_factory=dict)

    def answer(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], done: Callable[[int, str], None] | None = None
    ) -> list[str]:
        """Responses to (context, generation_kwargs), in that order; a context is one turn of a user.

        done: called with the index and text of each response, as they come.

        Raises:
            InputError: settings that cannot be used, or a context that leaves no room in the model's window.
        """
        groups: dict[Request, list[int]] = {}
        for index, (context, kwargs) in enumerate(requests):
            request = Request.of(kwargs)
            groups.setdefault(self._fitting(context, request), []).append(index)
        texts = [""] * len(requests)
        for request, indices in groups.items():
            for first in range(0, len(indices), self.batch):
                part = indices[first : first + self.batch]
                for index, text in zip(part, self._decode([requests[i][0] for i in part], request), strict=True):
                    texts[index] = text
                    if done is not None:
                        done(index, text)
        return texts

    def _decode(self, contexts: Sequence[str], request: Request) -> list[str]:
        result = self.program.generate(
            contexts,
            max_new_tokens=request.limit,
            stop=request.until,
            temperature=request.temperature,
            **self.settings,
        )
        assert result.texts is not None
        return result.texts

    def _fitting(self, context: str, request: Request) -> Request:
        """The request, with a limit that fits into the model's window after this context."""
        spec, tokenizer = self.program.spec, self.program.model.tokenizer
        assert tokenizer is not None
        length = len(tokenizer.encode(context))
        room = room_of(spec, spec.block_length) - length
        if room < 1:
            raise InputError(
                f"a context of {length} tokens leaves no room in the {spec.max_positions} positions of "
                f"{self.program.model.name}; give fewer examples (--num_fewshot)."
            )
        return Request(min(request.limit, room), request.until, request.temperature)


def adapter_of(
    pretrained: str,
    recipe: str = "dense",
    *,
    policy: str | None = None,
    threshold: float | None = None,
    steps: int | None = None,
    backend: str = "inductor",
    dtype: str | None = None,
    device: str | None = None,
    batch_size: int | str | None = None,
    seed: int = 0,
    **options: Any,
) -> Adapter:
    """An adapter from the harness's model arguments.

    Args:
        pretrained: name of an embedded model, or a checkpoint folder.
        recipe, options: as for `optimize`.
        policy, threshold, steps: as for `CompiledModel.generate`.
        backend: "inductor" or "eager".
        dtype, device: dtype and device of the weights, by name. The harness asks for cuda:0 by default; without a GPU
            that means the CPU, as for its own models.
        batch_size: prompts that are decoded together; `TOGETHER` for None, 1 (the harness's default) and "auto".
        seed: seed of the draws.

    Raises:
        DgraphError: an argument that cannot be used.
    """
    import torch

    kind = torch_dtype(dtype)
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        warn(f"there is no GPU here; {pretrained} runs on the CPU instead of {device}.")
        device = None
    rule = chosen_policy(policy, threshold, steps)
    model = load(pretrained, kind, device)
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, so it cannot read a prompt; add one to its folder.")
    asked = str(batch_size)
    together = int(asked) if asked.isdecimal() and int(asked) > 1 else TOGETHER
    program = optimize(model, recipe, backend=backend, **options)
    return Adapter(program, together, {"policy": rule, "seed": seed})


def single_turn(history: Iterable[Mapping[str, str]]) -> str:
    """The text of a chat that is one turn of a user. The chat template is applied when it is encoded.

    Raises:
        InputError: a system message, or several turns.
    """
    turns = list(history)
    if [turn.get("role") for turn in turns] != ["user"]:
        roles = ", ".join(str(turn.get("role")) for turn in turns)
        raise InputError(
            f"dgraph frames one turn of a user, got {roles or 'none'}; leave out --system_instruction and "
            f"--fewshot_as_multiturn."
        )
    return turns[0]["content"]


def register() -> type:
    """Register `dgraph` with the harness, and return its class there. Calling it again changes nothing.

    Raises:
        InputError: lm-evaluation-harness is not installed.
    """
    try:
        base: Any = importlib.import_module("lm_eval.api.model").LM
        registry: Any = importlib.import_module("lm_eval.api.registry")
    except ImportError as error:
        raise InputError(
            f"lm-evaluation-harness cannot be imported ({error}); install it with: pip install 'dgraph[eval]'."
        ) from None
    if NAME in registry.model_registry:
        return registry.get_model(NAME)

    class DgraphLM(base):  # type: ignore[misc]
        """A model under a recipe; arguments as `adapter_of` takes them."""

        def __init__(self, pretrained: str, max_batch_size: Any = None, **settings: Any):
            super().__init__()
            self.pretrained = pretrained
            self.adapter = adapter_of(pretrained, **settings)

        @property
        def tokenizer_name(self) -> str:
            return self.pretrained

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return single_turn(chat_history)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            tqdm: Any = importlib.import_module("tqdm").tqdm
            with tqdm(total=len(asked), disable=disable_tqdm, desc="dgraph") as bar:

                def done(index: int, text: str) -> None:
                    self.cache_hook.add_partial("generate_until", asked[index], text)
                    bar.update(1)

                return self.adapter.answer(asked, done)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError(NO_LIKELIHOOD)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError(NO_LIKELIHOOD)

    return registry.register_model(NAME)(DgraphLM)


def main() -> None:
    """Run the harness's command line with this model in it."""
    register()
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
