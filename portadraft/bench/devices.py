"""What a device does with models of real size: random weights made there, so that nothing is downloaded.

    python -m portadraft.bench.devices              # a GPU: llamas of 7B, 1B and 33B shape
    python -m portadraft.bench.devices --toy        # the same code at toy size, anywhere

Speed does not depend on what weights say, so random ones will do; only the embedding and the head
are made to agree on the next token clearly, so that rounding does not lead plain and drafted
decoding apart and acceptance is the oracle's. Sections stop starting when the time is up, and what was
left out is said. This module knows torch; `portadraft.bench.costs` measures models that exist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from portadraft.backends.torch.target import TorchTarget
from portadraft.bench.devices_models import SHAPES, TOYS, Shape, build, chain, drafter_for, traffic
from portadraft.bench.devices_table import show
from portadraft.core.decode import Decoder
from portadraft.core.drafter import Drafter
from portadraft.core.requests import Request
from portadraft.core.types import BeamShape
from portadraft.drafters.oracle import OracleDrafter

SLOTS = (1, 4, 8, 16, 32, 64, 128)
DRAFTS = ((1, 4), (4, 4), (8, 4), (16, 5), (32, 5))
STEPS = (BeamShape(1, 4), BeamShape(4, 4, 16), BeamShape(8, 4, 32), BeamShape(16, 5, 64))
BATCHES = (1, 4, 16, 80)
KEPT = 0.8
"""The probability with which the oracle keeps a true token."""
CONTEXT = 512


@dataclass
class Run:
    """One run's settings, its clock and what it found."""

    device: torch.device
    dtype: torch.dtype
    toy: bool
    seconds: float
    repeats: int
    started: float = field(default_factory=time.perf_counter)
    left_out: list[str] = field(default_factory=list)

    def late(self, what: str, needs: float = 0.0) -> bool:
        """Whether there is no time left for this section, which is then noted as left out."""
        late = time.perf_counter() - self.started + needs > self.seconds
        if late:
            self.left_out.append(f"{what}: no time left")
        return late

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def time(self, function: Callable[[], Any], repeats: int | None = None) -> float:
        """The median of a function's milliseconds, after three uses (the second may capture it)."""
        for _ in range(3):
            function()
        times = []
        for _ in range(repeats or self.repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1000)
        return statistics.median(times)


