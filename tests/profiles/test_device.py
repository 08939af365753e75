"""One device, one name, whoever reports it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portadraft.backends import REGISTRY
from portadraft.profiles.device import canonical_name, family, nominal_memory_gb
from portadraft.profiles.machine import this_machine, this_software, usable_cores

# canonical name: what drivers, tools and people call it
NAMES = {
    "NVIDIA H100 SXM": ("NVIDIA H100 80GB HBM3", "H100 SXM5", "H100-SXM5-80GB", "NVIDIA H100 SXM5 80GB"),
    "NVIDIA H100 PCIe": ("NVIDIA H100 PCIe", "H100 PCIe", "NVIDIA H100 80GB PCIe"),
    "NVIDIA H100 NVL": ("NVIDIA H100 NVL",),
    "NVIDIA H100 SXM MIG 1g.10gb": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb",),
    "NVIDIA H200 SXM": ("NVIDIA H200", "NVIDIA H200 SXM"),
    "NVIDIA H200 NVL": ("NVIDIA H200 NVL",),
    "NVIDIA GH200": ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
    "NVIDIA A100 SXM": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB", "A100-SXM4-40GB"),
    "NVIDIA A100 PCIe": ("A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB"),
    "NVIDIA A100 SXM MIG 3g.20gb": ("NVIDIA A100-SXM4-40GB MIG 3g.20gb",),
    "NVIDIA V100 SXM": ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
    "NVIDIA T4": ("Tesla T4", "NVIDIA T4", "T4"),
    "NVIDIA T4 vGPU 16Q": ("GRID T4-16Q",),
    "NVIDIA L4": ("NVIDIA L4", "L4"),
    "NVIDIA L40S": ("NVIDIA L40S",),
    "NVIDIA A10G": ("NVIDIA A10G", "A10G"),
    "NVIDIA RTX 4090": ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090", "RTX 4090"),
    "NVIDIA RTX 4090 Laptop": ("NVIDIA GeForce RTX 4090 Laptop GPU",),
    "NVIDIA RTX 2080 Max-Q": ("NVIDIA GeForce RTX 2080 with Max-Q Design",),
    "NVIDIA RTX 2080 Ti": ("NVIDIA GeForce RTX 2080 Ti",),
    "NVIDIA RTX 4070 Ti Super": ("NVIDIA GeForce RTX 4070 Ti SUPER",),
    "NVIDIA RTX 3060": ("NVIDIA GeForce RTX 3060 12GB", "NVIDIA GeForce RTX 3060"),
    "NVIDIA RTX A6000": ("NVIDIA RTX A6000", "RTX A6000"),
    "NVIDIA RTX 6000": ("Quadro RTX 6000",),
    "NVIDIA RTX 6000 Ada": ("NVIDIA RTX 6000 Ada Generation",),
    "Apple M1 Max": ("Apple M1 Max", "m1-max", "M1 Max"),
    "Apple M2 Ultra": ("Apple M2 Ultra", "M2-Ultra"),
    "Apple M2": ("Apple M2", "m2"),
    "Apple M4 Pro": ("Apple M4 Pro",),
    "AMD Instinct MI300X": ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    "AMD Radeon RX 7900 XTX": ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
    "Intel Xeon Platinum 8375C": ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz",),
    "Intel Core i7-1360P": ("13th Gen Intel(R) Core(TM) i7-1360P",),
    "Intel Core i7-8700K": ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "Intel(R) Core(TM) i7-8700K CPU @ 4.20GHz"),
    "AMD EPYC 7763": ("AMD EPYC 7763 64-Core Processor",),
    "AMD Ryzen 9 5950X": ("AMD Ryzen 9 5950X 16-Core Processor",),
    "AMD Ryzen 7 PRO 5850U": ("AMD Ryzen 7 PRO 5850U with Radeon Graphics",),
    "AMD Ryzen 7 8845HS": ("AMD Ryzen 7 8845HS w/ Radeon 780M Graphics",),
}


@pytest.mark.parametrize(("name", "reported"), [(name, one) for name, all_ in NAMES.items() for one in all_])
def test_canonical_name(name: str, reported: str) -> None:
    assert canonical_name(reported) == name
    assert canonical_name(f"  {reported} ") == name


@pytest.mark.parametrize("name", NAMES)
def test_a_canonical_name_stays(name: str) -> None:
    assert canonical_name(name) == name


@given(st.text(max_size=300))
def test_any_text(reported: str) -> None:
    name = canonical_name(reported)
    assert 0 < len(name) <= 120
    assert name.isprintable()
    assert family(name) is None or isinstance(family(name), str)


@pytest.mark.parametrize(
    ("gib", "nominal"),
    [
        *((79.1, 80), (39.4, 40), (22.0, 24), (44.5, 48), (14.6, 16), (139.8, 141), (178.4, 180), (10.9, 11)),
        *((11.8, 12), (31.2, 32), (125.6, 128), (503.4, 512), (1007.0, 1024), (1511.0, 1536), (0.3, 1)),
    ],
)
def test_memory(gib: float, nominal: int) -> None:
    assert nominal_memory_gb(gib * 2**30) == nominal
    assert nominal_memory_gb(nominal * 2**30) == nominal


def test_generations() -> None:
    assert family("NVIDIA H100 SXM") == family("NVIDIA H200 SXM") == family("NVIDIA H100 PCIe")
    assert family("NVIDIA A100 SXM") != family("NVIDIA RTX 3090")
    assert family("Apple M2") == family("Apple M2 Ultra") != family("Apple M1 Max")
    assert family("NVIDIA A100 SXM MIG 3g.20gb") is None
    assert family("NVIDIA T4 vGPU 16Q") is None
    assert family("something") is None


@pytest.mark.parametrize("backend", REGISTRY)
def test_this_machine(backend: str) -> None:
    if missing := REGISTRY[backend].missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    machine = this_machine(backend, "cpu")
    assert machine.kind == "cpu"
    assert machine.name not in ("", "unknown")
    assert machine.cores == usable_cores()
    assert machine.memory_gb is not None and machine.memory_gb >= 1
    software = this_software(backend)
    assert software.backend == backend
    assert software.versions
