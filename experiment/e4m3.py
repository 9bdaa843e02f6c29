"""The portable kernel's cache of e4m3 on a GPU, from the simplest case on; says what is wrong where something is."""

import itertools
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.mla_samples import Batch, drawn_batch, sentinels

E4M3 = torch.float8_e4m3fn


def ran(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sentinels(batch)
    batch.planned("fa2").run(*batch.inputs, out=out, lse=lse, kv_scale=batch.kv_scale)
    return out, lse


def explain(what: str, batch: Batch) -> bool:
    out, lse = ran(batch)
    try:
        batch.check(out, lse)
        return True
    except AssertionError as error:
        want, want_lse = batch.expected()
        got = out.cpu().double()
        norm = got.norm(dim=-1) / want.norm(dim=-1)
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        print(f"WRONG {what}: {error}")
        print(
            f"  scale {batch.kv_scale:.3f} qo {batch.qo_lens} kv {batch.kv_lens} heads {batch.heads} page {batch.page_size} causal {batch.causal}"
        )
        print(
            f"  |got|/|want| {norm.flatten()[:4].tolist()} cosine {cosine.flatten()[:4].tolist()} NaN {int(got.isnan().sum())} of {got.numel()}"
        )
        print(f"  lse got {lse.flatten()[:4].tolist()} want {want_lse.flatten()[:4].tolist()}")
        with_one = batch.kv_scale
        batch.kv_scale = 1.0
        again, _ = ran(batch)
        want, _ = batch.expected()
        error = (again.cpu().double() - want).norm(dim=-1) / want.norm(dim=-1)
        print(
            f"  with scale 1: worst {error.nan_to_num(9).max().item():.3g}, columns with the most error {(again.cpu().double() - want).abs().sum((0, 1)).topk(8).indices.tolist()}"
        )
        batch.kv_scale = with_one
        return False


fine = True
for dtype, form in itertools.product((torch.float16, torch.bfloat16), ("pair", "joined")):
    for kv_lens in ([1], [32], [33], [70], [100, 7], [3000]):
        batch = Batch([1] * len(kv_lens), kv_lens, 16, 16, dtype, "cuda", form=form, kv_dtype=E4M3)
        for scale in (1.0, batch.kv_scale):
            batch.kv_scale = scale
            fine &= explain(f"{dtype} {form} {kv_lens} scale {scale:.2f}", batch)
ones = Batch([1], [64], 16, 16, torch.float16, "cuda", kv_dtype=E4M3)
ones.kv_scale = 1.0
for x in (ones.ckv, ones.kpe):
    x.copy_(torch.ones_like(x, dtype=torch.float32).to(E4M3))
out, _ = ran(ones)
print("cache of ones: output from", out.min().item(), "to", out.max().item())
columns = (torch.arange(512, device="cuda") % 16 + 1).float().to(E4M3)
ones.ckv.copy_(columns.expand_as(ones.ckv))
out, _ = ran(ones)
print(
    "columns 1 to 16 again and again: right", torch.equal(out[0, 0].float(), columns.float()), out[0, 0, :18].tolist()
)
for number in range(40):
    random.seed(number), torch.manual_seed(number)
    batch = drawn_batch((torch.float16, torch.bfloat16)[number % 2], "cuda", 3000 if number % 4 == 0 else 400, E4M3)
    fine &= explain(f"drawn {number}", batch)
print("e4m3: all right" if fine else "e4m3: WRONG", flush=True)
sys.exit(not fine)
