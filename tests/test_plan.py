"""The planner: textbook cases, what is counted of a model, and the arithmetic by hand."""

from __future__ import annotations

import json
import math
import sys
import types
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastreduce
from benchmarks import models
from fastreduce import footprint, forecast, plan, plan_command, plan_report
from fastreduce.__main__ import _parser, main
from fastreduce.footprint import Gradient, Sample
from fastreduce.forecast import Cluster, Compute, Link
from fastreduce.plan import State, Work
from fastreduce.policy import MIB, GpuTopology, expected_seconds
from fastreduce.wire import Wire

RESNET = ["--model", "benchmarks.models:resnet18", "--input", "3x224x224", "--batch", "512"]


def planned(capsys, *options: str) -> dict:
    assert main(["plan", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys, *options: str) -> str:
    assert main(["plan", *options]) == 0
    return " ".join(capsys.readouterr().out.split())


# -- textbook cases -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet18():
    return plan_command.make(_parser().parse_args(["plan", *RESNET, "--ranks", "10"]))


def test_resnet18(resnet18):
    found = plan_report.plain(resnet18)
    m = 4 * 11_689_512
    assert found["elements"] == 11_689_512
    one, parallel, sharded, worker, server = (each["memory"] for each in found["layouts"])
    assert one["parameters"] == parallel["parameters"] == server["parameters"] == 4 * m
    assert worker["parameters"] == 2 * m
    assert sharded["parameters"] == 2 * m + math.ceil(2 * m / 10)
    # Every convolution's output (its batch normalisation's input), every ReLU's, the pooled one,
    # its indices of 8 bytes, the average; the statistics of 4,800 channels, twice.
    of_a_sample = 4 * (2_483_712 + 2_308_096 + 200_704 + 512) + 8 * 200_704
    assert one["activations"] == 512 * of_a_sample + 2 * 4 * 4_800
    assert worker["activations"] == parallel["activations"] == 52 * of_a_sample + 2 * 4 * 4_800
    assert server["activations"] == 0
    assert one["inputs"] == 512 * 4 * 3 * 224 * 224
    # The published 20.85 GB: the outputs of layers with parameters, twice; inputs; 4m.
    outputs = found["footprint"]["passes"][0]["outputs"]
    assert outputs == 512 * 4 * (2 * 2_483_712 + 1000)
    assert round((2 * outputs + one["inputs"] + one["parameters"]) / 1e9, 2) == 20.85


def test_resnet18_in_words(resnet18):
    words = " ".join(plan_report.text(resnet18).split())
    assert "187.0 MB = 4m" in words and "93.52 MB = 2m" in words
    assert "autograd saves 11.05 GB" in words
    assert "with inputs and parameter memory 20.85 GB" in words
    assert "Data parallelism fits: 10 GPUs" in words


def test_rounded_parameters(capsys):
    layouts = planned(capsys, "--params", "11.7e6", "--ranks", "10")["layouts"]
    assert layouts[0]["memory"]["parameters"] == 187_200_000
    assert layouts[3]["memory"]["parameters"] == 93_600_000


def test_gpt3(capsys):
    options = "--params", "175e9", "--layers", "96"
    found = planned(capsys, *options)
    memory = [each["memory"]["parameters"] for each in found["layouts"]]
    assert found["state"]["weights"] == 700e9
    assert memory == [2800e9, 2800e9, 1575e9, 1400e9, 2800e9]
    assert found["enough_ranks"] is found["enough_passes"] is None and not found["fits"]
    shapes = found["shapes"]
    assert shapes["replicas share the optimizer's state"] is None
    split = shapes["split by tensors and layers"]
    assert (split["data"], split["tensor"], split["pipeline"], split["gpus"]) == (1, 8, 5, 40)
    assert split["memory"]["total"] == round(2800e9 * 20 / 96 / 8)
    assert shapes["replicas share everything"]["gpus"] == 56
    words = said(capsys, *options)
    assert "Data parallelism alone cannot fit" in words and "2.800 TB on each" in words
    assert "40 = 1 data x 8 tensor x 5 pipeline" in words


# -- what is counted of a model -----------------------------------------------------------------


class Function(nn.Module):
    """A linear layer without bias from 16 to 32, and what ``then`` makes of it."""

    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(16, 32, bias=False)
        self.other = nn.Linear(32, 8, bias=False)
        self.register_buffer("scale", torch.ones(32))
        self.then = then

    def forward(self, x):
        return self.then(self, self.linear(x))


ROW = 32 * 4  # bytes of the layer's output, for each sample


@pytest.mark.parametrize(
    ("then", "saved"),
    [
        (lambda self, y: y + 1, 0),  # a sum needs neither operand
        (lambda self, y: y * self.scale, 0),  # a buffer is no activation
        (lambda self, y: y * y, ROW),  # saved twice
        (lambda self, y: self.other(y.view(-1, 32)[:, :]), ROW),  # as a view
        (lambda self, y: self.other(y.exp()), ROW),  # by two operations
        (lambda self, y: self.other(functional.relu(y)), ROW),
        (lambda self, y: self.other(functional.relu(y * 2.0, inplace=True)), ROW),
        (lambda self, y: functional.relu_(y).square(), ROW),
        (lambda self, y: y.exp() * y.sin(), 3 * ROW),  # exp's and sin's outputs, sin's input
        (lambda self, y: y[:, :1] * y[:, 1:2], ROW),  # the whole storage stays, for two columns
        (lambda self, y: functional.dropout(y, 0.5), ROW // 4),  # a mask of bytes, as on a GPU
        (lambda self, y: self.other(functional.dropout(y.exp(), 0.0)), ROW),
        (lambda self, y: checkpoint(lambda y: y.exp().sin().exp(), y, use_reentrant=False), ROW),
        (lambda self, y: checkpoint(lambda y: y.exp().sin().exp(), y, use_reentrant=True), ROW),
    ],
)
def test_every_saved_storage_counts_once(then, saved):
    model = Function(then)
    found, _ = footprint.run_pass(model, [torch.randn(6, 16)])
    assert found.saved == 6 * saved
    assert found.inputs == 6 * 16 * 4
    fake = footprint.footprint(lambda: Function(then), [Sample((16,))], (6, 2))
    assert fake.ran is None
    assert fake.passes[0] == found


def test_peak():
    """A single layer saves nothing of its own; at the end of backward there are its output, and the
    new gradient beside the old one, and a few scalars."""
    found, _ = footprint.run_pass(nn.Linear(16, 32, bias=False), [torch.randn(6, 16)])
    assert found.saved == 0
    assert 0 <= found.temporary - (6 * 32 * 4 + 16 * 32 * 4) <= 32


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.project, self.back = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        query, key, value = self.project(self.first(x)).view(-1, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        x = x + functional.dropout(self.back(y.transpose(1, 2).reshape_as(x)))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def blocks():
    return nn.Sequential(*(Block() for _ in range(3)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("build", "shape", "autocast"),
    [
        (convolutions, (3, 8, 8), None),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True)), (3, 8, 8), torch.bfloat16),
        (blocks, (16, 32), None),
        (blocks, (16, 32), torch.bfloat16),
        (lambda: checkpointed(blocks()), (16, 32), None),
        (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (16, 32), None),
    ],
)
def test_fake_tensors_are_counted_as_real_ones(build, shape, autocast):
    fake = footprint.footprint(build, [Sample(shape)], (4, 7), autocast=autocast)
    assert fake.ran is None
    found, gradients = footprint.run_pass(build(), [torch.randn(7, *shape)], autocast=autocast)
    assert found == fake.passes[1]
    assert [each.elements for each in gradients] == [each.elements for each in fake.gradients]


def checkpointed(model):
    footprint.checkpoint_modules(model, "Block")
    return model


def test_attention_saves_no_matrix():
    """As the fused kernels of GPUs, with dropout, too: what is saved grows with the sequence, not
    with its square, as operations do: of two products forward, five backward."""

    def attention(x):
        heads = x.unflatten(-1, (4, 8)).transpose(-2, -3)
        return functional.scaled_dot_product_attention(heads, heads, heads, None, 0.1)

    def found(length):
        model = Function(lambda self, y: attention(y))
        return footprint.run_pass(model, [torch.zeros(2, length, 16)])[0]

    assert found(128).saved == 2 * found(64).saved
    layer, product = 2 * (2 * 64 * 16 * 32), 2 * (2 * 4 * 64 * 64 * 8)
    assert found(64).forward == layer + 2 * product
    assert found(64).backward == layer + 5 * product


def test_checkpoints_save_inputs_alone():
    plain, _ = footprint.run_pass(blocks(), [torch.zeros(4, 16, 32)])
    found, _ = footprint.run_pass(checkpointed(blocks()), [torch.zeros(4, 16, 32)])
    assert found.saved == 2 * 4 * 16 * 32 * 4  # of three blocks; the first one's is the batch
    assert found.forward == plain.forward
    assert found.backward > plain.backward  # what is computed anew counts
    # Of one block at a time: the same for any number of them.
    more, _ = footprint.run_pass(
        checkpointed(nn.Sequential(*(Block() for _ in range(8)))), [torch.zeros(4, 16, 32)]
    )
    assert more.temporary == found.temporary


def test_autocast_saves_half():
    """Copies of the weights in 16 bit do not depend on the batch."""
    options = {"samples": [Sample((16,))], "batches": (64, 32)}
    model = lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))  # noqa: E731
    full = footprint.footprint(model, **options)
    half = footprint.footprint(model, autocast=torch.bfloat16, **options)
    more = [a.saved - b.saved for a, b in (full.passes, half.passes)]
    assert more[0] == 3 * 32 * 16 * 4  # the input of the first layer is the batch
    assert more[1] == 4 * 32 * 16 * 2  # and here its copy
    assert half.weights == full.weights
    assert {each.nbytes for each in half.gradients} == {16 * 16 * 4, 16 * 4}


