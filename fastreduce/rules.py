"""Which of torch's optimizers the kernels step, and how a parameter group says so."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from fastreduce import _C

_SGD, _ADAM, _ADAMW = range(3)  # csrc/optimizer.h
_UNSUPPORTED = ("amsgrad", "differentiable")
_WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Rule:
    """An optimizer's arithmetic, in one loop over the elements.

    SGD gives the bits of torch's, whatever its implementation. Adam and AdamW give those of torch's
    ``fused=True`` but for the last elements of a parameter, which fill no vector: torch's loop over
    these rounds otherwise. Its other implementations take square roots on the CPU that are not
    always the nearest number, and differ by one in the last place.

    Args:
        kind: of the kernels.
        decoupled: weight decay does not go through the gradient.
    """

    def __init__(self, kind: int, decoupled: bool) -> None:
        self._kind = kind
        self._decoupled = decoupled

    def moments(self, group: dict[str, Any]) -> list[str]:
        """The names of the state that is kept for every element: none, one or two."""
        if self._kind == _SGD:
            return ["momentum_buffer"] if group["momentum"] != 0 else []
        return ["exp_avg", "exp_avg_sq"]

    @property
    def kept(self) -> list[str]:
        """All that :meth:`moments` can name."""
        return ["momentum_buffer"] if self._kind == _SGD else ["exp_avg", "exp_avg_sq"]

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps the number of steps in a parameter's state."""
        return self._kind != _SGD

    def rates(self, group: dict[str, Any], step: int, first: bool, scale: float) -> _C.Rates:
        """Of the ``step``-th step, from 1 on, for gradients that are multiplied before all.
        ``first``: there is no momentum yet."""
        rates = _C.Rates(self._kind)
        rates.scale, rates.maximize = scale, group["maximize"]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        if self._kind == _SGD:
            rates.rate, rates.decay = rate, decay
            rates.momentum, rates.dampening = group["momentum"], group["dampening"]
            rates.nesterov, rates.first = group["nesterov"], first
            return rates
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rates.rate = rate / (1 - beta1**step)
        rates.decay = 1 - rate * decay if self._decoupled else decay
        rates.beta1, rates.beta2, rates.eps = beta1, beta2, group["eps"]
        rates.correction2 = (1 - beta2**step) ** 0.5
        return rates


def rule_of(optimizer: type[Optimizer], group: dict[str, Any]) -> Rule | None:
    """None where torch has to step: another class, or options that the kernels do not know.

    Raises:
        ValueError: an optimizer of torch's that does not work element by element, or an option that
            is for GPUs.
    """
    if group.get("capturable"):
        raise ValueError("capturable: expected False on the CPU")
    if optimizer.__name__ in _WHOLE:
        raise ValueError(f"optimizer_class: {optimizer.__name__} does not work element by element")
    if any(group.get(option) for option in _UNSUPPORTED):
        return None
    if optimizer is SGD:
        return Rule(_SGD, False)
    if optimizer is AdamW or (optimizer is Adam and group.get("decoupled_weight_decay")):
        return Rule(_ADAMW, True)
    return Rule(_ADAM, False) if optimizer is Adam else None
