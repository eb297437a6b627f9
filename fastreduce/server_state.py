"""A parameter server's state: gathered, shared out again, and put together from what is left."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastreduce.accumulation import shaped
from fastreduce.served import Piece

if TYPE_CHECKING:
    from fastreduce.parameter_server import ParameterServer

MASTER = "master"
_FORMAT = 1


def whole(server: ParameterServer, packed: dict[str, Any]) -> dict[str, Any]:
    """The ordinary state dict; collective. ``packed``: one without state."""
    own = {piece.index: _state_of(server, piece) for piece in server._shard.own()}
    kinds, scalars = {}, {}
    for index, values in own.items():
        kinds[index] = {name: each.dtype for name, each in values.items() if _is_shard(name, each)}
        scalars[index] = {name: v for name, v in values.items() if name not in kinds[index]}
    for others in server.communicator._group.all_gather_object((kinds, scalars)):
        kinds, scalars = others[0] | kinds, others[1] | scalars
    state: dict[int, dict[str, Any]] = {index: {**scalars[index]} for index in kinds}
    for flat in server._flats:
        found = {
            (name, dtype) for index in flat.offsets for name, dtype in kinds.get(index, {}).items()
        }
        for name, dtype in sorted(found, key=str):
            buffer = torch.zeros(flat.weights.numel(), dtype=dtype)
            for piece in server._shard.own():
                if piece.index in flat.offsets and kinds[piece.index].get(name) == dtype:
                    flat.of(buffer, piece.index)[piece.begin : piece.end] = own[piece.index][name]
            server.communicator.all_gather_v(buffer, flat.shares)
            for index, parameter in flat.members:
                if kinds.get(index, {}).get(name) == dtype:
                    state[index][name] = shaped(flat.of(buffer, index), parameter).clone()
    packed["state"] = {index: state[index] for index in sorted(state) if state[index]}
    return packed


def _state_of(server: ParameterServer, piece: Piece) -> dict[str, Any]:
    """What a rank keeps of a parameter; nothing before its first step."""
    state = server._shard.state_of(piece)
    if piece.master is not None and server._shard.steps[piece.index]:
        state[MASTER] = piece.master
    return state


def _is_shard(name: str, value: Any) -> bool:
    """Whether an entry of a piece's state, which is flat, has an element for each of its own."""
    return isinstance(value, Tensor) and name != "step" and value.dim() > 0


