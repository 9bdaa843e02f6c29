"""Host time of a call after the first, beside F.rms_norm on the same tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timing import Report, arguments, host_seconds

import flashinfer


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("host time of a call")
    x = torch.randn(4, 1024, device=options.device).bfloat16()
    w, out = torch.ones(1024, device=options.device).bfloat16(), torch.empty_like(x)
    gate = torch.randn(4, 2048, device=options.device).bfloat16()
    calls = {
        "F.rms_norm": lambda: F.rms_norm(x, (1024,), w, 1e-6),
        "rmsnorm": lambda: flashinfer.rmsnorm(x, w),
        "rmsnorm out=": lambda: flashinfer.rmsnorm(x, w, out=out),
        "fused_add_rmsnorm": lambda: flashinfer.fused_add_rmsnorm(out, x, w),
        "silu_and_mul out=": lambda: flashinfer.silu_and_mul(gate, out=out),
        "torch.add out=": lambda: torch.add(x, x, out=out),
    }
    times = {name: host_seconds(call, options.device) for name, call in calls.items() if options.only in name}
    times = {name: min(times[name], host_seconds(calls[name], options.device)) for name in times}
    for name, taken in times.items():
        report.add(name=name, us=taken * 1e6, of_rms_norm=taken / times.get("F.rms_norm", taken))
    report.write(options.json)


if __name__ == "__main__":
    main()
