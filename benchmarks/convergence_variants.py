"""The ways to average gradients that convergence.py compares: no hook, torch's hooks, and ours.

To add one, name it in ``VARIANTS``; a wire format of ours, in ``WIRES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import Wire

TIMEOUT_SECONDS = 120.0
FP32 = "fp32"
WITHIN_SD, WITHIN_POINT = "1 sd", "1 point"

# Gives a DDP model its hook for so many steps, and returns what is to be closed at the end.
Averaging = Callable[[DistributedDataParallel, int], "fastreduce.HookState | None"]


@dataclass(frozen=True)
class Variant:
    """A way to average gradients.

    Args:
        format: what ``--formats`` calls it.
        feedback: whether what is lost in a step is made up for in the next; None: nothing to say.
        average: registers the hook.
        target: what its training should come to.
    """

    format: str
    feedback: bool | None
    average: Averaging
    target: str | None = None

    @property
    def name(self) -> str:
        return f"{self.format}, no feedback" if self.feedback is False else self.format


def no_hook(_: DistributedDataParallel, steps: int) -> None:
    return None


def torch_fp16(ddp: DistributedDataParallel, steps: int) -> None:
    ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)


def torch_bf16(ddp: DistributedDataParallel, steps: int) -> None:
    # No annotations: DDP compares them with types, and here they are strings.
    def bf16_on_cpu(group, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(group, bucket)

    ddp.register_comm_hook(dist.group.WORLD, bf16_on_cpu)


def torch_powersgd(ddp: DistributedDataParallel, steps: int) -> None:
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ours(ddp: DistributedDataParallel, steps: int) -> fastreduce.HookState:
    return fastreduce.attach(ddp, timeout=TIMEOUT_SECONDS)


def over(schedule: dict[float, Wire]) -> Averaging:
    """fastreduce with wire formats, each from a share of the training on, and fp32 before."""

    def average(ddp: DistributedDataParallel, steps: int) -> fastreduce.HookState:
        wire = {round(share * steps): wire for share, wire in schedule.items()}
        return fastreduce.attach(ddp, timeout=TIMEOUT_SECONDS, wire=wire, wire_min_bytes=0)

    return average


# Our formats, as --formats calls them, and the target with feedback.
WIRES: dict[str, tuple[str | None, Wire]] = {
    "bf16": (None, Wire("bf16")),
    "fp16": (None, Wire("fp16")),
    "fp8_e4m3": (WITHIN_SD, Wire("fp8_e4m3")),
    "fp8_e5m2": (WITHIN_SD, Wire("fp8_e5m2")),
    "int8": (WITHIN_SD, Wire("int8")),
    "int4": (WITHIN_SD, Wire("int4")),
    "int4_stochastic": (None, Wire("int4", rounding="stochastic")),
    "onebit": (WITHIN_POINT, Wire("onebit")),
    "topk": (WITHIN_POINT, Wire("topk", k=0.01)),
    "randomk": (None, Wire("randomk", k=0.01)),
    "lowrank": (None, Wire("lowrank", rank=2)),
}
# The same after a beginning that sends more (Lin et al. 2018: deep gradient compression).
RAMPED = {
    "onebit": {0.1: WIRES["onebit"][1]},
    "onebit_int4": {0.1: WIRES["int4"][1], 0.3: WIRES["onebit"][1]},
    "topk": {0.1: Wire("topk", k=0.1), 0.3: Wire("topk", k=0.03), 0.5: WIRES["topk"][1]},
}

VARIANTS = [
    Variant(FP32, None, no_hook),
    Variant("fastreduce", None, ours),
    Variant("torch_bf16", None, torch_bf16),
    Variant("torch_fp16", None, torch_fp16),
    Variant("torch_powersgd", True, torch_powersgd),
    *(
        Variant(
            name,
            feedback,
            over({0: replace(wire, feedback=feedback)}),
            target if feedback else None,
        )
        for name, (target, wire) in WIRES.items()
        for feedback in (True, False)
    ),
    *(
        Variant(f"{name}_ramped", True, over(schedule), WITHIN_POINT)
        for name, schedule in RAMPED.items()
    ),
]
FORMATS = list(dict.fromkeys(variant.format for variant in VARIANTS))
NAMES = [variant.name for variant in VARIANTS]
# Of a longer training.
LONG = [FP32, "torch_powersgd", "fp8_e4m3", "int8", "int4", "onebit", "topk"]
LONG += [f"{name}_ramped" for name in RAMPED]
