"""What runs in the containers of run.py: each prints `count N checksum H` after every round of work on its GPUs.

programs.py hold GIB            bf16 weights on every GPU, summed up whole in every round; a counter on the GPU
programs.py zeros GIB           so much memory on a GPU and as much pinned on the host, most of it zero, summed up
programs.py odd PIECES          so many pieces of GPU memory of sizes that are no multiples of 2 MiB, each summed up
programs.py pinned GIB          so much pinned memory of the host that no packer makes smaller, and 1 GiB on a GPU
programs.py pool MIB            8 threads that use a pool (cudaMallocAsync) which keeps so much; 0: gives all back
programs.py train STEPS         a transformer with AdamW; prints each step's loss, bit by bit, as its checksum
programs.py lora GIB            fine-tuning of frozen bf16 weights by small adapters with AdamW; losses as `train`
programs.py nccl GIB            one rank a GPU, all-reduce over sockets in every round
programs.py ranks GIB           one process a GPU that holds weights and sums them up, none knows of another
programs.py ddp STEPS BACKEND RANK ADDRESS [PAUSE_S [RANKS]]   one of two ranks, or more, in a container each, rank 0 at
                                ADDRESS; losses as `train`
programs.py host GIB [GIB]      memory of the host, and of the GPU, summed up whole in every round; says when it stood
"""

import hashlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import torch

PAUSE_S = 0.02
# A process beside it, which stands still with it, and is not kept busy.
TICKER = """
import time
last = time.monotonic()
while True:
    time.sleep(0.002)
    now = time.monotonic()
    if now - last > 0.02:
        print("stood", round(now - last, 4), flush=True)
    last = now
"""


def say(count: int, checksum: str) -> None:
    print(f"count {count} checksum {checksum}", flush=True)


def hold(gib: float) -> None:
    torch.manual_seed(0)
    weights = []
    for number in range(torch.cuda.device_count()):
        part = torch.empty(int(gib * 2**30 / 2), dtype=torch.bfloat16, device=f"cuda:{number}")
        for piece in part.split(1 << 28):
            piece.normal_(0, 0.02)
        weights.append(part.view(torch.int64))
    counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    while True:
        counter += 1
        digest = hashlib.sha256()
        for part in weights:
            for piece in part.split(1 << 28):  # a sum over all of it, weighted so that order counts
                digest.update(struct.pack("<q", int((piece[::2] - 3 * piece[1::2]).sum())))
        say(int(counter), digest.hexdigest()[:16])
        time.sleep(PAUSE_S)


def zeros(gib: float) -> None:
    size, apart = int(gib * 2**30 / 8), 1 << 23
    parts = [torch.zeros(size, dtype=torch.int64, device="cuda"), torch.zeros(size, dtype=torch.int64, pin_memory=True)]
    for part in parts:
        part[::apart] = torch.arange(1, len(part[::apart]) + 1, device=part.device)
    count = 0
    while True:
        count += 1
        digest = hashlib.sha256()
        for part in parts:
            digest.update(struct.pack("<q", int(part.sum())))
            digest.update(part[::apart].contiguous().cpu().numpy())
        say(count, digest.hexdigest()[:16])
        time.sleep(PAUSE_S)


def odd(pieces: int) -> None:
    import ctypes

    torch.zeros(1, device="cuda")  # makes the context
    cuda, held = ctypes.CDLL("libcuda.so.1"), []
    for number in range(pieces):
        size = (9 << 18, (1 << 20) + 4096, (100 << 18) + (1 << 17), 1 << 18)[number % 4]
        pointer = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        assert cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(number % 255 + 1), ctypes.c_size_t(size)) == 0
        held.append((pointer, size))
    count = 0
    while True:
        count += 1
        digest = hashlib.sha256()
        for pointer, size in held:
            content = (ctypes.c_char * size)()
            assert cuda.cuMemcpyDtoH_v2(content, pointer, ctypes.c_size_t(size)) == 0
            digest.update(content)
        say(count, digest.hexdigest()[:16])
        time.sleep(PAUSE_S)


def pool(kept_bytes: int) -> None:
    import ctypes
    import threading

    weights = torch.arange(1 << 24, device="cuda")
    torch.cuda.synchronize()
    cuda, held, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(held), 0) == 0
    threshold = ctypes.c_uint64(kept_bytes)
    assert cuda.cuMemPoolSetAttribute(held, 4, ctypes.byref(threshold)) == 0  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

    def use() -> None:
        stream = ctypes.c_void_p()
        assert cuda.cuCtxSetCurrent(context) == 0
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
        while True:
            pointer = ctypes.c_uint64()
            assert cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(8 << 20), stream) == 0
            assert cuda.cuMemsetD8Async(pointer, ctypes.c_ubyte(1), ctypes.c_size_t(8 << 20), stream) == 0
            assert cuda.cuMemFreeAsync(pointer, stream) == 0

    for _ in range(8):
        threading.Thread(target=use, daemon=True).start()
    count = 0
    while True:
        count += 1
        say(count, str(int((weights[::2] - 3 * weights[1::2]).sum()) & 0xFFFF))
        time.sleep(PAUSE_S)


def pinned(gib: float) -> None:
    generator = torch.Generator().manual_seed(1)
    block = torch.empty(1 << 27, dtype=torch.int64).random_(generator=generator)
    parts = []
    for number in range(int(gib)):
        parts.append(torch.empty(1 << 27, dtype=torch.int64, pin_memory=True))
        parts[-1].copy_(block * (2 * number + 1) + number)
    parts.append(block.cuda())
    count = 0
    while True:
        count += 1
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.view(-1, 512).sum(1).cpu().numpy())
        say(count, digest.hexdigest()[:16])


