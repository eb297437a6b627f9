"""Federated averaging: the papers' equations, however clients are spread over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from torch import nn

import fastreduce
from fastreduce import federated

TIMEOUT = 60.0
CLIENTS, LR = 5, 0.1
SIZES = [7, 3, 12, 1, 9]
SAMPLED = [[1, 2, 4], [0, 1, 2, 3, 4], [3], [0, 4]]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    model[0].bias.requires_grad_(False)
    return model


def plain() -> nn.Module:
    """Without buffers, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(client, dtype=torch.float32):
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(SIZES[client], 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (SIZES[client],), generator=generator)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(client):
    """Client 0 takes 1 step, client 4 takes 5."""
    x, y = data(client)
    x = x.repeat(2, 1)  # batch normalisation wants 2 at least
    return [(x, y.repeat(2))] * (client + 1)


def whole(client):
    return [data(client, torch.float64)]


def local(model, client, correct=lambda model: None):
    """What a client comes to, in plain torch."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=LR)
    for batch in batches(client):
        optimizer.zero_grad()
        loss(own, batch).backward()
        correct(own)
        optimizer.step()
    return own.state_dict()


def reference(rounds, mu=0.0):
    """FedAvg and FedProx in one process: parameters in float64, counters by their maximum."""
    model = build()
    for sampled in rounds:
        start = copy.deepcopy(model)

        def drawn(own, start=start):
            for p, q in zip(own.parameters(), start.parameters(), strict=True):
                if p.requires_grad:
                    p.grad += mu * (p - q).detach()

        ended = [local(model, client, drawn) for client in sampled]
        state = model.state_dict()
        for name, value in state.items():
            values = [each[name] for each in ended]
            if value.is_floating_point():
                total = sum(SIZES[c] * v.double() for c, v in zip(sampled, values, strict=True))
                state[name] = total / sum(SIZES[client] for client in sampled)
            else:
                state[name] = torch.stack(values).max()
        model.load_state_dict(state)
    return model.state_dict()


def trained(kind, rounds, options):
    model = build()
    if dist.get_rank():
        nn.init.zeros_(model[0].weight)  # becomes rank 0's
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:
        algorithm = getattr(federated, kind)(comm, model, loss, SIZES, lr=LR, **options)
        for sampled in rounds:
            algorithm.round(batches, sampled)
        assert algorithm.rounds == len(rounds)
    return model.state_dict()


def run(pool, world_size, function, *arguments):
    return pool(world_size).run(_call, function, *arguments)


def _call(state, function, *arguments):
    return function(*arguments)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_one_process_on_any_number_of_ranks(pool, mu):
    want = reference(SAMPLED, mu)
    kind, options = ("FedProx", {"mu": mu}) if mu else ("FedAvg", {})
    states = {n: run(pool, n, trained, kind, SAMPLED, options) for n in (1, 2, 3, 4)}
    for found in states.values():
        for state in found:
            torch.testing.assert_close(state, want, rtol=1e-5, atol=1e-6)
            assert all(same_bits(state[name], found[0][name]) for name in state)
    for n in (2, 4):
        assert all(same_bits(states[n][0][name], states[1][0][name]) for name in want), n


def test_fedprox_without_mu_is_fedavg(pool):
    [one], [other] = (
        run(pool, 1, trained, kind, SAMPLED, options)
        for kind, options in (("FedAvg", {}), ("FedProx", {"mu": 0.0}))
    )
    assert all(same_bits(one[name], other[name]) for name in one)


@pytest.mark.parametrize("policy", ["first", "keep"])
def test_integer_buffers(pool, policy):
    """Of clients 1, 2 and 4, then of 3, which take one step more than their number."""
    for state in run(pool, 2, trained, "FedAvg", [[1, 2, 4], [3]], {"integer_buffers": policy}):
        assert state["1.num_batches_tracked"] == {"first": 2 + 4, "keep": 0}[policy]


def one_step(kind, options, rate):
    """Data parallelism's step, by the same all clients with one batch of all they have."""
    model, alone = plain(), plain()
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:
        algorithm = getattr(federated, kind)(comm, model, loss, SIZES, lr=LR, **options)
        for _ in range(3):
            algorithm.round(whole)
            alone.zero_grad()
            for client in range(CLIENTS):
                [batch] = whole(client)
                # SCAFFOLD's mean is over clients.
                part = SIZES[client] / sum(SIZES) if kind == "FedAvg" else 1 / CLIENTS
                (part * loss(alone, batch)).backward()
            with torch.no_grad():
                for p in alone.parameters():
                    p.sub_(p.grad, alpha=rate)
            torch.testing.assert_close(model.state_dict(), alone.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_step_of_all_is_data_parallelism(pool, world_size):
    run(pool, world_size, one_step, "FedAvg", {}, LR)
    run(pool, world_size, one_step, "Scaffold", {"global_lr": 0.5}, LR * 0.5)


def scaffold_reference(rounds):
    """The paper's equations, client after client."""
    model = plain()
    x = [p.detach().clone() for p in model.parameters()]
    c = [torch.zeros_like(p) for p in x]
    own = [[torch.zeros_like(p) for p in x] for _ in range(CLIENTS)]
    for sampled in rounds:
        moves, changes = [], []
        for i in sampled:
            y = [p.clone() for p in x]
            for _ in range(i + 1):
                for p, value in zip(model.parameters(), y, strict=True):
                    p.data.copy_(value)
                g = torch.autograd.grad(loss(model, whole(i)[0]), list(model.parameters()))
                for k in range(len(y)):
                    y[k] = y[k] - LR * (g[k] - own[i][k] + c[k])
            new = [own[i][k] - c[k] + (x[k] - y[k]) / ((i + 1) * LR) for k in range(len(y))]
            moves.append([y[k] - x[k] for k in range(len(y))])
            changes.append([new[k] - own[i][k] for k in range(len(y))])
            own[i] = new
        for k in range(len(x)):
            x[k] = x[k] + 0.7 * sum(each[k] for each in moves) / len(sampled)
            c[k] = c[k] + sum(each[k] for each in changes) / CLIENTS
    return x, c, own


def scaffold(rounds, states):
    """Goes on from what other ranks have saved."""
    model = plain()
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:
        algorithm = federated.Scaffold(comm, model, loss, SIZES, lr=LR, global_lr=0.7)
        if states:
            none = {"owners": range(CLIENTS), "clients": {}}
            with pytest.raises(ValueError, match="expected those of all ranks that saved"):
                algorithm.load_state_dict({**states[0], "clients": none})
            model.load_state_dict(states[0]["model"])
            algorithm.load_state_dict(*states)
        for sampled in rounds:
            algorithm.round(lambda client: whole(client) * (client + 1), sampled)
        return copy.deepcopy({**algorithm.state_dict(), "model": model.state_dict()})


@pytest.mark.parametrize("first, second", [(1, 2), (3, 1), (2, 3)])
def test_scaffold_goes_on_with_other_ranks(pool, first, second):
    states = run(pool, first, scaffold, SAMPLED[:2], [])
    states = run(pool, second, scaffold, SAMPLED[2:], states)
    x, c, own = scaffold_reference(SAMPLED)
    clients = {k: v for state in states for k, v in state["clients"]["clients"].items()}
    assert sorted(clients) == list(range(CLIENTS))
    for state in states:
        assert state["rounds"] == len(SAMPLED)
        assert state["clients"]["owners"] == list(range(CLIENTS))  # whoever has them
        torch.testing.assert_close(list(state["model"].values()), x)
        torch.testing.assert_close(state["c"], c)
    torch.testing.assert_close([clients[i] for i in range(CLIENTS)], own)
    # c is the mean of all, though not all have taken part.
    mean = [torch.stack(each).mean(0) for each in zip(*clients.values(), strict=True)]
    torch.testing.assert_close(states[0]["c"], mean)


def failing(kind, options):
    """A client raises on one rank: all ranks do, and the next round is as if that had not been."""
    model, other = build(), build()
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:
        make = getattr(federated, kind)
        algorithm = make(comm, model, loss, SIZES, lr=LR, **options)
        undisturbed = make(comm, other, loss, SIZES, lr=LR, **options)

        def broken(client):
            yield from batches(client)
            if client == 3:
                raise OSError("no disk")

        for sampled in SAMPLED:
            before = copy.deepcopy(model.state_dict())
            own = 3 in algorithm.mine(sampled)
            error, text = (OSError, "no disk") if own else (RuntimeError, "client 3 failed on rank")
            if 3 in sampled:
                with pytest.raises(error, match=text):
                    algorithm.round(broken, sampled)
                assert all(same_bits(model.state_dict()[name], before[name]) for name in before)
            algorithm.round(batches, sampled)
            undisturbed.round(batches, sampled)
        state, want = model.state_dict(), other.state_dict()
        assert all(same_bits(state[name], want[name]) for name in want)
        with pytest.raises(ValueError, match="none for client"):
            algorithm.round(lambda client: [], [comm.rank * 2] if comm.world_size == 1 else [0, 4])
        if comm.world_size > 1:
            with pytest.raises(ValueError, match="expected the same clients on all ranks"):
                algorithm.round(batches, [0, comm.rank + 1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failed_round_has_not_been(pool, world_size):
    run(pool, world_size, failing, "FedAvg", {})
    run(pool, world_size, failing, "Scaffold", {})


def averages(clients, kind):
    """Means and sums of several dtypes, in turn of every client, every other one, and none."""
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:
        dtypes = torch.float32, torch.bfloat16, torch.float64
        like = [torch.empty(3, 5), torch.empty(7, dtype=dtypes[1]), torch.empty(2, dtype=dtypes[2])]
        average = federated.Average(comm, like, clients)
        found = []
        for step in (1, 2, clients + 1):
            for client in range(step - 1, clients, step):
                if federated.home(client, clients, comm.world_size) == comm.rank:
                    generator = torch.Generator().manual_seed(client)
                    tensors = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in like]
                    tensors[0][0] = -0.0  # to which other ranks may add 0.0
                    if client == 3:
                        tensors = [torch.full_like(each, torch.nan) for each in tensors]
                    average.add(client, tensors, 0.0 if client == 3 else client + 1)
            found.append([each.clone() for each in getattr(average, kind)()])
            assert {each.dtype for each in found[-1]} == {torch.float32, torch.float64}
        return found


@pytest.mark.parametrize("clients", [1, 5, 11, 16])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_averages(pool, clients, kind):
    everywhere = {n: run(pool, n, averages, clients, kind) for n in (1, 2, 3, 4)}
    for n, found in everywhere.items():
        for steps in zip(*found, everywhere[1][0], strict=True):
            for got in zip(*steps, strict=True):
                if n == 3:
                    torch.testing.assert_close(got[0], got[-1], rtol=1e-5, atol=1e-5)
                else:
                    assert all(same_bits(each, got[-1]) for each in got), n
    for step, [got, *_] in zip((1, 2, clients + 1), everywhere[2][0], strict=True):
        total, divisor = torch.zeros(3, 5, dtype=torch.float64), 0
        for client in range(step - 1, clients, step):
            if client != 3:
                generator = torch.Generator().manual_seed(client)
                total += (client + 1) * torch.randn(3, 5, generator=generator).double()
                total[0] = 0.0
                divisor += client + 1
        want = total / max(divisor, 1) if kind == "mean" else total
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def misused():
    model = plain()
    with fastreduce.Communicator(timeout=TIMEOUT) as comm:

        def refused(text, call, kind=ValueError):
            with pytest.raises(kind, match=text):
                call()

        make = federated.FedAvg
        refused("sizes: expected one", lambda: make(comm, model, loss, [], lr=LR))
        refused("sizes: expected 0, or", lambda: make(comm, model, loss, [-1], lr=LR))
        refused(
            "integer_buffers: expected",
            lambda: make(comm, model, loss, SIZES, lr=LR, integer_buffers="mean"),
        )
        refused("that need a gradient", lambda: make(comm, nn.Tanh(), loss, SIZES, lr=LR))
        refused("mu: expected", lambda: federated.FedProx(comm, model, loss, SIZES, lr=LR, mu=-1))
        algorithm = make(comm, model, loss, [0, *SIZES[1:]], lr=LR)
        for sampled in ([], [2, 1], [1, 1], [5], [-1]):
            refused("sampled: expected some", lambda s=sampled: algorithm.round(whole, s))
        refused("a client with samples", lambda: algorithm.round(whole, [0]))
        refused("of one round", lambda: algorithm.load_state_dict({"rounds": 1}, {"rounds": 2}))
        average = federated.Average(comm, [torch.zeros(2)], 4)
        refused("client: expected 0 to 3", lambda: average.add(4, [torch.zeros(2)]))
        refused("client: expected one of", lambda: average.add(3 - 3 * comm.rank, [torch.zeros(2)]))
        refused("tensors: expected 1", lambda: average.add(3 * comm.rank, []))
        refused("denominator: expected", lambda: average.sum(0.0))
        integers = [torch.zeros(2, dtype=torch.int64)]
        refused("floating", lambda: federated.Average(comm, integers, 4), TypeError)


def test_misuse(pool):
    run(pool, 2, misused)


def test_samples():
    drawn = [federated.sample(10, 4, seed=1, round=each) for each in range(200)]
    assert drawn == [federated.sample(10, 4, seed=1, round=each) for each in range(200)]
    assert all(each == sorted(set(each)) and len(each) == 4 for each in drawn)
    counts = torch.tensor(drawn).flatten().bincount(minlength=10)
    assert counts.min() > 50 and counts.max() < 110
    assert drawn != [federated.sample(10, 4, seed=2, round=each) for each in range(200)]
    with pytest.raises(ValueError, match="count: expected 1 to 3"):
        federated.sample(3, 4, seed=0, round=0)


def test_dirichlet_split():
    labels = torch.arange(1000) % 10

    def largest_share(alpha):
        parts = federated.dirichlet_split(labels, 8, alpha, seed=3)
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
        shares = [labels[each].bincount().max() / len(each) for each in parts]
        return sum(map(float, shares)) / len(shares)

    assert largest_share(1000.0) < 0.15
    assert largest_share(0.1) > 0.4
    for clients, alpha, text in ((0, 1.0, "clients"), (1001, 1.0, "clients"), (2, 0.0, "alpha")):
        with pytest.raises(ValueError, match=f"{text}: expected"):
            federated.dirichlet_split(labels, clients, alpha, seed=0)
    with pytest.raises(ValueError, match="some client had none"):
        federated.dirichlet_split(labels[:20], 20, 0.01, seed=0)
