"""Ranks of a parameter server that are killed: no rank believes in a mixture of steps, and what is
left makes up the last complete step."""

from __future__ import annotations

import contextlib
import io
import os
import types
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from test_parameter_server import TIMEOUT, WAYS
from test_server_layouts import Wide, wide_loss

import fastreduce
from fastreduce import ParameterServer, enums, parameter_server, rendezvous, shard

STEPS = 3
FUSED_BYTES = parameter_server._FUSED_BYTES
OPTIONS = {"lr": 1e-2, "weight_decay": 1e-2}


def begin(way: str, layout: dict[str, Any], kind: Any) -> tuple[Wide, ParameterServer]:
    real = rendezvous._boot_id
    if way == "hosts" and dist.get_rank() == 1:
        rendezvous._boot_id = lambda: "another boot"
    try:
        model = Wide()
        layout = {**layout}
        parameter_server._FUSED_BYTES = 0 if layout.pop("fused", False) else 1 << 40
        if parameter_server._FUSED_BYTES:
            model.second.double()  # two dtypes, which are updated one after the other
        model.forward = lambda x: model.second(
            torch.tanh(model.first(x)).to(model.second.weight.dtype)
        )  # type: ignore
        server = ParameterServer(
            model.named_parameters(), kind, timeout=TIMEOUT, **layout, **OPTIONS
        )
    finally:
        rendezvous._boot_id = real
    return model, server


def snapshot(model: Wide, optimizer: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": [each.detach().clone() for each in model.parameters()],
        "state": {
            index: {name: value.clone() for name, value in values.items()}
            for index, values in optimizer["state"].items()
        },
    }


def backward(model: Wide, server: ParameterServer, step: int) -> None:
    with contextlib.nullcontext() if parameter_server._FUSED_BYTES else server.no_sync():
        wide_loss(model, step, dist.get_rank()).backward()


def undisturbed(
    _: dict[str, Any], way: str, layout: dict[str, Any], kind: Any
) -> list[dict[str, Any]]:
    """Before the first step, and after each."""
    model, server = begin(way, layout, kind)
    seen = [snapshot(model, server.state_dict())]
    for step in range(STEPS):
        server.zero_grad()
        backward(model, server, step)
        server.step()
        seen.append(snapshot(model, server.state_dict()))
    server.close()
    parameter_server._FUSED_BYTES = FUSED_BYTES
    return seen