def bandwidth(run: Run) -> float:
    """The most bytes per second that reading, or copying, large memory reaches here."""
    size = (1 << 22) if run.toy else (1 << 31)
    x = torch.ones(size // 4, dtype=torch.float32, device=run.device)
    y = torch.empty_like(x)
    copying = 2 * size / run.time(lambda: y.copy_(x))
    reading = size / run.time(lambda: x.sum())
    return max(copying, reading) * 1000


def passes(run: Run, target: TorchTarget, batch: int, slots: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of a verification pass by its slots, and as a ratio to the first."""
    rows: list[dict[str, Any]] = []
    with target.ops.no_grad():
        target.admit([prompt(run, target, b) for b in range(batch)], reserve=max(slots) + 8)
        try:
            for n in slots:
                packed = chain(target.ops, batch, n)
                latency = run.time(lambda packed=packed: target.verify(packed))  # type: ignore[misc]
                rows.append({"batch": batch, "slots": n, "latency_ms": latency})
        finally:
            while target.lengths:
                target.release(0)
    for row in rows:
        row["ratio"] = row["latency_ms"] / rows[0]["latency_ms"]
    return rows


def drafts(run: Run, target: TorchTarget, plain_ms: float) -> list[dict[str, Any]]:
    """Milliseconds of drafting by width and length, and as a part of a plain step."""
    drafter = drafter_for(target)
    ops, facts = target.ops, target.facts
    roots = ops.asarray([3])
    features = torch.ones((1, facts.hidden_size), dtype=run.dtype, device=run.device)
    rows = []
    with ops.no_grad():
        for width, length in DRAFTS[:2] if run.toy else DRAFTS:
            shape = BeamShape(width, length)
            latency = run.time(lambda shape=shape: drafter.draft(roots, features, shape))  # type: ignore[misc]
            rows.append({"width": width, "length": length, "latency_ms": latency, "ratio": latency / plain_ms})
    return rows


def steps(run: Run, target: TorchTarget, batch: int, shapes: Sequence[BeamShape], tokens: int) -> list[dict[str, Any]]:
    """Whole steps, plain and with an oracle: their cost, and what they bring at the oracle's acceptance.

    `ratio` is also the tokens per step at which a shape is as fast as plain decoding;
    `break_even_acceptance` is the acceptance of a single token that gives them, None where none
    does; `over_chain` is how many times the tokens per step of the first shape it must bring to
    be worth what it costs more.
    """
    prompts = [tuple(prompt(run, target, b)) for b in range(batch)]
    margin = 8 + max(shape.length for shape in shapes)
    plain = decode(run, target, None, None, prompts, tokens + margin)
    answers = dict(zip(prompts, plain["ids"], strict=True))
    rows = [{"batch": batch, "shape": "plain", "slots": 1, "step_ms": plain["step_ms"], "ratio": 1.0}]
    first = 0.0
    for shape in shapes:
        oracle = OracleDrafter(target.ops, answers, target.facts.vocabulary_size, KEPT)
        got = decode(run, target, oracle, shape, prompts, tokens)
        first = first or got["step_ms"]
        ratio = got["step_ms"] / plain["step_ms"]
        rows.append(
            {
                "batch": batch,
                "shape": f"{shape.width}x{shape.length}",
                "slots": shape.slots(),
                "step_ms": got["step_ms"],
                "ratio": ratio,
                "tokens_per_step": got["tokens_per_step"],
                "speedup": got["tokens_per_step"] / ratio,
                "break_even_acceptance": acceptance_for(ratio, shape.length),
                "over_chain": got["step_ms"] / first,
                "same_as_plain": all(a[: len(b)] == b for a, b in zip(plain["ids"], got["ids"], strict=True)),
            }
        )
    return rows


def decode(
    run: Run,
    target: TorchTarget,
    drafter: Drafter | None,
    shape: BeamShape | None,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
) -> dict[str, Any]:
    """Decode once to the end; the median milliseconds of its steps with all rows alive (captures fall out)."""
    decoder = Decoder(target, drafter, shape)
    ids: list[list[int]] = [[] for _ in prompts]
    times, given = [], []
    try:
        for progress in decoder.admit([Request(p, tokens) for p in prompts]):
            ids[progress.key].extend(progress.tokens)
        while decoder.live:
            whole = decoder.live == len(prompts)
            run.synchronize()
            start = time.perf_counter()
            news = decoder.step()
            run.synchronize()
            if whole:
                times.append((time.perf_counter() - start) * 1000)
                given += [n.accepted + 1 for n in news if n.accepted is not None]
            for progress in news:
                ids[progress.key].extend(progress.tokens)
    finally:
        decoder.close()
    return {
        "step_ms": statistics.median(times),
        "tokens_per_step": statistics.mean(given) if given else 1.0,
        "ids": ids,
    }


def acceptance_for(tokens_per_step: float, length: int) -> float | None:
    """The acceptance a of each drafted token at which 1 + a + … + a^L is that many; None where none is enough."""
    if tokens_per_step > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(length + 1)) < tokens_per_step:
            low = middle
        else:
            high = middle
    return high


def prompt(run: Run, target: TorchTarget, row: int) -> list[int]:
    """The ids of a row's prompt; rows differ, and in length as well."""
    length = (24 if run.toy else CONTEXT) - row % 7
    return [3 + (row * 31 + i * 17) % (target.facts.vocabulary_size - 3) for i in range(length)]


def kernels(run: Run, target: TorchTarget) -> list[dict[str, Any]]:
    """Where the time of a plain pass goes on the device, by kind of kernel; empty without a CUDA device."""
    if run.device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with target.ops.no_grad():
        target.admit([prompt(run, target, 0)], reserve=16)
        packed = chain(target.ops, 1, 1)
        for _ in range(3):
            target.verify(packed)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            for _ in range(3):
                target.verify(packed)
            run.synchronize()
        target.release(0)
    kinds: dict[str, list[float]] = {}
    for event in trace.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            kind = next((k for k, words in _KINDS.items() if any(word in name for word in words)), "elementwise, other")
            kinds.setdefault(kind, []).append(event.device_time)
    return [
        {"kernels": kind, "count": round(len(times) / 3), "latency_ms": sum(times) / 3000}
        for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1]))
    ]