def _is_whole(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether an entry of a parameter's state has an element for each of the parameter's."""
    if not isinstance(value, Tensor) or name == "step":
        return False
    return value.dim() > 0 or not shape


def validated(server: ParameterServer, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What is saved of each parameter, by its number here; raises if that does not fit."""
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in server.param_groups]:
        raise ValueError(
            f"param_groups: expected {[len(each['params']) for each in server.param_groups]} "
            f"parameters, got {sizes}"
        )
    for number, (given, own) in enumerate(zip(groups, server.param_groups, strict=True)):
        if missing := sorted(server.defaults.keys() & own.keys() - given.keys()):
            raise ValueError(f"param_groups: group {number} lacks {missing}")
        for key in server.defaults:
            if _is_number(own.get(key)) and not _is_number(given[key]):
                raise ValueError(
                    f"param_groups: group {number}: {key}: expected a number, got {given[key]!r}"
                )
    numbers = [number for group in groups for number in group["params"]]
    index_of = {number: index for index, number in enumerate(numbers)}
    needed = [server._shard.needed(number) for number in range(len(groups))]
    saved: dict[int, dict[str, Any]] = {}
    for number, values in state_dict["state"].items():
        if number not in index_of:
            raise ValueError(f"state: parameter {number} is in no group")
        index = index_of[number]
        shape = server._parameters[index].shape
        for name, value in values.items():
            if _is_whole(name, value, shape) and value.shape != shape:
                raise ValueError(
                    f"state of parameter {number}: expected {name} of shape {tuple(shape)}, "
                    f"got {tuple(value.shape)}"
                )
        stepped = index in server._trained and values.keys() - {MASTER}
        if stepped and (missing := sorted(needed[server._group_of[index]] - values.keys())):
            raise ValueError(f"state of parameter {number}: {missing} are missing")
        saved[index] = values
    return saved


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def restore(server: ParameterServer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Takes over what :func:`validated` gave."""
    for index in server._trained:
        values = saved.get(index, {})
        # SGD counts none.
        steps = int(values["step"]) if "step" in values else int(bool(values))
        server._shard.steps[index] = steps
        server._shard.remembers[index] = any(
            value is not None for name, value in values.items() if name != MASTER
        )
    for piece in server._shard.pieces:
        values = saved.get(piece.index, {})
        piece.moments.clear()
        piece.take(values.get(MASTER))
        rule = server._shard.rules[piece.group]
        for name in [] if rule is None else rule.kept:
            if values.get(name) is not None:
                piece.moment(name).copy_(piece.part(values[name]))
    for piece, parameter, state in server._shard.inner_pieces():
        shape = piece.parameter.shape
        for name, value in saved.get(piece.index, {}).items():
            if name == MASTER:
                continue
            state[name] = (
                piece.part(value).to(parameter.dtype)
                if _is_whole(name, value, shape)
                else copy.deepcopy(value)
            )


# -- what is left of a group ----------------------------------------------------------------------


def of_rank(server: ParameterServer, packed: dict[str, Any]) -> dict[str, Any]:
    """What a rank keeps, of one step, and all parameters as they are there, what it does not keep
    perhaps of the step before."""
    rank, ranks = server.communicator.rank, server.communicator.world_size
    return {
        "format": _FORMAT,
        "token": server._token,
        "rank": rank,
        "world_size": ranks,
        "step": server._shard.generation,
        "parameters_step": server._arrived,
        "param_groups": packed["param_groups"],
        "parameters": {
            index: parameter.detach().clone() for index, parameter in enumerate(server._parameters)
        },
        "names": list(server._names),
        "served": {
            index: {
                owner: server._dealing.range_of(index, owner) for owner in server._dealing.servers
            }
            for flat in server._flats
            for index in flat.offsets
        },
        "pieces": [
            {
                "index": piece.index,
                "begin": piece.begin,
                "end": piece.end,
                "weights": piece.rounded().clone(),
                "state": copy.deepcopy(_state_of(server, piece)),
            }
            for piece in server._shard.pieces
        ],
    }


def merge_shards(
    states: Sequence[Mapping[str, Any]], *, allow_lost: bool = False
) -> dict[str, Any]:
    """Puts together what ranks of one :class:`ParameterServer` have saved, of which others may have
    died.

    Args:
        states: what :meth:`ParameterServer.shard_state_dict` gave on the ranks that are left, in
            any order.
        allow_lost: where all ranks that kept a part have died (or, between hosts, have not come as
            far as others), its optimizer state becomes zeros and its parameters those that the
            others have; else that is an error.

    Returns:
        ``parameters``: a list of tensors, in the order of the parameters; ``optimizer``: the
        ordinary state dict for them; ``step``: how many steps that server has taken (those of
        before, if it was resumed, do not count); ``lost``: of every part that has been lost the
        parameter's name, the first element and the one after the last, in the order of its memory,
        and the rank that served it.

    Raises:
        ValueError: some part has been lost; the states are not of one server, or not of one step.
    """
    if not states or any(each.get("format") != _FORMAT for each in states):
        raise ValueError("states: expected what shard_state_dict() gave, of at least one rank")
    first = states[0]
    for each in states:
        if each["token"] != first["token"]:
            raise ValueError("states: expected those of one server, of one run")
    keeping = [each for each in states if each["pieces"]]
    steps = {each["rank"]: each["step"] for each in keeping}
    step = max(steps.values(), default=max(each["parameters_step"] for each in states))
    if len({*steps.values()}) > 1:
        if not allow_lost:
            raise ValueError(
                f"states: expected those of one step, got, by rank, {steps}; allow_lost=True takes "
                "those of the last one only"
            )
        keeping = [each for each in keeping if each["step"] == step]
    newest = max(states, key=lambda each: each["parameters_step"])
    pieces = {
        (piece["index"], piece["begin"]): piece for each in keeping for piece in each["pieces"]
    }
    parameters = [each.clone() for _, each in sorted(newest["parameters"].items())]
    lost = []
    state: dict[int, dict[str, Any]] = {}
    for index, ranges in first["served"].items():
        parameter = parameters[index]
        memory = torch.empty(parameter.numel(), dtype=parameter.dtype)
        shaped(memory, parameter).copy_(parameter)
        for rank, (begin, end) in ranges.items():
            if begin == end:
                continue
            piece = pieces.get((index, begin))
            if piece is None:
                lost.append((first["names"][index], begin, end, rank))
                continue
            memory[begin:end] = piece["weights"]
            _fill(state.setdefault(index, {}), piece, parameter)
        parameters[index].copy_(shaped(memory, parameter))
    if lost and not allow_lost:
        ranks = sorted({rank for *_, rank in lost})
        count = sum(end - begin for _, begin, end, _ in lost)
        raise ValueError(
            f"states: what ranks {ranks} served died with them: {count} elements of "
            f"{len({name for name, *_ in lost})} parameters. A server made with replicas=True "
            "keeps them; allow_lost=True goes on without their optimizer state"
        )
    optimizer = {
        "state": {i: v for i, v in state.items() if v},
        "param_groups": first["param_groups"],
    }
    return {"parameters": parameters, "optimizer": optimizer, "step": step, "lost": lost}


def _fill(state: dict[str, Any], piece: Mapping[str, Any], parameter: Tensor) -> None:
    """A piece's state in its place."""
    for name, value in piece["state"].items():
        if not _is_shard(name, value):
            state[name] = value
            continue
        if name not in state:
            # Of a lost part, the copy in float32 is what the parameter is.
            state[name] = torch.zeros_like(parameter, dtype=value.dtype)
            if name == MASTER:
                state[name].copy_(parameter)
        memory = torch.empty(parameter.numel(), dtype=value.dtype)
        view = shaped(memory, parameter)
        view.copy_(state[name])
        memory[piece["begin"] : piece["end"]] = value
        state[name].copy_(view)
