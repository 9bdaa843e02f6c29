"""Workspaces: memory that the ranks of a group share, and the state of the calls that use it.

``include/flashinfer/common/allreduce.h`` describes the protocol.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from .. import env
from .._ops.errors import either, type_error, value_error
from ..errors import CaptureError, GroupError, UnsupportedError
from ..jit import load as modules
from ..jit.modules.allreduce import gen_allreduce_module
from ._agree import Exchange
from ._memory import Library, SharedMemory, share_on_gpu, share_on_host
from .mnnvl import CommBackend, TorchDistBackend

__all__ = [
    "AllReduceFusionWorkspace",
    "MNNVLAllReduceFusionWorkspace",
    "TRTLLMAllReduceFusionWorkspace",
    "create_allreduce_fusion_workspace",
]

# Numbers of common/allreduce.h.
MAX_RANKS = 16
SLOTS = 2
EPOCH_WORDS = 1056  # one for each CTA of the largest grid
PART_BYTES = 16
HEADER_BYTES = SLOTS * MAX_RANKS * 16
# Words of CommReport.
ERROR, RANK, CALL, THEIRS, OURS, ABORT = 0, 1, 2, 3, 7, 11
REPORT_WORDS = 12
LATE, MISMATCH, ABORTED, CONCURRENT = 1, 2, 3, 4  # CommError
# By Collective.
OPERATIONS = ("allreduce_fusion", "reduce_scatter", "all_gather", "MoeAlltoAll.dispatch", "MoeAlltoAll.combine")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def padded(count: int) -> int:
    """Return the bytes that a row of ``count`` bytes takes in an inbox."""
    return -(-count // PART_BYTES) * PART_BYTES


def inbox_bytes(ranks: int, slot_bytes: int) -> int:
    """Return the bytes of a rank's inbox, whose largest input has ``slot_bytes``."""
    return HEADER_BYTES + SLOTS * (ranks - 1) * slot_bytes


