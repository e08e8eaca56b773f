"""The head of a language model split over processes: each has some of the vocabulary, none ever has all logits.

A small model predicts a token from the two before it. Its last layer is split by classes (`ColwiseParallel`). PyTorch
would gather the logits to sum their exponentials; fused, processes exchange two or three numbers for each token. It is
trained split and fused, plain in one process, and in float64, which shows how far rounding alone moves float32 losses.

    python examples/vocab_parallel.py [--steps N]                             two processes on the CPU
    torchrun --nproc-per-node 2 examples/vocab_parallel.py [--steps N]       a process for each GPU, or on the CPU
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from common import compare_losses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import cupyfuse.torch

VOCABULARY, FEATURES, TOKENS = 501, 24, 256  # 251 classes in one process, 250 in the other


class LanguageModel(nn.Module):
    """From two tokens to the loss of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.hidden = nn.Linear(2 * FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, contexts: Any, labels: Any) -> Any:
        features = F.gelu(self.hidden(self.embedding(contexts).flatten(1)))
        return F.cross_entropy(self.head(features), labels)


def draw_texts(device: str, batches: int = 16) -> list[torch.Tensor]:
    """Draw texts, the same in all processes: each token is one of three that may follow the one before it."""
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=generator)
    found = []
    for _ in range(batches):
        text = [0]
        for choice in torch.randint(3, (TOKENS - 1,), generator=generator).tolist():
            text.append(int(following[text[-1], choice]))
        found.append(torch.tensor(text, device=device))
    return found


def train(what: str, model: nn.Module, data: list[torch.Tensor], steps: int, mesh: Any = None) -> list[float]:
    """Train; return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens = data[step % len(data)]
        labels = tokens[2:] if mesh is None else distribute_tensor(tokens[2:], mesh, [Replicate()])
        loss = model(tokens.unfold(0, 3, 1)[:, :2], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss if mesh is None else loss.full_tensor()).detach())
        show_progress(what, step + 1, steps)
    return torch.stack(losses).tolist()


def show_progress(what: str, done: int, steps: int) -> None:
    """Draw a bar, in the first process and on a terminal."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        bar, end = "#" * (30 * done // steps), "\n" if done == steps else ""
        print(f"\r{what:<24} [{bar:<30}] {done}/{steps}", end=end, file=sys.stderr, flush=True)


def work(steps: int) -> None:
    """Train in this process, together with the others, and end it."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = "cuda" if torch.cuda.device_count() > local else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)  # on matrices as small as these, threads wait for each other
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (count,))

    torch.manual_seed(0)
    plain = LanguageModel().to(device)
    exact = copy.deepcopy(plain).double()
    # The logits stay split: the two options of ColwiseParallel, and the one line after it.
    split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(copy.deepcopy(plain), mesh, {"head": split})
    model = cupyfuse.torch.fuse(model, only_gains=False)  # so that chains as small as these run fused, too

    data = draw_texts(device)
    exact_losses = train("float64", exact, data, steps)
    plain_losses = train("float32, one process", plain, data, steps)
    fused_losses = train(f"split over {count}, fused", model, data, steps, mesh)
    if rank == 0:
        print(model.explain())
        print()
        compare_losses(plain_losses, fused_losses, exact_losses)
        logits, states = (4 * n * (TOKENS - 2) for n in (-(-VOCABULARY // count), 3))
        print(f"\na process sends {states / 1e3:.1f} kB a step for the loss; its logits would be {logits / 1e3:.0f} kB")
    dist.destroy_process_group()
    # PyTorch's DTensors keep gloo's threads to the end of the process, which aborts if one of them still frees a tensor
    # when Python has ended (pytorch/pytorch#179291). All is printed: end without them.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def spawn(count: int) -> int:
    """Start this script in several processes, and return 0 where all of them went well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *sys.argv]
    started = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(count)]
    return max(abs(process.wait()) for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(spawn(2))
    work(given.steps)


if __name__ == "__main__":
    main()
