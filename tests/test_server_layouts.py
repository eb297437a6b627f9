"""The parameter server's layouts: servers on some ranks only, DDP models, wire formats, replicas,
logical shards."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from test_parameter_server import TIMEOUT, WAYS, in_all_ways, means, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import ParameterServer
from fastreduce.shares import Shares


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("adamw", {"servers": [1]}),
        ("rmsprop", {"servers": [2, 0]}),
        ("momentum", {"servers": [0], "replicas": True}),
        ("adam", {"replicas": True}),
        ("rmsprop", {"replicas": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_who_serves_makes_no_difference(pool, name, layout, way):
    pool(3).run(in_all_ways, way, name, layout)


class Wide(nn.Module):
    """Parameters of many units, and small ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(100, 300, dtype=dtype)
        self.unused = nn.Linear(3, 3, dtype=dtype)
        self.second = nn.Linear(300, 40, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def wide_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 100, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 40, generator=generator, dtype=torch.float64)
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = (model(x.to(dtype)) - y.to(dtype)).square().mean()
    return loss


def with_ddp(_: dict[str, Any], way: str, layout: dict[str, Any], views: bool) -> None:
    """Beside the plain model's server: rebuilt buckets, unused parameters, accumulation, clipping,
    a step that is left out, checkpoints."""
    rank = dist.get_rank()
    mine, plain = Wide(), Wide()
    ddp = DistributedDataParallel(
        mine, find_unused_parameters=True, bucket_cap_mb=0.05, gradient_as_bucket_view=views
    )
    options = {"lr": 1e-2, "weight_decay": 1e-2}
    server = serve(way, ddp.parameters(), torch.optim.AdamW, ddp=ddp, **options, **layout)
    named = [(name, each) for name, each in plain.named_parameters()]
    other = serve(way, named, torch.optim.AdamW, **options, **layout)
    for step in range(5):
        server.zero_grad()
        other.zero_grad()
        if step == 2:
            with ddp.no_sync(), other.no_sync():
                wide_loss(ddp, 50, rank).backward()
                wide_loss(plain, 50, rank).backward()
        wide_loss(ddp, step, rank).backward()
        wide_loss(plain, step, rank).backward()
        if step == 3:
            assert same_bits(server.clip_grad_norm(0.01), other.clip_grad_norm(0.01))
        if step == 1:  # left out
            continue
        server.step()
        other.step()
        for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
            assert same_bits(a.detach(), b.detach()), f"step {step}: {name}"
    saved, expected = server.state_dict(), other.state_dict()
    assert saved["state"].keys() == expected["state"].keys() and saved["state"]
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert same_bits(saved["state"][index][key], value)
    server.load_state_dict(expected)
    with pytest.raises(fastreduce.UnsynchronizedError):
        server.zero_grad()
        server.step()
    with pytest.raises(RuntimeError, match=r"use ddp\.no_sync"), server.no_sync():
        pass
    wide_loss(ddp, 7, rank).backward()
    with pytest.raises(RuntimeError, match="another backward pass"):
        wide_loss(ddp, 7, rank).backward()
    server.close()
    other.close()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "layout", [{}, {"servers": [1], "replicas": True}], ids=["sharded", "textbook"]
)
def test_a_ddp_model(pool, way, layout, views):
    pool(2).run(with_ddp, way, layout, views)


