"""A rank of a data-parallel training with torch over gloo: training.py RANK SIZE STEPS MASTER FILE

Appends `step N loss HEX` to FILE for each step, the loss with all its bits, and then `done`. Steps have pauses as long
as there is a file `slowly` beside it, so that the training lasts as long as it is to be dumped.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

rank, size, steps = map(int, sys.argv[1:4])
master, file = sys.argv[4:]
slowly = Path(file).parent / "slowly"
os.environ.update(MASTER_ADDR=master, MASTER_PORT="29500", USE_LIBUV="0", OMP_NUM_THREADS="1")

import torch  # noqa: E402 - which reads these when it is loaded
import torch.distributed as dist  # noqa: E402


def say(text: str) -> None:
    with open(file, "a") as out:
        out.write(text + "\n")


torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(minutes=10))
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
generator = torch.Generator().manual_seed(100 + rank)
for step in range(steps):
    given = torch.randn(256, 64, generator=generator)
    wanted = given[:, :8].prod(1, keepdim=True)
    loss = ((model(given) - wanted) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    say(f"step {step} loss {float(total).hex()}")
    if slowly.exists():
        time.sleep(0.2)
dist.barrier()
say("done")
time.sleep(3600)  # so that no rank misses another one
