import sys

sys.path.insert(0, "experiment/device")
from dev import *

base = libs["base"]
part = sys.argv[1]
if part == "check":
    for a in [
        (64, 128, 1, 1, 128, False),
        (128, 128, 1, 1, 64, False),
        (256, 256, 2, 2, 128, False),
        (256, 256, 2, 2, 64, True),
        (256, 512, 2, 1, 128, True),
        (300, 333, 4, 2, 128, True),
        (333, 300, 4, 2, 64, True),
        (1000, 1100, 4, 4, 128, False),
        (1500, 1500, 8, 2, 64, True),
        (1500, 1500, 8, 2, 128, True),
        (77, 1030, 3, 3, 64, False),
    ]:
        check("base", base, *a, torch.bfloat16)
        if a[0] in (300, 333):
            check("base", base, *a, torch.float16)
    for n in libs:
        if n != "base" and "NO" not in n:
            check(n, libs[n], 1000, 1100, 4, 2, 128, True, torch.bfloat16)
            check(n, libs[n], 1000, 1100, 4, 2, 64, True, torch.bfloat16)
else:
    ls = ["base"] + [x for x in libs if x != "base"]
    for length in (4096, 16384):
        for dim in (128, 64):
            for causal in (False, True):
                bench(length, 16, 16, dim, causal, ls if length == 4096 or causal else ["base"])
    for causal in (False, True):
        bench(4096, 16, 4, 128, causal, ["base"])