_KINDS = {
    "matrix products": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "splitk", "wgrad", "dot_kernel"),
    "attention": ("fmha", "flash", "attention", "softmax"),
    "copies": ("memcpy", "memset", "copy"),
}


def one_model(run: Run, shape: Shape, speed: float) -> dict[str, Any]:
    """All sections of one model's shape; `left_out` of the run names what there was no time or memory for."""
    model = build(shape, run.device, run.dtype)
    target = TorchTarget(model)
    slots = SLOTS[:3] if run.toy else SLOTS
    out: dict[str, Any] = {"model": shape.name, "parameters": sum(p.numel() for p in model.parameters())}
    length = len(prompt(run, target, 0))
    out["passes"] = passes(run, target, 1, slots)
    plain_ms = out["passes"][0]["latency_ms"]
    limit_ms = traffic(model, length, target.facts.cache_bytes_per_token) / speed * 1000
    out["plain"] = {"latency_ms": plain_ms, "limit_ms": limit_ms, "share_of_bandwidth": limit_ms / plain_ms}
    if run.device.type == "cuda":
        out["plain"]["without_graphs_ms"] = passes(run, TorchTarget(model, graphs=None), 1, (1,))[0]["latency_ms"]
    out["kernels"] = kernels(run, target)
    out["steps"] = steps(run, target, 1, STEPS[:2] if run.toy else STEPS, 24 if run.toy else 64)
    if not run.late(f"{shape.name}: drafting"):
        out["drafts"] = drafts(run, target, plain_ms)
    out["batches"] = []
    for batch in () if not shape.batches else (2,) if run.toy else BATCHES[1:]:
        if run.late(f"{shape.name}: batch {batch}"):
            continue
        try:
            out["passes"] += passes(run, target, batch, slots[:2] if run.toy else (1, 16, 64))
            out["batches"] += steps(run, target, batch, STEPS[1:2], 12 if run.toy else 32)
        except torch.OutOfMemoryError:
            run.left_out.append(f"{shape.name}: batch {batch}: not enough memory")
            while target.lengths:
                target.release(0)
    out["notes"] = list(target.notes)
    return out


def measure(device: str = "cuda", *, toy: bool = False, seconds: float = 240.0, repeats: int = 15) -> dict[str, Any]:
    """All that a device check measures, as plain data."""
    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float16 if where.type == "mps" else torch.float32
    run = Run(where, dtype, toy, seconds, 3 if toy else repeats)
    speed = bandwidth(run)
    models = []
    for shape in TOYS if toy else SHAPES:
        if run.late(shape.name, shape.build_seconds):
            continue
        need = shape.parameters() * dtype.itemsize * 1.15
        if where.type == "cuda" and need > torch.cuda.mem_get_info(where)[0]:
            run.left_out.append(f"{shape.name}: needs {need / 2**30:.0f} GiB of free memory")
            continue
        models.append(one_model(run, shape, speed))
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "bench": "devices",
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "toy": toy,
        "bandwidth_gb_per_s": speed / 1e9,
        "models": models,
        "left_out": run.left_out,
        "seconds": time.perf_counter() - run.started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables, and one JSON document as the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m portadraft.bench.devices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--toy", action="store_true", help="tiny models, for a test of the script itself")
    parser.add_argument("--device", default=None, help="of torch; default: cuda, else mps, else the CPU (at toy size)")
    parser.add_argument("--seconds", type=float, default=240.0, help="no section starts after so long")
    parser.add_argument("--suite", default="", help="how the test suites went, for the report")
    parser.add_argument("--repeats", type=int, default=15, help="of each timing")
    given = parser.parse_args(arguments)
    from portadraft.backends.torch.devices import choose_device

    device = choose_device(given.device or "auto").value
    if device == "cpu" and not given.toy:
        print("no GPU that torch can use: measuring at toy size, on the CPU", file=sys.stderr)
    report = measure(device, toy=given.toy or device == "cpu", seconds=given.seconds, repeats=given.repeats)
    report["suite"] = given.suite
    show(report)
    print(json.dumps(rounded(report)))
    return 0


def rounded(value: Any) -> Any:
    """Floats with four significant digits, for JSON."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
