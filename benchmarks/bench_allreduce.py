"""Compare collectives with those of NCCL and torch's symmetric memory, in turns.

The all-reduce is measured alone and with residual and RMSNorm, reduce-scatter and all-gather alone. "experts" is a
dispatch of each rank's tokens with a combine. Its peer gathers all tokens and scatters the sums of all results.

    python benchmarks/bench_allreduce.py [--ranks 2] [--hidden 4096 7168 8192] [--tokens 1 8 32 128 512 2048 8192]
    python benchmarks/bench_allreduce.py --local 2      # ranks as streams of one GPU: launches, not links

Each line is a shape: microseconds of a call in a graph, of each peer, and the share of the floor that ours reached.
The floor is 2.2 us (2.6 us with the norm) and the bytes that a rank sends, of an all-reduce in one shot, at 360 GB/s
(two H100). All ranks begin after a barrier on their streams, and the rank that began last measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

# NVLink multicast stays off. torch and NCCL read these when they are loaded.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import torch.distributed as dist
from timing import Report, host_seconds

from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.alltoall import MoeAlltoAll
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.shares import all_gather, reduce_scatter
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as Pattern
from flashinfer.comm.workspace import create_allreduce_fusion_workspace
from flashinfer.norm import fused_add_rmsnorm

LINK_BYTES_PER_US, SUM_FLOOR, NORM_FLOOR = 360e3, 2.2, 2.6  # two H100, NV18
DTYPE = torch.bfloat16
TOP_K, EXPERTS_OF_RANK = 8, 32
Call = Callable[[], Any]


class Shape:
    """Tensors of one shape on this rank, and the calls that are compared: name -> call.

    Reduce-scatter and all-gather have ``tokens`` rows in all, rounded up to a multiple of the ranks.
    """

    def __init__(self, tokens: int, hidden: int, device: torch.device, ranks: int) -> None:
        def new(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device).to(DTYPE)

        self.x, self.residual, self.weight = new(tokens, hidden), new(tokens, hidden), new(hidden)
        self.out, self.bytes = torch.empty_like(self.x), self.x.numel() * self.x.itemsize
        rows = -(-tokens // ranks)
        self.whole, self.share = new(rows * ranks, hidden), new(rows, hidden)

    def ours(self, workspace: Any) -> dict[str, dict[str, Call]]:
        x, out, residual, weight = self.x, self.out, self.residual, self.weight
        return {
            "sum": {"ours": lambda: allreduce_fusion(x, workspace, Pattern.kAllReduce, True, output=out)},
            "fused": {
                "ours": lambda: allreduce_fusion(
                    x, workspace, Pattern.kARResidualRMSNorm, True,
                    norm_out=out, residual_out=residual, residual_in=residual, rms_gamma=weight,
                )
            },
            "reduce_scatter": {"ours": lambda: reduce_scatter(self.whole, workspace, self.share, True)},
            "all_gather": {"ours": lambda: all_gather(self.share, workspace, self.whole, True)},
        }  # fmt: skip

    def with_peers(self, workspace: Any, group: Any, exchange: MoeAlltoAll) -> dict[str, dict[str, Call]]:
        calls, x = self.ours(workspace), torch.zeros_like(self.x)  # zeros: sums in place stay finite
        calls["experts"] = self.experts(exchange, group.size())
        calls["sum"]["nccl"] = lambda: dist.all_reduce(x)
        calls["fused"]["nccl + norm"] = lambda: (dist.all_reduce(x), self.norm(x))
        share, whole = torch.zeros_like(self.share), torch.zeros_like(self.whole)
        calls["reduce_scatter"]["nccl"] = lambda: dist.reduce_scatter_tensor(share, whole)
        calls["all_gather"]["nccl"] = lambda: dist.all_gather_into_tensor(whole, share)
        try:
            import torch.distributed._symmetric_memory as symmetric

            shared = symmetric.empty(x.shape, dtype=DTYPE, device=x.device).zero_()
            symmetric.rendezvous(shared, group)
            two_shot = torch.ops.symm_mem.two_shot_all_reduce_
        except (ImportError, RuntimeError) as err:
            print(f"torch's symmetric memory is left out: {err}", flush=True)
            return calls
        calls["sum"]["symm"] = lambda: two_shot(shared, "sum", group.group_name)
        calls["fused"]["symm + norm"] = lambda: (two_shot(shared, "sum", group.group_name), self.norm(shared))
        return calls

    def experts(self, exchange: MoeAlltoAll, ranks: int) -> dict[str, Call]:
        tokens, device = self.x.shape[0], self.x.device
        ids = torch.randint(0, EXPERTS_OF_RANK * ranks, (tokens, TOP_K), device=device).int()
        payloads = [self.x, ids, torch.rand(tokens, TOP_K, device=device)]
        every, out = self.x.new_zeros(ranks * tokens, self.x.shape[1]), torch.zeros_like(self.x)

        def ours() -> None:
            received = exchange.dispatch(ids, payloads, tokens, -1, 1)
            exchange.combine(received[0], tokens, output=self.out)

        def gather_and_scatter() -> None:
            dist.all_gather_into_tensor(every, out)
            dist.reduce_scatter_tensor(out, every)

        return {"ours": ours, "nccl": gather_and_scatter}

    def norm(self, x: torch.Tensor) -> None:
        fused_add_rmsnorm(x, self.residual, self.weight)

    def floor(self, what: str, ranks: int) -> float:
        if what == "experts":  # with eight experts, nearly every token goes to every rank
            return 2 * (SUM_FLOOR + (ranks - 1) * self.bytes / LINK_BYTES_PER_US)
        sent = self.bytes if what in ("sum", "fused") else self.share.numel() * self.share.itemsize
        return (NORM_FLOOR if what == "fused" else SUM_FLOOR) + (ranks - 1) * sent / LINK_BYTES_PER_US


def captured(call: Call, count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    return graph


def calls_in_graph(shape: Shape) -> int:
    return 100 if shape.bytes <= 1 << 20 else 20 if shape.bytes <= 1 << 24 else 4


def medians(
    calls: dict[str, Call], count: int, rounds: int, stream: torch.cuda.Stream, begin: torch.Tensor
) -> dict[str, float]:
    """Return the median microseconds of each call, in graphs of `count` calls.

    The graphs are freed on return: NCCL's communicator waits for them when it is destroyed.
    """
    graphs = {name: captured(call, count, stream) for name, call in calls.items()}
    times = {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():  # in turns: each peer sees the same clocks
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                dist.all_reduce(begin)
                start.record()
                graph.replay()
                stop.record()
            stop.synchronize()
            own = torch.tensor([start.elapsed_time(stop) * 1e3 / count])
            dist.all_reduce(own, dist.ReduceOp.MIN)
            times[name].append(own.item())
    return {name: statistics.median(one) for name, one in times.items()}


def measure(rank: int, ranks: int, file: str, options: argparse.Namespace) -> None:
    """Measure all shapes on one rank of several GPUs. Rank 0 reports."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group, report = dist.group.WORLD, Report("All-reduce of several GPUs")
    most = max(options.tokens) * max(options.hidden)
    workspace = create_allreduce_fusion_workspace("auto", ranks, rank, most // 64 + 1, 64, DTYPE, group=group)
    mapping = Mapping(ranks, rank, tp_size=ranks, moe_ep_size=ranks)
    experts = EXPERTS_OF_RANK * ranks
    exchange = MoeAlltoAll(mapping, max(options.tokens), TOP_K, experts, None, max(options.hidden), group=group)
    begin, stream = torch.zeros(1, device=device), torch.cuda.Stream()
    for hidden in options.hidden:
        for tokens in options.tokens:
            shape = Shape(tokens, hidden, device, ranks)
            for what, calls in shape.with_peers(workspace, group, exchange).items():
                count = calls_in_graph(shape)
                with torch.cuda.stream(stream):
                    for call in calls.values():
                        call()
                torch.cuda.synchronize()
                found = medians(calls, count, options.rounds, stream, begin)
                workspace.check(), exchange.check()
                ours = found.pop("ours")
                more = {"ratio": min(found.values()) / ours}
                if tokens == min(options.tokens):
                    with torch.cuda.stream(stream):  # a workspace belongs to one stream at a time
                        more["host"] = host_seconds(calls["ours"], "cuda") * 1e6
                if rank == 0:
                    floor = shape.floor(what, ranks) / ours
                    report.add("us", ours, found, floor, more, name=what, ranks=ranks, tokens=tokens, hidden=hidden)
            dist.barrier()
    workspace.destroy(), exchange.destroy()
    if rank == 0:
        report.write(options.json)
    dist.destroy_process_group()


def measure_local(ranks: int, options: argparse.Namespace) -> None:
    """Measure ranks that are streams of this GPU. One replay holds a graph of each rank, joined at both ends."""
    import sys

    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    from tests.comm.ranks import Group

    report = Report("All-reduce of streams of one GPU")
    most = max(options.tokens) * max(options.hidden)
    group = Group(ranks, most // 64, 64, DTYPE, "cuda")
    for hidden in options.hidden:
        for tokens in options.tokens:
            shapes = [Shape(tokens, hidden, torch.device("cuda"), ranks) for _ in range(ranks)]
            for what in shapes[0].ours(group.workspaces[0]):
                count = calls_in_graph(shapes[0])
                graphs = [
                    captured(shapes[rank].ours(group.workspaces[rank])[what]["ours"], count, group.streams[rank])
                    for rank in range(ranks)
                ]
                times = []
                for _ in range(options.rounds):
                    torch.cuda.synchronize()
                    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ranks)]
                    for graph, stream, (start, stop) in zip(graphs, group.streams, events, strict=True):
                        with torch.cuda.stream(stream):
                            start.record()
                            graph.replay()
                            stop.record()
                    torch.cuda.synchronize()
                    times.append(min(start.elapsed_time(stop) for start, stop in events) * 1e3 / count)
                for workspace in group.workspaces:
                    workspace.check()
                report.add("us", statistics.median(times), name=what, ranks=ranks, tokens=tokens, hidden=hidden)
    group.destroy()
    report.write(options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs, by default all")
    parser.add_argument("--local", type=int, default=0, help="ranks that are streams of one GPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 7168, 8192])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    if options.local:
        return measure_local(options.local, options)
    if options.ranks < 2:
        parser.error("needs two GPUs; --local takes one")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/rendezvous", options)
        torch.multiprocessing.spawn(measure, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
