"""What one rank keeps of the parameters and of the optimizer's state, and how it steps that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastreduce import _C, enums
from fastreduce.rules import rule_of
from fastreduce.served import Piece


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says of how its parameters are stepped."""
    return {key: each for key, each in group.items() if key not in ("params", "param_names")}


@dataclass
class Update:
    """A step that is about to be made.

    Attributes:
        used: of each parameter whether some rank has used it.
        gradients: flat, of each.
        factor: of the gradients, ahead of all.
        steps, remembers: the shard's, after it.
        kernels: of each dtype.
    """

    used: Sequence[int]
    gradients: Mapping[int, Tensor]
    factor: float
    steps: list[int]
    remembers: list[bool]
    kernels: dict[torch.dtype, _C.Update]


class Shard:
    """Pieces of parameters, those that this rank serves and those that it mirrors.

    Attributes:
        steps: that each parameter has taken; the same on all ranks.
        remembers: whether its steps have left some state; likewise.
        generation: how many steps the pieces have taken together.

    Args:
        kind, options: of the optimizer.
        groups: parameter groups, of whoever owns this.
        group_of: each parameter's group.
        pieces: of what is kept.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        options: Mapping[str, Any],
        groups: list[dict[str, Any]],
        group_of: Sequence[int],
        pieces: list[Piece],
    ) -> None:
        self._kind, self._options = kind, options
        self.groups, self.group_of = groups, group_of
        self.pieces = pieces
        self.rules = [rule_of(kind, group) for group in groups]
        self.steps = [0] * len(group_of)
        self.remembers = [False] * len(group_of)
        self.generation = 0
        self._inner = self._make_inner()

    def own(self) -> list[Piece]:
        """What the rank serves."""
        return [piece for piece in self.pieces if not piece.mirrors]

    @property
    def fuses(self) -> bool:
        """Whether the kernels step all of it."""
        return self._inner is None

    def check_rules(self) -> None:
        """Options may have changed, but not between what the kernels know and what not."""
        rules = [rule_of(self._kind, group) for group in self.groups]
        if [rule is None for rule in rules] != [rule is None for rule in self.rules]:
            raise RuntimeError(
                "param_groups: options that the kernels do not know (amsgrad ...) cannot be "
                "switched: make a new ParameterServer"
            )
        self.rules = rules

    def regroup(self, groups: list[dict[str, Any]]) -> None:
        """These are the groups from now on; nothing has been kept of steps before."""
        self.groups = groups
        self.rules = [rule_of(self._kind, group) for group in groups]
        self._inner = self._make_inner()

    # -- a step -------------------------------------------------------------------------------

    def prepare(
        self, used: Sequence[int], gradients: Mapping[int, Tensor], factor: float
    ) -> Update:
        """What :meth:`run` does; nothing has been changed yet."""
        steps = [step + flag for step, flag in zip(self.steps, used, strict=True)]
        names = [
            [] if rule is None else rule.moments(group)
            for rule, group in zip(self.rules, self.groups, strict=True)
        ]
        remembers = [
            before or bool(flag and names[number])
            for number, flag, before in zip(self.group_of, used, self.remembers, strict=True)
        ]
        rows: dict[torch.dtype, list[Any]] = {}
        rates: dict[tuple[int, int, bool], _C.Rates] = {}
        for piece in self.pieces:
            piece.adopt()
            index, number = piece.index, piece.group
            rule = self.rules[number]
            if rule is None or not used[index]:
                continue
            key = number, steps[index], not self.remembers[index]
            if key not in rates:
                rates[key] = rule.rates(self.groups[number], key[1], key[2], factor)
            at = piece.addresses(gradients[index], names[number])
            row = (*at, piece.end - piece.begin, rates[key])
            rows.setdefault(piece.weights.dtype, []).append(row)
        kernels = {dtype: _C.Update(each) for dtype, each in rows.items()}
        return Update(used, gradients, factor, steps, remembers, kernels)

    def run(self, update: Update, *, kernels: bool = True) -> None:
        """Makes the step, but for what the reduction's ``kernels`` have done already."""
        for dtype, each in update.kernels.items() if kernels else ():
            each.run(enums.DTYPE[dtype])
        if self._inner is not None:
            self._step_inner(self._inner, update)
        self.steps, self.remembers = update.steps, update.remembers
        self.generation += 1

    def _step_inner(self, inner: Optimizer, update: Update) -> None:
        for own, group in zip(inner.param_groups, self.groups, strict=True):
            own.update(options_of(group))
        for piece, parameter, _ in self.inner_pieces():
            parameter.grad = None
            if update.used[piece.index]:
                gradient = update.gradients[piece.index][piece.begin : piece.end]
                gradient = gradient.to(parameter.dtype)
                parameter.grad = gradient if update.factor == 1.0 else gradient * update.factor
        inner.step()
        for piece, parameter, _ in self.inner_pieces():
            parameter.grad = None
            if piece.master is not None and piece.weights.dtype != piece.master.dtype:
                piece.weights.copy_(parameter.detach())

    # -- its state ----------------------------------------------------------------------------

    def _make_inner(self) -> Optimizer | None:
        """The optimizer itself, of those pieces that the kernels do not step, if any."""
        unknown = [piece for piece in self.pieces if self.rules[piece.group] is None]
        self._stepped = {piece: nn.Parameter(piece.exact) for piece in unknown}
        if None not in self.rules:
            return None
        groups: list[dict[str, Any]] = [{**options_of(each), "params": []} for each in self.groups]
        for piece, parameter in self._stepped.items():
            groups[piece.group]["params"].append(parameter)
        return self._kind(groups, **self._options)

    def inner_pieces(self) -> Iterator[tuple[Piece, nn.Parameter, dict[str, Any]]]:
        """What the optimizer itself steps, and its state."""
        for piece, parameter in self._stepped.items():
            assert self._inner is not None
            yield piece, parameter, self._inner.state[parameter]

    def needed(self, number: int) -> set[str]:
        """What the state of a parameter of that group consists of."""
        rule = self.rules[number]
        group = self.groups[number]
        if rule is not None:
            return {"step", *rule.moments(group)} if rule.counts_steps else set()
        probe = nn.Parameter(torch.zeros(1))
        probe.grad = torch.zeros(1)
        optimizer = self._kind([{**options_of(group), "params": [probe]}], **self._options)
        optimizer.step()
        return {name for name, value in optimizer.state[probe].items() if value is not None}

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """As torch would have it, of the piece; nothing before its first step."""
        rule = self.rules[piece.group]
        state: dict[str, Any] = {}
        if rule is None:
            assert self._inner is not None
            return dict(self._inner.state[self._stepped[piece]])
        if not self.steps[piece.index]:
            return state
        if rule.counts_steps:
            state["step"] = torch.tensor(float(self.steps[piece.index]))
        return state | piece.moments