def train(steps: int) -> None:
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 512), torch.nn.TransformerEncoder(layer, 6)).cuda()
    head = torch.nn.Linear(512, 1000).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-4)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 1000, (16, 128), generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(head(model(tokens)).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, struct.pack(">f", loss.item()).hex())
        time.sleep(PAUSE_S)
    time.sleep(3600)


def lora(gib: float) -> None:
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    width, rank = 8192, 16
    layers = max(1, int(gib * 2**30 / (2 * width * width)))
    weights = [torch.empty(width, width, dtype=torch.bfloat16, device="cuda").normal_(0, 0.01) for _ in range(layers)]
    down = [torch.nn.Parameter(torch.randn(rank, width, device="cuda") * 0.01) for _ in weights]
    up = [torch.nn.Parameter(torch.zeros(width, rank, device="cuda")) for _ in weights]
    optimizer = torch.optim.AdamW([*down, *up], lr=1e-3)
    step = 0
    while True:
        step += 1
        generator = torch.Generator().manual_seed(step)
        hidden = torch.randn(64, width, generator=generator).cuda()
        wanted = torch.randn(64, width, generator=generator).cuda()
        for base, a, b in zip(weights, down, up, strict=True):
            hidden = torch.nn.functional.gelu((hidden.bfloat16() @ base.T).float() + hidden @ a.T @ b.T) + hidden
        loss = torch.nn.functional.mse_loss(hidden, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, struct.pack(">f", loss.item()).hex())
        time.sleep(PAUSE_S)


def nccl_rank(rank: int, world: int, gib: float, _pipes: object) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    weights = torch.empty(int(gib * 2**30 / 2), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    ones = torch.ones(1 << 20, device="cuda")
    count = 0
    while True:
        count += 1
        ones.fill_(count)
        dist.all_reduce(ones)
        assert float(ones[0]) == count * world
        checksum = int(weights.view(torch.int64).sum())
        if rank == 0:
            say(count, f"{checksum & 0xFFFFFFFFFFFFFFFF:016x}")
        time.sleep(PAUSE_S)


def ddp(steps: int, backend: str, rank: int, address: str, pause_s: float, ranks: int) -> None:
    import torch.distributed as dist

    # To NCCL each container is a host: it refuses two ranks of one host on one GPU.
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="29517", NCCL_HOSTID=str(rank))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(ranks * step + rank)
        given = torch.randn(64, 512, generator=generator).cuda()
        loss = torch.nn.functional.mse_loss(model(given), given.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, struct.pack(">f", loss.item()).hex())
        time.sleep(pause_s)
    time.sleep(3600)


def host(gib: float, gpu_gib: float) -> None:
    subprocess.Popen([sys.executable, "-c", TICKER])
    block = torch.empty(1 << 27, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(1))
    parts = [block * (2 * number + 1) + number for number in range(int(gib))]  # nothing that a packer could save
    del block
    if gpu_gib:
        generator = torch.Generator("cuda").manual_seed(1)
        size = int(gpu_gib * 2**30 / 8)
        parts.append(torch.empty(size, dtype=torch.int64, device="cuda").random_(generator=generator))
    count = 0
    while True:
        count += 1
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.view(-1, 512).sum(1).cpu().numpy())  # a sum a page
        say(count, digest.hexdigest()[:16])


def lone_rank(rank: int, _world: int, gib: float, pipes: list[tuple[Any, Any]]) -> None:
    torch.manual_seed(rank)
    torch.cuda.set_device(rank)
    weights = torch.empty(int(gib * 2**30 / 2), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02).view(torch.int64)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    while True:
        counter += 1
        found = (int(counter), int(weights.sum()))
        if rank:
            pipes[rank][1].send(found)
            pipes[rank][1].recv()
        else:
            all_found = [found, *(pipe.recv() for pipe, _ in pipes[1:])]
            assert {count for count, _ in all_found} == {found[0]}
            say(found[0], hashlib.sha256(repr([digest for _, digest in all_found]).encode()).hexdigest()[:16])
            time.sleep(PAUSE_S)
            for pipe, _ in pipes[1:]:
                pipe.send(None)


def spawn(target: Callable[..., None], gib: float) -> None:
    """Run a process for each GPU, and report when one ends."""
    mp = get_context("spawn")
    world = torch.cuda.device_count()
    pipes = [mp.Pipe() for _ in range(world)]
    ranks = [mp.Process(target=target, args=(rank, world, gib, pipes)) for rank in range(world)]
    for process in ranks:
        process.start()
    while ranks:
        ended = wait([rank.sentinel for rank in ranks])
        print("ended:", [(rank.pid, rank.exitcode) for rank in ranks if rank.sentinel in ended], flush=True)
        ranks = [rank for rank in ranks if rank.sentinel not in ended]


PROGRAMS: dict[str, Callable[..., None]] = {
    "hold": hold,
    "zeros": zeros,
    "odd": lambda pieces: odd(int(pieces)),
    "pool": lambda mib: pool(int(mib) << 20),
    "pinned": pinned,
    "train": lambda steps: train(int(steps)),
    "lora": lora,
    "nccl": lambda gib: spawn(nccl_rank, gib),
    "ranks": lambda gib: spawn(lone_rank, gib),
    "ddp": lambda steps, backend, rank, address, pause_s=PAUSE_S, ranks=2: ddp(
        int(steps), backend, int(rank), address, float(pause_s), int(ranks)
    ),
    "host": lambda gib, gpu_gib=0: host(gib, float(gpu_gib)),
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](float(sys.argv[2]), *sys.argv[3:])
