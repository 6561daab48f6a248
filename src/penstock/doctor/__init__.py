"""Doctor: where a training script makes the host wait for the GPU, or the GPU for the host."""

from penstock.doctor.kinds import Kind
from penstock.doctor.report import Finding, Report
from penstock.doctor.watch import Watch, watch

__all__ = ["Finding", "Kind", "Report", "Watch", "watch"]
