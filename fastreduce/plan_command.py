"""``fastreduce plan``: its options, and the plan that they ask for."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastreduce import errors, forecast, plan, plan_report, terminal
from fastreduce.footprint import LOSSES, Footprint, Gradient, Sample, footprint, optimizer_bytes
from fastreduce.forecast import Bucket, Cluster, Compute, Link, Step
from fastreduce.options import EXIT_STATUS, UsageError, checked, positive, whole
from fastreduce.plan import State, Work
from fastreduce.plan_report import Plan, Scaling
from fastreduce.policy import MIB
from fastreduce.wire import FP32, Wire

EXAMPLES = """\
examples:
  fastreduce plan --model mine:build --input 3x224x224 --batch 512 --ranks 10
  fastreduce plan --model resnet50 --batch 256 --precision autocast-bf16 --bandwidth nvlink-h100 \\
      --flops 300                          # a name of torchvision's, where that is installed
  fastreduce plan --model mine:build --input 1024:int64 --loss cross_entropy --batch 64 \\
      --checkpoint Block --ranks 16 --bandwidth pcie4 --inter-bandwidth 100gbe --flops 60
  fastreduce plan --params 175e9 --layers 96 --gpu-memory 80GB

sizes are in bytes, or kB, MB, GB, TB (powers of 1000), or KiB, MiB, GiB, TiB; bandwidths in GB/s,
or one of """

_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The dtype of weights and gradients, whether the optimizer steps a float32 copy, and autocast's.
PRECISIONS: dict[str, tuple[torch.dtype, bool, torch.dtype | None]] = {
    **{name: (dtype, False, None) for name, dtype in _FLOATS.items()},
    "bf16-master": (torch.bfloat16, True, None),
    "fp16-master": (torch.float16, True, None),
    "autocast-bf16": (torch.float32, False, torch.bfloat16),
    "autocast-fp16": (torch.float32, False, torch.float16),
}
_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**n for n, prefix in enumerate(["", "k", "M", "G", "T"])},
    **{f"{prefix}iB": 1024**n for n, prefix in enumerate(["K", "M", "G", "T"], 1)},
}
_SHAPES: dict[str, tuple[bool, tuple[plan.Sharding, ...]]] = {
    "replicas share the optimizer's state": (False, ("optimizer",)),
    "replicas share everything": (False, ("all",)),
    "split by tensors and layers": (True, ("none",)),
    "split, replicas share the state": (True, ("optimizer",)),
    "split, replicas share everything": (True, ("all",)),
}


# What follows the name of a wire format.
_WIRE_NUMBERS = {"topk": "k", "randomk": "k", "lowrank": "rank"}


def _wire(text: str) -> Wire:
    name, colon, number = text.partition(":")
    if name == "threshold":
        raise ValueError(
            "how much threshold sends depends on the gradients' values, which nobody knows before: "
            "topk with the k that is expected sends as much"
        )
    if name not in (*errors.FORMATS, *_WIRE_NUMBERS):
        allowed = ", ".join([*errors.FORMATS, *(f"{each}:NUMBER" for each in _WIRE_NUMBERS)])
        raise ValueError(f"expected one of {allowed}, got {text!r}")
    if not colon:
        return Wire(name)  # type: ignore[arg-type]
    if name not in _WIRE_NUMBERS:
        raise ValueError(f"{name} takes no number, got {text!r}")
    try:
        value = int(number) if number.isdigit() else float(number)
    except ValueError:
        raise ValueError(f"expected a number behind {name}:, got {text!r}") from None
    return Wire(name, **{_WIRE_NUMBERS[name]: value})  # type: ignore[arg-type]


def _wire_name(wire: Wire) -> str:
    option = _WIRE_NUMBERS.get(wire.format)
    return f"{wire.format}:{getattr(wire, option)}" if option else wire.format


def _share(text: str) -> float:
    value = positive(text)
    if value >= 1:
        raise ValueError(f"expected a number between 0 and 1, got {text!r}")
    return value


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([A-Za-z]*)", text)
    if not found or found[2] not in _UNITS:
        raise ValueError(f"expected a size such as 80GB or 512MiB, got {text!r}")
    return int(positive(found[1]) * _UNITS[found[2]])


def _sample(text: str) -> Sample:
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name, None) if name else None
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape) or (
        name and not isinstance(dtype, torch.dtype)
    ):
        raise ValueError(
            f"expected the shape of one sample, such as 3x224x224 or 1024:int64, got {text!r}"
        )
    return Sample(tuple(map(int, shape.split("x"))), dtype)


def _link(text: str) -> Link:
    if text in forecast.LINKS:
        return forecast.LINKS[text]
    try:
        bandwidth = positive(text)
    except ValueError:
        raise ValueError(
            f"expected GB/s, or one of {', '.join(forecast.LINKS)}, got {text!r}"
        ) from None
    return Link(bandwidth * 1e9, 10e-6, "given; latency assumed")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = f"{EXAMPLES}{', '.join(forecast.LINKS)}\n\n{EXIT_STATUS}"
    parser.set_defaults(run=run)
    model = parser.add_argument_group("what is trained")
    which = model.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="module:function that gives it, or a name of torchvision")
    which.add_argument("--params", type=whole(), help="only how many parameters it has")
    model.add_argument(
        "--input",
        type=checked(_sample),
        action="append",
        help="shape of one sample, and its dtype: 3x224x224, 1024:int64; once for each argument of "
        "the model (torchvision: 3x224x224)",
    )
    model.add_argument("--loss", choices=LOSSES, default="sum", help="of the model's output (sum)")
    model.add_argument(
        "--activations",
        type=checked(_size),
        help="with --params: of one sample, as nothing can be measured",
    )
    model.add_argument(
        "--layers",
        type=whole(),
        default=1,
        help="all alike, that a pipeline may share (1)",
    )
    training = parser.add_argument_group("how it is trained")
    training.add_argument("--batch", type=whole(), help="samples of a step, of all ranks")
    training.add_argument("--accumulation", type=whole(), default=1, help="passes of a step (1)")
    training.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of everything (fp32); -master: 16-bit weights and gradients, float32 copy and state; "
        "autocast-: float32 weights and gradients",
    )
    training.add_argument(
        "--optimizer",
        default="adam",
        help=f"{', '.join(_OPTIMIZERS)}, or module:class (adam)",
    )
    training.add_argument(
        "--checkpoint",
        metavar="PATTERN",
        help="modules computed anew in backward: their class or name, * matches anything",
    )
    training.add_argument(
        "--wire",
        type=checked(_wire),
        default=FP32,
        metavar="FORMAT",
        help=f"of gradients between data-parallel ranks: {', '.join(errors.FORMATS)}, topk:K or "
        "randomk:K (K elements of a bucket, or a fraction, 0.01), lowrank:RANK (fp32, as they are)",
    )
    training.add_argument(
        "--bucket-mb", type=checked(positive), default=25, help="MiB of DDP's buckets (25)"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--ranks", type=whole(), help="GPUs (8, or those of all hosts)")
    where.add_argument("--hosts", type=whole(), help="(as few as have room)")
    where.add_argument("--gpus-per-host", type=whole(), default=8, help="(8)")
    where.add_argument(
        "--gpu-memory", type=checked(_size), default=_size("80GB"), help="of a GPU (80GB)"
    )
    where.add_argument(
        "--bandwidth", type=checked(_link), help="of a GPU, in one direction: GB/s, or a name"
    )
    where.add_argument("--latency", type=checked(positive), help="of a message, microseconds")
    where.add_argument(
        "--inter-bandwidth", type=checked(_link), help="of a host, to the others: GB/s, or a name"
    )
    where.add_argument(
        "--inter-latency", type=checked(positive), help="of its messages, microseconds"
    )
    time = where.add_mutually_exclusive_group()
    time.add_argument(
        "--step-seconds",
        type=checked(positive),
        help="measured: forward and backward of a rank's part of the batch",
    )
    time.add_argument("--flops", type=checked(positive), help="TFLOP/s that a GPU reaches")
    where.add_argument(
        "--backward-share",
        type=checked(_share),
        help="of that time (with --model its share of the operations, else 2/3)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything, in bytes and seconds")
    output.add_argument("--png", type=Path, metavar="FILE", help="memory as stacked bars")


# -- what is planned ----------------------------------------------------------------------------


def _found(name: str, option: str) -> Any:
    """What ``module:name`` stands for; modules are also looked for in the current directory."""
    module, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(f"{option}: {name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{option}: expected a function or a class, got {found!r}")
    return found


def _builder(name: str) -> Callable[[], nn.Module]:
    if ":" in name:
        found = _found(name, "--model")

        def build() -> nn.Module:
            model = found()
            if not isinstance(model, nn.Module):
                raise TypeError(f"expected {name} to give a torch.nn.Module, got {type(model)}")
            return model

        return build
    if importlib.util.find_spec("torchvision") is None:
        raise ValueError(
            f"--model: expected module:function, got {name!r} (names alone are torchvision's, "
            "which is not installed)"
        )
    try:
        from torchvision import models
    except Exception as error:  # one that was built for another torch
        raise ValueError(f"--model: torchvision: {type(error).__name__}: {error}") from error
    if name not in models.list_models():
        raise ValueError(f"--model: expected module:function or a torchvision model, got {name!r}")
    return lambda: models.get_model(name, weights=None)


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def _optimizer(options: argparse.Namespace, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Bytes that it keeps of parameters of such shapes, where it runs on every rank, and where a
    parameter server runs it."""
    dtype, master, _ = PRECISIONS[options.precision]
    if options.optimizer in _OPTIMIZERS:
        build = _OPTIMIZERS[options.optimizer]
    elif ":" in options.optimizer:
        build = _found(options.optimizer, "--optimizer")
    else:
        raise ValueError(
            f"--optimizer: expected {', '.join(_OPTIMIZERS)} or module:class, "
            f"got {options.optimizer!r}"
        )
    served = optimizer_bytes(build, shapes, torch.float32)
    if dtype == torch.float32:
        return served, served
    served += sum(map(math.prod, shapes)) * torch.float32.itemsize
    return served if master else optimizer_bytes(build, shapes, dtype), served


