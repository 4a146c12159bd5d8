"""Accelerators: dense peaks by number format, memory, bandwidth, and what their tensor cores multiply. Values only.

Peaks are vendors' dense figures in TFLOPS (TOPS for INT8), without sparsity; a GB is 10^9 bytes, as vendors print it,
where a card shows up to 7 % more. Each row has its source; None is a figure that no source here gives.
"""

from dataclasses import dataclass

BF16, INT8, FP8, MX, FP4, FNUZ = "bf16", "int8", "fp8", "mx", "fp4", "fnuz"
ALIKE = {MX: FP8, FNUZ: FP8}  # multiplied at that format's peak

_GH100 = "PyTorch torch/_inductor/analysis/device_info.py (sparse figures, halved) and NVIDIA’s H100 datasheet"
_ADA = "NVIDIA’s L40S datasheet and Ada whitepaper"
_GEFORCE = "NVIDIA’s Ada whitepaper; GeForce accumulates FP8 products in FP32 at half rate"
_CDNA = "AMD Instinct MI300X and MI350X data sheets"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, by its data sheet."""

    name: str
    architecture: str
    capability: str  # CUDA compute capability or gfx name
    memory_gb: float
    bandwidth_tbps: float
    bf16: float
    fp8: float | None
    int8: float | None
    fp4: float | None
    multiplies: tuple[str, ...]  # what its tensor cores take: of BF16, INT8, FP8, MX, FP4, FNUZ
    source: str
    note: str = ""

    def peak(self, kind: str) -> float | None:
        """Dense TFLOPS of a kind of product, or None.

        >>> ACCELERATORS["H100 SXM"].peak("fp8"), ACCELERATORS["A100 SXM"].peak("fp8")
        (1978.9, None)
        """
        peaks = {BF16: self.bf16, FP8: self.fp8, INT8: self.int8, FP4: self.fp4}
        return peaks[ALIKE.get(kind, kind)] if kind in self.multiplies else None

    def ridge(self, kind: str) -> float | None:
        """FLOP/byte at which memory and compute take equally long.

        >>> round(ACCELERATORS["H100 SXM"].ridge("bf16")), round(ACCELERATORS["H200 SXM"].ridge("fp8"))
        (295, 412)
        """
        peak = self.peak(kind)
        return peak / self.bandwidth_tbps if peak else None


_HOPPER, _BLACKWELL = (BF16, INT8, FP8), (BF16, INT8, FP8, MX, FP4)

ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator("H100 SXM", "Hopper", "9.0", 80, 3.35, 989.4, 1978.9, 1978.9, None, _HOPPER, _GH100),
        Accelerator("H100 PCIe", "Hopper", "9.0", 80, 2.0, 756.0, 1513.0, 1513.0, None, _HOPPER, "NVIDIA’s H100 "
                                                                                                 "PCIe datasheet, "
                                                                                                 "not rechecked", (
                                                                                                     "peaks from "
                                                                                                     "memory, not "
                                                                                                     "looked up"
                                                                                                 )),
        Accelerator("H200 SXM", "Hopper", "9.0", 141, 4.8, 989.4, 1978.9, 1978.9, None, _HOPPER,
                    "NVIDIA’s H200 datasheet; the compute of an H100"),
        Accelerator("H800 SXM", "Hopper", "9.0", 80, 3.35, 989.4, 1978.9, 1978.9, None, _HOPPER, _GH100,
                    "tensor cores of an H100; bandwidth assumed equal"),
        Accelerator("B200", "Blackwell", "10.0", 180, 7.7, 2250, 4500, None, 9000, _BLACKWELL,
                    "NVIDIA’s HGX table, per GPU, sparse figures halved",
                    "other NVIDIA pages say 192 GB and 8 TB/s"),
        Accelerator("GB200", "Blackwell", "10.0", 186, 8.0, 2500, 5000, None, 10000, _BLACKWELL,
                    "NVIDIA’s GB200 NVL72 table, per GPU"),
        Accelerator("L40S", "Ada", "8.9", 48, 0.864, 362.05, 733, 733, None, _HOPPER, _ADA),
        Accelerator("L4", "Ada", "8.9", 24, 0.3, 121, 242.5, 242.5, None, _HOPPER, _ADA,
                    "PyTorch’s table gives 3,350 GB/s, which is wrong"),
        Accelerator("RTX 4090", "Ada", "8.9", 24, 1.008, 165.2, 330.3, None, None, _HOPPER, _GEFORCE,
                    "FP8 with FP16 accumulation reaches 660.6"),
        Accelerator("RTX 5090", "Blackwell", "12.0", 32, 1.792, 209.5, 419, None, None, _BLACKWELL, _GEFORCE,
                    "FP8 with FP32 accumulation from a torchao issue; the rest from memory, not looked up"),
        Accelerator("MI300X", "CDNA3", "gfx942", 192, 5.3, 1307.4, 2614.9, 2614.9, None, (BF16, INT8, FNUZ), _CDNA,
                    "FP8 is FNUZ: E4M3 up to 240"),
        Accelerator("MI350X", "CDNA4", "gfx950", 288, 8.0, 2309.6, 4614, 4614, 9200, _BLACKWELL, _CDNA,
                    "OCP FP8 and MX; the FP4 figure is approximate"),
        Accelerator("A100 SXM", "Ampere", "8.0", 80, 2.039, 312, None, 624, None, (BF16, INT8),
                    "NVIDIA’s A100 80 GB datasheet", "no FP8 tensor cores: FP8 weights are decoded to BF16 first"),
    )
}  # fmt: skip

DEVICES = {  # torch's name of a whole device, and which of these it is; parts of one (MIG) have other names
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI350X": "MI350X",
    "NVIDIA A100-SXM4-80GB": "A100 SXM",
}
