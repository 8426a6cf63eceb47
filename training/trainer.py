"""The training loop: one optimizer and schedule per phase, stages of growing difficulty within it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from dgraph.ranks.groups import Alone, Group

from .data import KIND_NAMES, Batch
from .model import Mask
from .objective import Inputs, dense_mask, part_of, token_losses
from .tokenizer import EOS_ID

LogLine = dict[str, Any]

LOG_EVERY = 50
MASTERED = 0.03
"""Mean loss per token of a retrieval answer at which a stage has done its work."""


@dataclass(frozen=True)
class Stage:
    """A part of a phase: retrieval among up to `pairs`, until it is mastered or `until` of the phase is over."""

    pairs: int
    until: float = 1.0


class Trainable(Protocol):
    """Interface of a model for a trainer: `TinyModel` has it, and `Adopted` gives it to classes of transformers."""

    @property
    def lm_head(self) -> nn.Linear: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Final hidden states [R, T, hidden] of ids and positions i64 [R, T]."""
        ...


class Trainer:
    """One phase's optimizer and schedule: the rate rises to `peak` over `warmup` steps, then falls to final * peak.

    A phase is over after `steps` or `minutes`, whichever comes first, and the rate follows what is closer to its end.
    `dense` asks for dense masks (any device), else FlexAttention's; `compiled` compiles the loss and the masks.
    `decay`: of matrices. `autocast`: dtype of matrix products. Only parameters that ask for a gradient are trained.
    Each of several `ranks` takes a part of a batch's rows, and gradients are added: a step is that of one.

    Attributes:
        done: steps so far.
        clock: seconds of training after the last of them, on rank 0: the rate and the end depend on it.
    """

    def __init__(
        self,
        model: Trainable,
        steps: int,
        peak: float,
        final: float,
        dense: bool,
        compiled: bool,
        warmup: int = 100,
        minutes: float = float("inf"),
        decay: float = 0.1,
        autocast: torch.dtype = torch.bfloat16,
        ranks: Group | None = None,
    ) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.trained if p.dim() == 2]
        vectors = [p for p in self.trained if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.model, self.steps, self.minutes, self.dense = model, steps, minutes, dense
        self.autocast, self.ranks = autocast, ranks or Alone()
        self.peak, self.final, self.warmup = peak, final, min(warmup, max(1, steps // 10))
        self.device = model.lm_head.weight.device
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=cuda)
        self.block_mask: Callable[..., Any] = torch.compile(create_block_mask) if compiled else create_block_mask
        self.losses: Callable[..., Tensor] = torch.compile(token_losses) if compiled else token_losses
        self.done, self.clock = 0, 0.0
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time since the phase began."""
        return time.perf_counter() - self.began

    @property
    def fraction(self) -> float:
        """Fraction of the phase that is over, 1 or more at its end."""
        return max(self.done / self.steps, self.clock / (60 * self.minutes))

    def rate(self) -> float:
        """The learning rate of the next step."""
        if self.done < self.warmup:
            return self.peak * (self.done + 1) / self.warmup
        start = min(self.warmup / self.steps, 0.999)  # a single step is all warm-up
        return self.peak * (1 - (1 - self.final) * min(1, max(0, self.fraction - start) / (1 - start)))

    def state(self) -> dict[str, Any]:
        """State for `restore`: the trained parameters in their order, the optimizer, steps and seconds."""
        parameters = [p.detach() for p in self.trained]
        optimizer = self.optimizer.state_dict()
        return {"parameters": parameters, "optimizer": optimizer, "done": self.done, "seconds": self.clock}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state` of a trainer of the same model."""
        for parameter, value in zip(self.trained, state["parameters"], strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.clock = state["done"], state["seconds"]
        self.began = time.perf_counter() - self.clock

    def mask(self, inputs: Inputs) -> Mask:
        """Attention mask of the rows of `inputs`, in the form the chosen kernel takes."""
        rows, length = inputs.input_ids.shape
        if self.dense:
            return dense_mask(inputs.visible, rows, length, self.device)
        return self.block_mask(inputs.visible, rows, None, length, length, device=self.device)

    def forward(self, inputs: Inputs) -> Tensor:
        """The unweighted loss per row [R, P], 0 where a row has no weight: no logits are made of such rows."""
        learnt = inputs.weights > 0
        chosen = learnt.flatten().nonzero().flatten()
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast != torch.float32):
            hidden = self.model.hidden(inputs.input_ids, inputs.positions, self.mask(inputs))
            rows = hidden[:, -learnt.shape[1] :].flatten(0, 1).index_select(0, chosen)  # whose gradient is quick to add
            losses = self.losses(rows[None], self.model.lm_head.weight, inputs.targets.flatten()[chosen][None])[0]
        return torch.zeros_like(inputs.weights).masked_scatter(learnt, losses)

    def step(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Do one update; return the loss before it, and the unweighted loss per row [R, P].

        The losses per row are those of `forward` for this rank's rows.

        Raises:
            InputError: the rows cannot be divided among the ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        inputs = part_of(inputs, self.ranks.rank, self.ranks.world)
        losses = self.forward(inputs)
        loss = (losses * inputs.weights).sum() / inputs.scale
        loss.backward()
        loss = self._added(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.clock = self.ranks.exchange(self.seconds)[0]
        return loss, losses.detach()

    def _added(self, loss: Tensor) -> Tensor:
        """Add up the gradients of all ranks, and their parts of the loss."""
        if self.ranks.world == 1:
            return loss
        gradients = [p.grad for p in self.trained if p.grad is not None]
        total = self.ranks.all_reduce(torch.cat([*(each.flatten() for each in gradients), loss[None]]))
        parts = total.split([*(each.numel() for each in gradients), 1])
        for gradient, part in zip(gradients, parts[:-1], strict=True):
            gradient.copy_(part.view_as(gradient))
        return total[-1]


def task_means(inputs: Inputs, losses: Tensor) -> dict[str, float]:
    """Mean loss per token learnt of each task, end tokens left out: there are many and they are easy."""
    learnt = (inputs.weights > 0) & (inputs.targets != EOS_ID)
    chosen = {name: learnt & (inputs.tasks == number) for number, name in enumerate(KIND_NAMES)}
    return {name: round(float((losses * at).sum() / at.sum().clamp_min(1)), 4) for name, at in chosen.items()}


def run_phase(
    trainer: Trainer,
    stages: Sequence[Stage],
    batches_of: Callable[[int, Stage], Iterable[Batch]],
    inputs_of: Callable[[Batch], Inputs],
    log: Callable[[LogLine], None],
    probe: Callable[[], LogLine],
    probe_every: int,
    save: Callable[[], None],
    save_every: float = 60.0,
) -> None:
    """Run a phase; log the mean loss per task every 50 steps, `probe` every `probe_every` steps and after each stage.

    `batches_of` gives the endless or long enough batches of a stage and its number. `save` is called every `save_every`
    seconds and at the end, an interrupt included.
    """
    saved = 0.0
    try:
        for number, stage in enumerate(stages):
            for batch in batches_of(number, stage):
                inputs = inputs_of(batch.to(trainer.device))
                loss, losses = trainer.step(inputs)
                over = trainer.fraction >= (stage.until if number + 1 < len(stages) else 1.0)
                if trainer.done % LOG_EVERY == 0 or trainer.done <= 3 or over:
                    means = task_means(inputs, losses)
                    line = {"step": trainer.done, "pairs": stage.pairs, "loss": round(float(loss), 4), **means}
                    log({**line, "rate": round(trainer.rate(), 6), "seconds": round(trainer.seconds, 1)})
                    over |= (
                        number + 1 < len(stages) and trainer.done > trainer.warmup and 0 < means["needle"] < MASTERED
                    )
                    if trainer.seconds - saved > save_every:
                        save()
                        saved = trainer.seconds
                if over:
                    break
                if probe_every and trainer.done % probe_every == 0:
                    log({"step": trainer.done, **probe()})
            if probe_every and number + 1 < len(stages):
                log({"step": trainer.done, **probe()})
    finally:
        save()
    log({"phase seconds": round(trainer.seconds, 1)})
