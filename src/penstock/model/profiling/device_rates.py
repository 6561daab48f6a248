"""Device rates: the operations and bytes per second of a device, from its data sheet or from a short measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.errors import CostError, UsageError, nearest

if TYPE_CHECKING:
    import torch

    from penstock.model.profiling.call_timing import Call, Timing

# The shares of the peak figures on a data sheet that large products and copies reach. On an H200, `measured` gives 0.71
# of the bf16 rate and 0.89 of the bandwidth; the layers of a model are smaller and less regular than its operations.
_FLOPS_SHARE = 0.6
_BYTES_SHARE = 0.8


@dataclass(frozen=True)
class Rates:
    """The operations and bytes per second that a device reaches in practice.

    >>> Rates(flops_per_second=1e12, bytes_per_second=1e11).seconds(flops=2e12, num_bytes=1e9)
    2.0

    Attributes:
        flops_per_second: operations of matrix products and convolutions in 16 bits (multiply and add count as two).
        bytes_per_second: bytes read and written in the device's memory.
        launch_seconds: the time that each operation takes in addition.
        float32_flops_per_second: operations of products in 32 bits; by default, the rate in 16 bits.
        name: a description of the device.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 0.0
    float32_flops_per_second: float | None = None
    name: str = "given rates"

    def __post_init__(self) -> None:
        faults = [
            f"{field}: {value!r} must be finite and positive"
            for field in ("flops_per_second", "bytes_per_second", "float32_flops_per_second")
            if (value := getattr(self, field)) is not None and not _is_number(value, above=0.0)
        ]
        if not _is_number(self.launch_seconds, above=-1e-300):
            faults.append(f"launch_seconds: {self.launch_seconds!r} must be finite and not negative")
        if faults:
            raise CostError("; ".join(faults))

    def seconds(self, *, flops: float, num_bytes: float, is_float32: bool = False) -> float:
        """Return the seconds of an operation: computing and moving overlap, and the launch is added."""
        rate = self.float32_flops_per_second if is_float32 else None
        return max(flops / (rate or self.flops_per_second), num_bytes / self.bytes_per_second) + self.launch_seconds

    @classmethod
    def of(cls, name: str) -> Rates:
        """Return the rates of a known device.

        Raises:
            UsageError: if the name is not in `KNOWN_RATES`.
        """
        if name.lower() not in KNOWN_RATES:
            known = ", ".join(KNOWN_RATES)
            raise UsageError(f"rates: unknown device {name!r}.{nearest(name.lower(), KNOWN_RATES)} Known: {known}")
        return KNOWN_RATES[name.lower()]

    @classmethod
    def measured(cls, device: torch.device | str = "cpu") -> Rates:
        """Measure the rates of a device with large products, a large copy and a tiny addition."""
        import torch

        from penstock.model.profiling.call_timing import clock_for, median_time

        where = torch.device(device)
        clock, is_cpu = clock_for(where), where.type == "cpu"

        def seconds(call: Call) -> Timing:
            call()
            return median_time(clock, lambda: call, is_reusable=True, repeats=5, seconds=0.2)

        size = 1024 if is_cpu else 8192

        def flops(dtype: torch.dtype) -> float:
            left, right = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
            return float(2 * size**3 / seconds(lambda: torch.mm(left, right)).longer)

        source = torch.zeros((1 << 26) if is_cpu else (1 << 30), dtype=torch.uint8, device=where)
        target = torch.zeros_like(source)
        tiny = torch.zeros(1, device=where)
        single = flops(torch.float32)
        return cls(
            flops_per_second=single if is_cpu else flops(torch.bfloat16),
            bytes_per_second=2 * source.numel() / seconds(lambda: target.copy_(source)).longer,
            launch_seconds=seconds(lambda: tiny + tiny).device,
            float32_flops_per_second=single,
            name=f"{where.type}, measured",
        )


def _is_number(value: object, *, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < float("inf")


def _published(name: str, *, tera_16: float, tera_32: float, giga_bytes: float) -> Rates:
    """Return the rates of a device from its peak figures; all of them are dense (without structured sparsity)."""
    return Rates(
        flops_per_second=tera_16 * 1e12 * _FLOPS_SHARE,
        bytes_per_second=giga_bytes * 1e9 * _BYTES_SHARE,
        launch_seconds=3e-6,  # about the shortest time from one kernel to the next on these devices
        float32_flops_per_second=tera_32 * 1e12 * _FLOPS_SHARE,
        name=name,
    )


# Published peak figures: 16 bits on matrix units with 32-bit sums, 32 bits without TF32, memory bandwidth.
KNOWN_RATES: Mapping[str, Rates] = MappingProxyType(
    {
        # no data sheet: a few cores of a current server; `Rates.measured("cpu")` is more accurate
        "cpu": Rates(2e11, 2e10, 2e-6, name="a few cores"),
        # NVIDIA V100 data sheet, SXM2; fp16, since it has no bf16
        "v100": _published("NVIDIA V100 SXM2", tera_16=125, tera_32=15.7, giga_bytes=900),
        # NVIDIA T4 data sheet; fp16
        "t4": _published("NVIDIA T4", tera_16=65, tera_32=8.1, giga_bytes=320),
        # NVIDIA A100 data sheet, SXM4 80 GB
        "a100": _published("NVIDIA A100 SXM4 80 GB", tera_16=312, tera_32=19.5, giga_bytes=2039),
        # NVIDIA L4 data sheet; its matrix figures assume sparsity, so they are halved here
        "l4": _published("NVIDIA L4", tera_16=121, tera_32=30.3, giga_bytes=300),
        # NVIDIA L40S data sheet
        "l40s": _published("NVIDIA L40S", tera_16=362, tera_32=91.6, giga_bytes=864),
        # NVIDIA Ada GPU architecture paper, appendix A; bf16 with fp32 sums
        "rtx4090": _published("NVIDIA RTX 4090", tera_16=165.2, tera_32=82.6, giga_bytes=1008),
        # NVIDIA H100 data sheet, SXM5; its matrix figures assume sparsity, so they are halved here
        "h100": _published("NVIDIA H100 SXM5", tera_16=989.4, tera_32=67, giga_bytes=3350),
        # NVIDIA H200 data sheet, SXM; likewise
        "h200": _published("NVIDIA H200 SXM", tera_16=989.4, tera_32=67, giga_bytes=4800),
        # AMD Instinct MI300X data sheet
        "mi300x": _published("AMD Instinct MI300X", tera_16=1307.4, tera_32=163.4, giga_bytes=5300),
    }
)