def test_layer_norm_under_autocast_is_float32():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
    found, _ = footprint.run_pass(model, [torch.zeros(8, 16)], autocast=torch.bfloat16)
    # A copy of the batch; the norm's input, mean and deviation.
    assert found.saved == 2 * 8 * 16 + 4 * 8 * 16 + 2 * 4 * 8


def test_cross_entropy():
    model = nn.Linear(16, 32)
    found, _ = footprint.run_pass(model, [torch.zeros(2, 3, 16)], loss="cross_entropy")
    assert found.saved == 6 * 32 * 4 + 6 * 8 + 4  # log-probabilities, targets, their weight


class NeedsValues(nn.Module):
    """What it computes depends on data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x)
        return y.exp() if y.sum().item() > -1e9 else y


def test_models_that_need_values_run_on_the_cpu():
    found = footprint.footprint(NeedsValues, [Sample((16,))], (1000, 500))
    assert "DataDependentOutputException" in found.ran
    assert [each.samples for each in found.passes] == [2, 4]
    assert found.at(1000).saved == 1000 * 16 * 4
    assert found.at(1000).inputs == 1000 * 16 * 4


@pytest.mark.parametrize("draw", [nn.init.trunc_normal_, lambda weight: weight.max().item()])
def test_initial_values_need_not_be_drawn(draw):
    def build():
        layer = nn.Linear(16, 16)
        draw(layer.weight)
        return nn.Sequential(layer, nn.Sigmoid())

    found = footprint.footprint(build, [Sample((16,))], (1000, 500))
    assert found.ran is None
    assert found.passes[0].saved == 1000 * 16 * 4


class Tied(nn.Module):
    """Layers that share a weight, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.second(self.frozen(self.first(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_and_frozen_parameters(dtype):
    found = footprint.footprint(Tied, [Sample((16,))], (4, 2), dtype=dtype)
    assert found.ran is None
    assert found.elements == 2 * 256
    assert found.weights == 2 * 256 * dtype.itemsize
    assert [each.elements for each in found.gradients] == [256]
    assert found.passes[0].saved == 4 * 16 * dtype.itemsize  # what the second layer is given


def test_gradients_are_ready_when_their_operations_are_done():
    """Of three equal products of backward, the last layer has two."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    found, gradients = footprint.run_pass(model, [torch.zeros(4, 16)])
    assert found.forward == 2 * (2 * 4 * 16 * 16)
    assert found.backward == 3 * (2 * 4 * 16 * 16)
    assert [each.ready for each in gradients] == [2 / 3, 2 / 3, 1, 1]
    assert {each.shape for each in gradients[:2]} == {(16, 16), (16,)}


def test_optimizer_state():
    def state(optimizer, dtype=torch.float32, **options):
        return footprint.optimizer_bytes(
            lambda parameters: optimizer(parameters, lr=0.1, **options), [(3, 5), (7,)], dtype
        )

    weights = 4 * (15 + 7)
    assert state(torch.optim.SGD) == 0
    assert state(torch.optim.SGD, momentum=0.9) == weights
    assert state(torch.optim.Adam) == state(torch.optim.AdamW) == 2 * weights
    assert state(torch.optim.Adam, torch.bfloat16) == weights
    assert state(torch.optim.Adam, amsgrad=True) == 3 * weights


@pytest.mark.parametrize(
    ("precision", "one", "shared"),  # bytes of a parameter: on every rank, and shared out
    [
        ("fp32", 16, 8),
        ("autocast-bf16", 16, 8),
        ("bf16", 8, 12),  # a server always keeps a float32 copy
        ("bf16-master", 16, 12),
        ("fp16-master", 16, 12),
    ],
)
def test_precisions(capsys, precision, one, shared):
    options = "--params", "1000", "--ranks", "4", "--precision", precision
    _, parallel, sharded, worker, _ = planned(capsys, *options)["layouts"]
    assert parallel["memory"]["parameters"] == 1000 * one
    own = worker["memory"]["parameters"]
    assert own == 1000 * (8 if one - shared == 8 else 4)
    assert sharded["memory"]["parameters"] == own + 1000 * shared // 4


# -- groups -------------------------------------------------------------------------------------


def all_shapes(state, work, layers, gpus_per_host, most):
    """Sizes and memory of all groups, without any order."""
    tensors = [n for n in range(1, gpus_per_host + 1) if gpus_per_host % n == 0]
    for tensor, pipeline in product(tensors, range(1, layers + 1)):
        for sharding, data in product(["none", "optimizer", "all"], range(1, most + 1)):
            gpus = data * tensor * pipeline
            if gpus > most or (gpus > gpus_per_host and gpus % gpus_per_host):
                continue
            memory = plan.shape_memory(state, work, layers, tensor, pipeline, sharding, data)
            yield gpus, memory.total


@pytest.mark.parametrize("capacity", [4000, 1500, 700, 400, 250, 150, 125])
def test_no_smaller_group_has_room(capacity):
    state = State(weights=1000, gradients=1000, optimizer=2000, served=2000)
    work = Work(activations=60, inputs=10, temporary=8)
    found = plan.smallest_shape(state, work, capacity, 10_000, layers=6, gpus_per_host=4)
    every = all_shapes(state, work, 6, 4, most=200)
    assert found.memory.total <= capacity
    assert found.gpus == min(gpus for gpus, total in every if total <= capacity)


def test_no_group_has_room():
    state = State(weights=1000, gradients=1000, optimizer=2000, served=2000)
    # Not even the inputs; and not with two samples, one for each of two GPUs.
    assert plan.smallest_shape(state, Work(inputs=10), 10, 1000) is None
    assert plan.smallest_shape(state, Work(), 1500, 2, split=False) is None
    # 20 GPUs are enough, which fill no hosts of 8.
    assert plan.smallest_shape(state, Work(), 2100, 24, split=False).gpus == 24
    assert plan.smallest_shape(state, Work(), 2100, 23, split=False) is None


@pytest.mark.parametrize("capacity", [4000, 4200, 4100, 5000, 9000])
def test_enough_ranks_and_passes(capacity):
    state = State(weights=1000, gradients=1000, optimizer=2000, served=2000)

    def work(samples):
        return Work(activations=100 * samples)

    def fits(samples):
        return 4000 + 100 * samples <= capacity

    batch = 40
    ranks = [n for n in range(1, batch + 1) if fits(-(-batch // n))]
    assert plan.enough_ranks(state, work, capacity, batch) == (min(ranks) if ranks else None)
    passes = [n for n in range(1, 11) if fits(-(-batch // (4 * n)))]
    assert plan.enough_passes(state, work, capacity, batch, 4) == (min(passes) if passes else None)


# -- time ---------------------------------------------------------------------------------------

LINK = Link(bandwidth=1e9, latency=1e-3, source="")
SLOW = Link(bandwidth=1e8, latency=1e-2, source="")
NVLINK = GpuTopology("switch", multicast=True)


@pytest.mark.parametrize(
    ("ready", "seconds", "backward", "sticks_out"),
    [
        ([], [], 5, 0),
        ([5], [2], 5, 2),  # the last bucket always does
        ([1, 3, 5], [1, 1, 1], 5, 1),  # each ends before the next one is ready
        ([1, 3, 5], [4, 1, 1], 5, 2),  # the first one is still under way: 5, 6, 7
        ([1, 3, 5], [1, 4, 1], 5, 3),  # 2, 7, 8
        ([1, 2, 3], [0.5, 0.5, 0.5], 5, 0),
    ],
)
def test_overlap(ready, seconds, backward, sticks_out):
    assert forecast.exposed(ready, seconds, backward) == sticks_out


def test_ring():
    algorithm, seconds = Cluster(4, 1, LINK, LINK).all_reduce(10**9)
    assert algorithm == "ring"
    assert seconds == pytest.approx(2 * 3 / 4 + 7 * 1e-3)
    assert Cluster(1, 1, LINK, LINK).all_reduce(10**9) == ("none", 0)


def test_own_algorithms_on_gpus():
    link = Link(NVLINK.bandwidth, NVLINK.signal, "", NVLINK)
    cluster = Cluster(8, 1, link, link)
    for nbytes in (8 << 10, 16 * MIB, 64 * MIB):
        algorithm, seconds = cluster.all_reduce(nbytes)
        assert seconds == expected_seconds(algorithm, nbytes, 8, NVLINK)
    assert cluster.all_reduce(8 << 10)[0] == "low_latency"
    assert cluster.all_reduce(64 * MIB)[0] == "process_group"


def test_hierarchical():
    """Two hosts of 4: a ring of 4 inside, a ring of 2 between, of a host's bandwidth."""
    algorithm, seconds = Cluster(8, 2, LINK, SLOW).all_reduce(10**8)
    assert algorithm == "hierarchical"
    assert seconds == pytest.approx((0.15 + 7 * 1e-3) + (1 + 3 * 1e-2))


def test_exchange():
    """In a wire format every rank sends for itself: two hosts of 4 carry 4 x 1/2 to all, and 1/2 of
    what all gather."""
    one = Cluster(4, 1, LINK, LINK).exchange(10**9)
    assert one == pytest.approx(2 * 3 / 4 + (1 + 3) * 1e-3)
    two = Cluster(8, 2, LINK, SLOW).exchange(10**8)
    assert two == pytest.approx((2 + 0.5) + (1 + 7) * 1e-2 + (3 / 8 + 1) / 10)
    alone = Cluster(2, 2, LINK, SLOW).exchange(10**8)
    assert alone == pytest.approx(2 * 0.5 + (1 + 1) * 1e-2)


def test_payload():
    """int8: a byte an element, and 4 for every 128 of a parameter; small buckets travel as they
    are, and so does what loses nothing."""
    gradients = [Gradient((100_000,), 400_000, 0.5), Gradient((100,), 400, 1.0)]
    [bucket] = forecast.buckets(gradients, 25 * MIB, Wire("int8"))
    assert (bucket.elements, bucket.nbytes, bucket.ready) == (100_100, 400_400, 1.0)
    assert bucket.encoded == forecast.Blocks(100_100, 100_100 + 4 * (782 + 1))
    [small] = forecast.buckets([Gradient((100,), 400, 1.0)], 25 * MIB, Wire("int8"))
    assert small.encoded is None and small.sent(2) == 400
    [native] = forecast.buckets(gradients, 25 * MIB, Wire("bf16"), torch.bfloat16)
    assert native.encoded is None
    residuals = 2 * 4 * 100_100 * (1 + 1 / 4)
    payload = bucket.encoded.payload
    assert forecast.wire_memory([bucket], 4) == round(residuals + 3.25 * payload)
    assert forecast.wire_memory([bucket], 1) == 0


def test_chosen_elements():
    """A number, and 8 bytes for each, from every rank to all."""
    gradients = [Gradient((200, 1000), 800_000, 0.5), Gradient((100,), 400, 1.0)]
    [bucket] = forecast.buckets(gradients, 25 * MIB, Wire("topk", k=0.01))
    message = 8 + 8 * 2001
    assert bucket.encoded == forecast.Chosen(200_100, message)
    assert bucket.sent(4) == 3 * message
    assert forecast.wire_memory([bucket], 4) == 8 * 200_100 + 5 * message
    step = forecast.data_parallel([bucket], Cluster(4, 1, LINK, LINK), None)
    assert step.algorithm == "all_gather"
    assert step.communication == pytest.approx(3 * message / LINK.bandwidth + 3 * LINK.latency)
    apart = forecast.data_parallel([bucket], Cluster(2, 2, LINK, SLOW), None)
    assert apart.communication == pytest.approx(message / SLOW.bandwidth + SLOW.latency)
    [few] = forecast.buckets(gradients, 25 * MIB, Wire("randomk", k=7))
    assert few.encoded == forecast.Chosen(200_100, 8 + 8 * 7)


def test_low_rank():
    """Three collectives of a matrix; what is none travels as it is, unless all of it is small."""
    shapes = [(100, 30, 10), (100,), (2, 3)]
    gradients = [Gradient(shape, 4 * math.prod(shape), 1.0) for shape in shapes]
    [bucket] = forecast.buckets(gradients, 25 * MIB, Wire("lowrank", rank=2))
    rest = forecast.Blocks(0, 4 * 106)
    assert bucket.encoded == forecast.Factored(30_000, ((200, 600),), rest)
    assert bucket.sent(2) == 4 * 800 + 4 * 200 + 4 * 106
    messages = round(4 * 106 * 3.5)
    assert forecast.wire_memory([bucket], 2) == 8 * (30_000 + 600) + messages
    cluster = Cluster(4, 1, LINK, LINK)
    step = forecast.data_parallel([bucket], cluster, None)
    assert step.algorithm == "factors"
    left, right = (cluster.all_reduce(nbytes)[1] for nbytes in (800, 2400))
    assert step.communication == pytest.approx(1.5 * left + right + cluster.exchange(4 * 106))
    [small] = forecast.buckets(gradients[1:], 25 * MIB, Wire("lowrank"))
    assert small.encoded is None
    [half] = forecast.buckets(gradients, 25 * MIB, Wire("lowrank"), torch.bfloat16)
    assert half.encoded.rest == forecast.Blocks(0, 2 * 106)


@pytest.mark.parametrize(
    ("wire", "bytes_per_element", "near"),
    [
        *(("fp32", 4.0006, 1e-3), ("bf16", 2.0001, 1e-4), ("int8", 1.0314, 1e-3)),
        *(("onebit", 0.1564, 2e-3), ("topk:0.01", 0.0801, 2e-3), ("lowrank:2", 0.0178, 0.04)),
    ],
)
def test_bytes_between_two_hosts_are_those_measured(wire, bytes_per_element, near):
    """docs/performance.md: the MLP of benchmarks.hosts, payload as counted by the interfaces."""
    gradients = [
        Gradient(tuple(parameter.shape), parameter.nbytes, 1.0)
        for parameter in reversed(list(models.mlp().parameters()))
    ]
    found = forecast.buckets(gradients, 25 * MIB, plan_command._wire(wire))
    sent = sum(bucket.sent(2) for bucket in found) / sum(bucket.elements for bucket in found)
    assert sent == pytest.approx(bytes_per_element, rel=near)


def recorded(state: dict, wire: str) -> list[tuple[int, int]]:
    """On a rank: of each bucket of a step its bytes, and what this rank sent."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(blocks_and_bias(), bucket_cap_mb=1)
    hook = fastreduce.attach(ddp, wire=plan_command._wire(wire), record=True)
    for _ in range(3):  # DDP makes its buckets anew after the first
        ddp(torch.ones(4, 300)).sum().backward()
    last = hook.stats()[-1]
    hook.close()
    return [(each.nbytes, each.wire_bytes) for each in last.buckets]


def blocks_and_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 900), nn.LayerNorm(900))


@pytest.mark.parametrize("wire", ["int8", "onebit", "topk:0.01", "randomk:500", "lowrank:2"])
def test_bytes_are_those_that_ranks_send(pool, wire):
    """Of all buckets of a step, and all ranks: a part of a matrix may be larger on one."""
    every = pool(2).run(recorded, wire)
    found = forecast.buckets(
        footprint.footprint(blocks_and_bias, [Sample((300,))], (4, 2)).gradients,
        MIB,
        plan_command._wire(wire),
    )
    assert [nbytes for nbytes, _ in every[0]] == [bucket.nbytes for bucket in found]
    for at, bucket in enumerate(found):
        sent = sum(rank[at][1] for rank in every)
        assert sent == pytest.approx(2 * bucket.sent(2), abs=8) if bucket.encoded else sent == 0
    assert any(bucket.encoded for bucket in found)


def test_buckets_are_those_of_ddp():
    tensors = [torch.empty(100 + 7919 * n % 90_000) for n in range(60)]
    cap = MIB + MIB // 2
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, cap])
    found = forecast.buckets([Gradient((t.numel(),), t.nbytes, 1.0) for t in tensors], cap)
    assert len(found) > 5
    expected = [sum(tensors[at].nbytes for at in bucket) for bucket in assigned]
    assert [bucket.nbytes for bucket in found] == expected


def test_steps():
    """Two buckets of 100 MB, half of backward each, in 3 s of computation, 2 of them backward."""
    cluster = Cluster(2, 1, LINK, LINK)
    gradients = [Gradient((25_000_000,), 10**8, share) for share in (0.5, 1.0)]
    found = forecast.buckets(gradients, MIB)
    compute = Compute(3.0, 2 / 3, 1)
    each = 0.1 + 3e-3
    step = forecast.data_parallel(found, cluster, compute)
    assert step.communication == pytest.approx(2 * each)
    assert step.sticks_out == pytest.approx(each)  # the first one is hidden
    assert step.seconds == pytest.approx(3 + each)
    # In 100 passes only the last one's backward, of 20 ms, hides anything.
    short = forecast.data_parallel(found, cluster, Compute(3.0, 2 / 3, 100))
    assert short.sticks_out == pytest.approx(2 * each - 0.01)
    sharded = forecast.sharded_server(found, cluster, compute, 2 * 10**8)
    assert sharded.sticks_out == pytest.approx(each / 2 + (0.2 + 3e-3) / 2)
    server = forecast.textbook_server(found, cluster, compute, 2 * 10**8)
    assert server.sticks_out == pytest.approx(0.201 + 0.401)
    assert forecast.data_parallel(found, cluster, None).seconds is None


@pytest.mark.parametrize("end", [1, 2, 3, 4, 7, 8, 12, 20, 100])
def test_hidden_until(end):
    """Hosts of 4: within the first one every number counts, then full hosts."""
    found = forecast.hidden_until(lambda ranks: 0.01 if ranks <= end else 0.06, 4, 40)
    assert found == (end if end < 4 else min(end - end % 4, 40))


def test_a_plan_of_time(capsys):
    """One bucket of 4 MB, a ring of 8 at 10 GB/s, 15 messages of 10 us, behind all of backward."""
    options = "--params", "1e6", "--bandwidth", "10", "--latency", "10"
    found = planned(capsys, *options, "--step-seconds", "0.05")
    step = found["steps"]["data parallel"]
    assert step["sticks_out"] == pytest.approx(2 * 7 / 8 * 4e-4 + 15 * 1e-5)
    assert step["seconds"] == pytest.approx(0.05 + step["sticks_out"])
    assert [each["ranks"] for each in found["scaling"]] == [8, 8]  # as many as were looked at
    assert found["sources"]["computation"] == "given"
    assert found["sources"]["links within a host"].endswith("given; latency given")
    assert planned(capsys, *options)["steps"]["data parallel"]["seconds"] is None
    slow = planned(capsys, *options, "--step-seconds", "0.01")
    assert [each["ranks"] for each in slow["scaling"]] == [2, 5]


def test_operations_and_a_rate_give_seconds(capsys):
    options = ["--model", f"{__name__}:blocks", "--input", "16x32", "--batch", "32"]
    found = planned(capsys, *options, "--bandwidth", "pcie4", "--flops", "0.001")
    own = found["footprint"]["passes"][1]
    assert own["samples"] == 4
    operations = own["forward"] + own["backward"]
    assert found["compute"]["seconds"] == pytest.approx(operations / 1e9)
    assert found["compute"]["backward"] == pytest.approx(own["backward"] / operations)
    assert found["sources"]["backward"] == "operations counted"


# -- the command --------------------------------------------------------------------------------

SMALL = ["--model", f"{__name__}:blocks", "--input", "16x32", "--batch", "8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --model --params is required"),
        (["--params", "0"], "expected a whole number of 1 or more, got '0'"),
        (["--params", "1.5"], "expected a whole number of 1 or more, got '1.5'"),
        (["--params", "many"], "expected a whole number of 1 or more, got 'many'"),
        (["--params", "9", "--gpu-memory", "80 apples"], "a size such as 80GB or 512MiB"),
        (["--params", "9", "--precision", "fp8"], "invalid choice: 'fp8'"),
        (["--params", "9", "--wire", "int7"], "expected one of fp32, bf16,"),
        (["--params", "9", "--wire", "int8:2"], "int8 takes no number, got 'int8:2'"),
        (["--params", "9", "--wire", "topk:all"], "expected a number behind topk:, got 'topk:all'"),
        (["--params", "9", "--wire", "topk:1.5"], "k: expected a fraction up to 1.0 or a whole"),
        (["--params", "9", "--wire", "lowrank:0"], "rank: expected 1 or more, got 0"),
        (["--params", "9", "--wire", "threshold"], "depends on the gradients' values"),
        (["--params", "9", "--bandwidth", "fast"], "expected GB/s, or one of nvlink-h100"),
        (["--params", "9", "--bandwidth", "-1"], "got '-1'"),
        (["--params", "9", "--backward-share", "1.5"], "between 0 and 1, got '1.5'"),
        (["--model", "a:b", "--input", "3,4"], "the shape of one sample"),
        (["--model", "a:b", "--input", "3x4:floaty"], "the shape of one sample"),
    ],
)
def test_options_that_cannot_be_read(capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        main(["plan", *options])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--params", "9", "--input", "3"], "--input: not with --params"),
        (["--params", "9", "--bandwidth", "1", "--flops", "1"], "--flops: not with --params"),
        (["--params", "9", "--step-seconds", "1"], "--step-seconds: not without --bandwidth"),
        (["--params", "9", "--activations", "1GB"], "--batch: needed with --activations"),
        (["--params", "9", "--wire", "lowrank:2"], "lowrank needs the parameters' shapes"),
        (["--params", "9", "--optimizer", "lion"], "expected sgd, momentum, adam, adamw or"),
        (["--params", "9", "--optimizer", "torch.optim:Lion"], "torch.optim:Lion"),
        (["--params", "9", "--optimizer", "torch.optim:Adafactor"], "without values"),
        (["--params", "9", "--ranks", "9", "--hosts", "1"], "expected 1 to 8 on 1 hosts"),
        (["--params", "9", "--ranks", "9", "--bandwidth", "1"], "--inter-bandwidth: needed with 2"),
        ([*SMALL[:4]], "--batch: needed with --model"),
        ([*SMALL[:5], "7"], "a sample for each of 8 ranks"),
        ([*SMALL[:2], "--batch", "8"], "--input: needed"),
        ([*SMALL, "--activations", "1GB"], "--activations: not with --model"),
        ([*SMALL, "--checkpoint", "Blok"], "classes are Block, LayerNorm, Linear, Sequential"),
        ([*SMALL[:3], "16x31", *SMALL[4:]], "it cannot be run: with fake tensors"),
        (["--model", "nowhere:net", *SMALL[2:]], "ModuleNotFoundError"),
        (["--model", f"{__name__}:RESNET", *SMALL[2:]], "expected a function or a class"),
        (["--model", "builtins:int", *SMALL[2:]], "to give a torch.nn.Module, got <class 'int'>"),
    ],
)
def test_options_that_do_not_fit_together(capsys, options, message):
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_torchvision_names(capsys, monkeypatch):
    options = ["--model", "small", *SMALL[2:]]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert main(["plan", *options]) == 2
    assert "torchvision's, which is not installed" in capsys.readouterr().err
    models = types.SimpleNamespace(
        list_models=lambda: ["small"], get_model=lambda name, weights: blocks()
    )
    torchvision = types.ModuleType("torchvision")
    torchvision.models, torchvision.__spec__ = models, types.SimpleNamespace(name="torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    assert planned(capsys, *options)["model"] == "small"
    assert main(["plan", "--model", "large", *SMALL[2:]]) == 2
    assert "expected module:function or a torchvision model, got 'large'" in capsys.readouterr().err


def test_picture(capsys, tmp_path, monkeypatch):
    path = tmp_path / "memory.png"
    said(capsys, "--params", "1e6", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", "--params", "1e6", "--png", str(path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_what_fits_is_said(capsys):
    words = said(capsys, "--params", "1e6", "--activations", "1MB", "--batch", "64", "--ranks", "2")
    assert "Data parallelism fits: 2 GPUs of 80.00 GB" in words
    words = said(
        *(capsys, "--params", "1e6", "--activations", "1MB", "--batch", "64", "--ranks", "2"),
        *("--gpu-memory", "24MB"),
    )
    assert "fits on 8 GPUs of 24.00 MB or more" in words and "--accumulation 4 or more" in words
    words = said(capsys, "--params", "1e6", "--gpu-memory", "10MB")
    assert "It fits where the ranks share the optimizer's state" in words
