"""Doctor: find the lines at which a training script makes the host wait for the GPU, or the GPU for the host."""

from penstock.doctor.doctor_report import Finding, Kind, Report
from penstock.doctor.script_watch import Watch, watch

__all__ = ["Finding", "Kind", "Report", "Watch", "watch"]
