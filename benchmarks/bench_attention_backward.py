"""The backward pass of attention beside that of torch's own, in one run, each with its own forward pass aside.

FLOPs are those of five products: 10 * queries * keys * heads * head_dim, halved when causal. Torch's side gets the layout
it likes best. `vs_torch` is torch's time over ours. On a CPU the two take turns and the fastest of each counts.
"""

from __future__ import annotations

import torch
from bench_attention import both, torch_attention
from timing import Report, arguments

import flashinfer

# length, query heads, key heads, head_dim, causal
CASES = {
    "cpu": [
        *((n, heads, heads, 64, causal) for n, heads in ((1024, 8), (4096, 2)) for causal in (False, True)),
        *((n, heads, heads, 128, causal) for n, heads in ((1024, 8), (2048, 4), (4096, 2)) for causal in (False, True)),
        (2048, 8, 2, 128, True),
        (4096, 1, 1, 128, False),
    ],
    "cuda": [(n, 16, heads, 128, causal) for n in (1024, 4096) for heads in (16, 4) for causal in (False, True)],
}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}


def backward(case: tuple[int, int, int, int, bool], name: str, device: str, report: Report) -> None:
    length, qo_heads, kv_heads, dim, causal = case
    dtype = getattr(torch, name)
    leaves = [
        torch.randn(length, heads, dim, device=device).to(dtype).requires_grad_()
        for heads in (qo_heads, kv_heads, kv_heads)
    ]
    theirs = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in leaves]
    out = flashinfer.single_prefill_with_kv_cache(*leaves, causal=causal)
    their_out = torch_attention(*theirs, causal)
    grad = torch.randn(out.shape, device=device).to(dtype)
    their_grad = grad.transpose(0, 1)[None].contiguous()

    def ours(_: int) -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def torchs(_: int) -> None:
        torch.autograd.grad(their_out, theirs, their_grad, retain_graph=True)

    ours(0)
    mine, peer = both(ours, torchs, 1, device)
    flops = 10 * length * length * qo_heads * dim / (2 if causal else 1)
    report.add(
        name="prefill_backward", length=length, heads=f"{qo_heads}/{kv_heads}", head_dim=dim, causal=causal, dtype=name,
        ms=mine * 1e3, GFLOPps=flops / mine / 1e9, torch_GFLOPps=flops / peer / 1e9, vs_torch=peer / mine,
    )  # fmt: skip


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("attention_backward")
    for name in DTYPES[options.device]:
        for case in CASES[options.device]:
            backward(case, name, options.device, report)
    report.write(options.json)


if __name__ == "__main__":
    main()
