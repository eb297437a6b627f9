"""What torch.compile sees of a hook: an operator that names its state by a number."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastreduce.ddp import HookState

_states: weakref.WeakValueDictionary[int, HookState] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(state: HookState) -> int:
    """The number by which :func:`average_gradient_` finds the state, as long as it lives."""
    number = next(_numbers)
    _states[number] = state
    return number


@torch.library.custom_op("fastreduce::average_gradient_", mutates_args={"gradient"})
def average_gradient_(gradient: Tensor, state: int) -> None:
    """``gradient`` becomes its mean over the ranks of a :class:`~fastreduce.HookState`, by its
    weights. Where DDP's reducer is compiled (``python_reducer``), it calls this once for each
    parameter, in one order on all ranks.

    Raises:
        RuntimeError: the state is gone.
    """
    found = _states.get(state)
    if found is None:
        raise RuntimeError("the HookState of this compiled model does not exist any more")
    found.average_gradient(gradient)


@average_gradient_.register_fake
def _(gradient: Tensor, state: int) -> None:
    return None
