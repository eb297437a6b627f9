"""torchrun --standalone --nproc-per-node 2 examples/train_digits_any_ranks.py

Prints the same hash of the parameters on 1, 2, 4 and 8 ranks, with dropout and noise on the images:
whatever is random is drawn anew for each logical shard, from its step and its number.
"""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

SHARDS, PER_SHARD = 8, 12

dist.init_process_group("gloo")
torch.set_num_threads(1)  # the number of threads can change the order of sums
torch.manual_seed(0)

pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = pixels.float() / 16
train, test = torch.randperm(len(labels)).split([1437, 360])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
ddp = DistributedDataParallel(model)
state = fastreduce.attach(ddp)
optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)
for step in range(200):
    # The order of the data: the same global batch on every rank, cut into shards.
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(step))
    parts = train[order[: SHARDS * PER_SHARD]].split(PER_SHARD)
    optimizer.zero_grad()
    for shard in state.shards(SHARDS):  # those of this rank
        # Dropout draws from the default generator, the noise from one of its own.
        torch.manual_seed(SHARDS * step + shard)
        own = torch.Generator().manual_seed(SHARDS * step + shard)
        x = images[parts[shard]]
        x = x + 0.05 * torch.randn(x.shape, generator=own)
        nn.functional.cross_entropy(ddp(x), labels[parts[shard]]).backward()
    optimizer.step()

if dist.get_rank() == 0:
    model.eval()
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"test accuracy {accuracy:.2%}, parameters {hashlib.sha256(bits).hexdigest()[:16]}")
state.close()
dist.destroy_process_group()