def most_columns(dtype: torch.dtype, device: torch.device) -> int | float:
    """Return the longest row of the norm on a device.

    On Hopper, eight CTAs of 512 threads have one part of a row in each thread. Before, a thread of one CTA has several.
    """
    if device.type != "cuda":
        return float("inf")
    hopper = torch.cuda.get_device_properties(device).major >= 9
    parts = 8 if hopper else 2 * dtype.itemsize
    return parts * 512 * (PART_BYTES // dtype.itemsize)


class AllReduceFusionWorkspace:
    """Base of the workspaces of :func:`allreduce_fusion`.

    Attributes: ``world_size``, ``rank``, ``backend``.
    """

    backend = ""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank

    def destroy(self) -> None:
        """Release the memory. Repeated calls do nothing."""
        raise NotImplementedError

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> bool:
        """Return whether a call with such an input fits."""
        raise NotImplementedError


class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Memory of one rank that its peers write, and the state of its calls.

    The constructor is a collective call: all ranks get a workspace, or all raise the same error. All ranks make the
    calls of a workspace in the same order, on one stream or on streams that wait for each other. CUDA graphs contain
    its addresses, so it must outlive them. A call may have any shape whose bytes fit.

    Args:
        tp_size, tp_rank: ranks of the group, at most 16, and this rank.
        max_token_num, hidden_dim, dtype: the largest input, equal on all ranks.
        comm_backend: exchanges objects between the ranks, by default over ``group``.
        group: a process group, by default all ranks. Not needed for one rank.
        device: of the inputs, by default the current GPU, or the CPU without one.

    Raises:
        ValueError: sizes differ between ranks, or are invalid.
        UnsupportedError: the ranks are on several hosts.
        GroupError: memory is mapped, but a rank does not see the bytes that another rank writes.
        CaptureError: a CUDA graph is being captured.
        RuntimeError: there is no memory, or it cannot be shared.

    Attributes: ``metadata``, a dict with the sizes.
    """

    backend = "trtllm"

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        comm_backend: CommBackend | None = None,
        group: Any = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        op = "TRTLLMAllReduceFusionWorkspace"
        self._memory: SharedMemory | None = None
        self._process = os.getpid()
        super().__init__(tp_size, tp_rank)
        exchange = Exchange(backend_of(op, tp_size, comm_backend, group))
        exchange.vote(lambda: _check(op, tp_size, tp_rank, max_token_num, hidden_dim, dtype, exchange))
        self._device = exchange.run(lambda: device_of(device))
        exchange.vote(lambda: _check_columns(op, hidden_dim, dtype, self._device))
        row_bytes = hidden_dim * dtype.itemsize
        self._slot_bytes = max_token_num * padded(row_bytes)
        self.metadata = {
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "use_fp32_lamport": dtype == torch.float32,
        }
        self._timeout = max(exchange.vote(env.COMM_TIMEOUT.get))
        shares = agree_on_place(op, exchange, self._device, self._slot_bytes)
        library = exchange.run(lambda: load(self._device, dtype, tp_size))
        on_device = torch.cuda.device(self._device) if library is not None else nullcontext()
        with on_device:
            self._allocate(exchange, library, shares)

    def _allocate(self, exchange: Exchange, library: Library | None, shares: int) -> None:
        """Share the inboxes, test them, and make the table that the operator reads."""

        exchange.vote(self._make_state)
        addresses: tuple[int, ...] = (0,)
        if exchange.size > 1:
            count = inbox_bytes(exchange.size, self._slot_bytes)
            self._memory = share_empty(count, exchange, self._device, library)
            addresses = self._memory.addresses
        self._make_table(addresses, shares)

    @classmethod
    def _over(
        cls, addresses: tuple[int, ...], rank: int, slot_bytes: int, device: torch.device, shares: int
    ) -> TRTLLMAllReduceFusionWorkspace:
        """Make a workspace over existing inboxes. The caller owns them, and they contain empty words. A local call.

        Args:
            addresses: of the inboxes, by rank.
            slot_bytes: of the largest input.
            shares: ranks on this rank's GPU.
        """
        self = cls.__new__(cls)
        AllReduceFusionWorkspace.__init__(self, len(addresses), rank)
        self._memory, self._process, self._device, self._slot_bytes = None, os.getpid(), device, slot_bytes
        self.metadata = {"tp_rank": rank, "tp_size": len(addresses)}
        self._timeout = env.COMM_TIMEOUT.get()
        self._make_state()
        self._make_table(addresses, shares)
        return self

    def _make_state(self) -> None:
        on_gpu = self._device.type == "cuda"
        self._order = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._state = torch.zeros(EPOCH_WORDS + 2, dtype=torch.int32, device=self._device)
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._words = (ctypes.c_uint32 * REPORT_WORDS).from_address(self._report.data_ptr())

    def _make_table(self, addresses: tuple[int, ...], shares: int) -> None:
        multiprocessors = 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            # Ranks that share a GPU must be resident together, or they would wait for each other forever. With PDL a
            # rank's next kernel is resident while its last one still waits, so each rank needs room for two kernels.
            resident = 1 if shares == 1 else 2 * shares
            multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count // resident
        table = [
            self._state.data_ptr(),
            self._report.data_ptr(),
            self.rank,
            self.world_size,
            max(1, multiprocessors),
            self._slot_bytes,
            int(self._timeout * 1e9),
            *addresses,
        ]
        self._table = torch.tensor(table + [0] * (7 + MAX_RANKS - len(table)), dtype=torch.int64, device="cpu")

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> bool:
        """Return whether a call with such an input fits: its bytes, and the length of its rows for the norm.

        Args:
            tp_size: number of ranks. The result is False if the workspace has another number.
            num_tokens, hidden_dim, dtype: of the input. Rows are padded to 16 bytes.
            use_oneshot: ignored.
        """
        fits = self.world_size == 1 or num_tokens * padded(hidden_dim * dtype.itemsize) <= self._slot_bytes
        fits = fits and hidden_dim <= most_columns(dtype, self._device)
        return self._is_alive() and tp_size == self.world_size and fits

    def check(self) -> None:
        """Raise the error of the first failed call of this workspace.

        Calls on a GPU return before their kernel runs. Each later call raises the error, and so does this function. It
        does not wait for the GPU: call it after a replay has ended.

        Raises:
            GroupError: a rank did not arrive in time or made another call, :meth:`abort` was called, or two
                streams used the workspace at once. The workspace is unusable: make a new one.
        """
        words = self._words
        code, rank, call = words[ERROR], words[RANK], words[CALL]
        if code == 0 and words[ABORT] == 0:
            return
        op = OPERATIONS[words[OURS + 3] >> 12 & 7]
        if code == LATE:
            raise GroupError(f"{op}: rank {rank} did not arrive within {self._timeout:g} s in call {call}", (rank,))
        if code == MISMATCH:
            theirs, ours = _call_text(words[THEIRS : THEIRS + 4]), _call_text(words[OURS : OURS + 4])
            raise GroupError(
                f"{op}: rank {rank} made call {call} with {theirs}, rank {self.rank} with {ours}", (rank, self.rank)
            )
        if code == CONCURRENT:
            raise GroupError(f"{op}: two streams used the workspace at once in call {call}", (self.rank,))
        if code == ABORTED:
            raise GroupError(f"{op}: aborted in call {call} while it waited for rank {rank}", (rank,))
        raise GroupError(f"{op}: aborted", (self.rank,))

    def _call(self, operator: Callable[..., object], *arguments: object) -> None:
        """Call an operator of this workspace. Raise the error of an earlier call that failed."""
        try:
            operator(*arguments)
        except GroupError:
            self.check()  # raises the error with its reason
            raise

    def abort(self) -> None:
        """End running and later waits of this rank, from any thread. The workspace is unusable afterwards."""
        self._words[ABORT] = 1

    def destroy(self) -> None:
        """Wait for this rank's kernels and unmap the memory. Warn of an error that no call has raised.

        This is a local call: it needs no other rank and no process group. Repeated calls do nothing. Later calls of
        :func:`allreduce_fusion` raise ``ValueError``.
        """
        if not self._is_alive():
            return
        self._table[0] = 0
        memory, self._memory = self._memory, None
        if self._process != os.getpid():  # a forked child: the mappings of a GPU are its parent's
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if memory is not None:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                memory.close()
        if self._words[ERROR] != 0:
            try:
                self.check()
            except GroupError as err:
                warnings.warn(f"a workspace was destroyed after an error: {err}", RuntimeWarning, stacklevel=2)

    def checkpoint_prepare(self) -> NoReturn:
        """Raise ``NotImplementedError``: the memory cannot be unmapped for a checkpoint."""
        raise NotImplementedError("checkpoint_prepare: this workspace cannot unmap its memory and map it again")

    def checkpoint_restore(self, comm_backend: CommBackend | None = None) -> NoReturn:
        """Raise ``NotImplementedError``, as :meth:`checkpoint_prepare` does."""
        raise NotImplementedError("checkpoint_restore: this workspace cannot unmap its memory and map it again")

    def _is_alive(self) -> bool:
        table: torch.Tensor | None = getattr(self, "_table", None)
        return table is not None and int(table[0]) != 0

    def __del__(self) -> None:
        if self._is_alive() and self._process == os.getpid():
            warnings.warn("a workspace was not destroyed: call destroy()", ResourceWarning, stacklevel=2)
            self.destroy()


class MNNVLAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Raise ``UnsupportedError`` when made: this library uses no NVLink multicast."""

    backend = "mnnvl"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise UnsupportedError(
            "MNNVLAllReduceFusionWorkspace: needs NVLink multicast, which this library does not use; use"
            " TRTLLMAllReduceFusionWorkspace"
        )


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: CommBackend | None = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    device: torch.device | str | int | None = None,
    **options: Any,
) -> TRTLLMAllReduceFusionWorkspace:
    """Make the workspace of :func:`allreduce_fusion`: a collective call of all ranks.

    Args:
        backend: ``"auto"`` or ``"trtllm"``. FlashInfer's ``"mnnvl"`` backends need NVLink multicast, which is not supported.
        world_size, rank, max_token_num, hidden_dim, dtype, comm_backend, group, device: see
            :class:`TRTLLMAllReduceFusionWorkspace`.
        gpus_per_node: ignored: all ranks are on one host.
        force_oneshot_support: ignored: every size that fits can be summed in one shot.
        options: options of other backends, which must be ``None``.

    Raises:
        ValueError: a backend that needs multicast, a missing size, or an option of another backend.
        RuntimeError: an unknown backend, and the errors of :class:`TRTLLMAllReduceFusionWorkspace`.
    """
    op = "create_allreduce_fusion_workspace"
    if backend in ("mnnvl", "mnnvl-cutedsl"):
        raise ValueError(f"{op}: backend: got {backend!r}, which needs NVLink multicast, wanted 'auto' or 'trtllm'")
    if backend not in ("auto", "trtllm"):
        raise RuntimeError(f"{op}: backend: got {backend!r}, wanted 'auto' or 'trtllm'")
    if given := sorted(name for name, value in options.items() if value is not None):
        raise value_error(op, given[0], f"an option of backend 'mnnvl-cutedsl' with {backend!r}", "none")
    if world_size is None or rank is None or max_token_num is None or hidden_dim is None or dtype is None:
        sizes = dict(world_size=world_size, rank=rank, max_token_num=max_token_num, hidden_dim=hidden_dim, dtype=dtype)
        missing = next(name for name, value in sizes.items() if value is None)
        raise value_error(op, missing, None, "a value")
    return TRTLLMAllReduceFusionWorkspace(
        world_size, rank, max_token_num, hidden_dim, dtype, comm_backend, group, device=device
    )