def die_at(moment: str, server: ParameterServer) -> None:
    def end(*_: Any, **__: Any) -> Any:
        os._exit(9)

    def after(method: str, times: int = 1) -> None:
        inner, calls = getattr(server, method), []

        def some(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            calls.append(method)
            if len(calls) == times:
                os._exit(9)
            return result

        setattr(server, method, some)

    if moment == "before":
        end()
    if moment == "reduced":
        after("_agree")
    if moment == "committed":
        after("_commit")
    if moment == "updating" and (not server._shard.pieces or server._fuses()):
        server._update = end  # type: ignore[method-assign]
    elif moment == "updating" and not server._shard.fuses:
        server._shard._step_inner = end  # type: ignore[method-assign]
    elif moment == "updating":  # with one dtype of two

        class Once(dict[Any, int]):
            def __getitem__(self, key: Any) -> int:
                if key in self.seen:
                    return super().__getitem__(key)
                if self.seen:
                    os._exit(9)
                self.seen.append(key)
                return super().__getitem__(key)

            seen: ClassVar[list[Any]] = []

        shard.enums = types.SimpleNamespace(DTYPE=Once(enums.DTYPE))  # type: ignore
    if moment == "updated":
        after("_update")
    if moment == "gathered":
        after("step")


def bereaved(
    way: str, layout: dict[str, Any], kind: Any, dead: int, moment: str
) -> tuple[str, dict[str, Any], bool]:
    """What the error says, what can be saved, and whether the server believes in what it has."""
    model, server = begin(way, layout, kind)
    for step in range(STEPS - 1):
        server.zero_grad()
        backward(model, server, step)
        server.step()
    server.zero_grad()
    backward(model, server, STEPS - 1)
    assert server._fuses() != bool(parameter_server._FUSED_BYTES)
    if dist.get_rank() == dead:
        die_at(moment, server)
    named = fastreduce.PeerLostError if way == "shared memory" else RuntimeError
    with pytest.raises(named, match="rank" if way == "shared memory" else "") as raised:
        server.step()
        server.zero_grad()
        backward(model, server, STEPS)
        server.step()
    if way == "hosts":  # who waits for this rank, gloo tells only so
        dist.destroy_process_group()
    believes = not server._broken
    if not believes:
        for what in (server.step, server.state_dict, server.zero_grad):
            with pytest.raises(RuntimeError, match="an earlier step failed"):
                what()
    file = io.BytesIO()
    torch.save(server.shard_state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    parameters = saved["parameters"]
    for index, each in enumerate(model.parameters()):
        assert same_bits(parameters[index], each.detach())
    server.__exit__(RuntimeError, None, None)
    return str(raised.value), saved, believes


def check(reference: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """It is one of the steps, whole."""
    expected = reference[found["step"]]
    for a, b in zip(found["parameters"], expected["parameters"], strict=True):
        assert same_bits(a, b)
    state = found["optimizer"]["state"]
    assert state.keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert state[index].keys() == values.keys()
        for name, value in values.items():
            assert same_bits(state[index][name], value), (index, name)


KINDS = {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
ALL = ["before", "reduced", "committed", "updating", "updated", "gathered"]
# Name -> how parameters are served, who dies, and where in its last step.
LAYOUTS: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "replicas": ({"replicas": True}, 1, ALL),
    "sharded": ({}, 2, ["reduced", "updating"]),
    "accumulated": ({"fused": True}, 0, ["committed", "updating"]),
    "narrow on the way": (
        {"replicas": True, "parameter_wire": "bf16"},
        2,
        ["updating", "gathered"],
    ),
    "worker": ({"servers": [0]}, 1, ["committed"]),
    "server": ({"servers": [0]}, 0, ["updating", "gathered"]),
    "server with a replica": ({"servers": [0], "replicas": True}, 0, ["committed", "updated"]),
}


# A worker that is lost between hosts, a server waits for as long as gloo's timeout is.
CASES = [
    (layout, way) for layout in LAYOUTS for way in WAYS if (layout, way) != ("worker", "hosts")
]


@pytest.mark.parametrize(("layout", "way"), CASES)
def test_what_is_left_makes_up_the_last_complete_step(ranks, pool, layout, way):
    arguments, dead, moments = LAYOUTS[layout]
    if way == "hosts":
        moments = [moments[len(moments) // 2]]
    name = "rmsprop" if layout == "replicas" and way == "hosts" else "adamw"
    kind = KINDS[name]
    # A backend adds in an order that depends on who reduces.
    alike = ("fused", "parameter_wire")
    same = {k: v for k, v in arguments.items() if way == "hosts" or k in alike}
    reference = pool(3).run(undisturbed, way, same, kind)[0]
    for moment in moments:
        group = ranks(3)
        for rank in range(3):
            group.start(rank, bereaved, way, arguments, kind, dead, moment)
        left = [group.result(rank) for rank in range(3) if rank != dead]
        states = [saved for _, saved, _ in left]
        loses = layout in ("sharded", "server", "accumulated")
        if loses:
            with pytest.raises(ValueError, match=rf"ranks \[{dead}\] served died"):
                fastreduce.merge_shards(states)
        found = fastreduce.merge_shards(states, allow_lost=True)
        assert bool(found["lost"]) == loses, moment
        assert all(rank == dead for *_, rank in found["lost"])
        if layout == "server":  # parameters are those of the step before, or of this one
            expected = reference[found["step"]]
            for a, b in zip(found["parameters"], expected["parameters"], strict=True):
                assert same_bits(a, b)
        elif not loses:
            check(reference, found)
        for text, saved, believes in left:
            whole = reference[saved["parameters_step"]]["parameters"]
            same = all(
                same_bits(a, b) for a, b in zip(saved["parameters"].values(), whole, strict=True)
            )
            assert same or not believes, (moment, text)
            if moment in ("before", "reduced"):
                assert believes and "are those of before" in text
