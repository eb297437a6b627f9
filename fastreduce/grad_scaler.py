"""Automatic loss scaling whose unscaling and overflow check ride along with the averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

if TYPE_CHECKING:
    from fastreduce.ddp import HookState
    from fastreduce.parameter_server import ParameterServer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a DDP model with fastreduce's hook, or a ParameterServer.

    The reduction multiplies by the inverse of the scale in its accumulator and counts what is not
    finite in the result, which is the same on all ranks: ``unscale_`` and ``step`` read no gradient
    for that, and a step that is skipped is skipped on all ranks. So after ``backward()`` gradients
    are unscaled already, and may be clipped at once, with ``unscale_`` or without. A scale that
    differs between the ranks is an error of ``backward()``. A pass must not begin with gradients
    that an earlier one has averaged: accumulate under ``no_sync()``. What overflows skips the steps
    of all optimizers of the model.

    A server keeps gradients scaled, and divides as it updates; there, different scales are an error
    of ``step()``.

    Args:
        state: of the model; it counts norms from then on. None of its parameters is float16. Or a
            server, whose may be.
        kwargs: passed on to ``torch.amp.GradScaler``.
    """

    def __init__(self, state: HookState | ParameterServer, **kwargs: Any) -> None:
        super().__init__(**{"device": "cuda" if state.on_gpus else "cpu", **kwargs})
        self._state = state
        self._seen: dict[int, int] = {}  # synchronised passes, by optimizer
        state.unscale_by(self)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's. Optimizers that would unscale by themselves are told not to."""
        if self.is_enabled():
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.READY:
                self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Whether the pass's gradients overflowed, on their device; they are unscaled."""
        state = self._state
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        used = [each for each in parameters if each.grad is not None]
        foreign = [each for each in used if not state.averages(each)]
        if foreign:
            raise ValueError(
                f"optimizer: {len(foreign)} of its parameters with a gradient are not averaged by "
                "the state of this GradScaler"
            )
        self._seen[id(optimizer)] = state.newer_than(self._seen.get(id(optimizer), 0))
        overflowed = float(state.grad_norm.nonfinite > 0)  # of a server collective
        devices = {each.device for each in used}
        return {device: torch.full((), overflowed, device=device) for device in devices}