def make(options: argparse.Namespace, progress: Callable[[str], object] = lambda _: None) -> Plan:
    """Everything, of the command's options. ``progress`` is told what goes on.

    Raises:
        ValueError: options that contradict each other, or a model that cannot be run.
    """
    ranks, hosts = _places(options)
    dtype, _, _ = PRECISIONS[options.precision]
    cap = round(options.bucket_mb * MIB)
    found = _measured(options, ranks, progress) if options.model else None
    if found is not None:
        gradients: Sequence[Gradient] = found.gradients
        elements, weights = found.elements, found.weights
    else:
        _refuse(options, "with --params", "input", "checkpoint", "flops")
        if options.wire.format == "lowrank":
            raise ValueError("--wire: lowrank needs the parameters' shapes, so --model")
        if options.activations is not None and options.batch is None:
            raise ValueError("--batch: needed with --activations")
        elements, weights = options.params, options.params * dtype.itemsize
        gradients = _even(elements, dtype.itemsize, cap)
    shapes = [gradient.shape for gradient in gradients] if found else [(elements,)]
    trained = sum(gradient.nbytes for gradient in gradients)
    progress("the optimizer's state")
    kept, served = _optimizer(options, shapes)
    progress("groups of GPUs, and the time of a step")
    state = State(weights, trained, kept, served)

    def work(samples: int) -> Work:
        if found is None:
            return Work(activations=(options.activations or 0) * samples)
        each = found.at(samples)
        inputs = round(each.inputs) + found.buffers
        return Work(round(each.saved), inputs, max(0, round(each.temporary)))

    buckets = forecast.buckets(gradients, cap, options.wire, dtype)
    # Where nothing depends on the batch, there are as many samples as anybody may want.
    batch = options.batch or plan.MOST_GPUS * options.layers
    layouts = plan.layouts(
        state,
        work,
        ranks,
        batch,
        accumulation=options.accumulation,
        wire=forecast.wire_memory(buckets, ranks),
    )
    room = state, work, options.gpu_memory, batch
    enough_ranks = plan.enough_ranks(*room, options.accumulation)
    enough_passes = plan.enough_passes(*room, ranks)
    shared = layouts[2].memory.total <= options.gpu_memory
    groups: dict[str, plan.Shape | None] = {}
    if enough_ranks is None and enough_passes is None and not shared:
        for what, (split, shardings) in _SHAPES.items():
            groups[what] = plan.smallest_shape(
                state,
                work(1),
                options.gpu_memory,
                batch,
                layers=options.layers,
                gpus_per_host=options.gpus_per_host,
                shardings=shardings,
                split=split,
            )
    links = _links(options, hosts)
    compute = _compute(options, found, layouts[1].samples)
    steps: dict[str, Step] = {}
    scaling: list[Scaling] = []
    if links:
        cluster = Cluster(ranks, hosts, links["inside"], links.get("between", links["inside"]))
        steps, scaling = _forecast(options, buckets, state.weights, cluster, compute)
    return Plan(
        model=options.model or "a model",
        elements=elements,
        batch=options.batch,
        training={
            name: str(getattr(options, name))
            for name in ("batch", "accumulation", "precision", "optimizer", "checkpoint")
            if getattr(options, name) is not None
        }
        | {"wire": _wire_name(options.wire)},
        ranks=ranks,
        hosts=hosts,
        layers=options.layers,
        capacity=options.gpu_memory,
        state=state,
        layouts=layouts,
        footprint=found,
        enough_ranks=enough_ranks,
        enough_passes=enough_passes,
        shapes=groups,
        steps=steps,
        compute=compute,
        scaling=scaling,
        sources=_sources(options, found, links, compute)
        | ({"wire": _said_of(options.wire, buckets, ranks)} if options.wire != FP32 else {}),
    )


