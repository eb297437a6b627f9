"""torchrun --standalone --nproc-per-node 2 examples/cluster_digits_cupy.py

Collectives on CuPy's arrays, without a model or DDP: k-means, of which each rank has a part of the
samples. Without a GPU the arrays are NumPy's.

Prints a hash of the centres, the same on any number of ranks: the pixels are whole numbers, whose
sums in float64 are exact.
"""

import argparse
import hashlib
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import fastreduce

parser = argparse.ArgumentParser()
parser.add_argument("--clusters", type=int, default=10)
parser.add_argument("--rounds", type=int, default=20)
options = parser.parse_args()

if torch.cuda.is_available():
    import cupy as xp

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    xp.cuda.Device(local_rank).use()
    kind = "CuPy"
else:
    xp, kind = np, "NumPy (no GPU)"
dist.init_process_group()  # gloo, and NCCL where there is a GPU
rank, ranks = dist.get_rank(), dist.get_world_size()
comm = fastreduce.Communicator()

pixels, labels = load_digits(return_X_y=True)
samples, digits = xp.asarray(pixels[rank::ranks]), xp.asarray(labels[rank::ranks])

centres = xp.zeros((options.clusters, 64))
if rank == 0:
    chosen = np.random.default_rng(0).choice(len(pixels), options.clusters, replace=False)
    centres = xp.asarray(pixels[chosen])
comm.broadcast(centres)
for _ in range(options.rounds):
    nearest = ((samples[:, None] - centres) ** 2).sum(2).argmin(1)
    belongs = xp.eye(options.clusters)[nearest]  # (samples, clusters)
    sums, counts = belongs.T @ samples, belongs.sum(0)[:, None]
    comm.all_reduce(sums, "sum")
    comm.all_reduce(counts, "sum")
    centres = xp.where(counts > 0, sums / xp.maximum(counts, 1), centres)

found = xp.zeros((options.clusters, 10), dtype=xp.int64)  # how many of each digit a cluster has
for cluster in range(options.clusters):
    found[cluster] = xp.bincount(digits[nearest == cluster], minlength=10)
comm.all_reduce(found, "sum")
if rank == 0:
    usual = int(found.max(1).sum()) / len(pixels)
    bits = hashlib.sha256(centres.tobytes()).hexdigest()[:16]
    print(f"{kind}, {ranks} ranks: {usual:.1%} are of their cluster's usual digit, centres {bits}")
comm.close()
dist.destroy_process_group()
