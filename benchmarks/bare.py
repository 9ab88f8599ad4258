"""The bare loop: FedAvg or SCAFFOLD written by hand for one workload, without a framework, as a baseline for speed.

Two processes with one thread each; float images in shared memory, index slices instead of a DataLoader, one net per
process, weights loaded for each client, a weighted sum in each process, plain eager steps with torch.optim.SGD.
SCAFFOLD's control variates of all clients are rows of one matrix in shared memory; option II, equal weights.
"""

from __future__ import annotations

import ctypes

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from workloads import Workload, cohort, images


def lenet() -> nn.Module:
    """The net "lenet" of the workloads."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mcmahan() -> nn.Module:
    """The net "mcmahan" of the workloads: the CNN of the FedAvg paper."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


NETS = {"lenet": lenet, "mcmahan": mcmahan}


def work(pipe, workload: Workload, x: Tensor, y: Tensor, shared: Tensor, total: Tensor, controls: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Run a worker process: train the clients that arrive over the pipe, or evaluate; None ends it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, 1 << 30)
    torch.set_num_threads(1)
    net = NETS[workload.net]()
    parameters = list(net.parameters())
    sizes = [p.numel() for p in parameters]
    loss = nn.CrossEntropyLoss()
    while (clients := pipe.recv()) is not None:
        if clients == "evaluate":
            with torch.no_grad():
                load(parameters, sizes, shared)
                right = sum(int((net(x[i : i + 500]).argmax(1) == y[i : i + 500]).sum()) for i in range(0, 5000, 500))
            pipe.send(right)
            continue
        total.zero_()
        for client in clients:
            load(parameters, sizes, shared)
            descent = torch.optim.SGD(parameters, lr=workload.lr, momentum=workload.momentum)
            start = client * workload.samples
            tilt = controls[-1] - controls[client] if len(controls) else None
            for _ in range(workload.epochs):
                order = torch.randperm(workload.samples) + start
                for index in order.split(workload.batch):
                    descent.zero_grad()
                    loss(net(x[index]), y[index]).backward()
                    if tilt is not None:
                        for p, values in zip(parameters, tilt.split(sizes), strict=True):
                            p.grad.add_(values.view_as(p))
                    descent.step()
            trained = torch.cat([p.detach().view(-1) for p in parameters])
            total[: len(shared)].add_(trained, alpha=workload.samples)
            if len(controls):
                steps = workload.epochs * -(-workload.samples // workload.batch)
                change = (shared - trained) / (steps * workload.lr) - controls[-1]
                controls[client].add_(change)
                total[len(shared) :].add_(change)
        pipe.send("done")


def load(parameters: list[nn.Parameter], sizes: list[int], flat: Tensor) -> None:
    """Copy a flat vector into parameters of these sizes."""
    with torch.no_grad():
        for p, values in zip(parameters, flat.split(sizes), strict=True):
            p.copy_(values.view_as(p))


class Bare:
    """The bare loop on a workload; has the interface of `Ours`."""

    def __init__(self, workload: Workload, processes: int = 2) -> None:
        self.workload = workload
        context = mp.get_context("spawn")
        raw, labels = images(workload)
        x = ((torch.from_numpy(raw).float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous().share_memory_()
        y = torch.from_numpy(labels).share_memory_()
        net = NETS[workload.net]()
        self.shared = torch.cat([p.detach().view(-1) for p in net.parameters()]).share_memory_()
        rows = workload.clients + 1 if workload.method == "scaffold" else 0  # the last is the server's
        self.controls = torch.zeros(rows, len(self.shared)).share_memory_()
        size = len(self.shared) * (2 if rows else 1)  # the sum of models, and of changes to control variates
        self.totals = [torch.zeros(size).share_memory_() for _ in range(processes)]
        self.pipes, self.processes = [], []
        for total in self.totals:
            mine, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, workload, x, y, self.shared, total, self.controls), daemon=True
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.round()

    def round(self, number: int = 0) -> None:
        """Train one round; `number` determines the cohort."""
        clients = cohort(self.workload, number)
        for i, pipe in enumerate(self.pipes):
            pipe.send(clients[i :: len(self.pipes)])
        for pipe in self.pipes:
            pipe.recv()
        model, changes = sum(self.totals).split([len(self.shared), len(self.totals[0]) - len(self.shared)])
        self.shared.copy_(model / (len(clients) * self.workload.samples))
        if len(self.controls):
            self.controls[-1].add_(changes / self.workload.clients)

    def evaluate(self) -> None:
        """Evaluate the model on 10,000 samples, half of them in each process."""
        for pipe in self.pipes:
            pipe.send("evaluate")
        for pipe in self.pipes:
            pipe.recv()

    def pids(self) -> list[int]:
        """The worker processes."""
        return [p.pid for p in self.processes if p.pid]

    def close(self) -> None:
        """End the worker processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()
