"""One device, one name. Drivers, tools and versions name the same device differently; this module decides.

    NVIDIA H100 80GB HBM3, H100 SXM5 80GB             → NVIDIA H100 SXM
    NVIDIA A100-SXM4-40GB MIG 3g.20gb                 → NVIDIA A100 SXM MIG 3g.20gb
    NVIDIA GeForce RTX 4090 Laptop GPU                → NVIDIA RTX 4090 Laptop
    Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz     → Intel Xeon Platinum 8375C

Memory is a field of its own and leaves the name; what changes the speed (form factor, laptop and Max-Q variants, MIG
slices, virtual GPUs) stays. Pure functions of text; nothing is asked of the system here.
"""

from __future__ import annotations

import re

_MARKS = re.compile(r"\((?:R|TM|C)\)|[®™]", re.IGNORECASE)
_MEMORY = re.compile(r"\b\d+(?:\.\d+)?\s?G(?:i?B)\b", re.IGNORECASE)
_MIG = re.compile(r"\bMIG\s+(\d+g\.\d+gb(?:\+\S+)?)", re.IGNORECASE)
_NVIDIA = re.compile(
    r"^(?:NVIDIA|Tesla|GeForce|Quadro|GRID|TITAN)\b"
    r"|^(?:GB?|[ABHLPTV])\d{1,3}0?[SGX]?(?:[ -]|$)|^(?:RTX|GTX)\b",
    re.IGNORECASE,
)
_VGPU = re.compile(r"(?:-| vGPU )(\d+[QCAB])\b")
_FORM = re.compile(r"\b(SXM\d?|PCI-?E|NVL|DGXS|FHHL|HBM\d?e?|OAM)\b", re.IGNORECASE)
_BY_DEFAULT_SXM = {"H200", "B200", "B300", "GB200", "GB300"}
_SIZES = (1, 2, 3, 4, 6, 8, 10, 11, 12, 16, 18, 20, 24, 32, 36, 40, 48, 64, 80, 94, 96, 112, 128, 141, 144)
_LARGE_SIZES = (180, 192, 256, 288, 384, 512, 640, 768, 1024)

_GENERATIONS = (
    ("NVIDIA Hopper", r"NVIDIA (?:GH200|H(?:20|100|200|800))\b"),
    ("NVIDIA Blackwell", r"NVIDIA (?:G?B\d{2,3}|(?:GeForce )?RTX (?:PRO )?50\d0|RTX PRO \d+)\b"),
    ("NVIDIA Ampere data centre", r"NVIDIA A(?:30|100|800)\b"),
    ("NVIDIA Ampere", r"NVIDIA (?:A\d{1,2}G?|RTX A\d+|RTX 30\d0)\b"),
    ("NVIDIA Ada", r"NVIDIA (?:L\d{1,2}S?|RTX 40\d0|RTX \d+ Ada)\b"),
    ("NVIDIA Volta", r"NVIDIA (?:V100|TITAN V)\b"),
    ("NVIDIA Turing", r"NVIDIA (?:T4|RTX 20\d0|GTX 16\d0|RTX [34568]000|TITAN RTX)\b"),
    ("NVIDIA Pascal", r"NVIDIA (?:P\d{1,3}|GTX 10\d0)\b"),
    ("AMD CDNA 3", r"AMD Instinct MI3\d\d"),
    ("AMD CDNA 2", r"AMD Instinct MI2\d\d"),
    ("AMD RDNA 3", r"AMD Radeon (?:RX|PRO W)\s?7\d{3}"),
    ("AMD RDNA 4", r"AMD Radeon (?:RX|AI PRO R)\s?9\d{3}"),
)


def canonical_name(reported: str) -> str:
    """The canonical name of a GPU, an Apple chip, or a CPU, from what a driver, system or person calls it.

    Unknown names come back tidied, so that equal reports stay equal. Never longer than 120 characters.
    """
    text = "".join(c if c.isprintable() else " " for c in reported[:400])
    text = " ".join(_MARKS.sub(" ", text).split())
    if _NVIDIA.search(text):
        name = _nvidia(text)
    elif re.search(r"\bApple\b|^M\d+[- ]?(?:Pro|Max|Ultra)?$", text, re.IGNORECASE):
        name = _apple(text)
    elif re.search(r"\b(?:Instinct|Radeon (?!Graphics))\b", text) and "Ryzen" not in text:
        name = _amd_gpu(text)
    else:
        name = _processor(text)
    return name[:120].strip() or "unknown"