def _said_of(wire: Wire, buckets: Sequence[Bucket], ranks: int) -> str:
    elements = sum(each.elements for each in buckets)
    sent = sum(each.sent(ranks) for each in buckets) / elements
    plain = sum(each.nbytes for each in buckets) / elements * 2 * (ranks - 1) / ranks
    return (
        f"computed: with {_wire_name(wire)} a rank sends {sent:.4g} bytes an element to others, "
        f"as they are {plain:.4g}"
    )


def _refuse(options: argparse.Namespace, why: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: not {why}")


def _places(options: argparse.Namespace) -> tuple[int, int]:
    """Ranks and hosts."""
    ranks, hosts, most = options.ranks, options.hosts, options.gpus_per_host
    if ranks is None:
        ranks = most * (hosts or 1)
    if hosts is None:
        hosts = -(-ranks // most)
    if not hosts <= ranks <= hosts * most:
        raise ValueError(
            f"--ranks: expected {hosts} to {hosts * most} on {hosts} hosts with {most} GPUs each, "
            f"got {ranks}"
        )
    return ranks, hosts


def _measured(
    options: argparse.Namespace, ranks: int, progress: Callable[[str], object]
) -> Footprint:
    _refuse(options, "with --model, of which they are measured", "activations")
    if options.batch is None:
        raise ValueError("--batch: needed with --model")
    if options.batch < ranks * options.accumulation:
        raise ValueError(
            f"--batch: expected at least a sample for each of {ranks} ranks in each of "
            f"{options.accumulation} passes, got {options.batch}"
        )
    samples = options.input or ([Sample((3, 224, 224))] if ":" not in options.model else None)
    if samples is None:
        raise ValueError("--input: needed with --model module:function, such as 3x224x224")
    dtype, _, autocast = PRECISIONS[options.precision]
    one = plan.micro_batch(options.batch, 1, options.accumulation)
    own = plan.micro_batch(options.batch, ranks, options.accumulation)
    # Of what fails with fake tensors torch logs the traceback; the exception says enough.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return footprint(
        _builder(options.model),
        samples,
        (one, own if own != one else max(1, one // 2) if one > 1 else 2),
        dtype=dtype,
        autocast=autocast,
        recompute=options.checkpoint,
        loss=options.loss,
        progress=progress,
    )


def _even(elements: int, itemsize: int, cap: int) -> list[Gradient]:
    """A model of which nothing else is known, in pieces of a bucket."""
    each = max(1, cap // itemsize)
    counts = [each] * (elements // each) + [elements % each] * (elements % each > 0)
    return [
        Gradient((count,), count * itemsize, place / len(counts))
        for place, count in enumerate(counts, 1)
    ]


def _compute(options: argparse.Namespace, found: Footprint | None, samples: int) -> Compute | None:
    """Of a rank that computes so many samples at once."""
    share, passes = options.backward_share or 2 / 3, options.accumulation
    each = found.at(samples) if found is not None else None
    if each is not None and each.backward and options.backward_share is None:
        share = each.backward / (each.forward + each.backward)
    if options.step_seconds is not None:
        return Compute(options.step_seconds, share, passes)
    if options.flops is None or each is None:
        return None
    operations = (each.forward + each.backward) * passes
    if not operations:
        raise ValueError("--flops: the model has no matrix products, convolutions or attention")
    return Compute(operations / (options.flops * 1e12), share, passes)


def _links(options: argparse.Namespace, hosts: int) -> dict[str, Link]:
    """Between the GPUs of a host, and between hosts where that is given; none without the first."""
    if options.bandwidth is None:
        needed = ("latency", "inter_bandwidth", "inter_latency", "step_seconds", "flops")
        _refuse(options, "without --bandwidth", *needed)
        return {}
    links = {"inside": _with_latency(options.bandwidth, options.latency)}
    if options.inter_bandwidth is not None:
        links["between"] = _with_latency(options.inter_bandwidth, options.inter_latency)
    elif hosts > 1:
        raise ValueError(f"--inter-bandwidth: needed with {hosts} hosts")
    else:
        _refuse(options, "without --inter-bandwidth", "inter_latency")
    return links


def _with_latency(link: Link, microseconds: float | None) -> Link:
    if microseconds is None:
        return link
    latency, topology = microseconds * 1e-6, link.topology
    return replace(
        link,
        latency=latency,
        source=f"{link.source.partition(';')[0]}; latency given",
        topology=topology and replace(topology, signal=latency),
    )


def _forecast(
    options: argparse.Namespace,
    buckets: Sequence[Bucket],
    weights: int,
    cluster: Cluster,
    compute: Compute | None,
) -> tuple[dict[str, Step], list[Scaling]]:
    """Of data parallelism and parameter servers, and how far the first scales."""
    steps = {
        "data parallel": forecast.data_parallel(buckets, cluster, compute),
        "server, sharded": forecast.sharded_server(buckets, cluster, compute, weights),
        "server, textbook": forecast.textbook_server(buckets, cluster, compute, weights),
    }
    if compute is None:
        return steps, []
    host = cluster.ranks_per_host if options.hosts else options.gpus_per_host

    def slowdown(count: int, own: Compute) -> float:
        wide = replace(cluster, ranks=count, hosts=-(-count // host))
        sticks_out = forecast.data_parallel(buckets, wide, own).sticks_out
        assert sticks_out is not None
        return sticks_out / own.seconds

    def divided(count: int) -> float:
        return slowdown(count, replace(compute, seconds=compute.seconds * cluster.ranks / count))

    most = forecast.MOST_RANKS if options.inter_bandwidth else host
    fixed = min(most, options.batch // options.accumulation) if options.batch else most
    return steps, [
        Scaling(
            "a rank's batch fixed",
            forecast.hidden_until(lambda count: slowdown(count, compute), host, most),
            most,
        ),
        Scaling("the global batch fixed", forecast.hidden_until(divided, host, fixed), fixed),
    ]


def _sources(
    options: argparse.Namespace,
    found: Footprint | None,
    links: dict[str, Link],
    compute: Compute | None,
) -> dict[str, str]:
    sources = {"weights, gradients": "counted", "optimizer": "measured on the meta device"}
    if found is None:
        measured = "given" if options.activations else "not counted"
    elif found.ran is None:
        measured = "measured on fake tensors (in groups: on the line through two batches)"
    else:
        measured = (
            f"measured on the CPU with {found.passes[0].samples} and {found.passes[1].samples} "
            f"samples, continued in a line (with fake tensors: {found.ran})"
        )
    sources["activations, temporary"] = measured
    where = {"inside": "links within a host", "between": "links between hosts"}
    for name, link in links.items():
        sources[where[name]] = (
            f"{link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us: {link.source}"
        )
    if links:
        sources["communication"] = "estimated"
    if compute is not None:
        given = options.step_seconds is not None
        sources["computation"] = "given" if given else "estimated: operations counted, rate given"
        if options.backward_share is not None:
            sources["backward"] = "given"
        elif found is not None and found.passes[0].backward:
            sources["backward"] = "operations counted"
        else:
            sources["backward"] = "2/3, assumed"
    return sources


def run(options: argparse.Namespace) -> int:
    """Makes the plan and says it; returns the exit status."""
    if options.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png: needs matplotlib: pip install matplotlib")
    try:
        with terminal.progress(5 if options.model else 2, "plan") as bar:
            found = make(options, partial(terminal.step, bar))
        if options.png is not None:
            plan_report.draw(found, options.png)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(plan_report.plain(found), indent=2))
    else:
        print(plan_report.text(found, terminal.colours(sys.stdout)))
    return 0