def backend_of(op: str, size: int | None, backend: CommBackend | None, group: Any) -> CommBackend | None:
    """Return the exchange of Python objects between the ranks of a group. A group of one needs none."""
    if backend is not None or size == 1:
        return backend
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise value_error(op, "group", "none, and torch.distributed is not initialised", "a group or a comm_backend")
    return TorchDistBackend(group)


def check_workspace(op: str, workspace: object) -> None:
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise type_error(op, "workspace", type(workspace).__name__, "TRTLLMAllReduceFusionWorkspace")


def _check(op: str, size: int, rank: int, tokens: int, hidden: int, dtype: torch.dtype, exchange: Exchange) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise value_error(op, "tp_size", size, f"1 to {MAX_RANKS}")
    if (exchange.size, exchange.rank) != (size, rank):
        got = f"rank {rank} of {size}"
        raise value_error(op, "tp_rank", got, f"rank {exchange.rank} of {exchange.size} as the group has")
    if tokens < 1 or hidden < 1:
        raise value_error(op, "max_token_num", f"{tokens} x {hidden}", "positive sizes")
    if dtype not in DTYPES:
        raise type_error(op, "dtype", dtype, either(DTYPES))


def _check_columns(op: str, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    if hidden > (most := most_columns(dtype, device)):
        raise value_error(op, "hidden_dim", hidden, f"at most {most} on this GPU")


def device_of(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _host() -> str:
    """Return the boot id of this host. Ranks share memory only if their boot ids are equal."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()


def agree_on_place(op: str, exchange: Exchange, device: torch.device, count: int) -> int:
    """Check that all ranks are on one host, and that all request ``count`` bytes.

    Returns:
        The number of ranks on this rank's GPU.
    """

    def facts() -> tuple[str, str]:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{op}: a CUDA graph is being captured: make the workspace before the capture")
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)
        return _host(), gpu

    places = exchange.vote(facts)
    for rank, (host, _) in enumerate(places):
        if host != places[0][0]:
            raise UnsupportedError(f"{op}: rank {rank} is on another host than rank 0, wanted ranks of one host")
    exchange.agree(f"{op}: release", env.VERSION)
    exchange.agree(f"{op}: device", device.type)
    exchange.agree(f"{op}: bytes", count)
    return sum(gpu == places[exchange.rank][1] for _, gpu in places)


def load(device: torch.device, dtype: torch.dtype, ranks: int) -> Library | None:
    """Load the module. On a GPU, also load the kernels that later calls launch."""
    spec = gen_allreduce_module(device.type)
    needs = {"dtype": (str(dtype).removeprefix("torch."),)}
    modules.load(spec, needs)
    if device.type == "cpu":
        return None
    artifact = modules.loaded(spec, needs)
    assert artifact is not None
    library = Library(str(artifact.path))
    with torch.cuda.device(device):
        library("load_kernels", ranks)
    return library


def share_empty(count: int, exchange: Exchange, device: torch.device, library: Library | None) -> SharedMemory:
    """Share memory of each rank, filled with empty words. Test that each rank sees the bytes of its peers."""
    memory = share_on_host(count, exchange) if library is None else share_on_gpu(count, exchange, device.index, library)
    try:
        _test_writes(exchange, memory)
    except Exception:
        memory.close()
        raise
    return memory


def _test_writes(exchange: Exchange, memory: SharedMemory) -> None:
    """Check that each rank sees the bytes that its peers write to its memory. Leave the memory empty.

    Raises:
        GroupError: a rank does not see them. The text names both ranks.
    """
    size, rank = exchange.size, exchange.rank

    def header_at(sender: int) -> int:
        return sender * 16  # offset of a header of slot 0

    def write() -> None:
        for peer in range(size):
            memory.write(memory.addresses[peer] + header_at(rank), bytes([rank + 1, peer + 1] * 8))

    def compare() -> None:
        for sender in range(size):
            if memory.read(memory.addresses[rank] + header_at(sender), 16) != bytes([sender + 1, rank + 1] * 8):
                text = f"rank {rank} does not see the bytes that rank {sender} writes to its memory"
                raise GroupError(text, (rank, sender))

    exchange.vote(write)
    exchange.vote(compare)
    exchange.vote(lambda: memory.write(memory.addresses[rank], b"\xff" * HEADER_BYTES))


def _call_text(words: list[int]) -> str:
    _, rows, row_bytes, kind = words
    dtypes: dict[int, str] = {1: "float32", 2: "float16", 3: "bfloat16", 6: "bytes"}  # DType of common/dtype.h
    fusions = ("residual and norm", "FP8 norm", "FP8 norm by tokens", "FP8 norm by groups")  # by NormQuant
    fusion = fusions[kind >> 9 & 3] if kind & 0x100 else "the sum only"
    if collective := kind >> 12 & 7:
        fusion = OPERATIONS[collective]
    if count := kind >> 29:  # payloads of MoeAlltoAll.dispatch
        ids = f", ids in number {(kind >> 26 & 7) - 1}" if kind >> 26 & 7 else ""
        fusion += f", {count} payloads of layout {kind >> 16 & 0x3FF:03x}{ids}"
    shots = ", in two shots" if kind & 0x800 else ""
    return f"{rows} rows of {row_bytes} bytes, {dtypes.get(kind & 0xFF, '?')}, {fusion}{shots}"
