"""Optimizer steps in one loop: the reference's bits on every instruction set, and torch's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conftest import on_every_instruction_set, same_bits

from fastreduce import _C, enums, reference
from fastreduce.rules import Rule, rule_of

COUNTS = [1, 7, 31, 512, 1000, 4099]
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.03}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.4, 0.9)}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw none": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-3}),
}


def options_of(name: str) -> tuple[Rule, dict[str, Any]]:
    kind, options = CASES[name]
    group = kind([torch.nn.Parameter(torch.ones(1))], **options).param_groups[0]
    rule = rule_of(kind, group)
    assert rule is not None
    return rule, group


def gradient_of(count: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    sizes = torch.randint(-12, 4, (count,), generator=generator).float().exp2()
    return torch.randn(count, generator=generator) * sizes


class Ours:
    """Weights and state of one parameter."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.rule, self.group = options_of(name)
        self.weight = weight.clone()
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.master = weight.float() if wide != weight.dtype else None
        self.moments = [torch.zeros(len(weight), dtype=wide) for _ in self.rule.moments(self.group)]

    def step(self, number: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        state = [gradient, self.weight, self.master, *self.moments]
        state += [None] * (2 - len(self.moments))
        count = len(self.weight)
        # In runs, in any order: what is before and after is as it was.
        cut = count // 3
        rates = self.rule.rates(self.group, number, number == 1, scale)
        rows = []
        for begin, end in ((cut, count), (0, cut)):
            at = [
                0 if each is None else each.data_ptr() + begin * each.element_size()
                for each in state
            ]
            rows.append((*at, end - begin, rates))
        _C.Update(rows).run(enums.DTYPE[self.weight.dtype])


def referred(name: str, state: list[Any], gradient: torch.Tensor, step: int) -> list[Any]:
    """The reference's weight and moments."""
    kind, options = CASES[name]
    if kind is torch.optim.SGD:
        return list(reference.sgd(state[0], gradient, state[1], **options))
    decoupled = kind is torch.optim.AdamW
    decay = {"weight_decay": 1e-2} if decoupled else {}
    return list(
        reference.adam(
            *(state[0], gradient, *state[1:]), step=step, decoupled=decoupled, **decay | options
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_reference(name):
    for count in COUNTS:
        torch.manual_seed(count)
        weight = torch.randn(count)
        ours = Ours(name, weight)
        state: list[Any] = [weight, *([None] if CASES[name][0] is torch.optim.SGD else [])]
        state += [torch.zeros(count)] * (3 - len(state) if len(state) == 1 else 0)
        for step in range(1, 6):
            gradient = gradient_of(count, step)
            ours.step(step, gradient)
            state = referred(name, state, gradient, step)
            for mine, expected in zip([ours.weight, *ours.moments], state, strict=False):
                assert same_bits(mine, expected), (count, step)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_steps_as_torch_does(name, dtype):
    kind, options = CASES[name]
    for count in COUNTS:
        torch.manual_seed(count)
        weight = torch.randn(count, dtype=dtype)
        ours = Ours(name, weight)
        parameter = torch.nn.Parameter(weight.clone())
        torchs = kind([parameter], **options, foreach=False, fused=False)
        for step in range(1, 8):
            gradient = gradient_of(count, step).to(dtype)
            parameter.grad = gradient.clone()
            torchs.step()
            ours.step(step, gradient * 4, 0.25)
            if kind is torch.optim.SGD:
                assert same_bits(ours.weight, parameter.detach()), (count, step)
                continue
            # One in the last place, of the weight or of what is added: torch's roots are not always
            # the nearest number.
            size = torch.maximum(ours.weight.abs(), torch.tensor(options["lr"], dtype=dtype))
            close = torch.finfo(dtype).eps * size
            assert ((ours.weight - parameter.detach()).abs() <= 2 * close).all(), (count, step)
            with torch.no_grad():  # a step's difference is what counts
                parameter.copy_(ours.weight)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_weights_are_rounded_from_wide_ones(name, dtype):
    for count in COUNTS:
        torch.manual_seed(count)
        weight = torch.randn(count).to(dtype)
        narrow, wide = Ours(name, weight), Ours(name, weight.float())
        for step in range(1, 4):
            gradient = gradient_of(count, step).to(dtype)
            narrow.step(step, gradient)
            wide.step(step, gradient.float())
            assert narrow.master is not None and same_bits(narrow.master, wide.weight)
            assert same_bits(narrow.weight, wide.weight.to(dtype))


def digest() -> None:
    """Prints what becomes of some steps."""
    found = []
    for name in CASES:
        torch.manual_seed(0)
        ours = Ours(name, torch.randn(1000))
        for step in range(1, 4):
            ours.step(step, gradient_of(1000, step))
        found.append([each.view(torch.int32).sum().item() for each in (ours.weight, *ours.moments)])
    print(json.dumps(found))


def test_every_instruction_set_has_the_same_bits():
    said = on_every_instruction_set("import test_optimizer; test_optimizer.digest()")
    assert len({json.dumps(found) for found in said.values()}) == 1
    assert "baseline" in said
