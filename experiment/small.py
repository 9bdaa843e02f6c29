"""Small cases under compute-sanitizer: small.py fa2|fa3|e4m3."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.mla_samples import Batch

KIND = sys.argv[1]
for page in (16, 5, 64):
    for qo, kv in (([1, 2], [70, 0]), ([1], [700]), ([1], [1])):
        batch = Batch(
            qo,
            kv,
            16,
            page,
            torch.bfloat16,
            "cuda",
            causal=True,
            kv_dtype=torch.float8_e4m3fn if KIND == "e4m3" else None,
        )
        out = batch.planned("fa3" if KIND == "fa3" else "fa2").run(*batch.inputs, kv_scale=batch.kv_scale)
        batch.check(out)
print(KIND, "small cases are right", flush=True)