def _nvidia(text: str) -> str:
    mig = _MIG.search(text)
    text = _MIG.sub(" ", text)
    vgpu = _VGPU.search(text)
    virtual = vgpu or re.match(r"(?:NVIDIA )?GRID\b", text)
    text = _VGPU.sub(" ", text)
    suffix = [
        label
        for label, found in (
            ("Laptop", re.search(r"\b(?:Laptop|Mobile|Notebook)\b", text, re.IGNORECASE)),
            ("Max-Q", re.search(r"\bMax-?Q\b", text, re.IGNORECASE)),
        )
        if found
    ]
    text = text.replace("-", " ")
    forms = [_form(found) for found in _FORM.findall(text)]
    text = _FORM.sub(" ", _MEMORY.sub(" ", text))
    text = re.sub(
        r"\b(?:NVIDIA|Tesla|GeForce|Quadro|GRID|Laptop|Mobile|Notebook|Max ?Q|with|Design|GPU|Graphics|Generation)\b",
        " ",
        text,
        flags=re.IGNORECASE,
    )
    model = " ".join(_word(word) for word in text.split())
    form = "SXM" if not forms and model in _BY_DEFAULT_SXM else "".join(sorted(set(forms))[:1])
    parts = ["NVIDIA", model, form, *suffix]
    if mig:
        parts.append(f"MIG {mig[1].lower()}")
    if virtual:
        parts.append(f"vGPU {vgpu[1]}" if vgpu else "vGPU")
    return " ".join(part for part in parts if part)


def _word(word: str) -> str:
    if word.upper() in ("RTX", "GTX", "TITAN", "PRO") or any(c.isdigit() for c in word):
        return word.upper()
    return word.capitalize()


def _form(text: str) -> str:
    """SXM modules are the ones that the driver names after their memory: "H100 80GB HBM3"."""
    upper = text.upper().replace("-", "")
    if upper.startswith(("SXM", "HBM")):
        return "SXM"
    return "PCIe" if upper == "PCIE" else upper


def _apple(text: str) -> str:
    found = re.search(r"\b([AM]\d+)\b[- ]*(Pro|Max|Ultra)?", text, re.IGNORECASE)
    if found is None:
        return text
    return " ".join(part for part in ("Apple", found[1].upper(), (found[2] or "").capitalize()) if part)


def _amd_gpu(text: str) -> str:
    text = _MEMORY.sub(" ", text)
    text = re.sub(r"\b(?:AMD|Advanced Micro Devices,? Inc\.?|Graphics|OAM|HBM\d?e?)\b", " ", text)
    text = " ".join(text.replace("[", " ").replace("]", " ").split())
    return f"AMD {text}"


def _processor(text: str) -> str:
    """A CPU by its model: no clock, no count of cores, no built-in graphics."""
    text = re.sub(r"@.*$", " ", text)
    text = re.sub(r"\b(?:w/|with)\s+Radeon.*$", " ", text, flags=re.IGNORECASE)
    text = re.sub(r"\b\d+(?:st|nd|rd|th) Gen\b", " ", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(?:\d+|Two|Four|Six|Eight|Quad|Dual)-Core\b", " ", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(?:CPU|Processor)\b", " ", text)
    text = re.sub(r"\b\d+\.\d+\s?GHz\b", " ", text, flags=re.IGNORECASE)
    return " ".join(text.replace("( )", " ").split()).rstrip(" ,")


def nominal_memory_gb(size_bytes: float) -> int:
    """What the maker calls that memory: drivers and kernels report a little less (79.1 GiB of 80, 22.0 of 24)."""
    size = size_bytes / 2**30
    for nominal in (*_SIZES, *_LARGE_SIZES):
        if size <= nominal + 0.5:
            return nominal
    return 256 * -int(-size // 256)


def family(name: str) -> str | None:
    """The generation that a canonical name belongs to, or None: devices of one generation weigh a pass over many
    slots against one over one in a similar way. A MIG slice or virtual GPU is like nothing but itself.
    """
    if " MIG " in name or " vGPU" in name:
        return None
    for generation, pattern in _GENERATIONS:
        if re.match(pattern, name):
            return generation
    if found := re.match(r"Apple [AM]\d+", name):
        return found[0]
    if found := re.match(r"(?:AMD (?:EPYC|Ryzen)|Intel (?:Xeon|Core)|Arm Neoverse)", name):
        return found[0]
    return None
