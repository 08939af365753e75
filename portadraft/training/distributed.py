"""Several processes that train one drafter: who is who, sums over all of them, and one that speaks and writes.

Started by `torchrun` or `accelerate launch`, which tell each process its number in the environment
(RANK, WORLD_SIZE, LOCAL_RANK); a script of the caller's own may have joined them already. All read
and write the same work folder, so they stand on one machine or on a shared file system.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from portadraft.errors import InvalidArgument, PortadraftError

T = TypeVar("T")

PATIENCE = timedelta(hours=6)
"""How long a process waits for the others: one may still be generating when the rest are done."""


@dataclass(frozen=True)
class Processes:
    """This process among all of them; alone unless told otherwise.

    rank: its number, of `world`. device: where it computes ("auto" where nothing was said).
    """

    rank: int = 0
    world: int = 1
    device: str = "auto"

    @property
    def main(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.world > 1:
            dist.barrier()

    def add(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place; every process gets the same bits."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def agree(self, value: Any) -> Any:
        """The main process's value (plain JSON) for all."""
        if self.world == 1:
            return value
        where = self._where()
        data = json.dumps(value).encode() if self.main else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=where)
        dist.broadcast(size, 0)
        buffer = torch.zeros(int(size), dtype=torch.uint8, device=where)
        if self.main:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return json.loads(bytes(buffer.cpu().tolist()))

    def lead(self, work: Callable[[], T]) -> T:
        """What the main process's work returns (plain JSON), for all; if it fails, all fail.

        Raises: what the work raises; in the other processes InvalidArgument with the same words.
        """
        if self.world == 1:
            return work()
        if not self.main:
            failed, result = self.agree(None)
            if failed is not None:
                raise InvalidArgument(failed)
            return cast(T, result)
        try:
            result = work()
        except (PortadraftError, OSError) as error:
            self.agree([str(error), None])
            raise
        self.agree([None, result])
        return result

    def _where(self) -> str:
        return "cpu" if dist.get_backend() == "gloo" else self.device


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def join(device: str = "auto") -> Iterator[Processes]:
    """Join the other processes, if there are any, and leave them at the end.

    device: "auto" and "cuda" become this process's own GPU.

    Raises: InvalidArgument where there are more processes than GPUs, or the device serves only one.
    """
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), _own(device))
        return
    if not launched():
        yield Processes(device=device)
        return
    device = _own(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def _own(device: str) -> str:
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not wants_cpu else "cpu"
    if device == "cpu":
        return device
    if device.partition(":")[0] != "cuda":
        raise InvalidArgument(f"device={device!r}: several processes train on cuda or cpu only; start one process")
    if device == "cuda":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise InvalidArgument(
                f"device='cuda': process {local} of this machine has no GPU of its own ({count} found); "
                "start as many processes as there are GPUs"
            )
        torch.cuda.set_device(local)
        return f"cuda:{local}"
    raise InvalidArgument(f"device={device!r}: each process takes a GPU of its own; pass 'cuda' or 'auto'")