def refused(_: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(Wide())
    parameters = list(ddp.parameters())
    adam = torch.optim.Adam
    with pytest.raises(ValueError, match="2 are missing"):
        ParameterServer(parameters[2:], adam, ddp=ddp)
    with pytest.raises(ValueError, match="expected None with ddp"):
        ParameterServer(parameters, adam, ddp=ddp, workers=[0])
    for what in ({"servers": []}, {"servers": [0, 0]}, {"servers": [2]}, {"workers": [-1]}):
        with pytest.raises(ValueError, match=f"{next(iter(what))}: expected"):
            ParameterServer(Wide().parameters(), adam, **what)
    with pytest.raises(ValueError, match="other shapes"):
        ParameterServer(Wide().parameters(), adam, servers=[dist.get_rank()])
    with pytest.raises(ValueError, match="parameter_wire"):
        ParameterServer(Wide().parameters(), adam, parameter_wire="int8")
    for wire in ("topk", "lowrank", fastreduce.Wire("int8", block=96)):
        with pytest.raises(ValueError, match="blocks that divide 1024"):
            ParameterServer(Wide().parameters(), adam, wire=wire)


def test_what_cannot_be_is_refused(pool):
    pool(2).run(refused)


def test_shares_that_overlap_are_refused():
    found = Shares(10, [[(0, 3), (5, 5)], [(3, 5), (7, 10)]])
    assert found.size(0) == 3 and found.size(1) == 5
    flat = torch.arange(10)
    assert found.taken(flat, 1).tolist() == [3, 4, 7, 8, 9]
    found.put(flat, 1, torch.zeros(5, dtype=torch.int64))
    assert flat.tolist() == [0, 1, 2, 0, 0, 5, 6, 0, 0, 0]
    for ranges in ([[(0, 3)], [(2, 4)]], [[(8, 11)]], [[(0, 2), (1, 3)]]):
        with pytest.raises(ValueError, match="apart, in 10 elements"):
            Shares(10, ranges)


def with_idle_servers(_: dict[str, Any], way: str) -> None:
    """Ranks 1 and 2 compute; 0 serves, or serves nothing either."""
    rank = dist.get_rank()
    for servers in ([0], [1, 2], [0, 2]):
        mine, twin = Wide(), Wide()
        server = serve(
            way, mine.parameters(), torch.optim.SGD, servers=servers, workers=[1, 2], lr=0.1
        )
        alone = torch.optim.SGD(twin.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            server.zero_grad()
            if rank:
                wide_loss(mine, step, rank).backward()
            server.step()
            means(twin, [wide_loss(twin, step, p) for p in (1, 2)])
            alone.step()
        for (name, a), b in zip(mine.named_parameters(), twin.parameters(), strict=True):
            assert same_bits(a.detach(), b.detach()), f"{servers}: {name}"
        server.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_server_may_compute_nothing(pool, way):
    pool(3).run(with_idle_servers, way)


def in_wires(_: dict[str, Any], way: str, layout: dict[str, Any]) -> dict[str, Any]:
    """What lossy formats lose comes later: the sum of all updates is that of the true means. A
    step with an inf is skipped, and loses nothing."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(17))]
    server = serve(
        way,
        parameters,
        torch.optim.SGD,
        lr=1.0,
        wire="int4",
        wire_min_bytes=0,
        **layout,
    )
    scaler = fastreduce.GradScaler(server, init_scale=4.0, growth_interval=10**6)
    total = [torch.zeros(5000, dtype=torch.float64), torch.zeros(17, dtype=torch.float64)]
    for step in range(12):
        server.zero_grad()
        inputs = []
        for p in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(1000 * step + p)
            inputs.append([torch.randn(each.shape, generator=generator) for each in parameters])
        spoilt = step == 5
        unused = step == 7
        loss = (parameters[0] * inputs[rank][0]).sum()
        if not unused:
            loss = loss + (parameters[1] * inputs[rank][1]).sum()
        if spoilt and rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        before = [each.detach().clone() for each in parameters]
        scaler.step(server)
        scaler.update()
        if spoilt:
            assert all(same_bits(a.detach(), b) for a, b in zip(parameters, before, strict=True))
            continue
        for index in range(1 if unused else 2):
            total[index] += sum(each[index].double() for each in inputs) / len(inputs)
    saved = server.wire_state_dict(merge=True)
    assert saved is not None
    for index, each in enumerate(parameters):
        # Residuals are of gradients scaled by what the scale is now.
        left = saved["residuals"][str(index)]["sent"].double() / scaler.get_scale()
        wrong = (-each.detach().double() + left - total[index]).abs().max().item()
        lost = (-each.detach().double() - total[index]).abs().max().item()
        assert wrong < 1e-4 < lost, (index, wrong, lost)
    server.load_wire_state_dict(saved)
    result = {"parameters": [each.detach().clone() for each in parameters]}
    server.close()
    return result


@pytest.mark.parametrize("layout", [{}, {"servers": [1]}], ids=["sharded", "textbook"])
def test_wire_formats_lose_nothing(pool, layout):
    results = [pool(3).run(in_wires, way, layout) for way in WAYS]
    for each in (*results[0], *results[1]):
        for a, b in zip(each["parameters"], results[0][0]["parameters"], strict=True):
            assert same_bits(a, b)


def narrow_on_the_way(_: dict[str, Any], way: str) -> None:
    """Parameters travel in bfloat16, and are kept in float32."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, twin = Wide(), Wide()
    exact = [each.detach().clone().requires_grad_() for each in twin.parameters()]
    server = serve(way, mine.parameters(), torch.optim.SGD, lr=1e-3, parameter_wire="bf16")
    alone = torch.optim.SGD(exact, lr=1e-3, foreach=False)
    for step in range(6):
        for a, b in zip(twin.parameters(), exact, strict=True):
            a.data.copy_(b.detach().bfloat16())
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert same_bits(a.detach(), b.detach()), step
        means(twin, [wide_loss(twin, step, p) for p in range(ranks)])
        for a, b in zip(twin.parameters(), exact, strict=True):
            b.grad = a.grad
        server.zero_grad()
        wide_loss(mine, step, rank).backward()
        server.step()
        alone.step()
        if step == 3:
            saved, model = server.state_dict(), copy.deepcopy(mine.state_dict())
            server.close()
            mine = Wide()
            mine.load_state_dict(model)
            server = serve(
                way,
                mine.parameters(),
                torch.optim.SGD,
                lr=1e-3,
                parameter_wire="bf16",
                servers=[0],
            )
            server.load_state_dict(saved)
            assert any(
                not same_bits(v["master"], v["master"].bfloat16().float())
                for v in saved["state"].values()
            )
    server.close()


@pytest.mark.parametrize("way", WAYS)
def test_parameters_may_travel_narrow(pool, way):
    pool(2).run(narrow_on_the_way, way)


def in_shards(_: dict[str, Any], weighted: bool) -> list[torch.Tensor]:
    model = Wide()
    server = ParameterServer(
        model.parameters(), torch.optim.AdamW, timeout=TIMEOUT, lr=1e-2, bucket_bytes=50_000
    )
    for step in range(4):
        server.zero_grad()
        for shard in server.shards(4):
            if weighted:
                server.weight(shard + 1.0)
            wide_loss(model, step, shard).backward()
        if step == 2:
            server.clip_grad_norm(1e-3)
        server.step()
    with pytest.raises(ValueError, match="power of two"):
        server.shards(3)
    result = [each.detach().clone() for each in model.parameters()]
    server.close()
    return result


@pytest.mark.parametrize("weighted", [False, True])
def test_logical_shards_give_the_same_bits_on_any_number_of_ranks(pool, weighted):
    alone = pool(1).run(in_shards, weighted)[0]
    assert not same_bits(alone[0], Wide().first.weight.detach())
    for world in (2, 4):
        for found in pool(world).run(in_shards, weighted):
            assert all(same_bits(a, b) for a, b in zip(alone, found, strict=True))


def fused(_: dict[str, Any]) -> None:
    """What has only been accumulated is reduced and updated in one loop: the same bits."""
    rank = dist.get_rank()
    models = [nn.Linear(700, 600) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    servers = [
        ParameterServer(each.parameters(), torch.optim.AdamW, timeout=TIMEOUT, lr=1e-2)
        for each in models
    ]
    assert servers[0]._flats[0].weights.nbytes > 1 << 20
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, 700)
        for number, (model, server) in enumerate(zip(models, servers, strict=True)):
            server.zero_grad()
            if number:
                model(x).square().mean().backward()
                assert not server._fuses()
            else:
                with server.no_sync():
                    model(x).square().mean().backward()
                assert server._fuses()
            if step == 2:
                server.clip_grad_norm(0.1)  # which reduces, and nothing does it again
                assert not server._fuses()
            server.step()
            if step == 1:
                server.step()  # with the same gradients
                with server.no_sync(), pytest.raises(RuntimeError, match="another backward pass"):
                    model(x).square().mean().backward()
            assert server.grad_norm.nonfinite == 0
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert same_bits(a.detach(), b.detach())
    for server in servers:
        server.close()


def test_reduction_and_update_in_one_loop(pool):
    pool(2).run(fused)
    pool(3).run(fused)


def through_torch(_: dict[str, Any], layout: dict[str, Any], dtype: torch.dtype) -> None:
    """A checkpoint's float32 copies count only for the parameters that they belong to, in whichever
    order the two are loaded."""
    rank = dist.get_rank()
    model = Wide(dtype)
    options = {"lr": 1e-2}

    def make(model: nn.Module) -> ParameterServer:
        kind = torch.optim.AdamW
        return ParameterServer(model.parameters(), kind, timeout=TIMEOUT, **layout, **options)

    server = make(model)
    for step in range(2):
        server.zero_grad()
        wide_loss(model, step, rank).backward()
        server.step()
    saved, weights = copy.deepcopy((server.state_dict(), model.state_dict()))
    exact = saved["state"][0]["master"].clone()
    server.close()
    for first in ("server", "model"):
        again = Wide(dtype)
        if first == "model":
            again.load_state_dict(weights)
        server = make(again)
        server.load_state_dict(saved)
        if first == "server":
            again.load_state_dict(weights)
        server.param_groups[0]["lr"] = 0.0
        server.zero_grad()
        wide_loss(again, 9, rank).backward()
        server.step()
        assert same_bits(server.state_dict()["state"][0]["master"], exact), first
        server.close()
    trained = Wide(dtype)
    trained.load_state_dict(weights)
    other = torch.optim.AdamW(trained.parameters(), **options)
    other.load_state_dict(copy.deepcopy(saved))
    for step in range(3):
        other.zero_grad()
        wide_loss(trained, step, 0).backward()
        other.step()
    weights, saved = trained.state_dict(), other.state_dict()
    again = Wide(dtype)
    again.load_state_dict(weights)
    server = make(again)
    server.load_state_dict(saved)
    server.param_groups[0]["lr"] = 0.0
    server.zero_grad()
    wide_loss(again, 9, rank).backward()
    server.step()
    for name, value in again.state_dict().items():
        expected = weights[name]
        if layout:
            expected = expected.bfloat16().float()
        assert same_bits(value, expected), name
    server.close()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [({}, torch.bfloat16), ({"parameter_wire": "bf16"}, torch.float32)],
    ids=["bfloat16", "parameter_wire"],
)
def test_checkpoints_through_torch_and_back(pool, layout, dtype):
    pool(2).run(through_torch, layout, dtype)


def scaled_and_resumed(_: dict[str, Any]) -> None:
    """What has been kept back is of gradients in the scale that it was saved with."""
    rank = dist.get_rank()
    results = []
    for resumes in (False, True):
        parameter = nn.Parameter(torch.zeros(3000))
        options: dict[str, Any] = {"lr": 1.0, "wire": "int4", "wire_min_bytes": 0}
        server = ParameterServer([parameter], torch.optim.SGD, timeout=TIMEOUT, **options)
        scaler = fastreduce.GradScaler(server, init_scale=1024.0)
        for step in range(3):
            if resumes and step == 2:
                state, values = server.wire_state_dict(), parameter.detach().clone()
                scale = scaler.state_dict()
                server.close()
                parameter = nn.Parameter(values)
                server = ParameterServer([parameter], torch.optim.SGD, timeout=TIMEOUT, **options)
                scaler = fastreduce.GradScaler(server)
                scaler.load_state_dict(scale)
                assert state is not None
                server.load_wire_state_dict(state)
            torch.manual_seed(10 * step + rank)
            server.zero_grad()
            scaler.scale((parameter * torch.randn(3000)).sum()).backward()
            scaler.step(server)
            scaler.update()
        results.append(parameter.detach().clone())
        server.close()
    assert same_bits(*results)


def names_of_several_modules(_: dict[str, Any]) -> None:
    pair = [nn.Linear(40, 40, bias=False) for _ in range(2)]
    groups = [{"params": list(each.named_parameters())} for each in pair]
    server = ParameterServer(groups, torch.optim.SGD, wire="int4", wire_min_bytes=0)
    assert server._names == ["0.weight", "1.weight"]
    server.close()


def other_arguments(_: dict[str, Any]) -> None:
    rank = dist.get_rank()
    sgd = torch.optim.SGD
    for options in ({"lr": 0.1 + rank}, {"wire": ["int8", "int4"][rank]}, {"wire_seed": rank}):
        with pytest.raises(ValueError, match="other shapes"):
            ParameterServer(Wide().parameters(), sgd, **options)
    with pytest.raises(ValueError, match="capturable"):
        ParameterServer(Wide().parameters(), torch.optim.AdamW, capturable=True)
    ddp = DistributedDataParallel(Wide())
    state = fastreduce.attach(ddp)
    with pytest.raises(ValueError, match="without a communication hook"):
        ParameterServer(ddp.parameters(), sgd, ddp=ddp)
    state.close()


def a_rank_that_cannot(_: dict[str, Any]) -> None:
    """What one rank cannot prepare, no rank does; and they go on afterwards."""
    rank = dist.get_rank()
    model = Wide()
    server = ParameterServer(model.parameters(), torch.optim.SGD, timeout=TIMEOUT, lr=0.1)
    for step in range(3):
        server.zero_grad()
        wide_loss(model, step, rank).backward()
        before = [each.detach().clone() for each in model.parameters()]
        if step == 1:
            if rank == 1:
                server.param_groups[0]["lr"] = None
            with pytest.raises((TypeError, RuntimeError), match="are those of before this step"):
                server.step()
            server.param_groups[0]["lr"] = 0.1
            assert all(
                same_bits(a.detach(), b) for a, b in zip(model.parameters(), before, strict=True)
            )
        server.step()
    assert server.shard_state_dict()["step"] == 3
    server.close()
    with pytest.raises(RuntimeError, match="the server is closed"):
        server.step()


def what_others_may_do(_: dict[str, Any]) -> None:
    """Graphs that hold what has not been updated; gradients set to None after a pass."""
    rank = dist.get_rank()
    model = Wide()
    server = ParameterServer(model.parameters(), torch.optim.SGD, timeout=TIMEOUT, lr=0.1)
    held = (model.unused.weight * model.unused.weight).sum()
    server.zero_grad()
    with server.no_sync():
        (100 * wide_loss(model, 0, rank)).backward()
    model.second.bias.grad = None
    before = model.second.bias.detach().clone()
    server.step()
    assert same_bits(model.second.bias.detach(), before)
    server.zero_grad()
    held.backward()
    server.close()


@pytest.mark.parametrize(
    "what",
    [
        scaled_and_resumed,
        names_of_several_modules,
        other_arguments,
        a_rank_that_cannot,
        what_others_may_do,
    ],
)
def test_what_a_hostile_reader_found(pool, what):
    pool(2).run(what)


def served(_: dict[str, Any]) -> dict[str, Any]:
    server = ParameterServer(Wide().parameters(), torch.optim.SGD, timeout=TIMEOUT)
    saved = server.shard_state_dict()
    server.close()
    return saved


def test_shards_of_two_runs_are_not_mixed(pool):
    first, second = (pool(2).run(served) for _ in range(2))
    assert fastreduce.merge_shards(first)["step"] == 0
    with pytest.raises(ValueError, match="of one run"):
        fastreduce.merge_shards([first[0], second[1]])
    with pytest.raises(ValueError, match=r"ranks \[1\] served died"):
        fastreduce.merge_shards(first[:1])


def interrupted_at_the_end(_: dict[str, Any]) -> None:
    """Where others' memory has been read, what is sent in another dtype arrives, too."""
    model = Wide()
    server = ParameterServer(
        model.parameters(), torch.optim.SGD, timeout=TIMEOUT, lr=1.0, parameter_wire="bf16"
    )
    gather = server.communicator.all_gather_v
    before = [each.detach().clone() for each in model.parameters()]

    def ended(*arguments: Any) -> None:
        gather(*arguments)
        error = fastreduce.PeerLostError("a peer has died")
        error.phase, error.ran = "exit", True
        raise error

    server.communicator.all_gather_v = ended  # type: ignore[method-assign]
    server.zero_grad()
    wide_loss(model, 0, 0).backward()
    with pytest.raises(fastreduce.PeerLostError, match="those of after it"):
        server.step()
    changed = [
        not same_bits(a.detach(), b) for a, b in zip(model.parameters(), before, strict=True)
    ]
    assert changed == [True, True, False, False, True, True]
    server.close()


def test_parameters_arrive_although_a_peer_dies_at_the_end(pool):
    pool(2).run(interrupted_at_the_end)
