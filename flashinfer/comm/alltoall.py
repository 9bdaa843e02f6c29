"""All-to-all of experts: tokens to the ranks of their experts, and the sums of results back.

``include/flashinfer/common/moe_alltoall.h`` describes the layout and the order of writes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_dynamo_compiling

from .. import env
from .._ops.declare import define
from .._ops.errors import type_error, value_error
from .._ops.route import without_gradient
from .._ops.tensors import check_dims, check_tensor
from ..errors import CaptureError, GradientError, UnsupportedError
from ..jit.modules.allreduce import gen_allreduce_module
from ._agree import Exchange
from ._memory import Library
from .mnnvl import CommBackend
from .workspace import (
    ABORT,
    DTYPES,
    ERROR,
    HEADER_BYTES,
    MAX_RANKS,
    TRTLLMAllReduceFusionWorkspace,
    agree_on_place,
    backend_of,
    device_of,
    load,
    share_empty,
)

__all__ = ["MoeAlltoAll", "moe_a2a_get_workspace_size_per_rank"]

# Numbers of common/moe_alltoall.h.
MAX_PAYLOADS = 6
AREA_BYTES = 128

_moe_dispatch = define(
    "moe_dispatch(Tensor experts, Tensor payload0, Tensor? payload1, Tensor? payload2, Tensor? payload3,"
    " Tensor? payload4, Tensor? payload5, Tensor(a!) targets, Tensor(b!) order, Tensor table, int most,"
    " int num_experts, int ids, int invalid_id, bool? enable_pdl) -> ()",
    gen_allreduce_module,
    on_host=("table",),
)
_moe_combine = define(
    "moe_combine(Tensor payload, Tensor(a!) out, Tensor targets, Tensor(b!) order, Tensor table,"
    " bool? enable_pdl) -> ()",
    gen_allreduce_module,
    fallback=without_gradient("moe_combine", "payload"),
    on_host=("table",),
)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
) -> int:
    """Return how many bytes each rank needs for :class:`MoeAlltoAll`.

    Args:
        ep_size: ranks.
        max_num_tokens: the most tokens of a rank.
        total_dispatch_payload_size_per_token: bytes of all payloads of a token.
        combine_payload_size_per_token: bytes of a token's result.
    """
    rows = ep_size * max_num_tokens
    payloads = rows * total_dispatch_payload_size_per_token + MAX_PAYLOADS * AREA_BYTES
    return sum(map(whole_areas, (rows * 4, payloads, rows * combine_payload_size_per_token)))


def whole_areas(count: int) -> int:
    """Return ``count`` bytes rounded up to whole areas."""
    return -(-count // AREA_BYTES) * AREA_BYTES


class _Region(TRTLLMAllReduceFusionWorkspace):
    """Memory that the peers of a rank write, for one call at a time.

    Args:
        exchange: the ranks.
        count: bytes of each rank, equal on all ranks.
        device: of the payloads.

    Attributes:
        name: equal on all ranks, and different from that of every other region.
        dispatched: of a dispatch without its combine: runtime_max_tokens_per_rank, this rank's number of tokens, and
            the ranks of the tokens' experts.
        sent, returned: the most bytes that a dispatch and a combine have used.
    """

    def __init__(self, exchange: Exchange, count: int, device: torch.device) -> None:
        self._memory, self._process, self._device = None, os.getpid(), device
        self.world_size, self.rank = exchange.size, exchange.rank
        self.name: str = exchange.vote(lambda: secrets.token_hex(16))[0]
        self.metadata = {"tp_rank": exchange.rank, "tp_size": exchange.size}
        self._slot_bytes, self.users = whole_areas(count), 0
        self._timeout = max(exchange.vote(env.COMM_TIMEOUT.get))
        shares = agree_on_place("MoeAlltoAll", exchange, device, self._slot_bytes)
        library = exchange.run(lambda: load(device, torch.bfloat16, exchange.size))
        self.dispatched: tuple[int, int, torch.Tensor] | None = None
        self.sent = self.returned = 0
        with torch.cuda.device(device) if library is not None else nullcontext():
            self._allocate(exchange, library, shares)

    def is_usable(self) -> bool:
        """Return whether later calls can succeed."""
        return self._is_alive() and self._words[ERROR] == 0 and self._words[ABORT] == 0

    def _allocate(self, exchange: Exchange, library: Library | None, shares: int) -> None:
        exchange.vote(self._make_state)
        count = HEADER_BYTES + self._slot_bytes
        if exchange.size > 1:
            self._memory = share_empty(count, exchange, self._device, library)
            addresses = self._memory.addresses
        else:
            self._own = torch.full((count,), 0xFF, dtype=torch.uint8, device=self._device)
            addresses = (self._own.data_ptr(),)
        self._make_table(addresses, shares)
        self.bytes = _bytes_at(addresses[exchange.rank] + HEADER_BYTES, self._slot_bytes, self._device)


_regions = WeakValueDictionary[tuple[str, int], _Region]()  # by name and rank


class MoeAlltoAll:
    """Exchange of tokens between ranks that have a share of the experts each.

    Rank ``r`` of ``n`` has the experts from ``r * num_experts // n`` on. The constructor is a collective call: all
    ranks get an object, or all raise the same error. Objects of one group that need equal sizes share a workspace,
    so each layer of a model can make its own object. All calls of a workspace are in one order, on one stream or on
    streams that wait for each other. :meth:`dispatch` and :meth:`combine` of one object alternate. CUDA graphs hold
    addresses, so the object must outlive them.

    Args:
        mapping: with ``moe_ep_size`` and ``moe_ep_rank``, such as :class:`flashinfer.comm.Mapping`.
        max_num_tokens: the most tokens of a rank in a call, equal on all ranks.
        top_k: experts of a token.
        num_experts: of all ranks, a multiple of the ranks.
        workspace_size_per_rank: bytes of :func:`moe_a2a_get_workspace_size_per_rank`. By default they serve 16-bit
            rows of ``hidden_size``, with an id and a float32 weight for each expert.
        hidden_size: columns of a row, needed without ``workspace_size_per_rank``.
        mnnvl_config: such as :class:`flashinfer.comm.MnnvlConfig`. Its ``comm_backend`` exchanges Python objects.
        comm_backend: exchanges Python objects instead of ``mnnvl_config.comm_backend``.
        group: exchanges Python objects if there is neither, by default all ranks.
        device: of the payloads, by default the current GPU, or the CPU without one.

    Raises:
        ValueError: sizes are invalid, or differ between ranks.
        UnsupportedError: the ranks are on several hosts.
        GroupError: memory is mapped, but what one rank writes does not arrive at another.
        CaptureError: a CUDA graph is being captured.
        RuntimeError: no memory, or memory that cannot be shared.
    """

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        *,
        comm_backend: CommBackend | None = None,
        group: Any = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        op = "MoeAlltoAll"
        size, rank = mapping.moe_ep_size, mapping.moe_ep_rank
        backend = getattr(mnnvl_config, "comm_backend", None) if comm_backend is None else comm_backend
        exchange = Exchange(backend_of(op, size, backend, group))

        def check() -> int:
            if (exchange.size, exchange.rank) != (size, rank) or size > MAX_RANKS:
                wanted = f"rank {exchange.rank} of {exchange.size} as the group has, of {MAX_RANKS} at most"
                raise value_error(op, "mapping", f"rank {rank} of {size}", wanted)
            sizes = dict(max_num_tokens=max_num_tokens, top_k=top_k, workspace_size_per_rank=workspace_size_per_rank)
            for name, value in sizes.items():
                if value is not None and value < 1:
                    raise value_error(op, name, value, "a positive number")
            if num_experts < 1 or num_experts % size != 0:
                raise value_error(op, "num_experts", num_experts, f"a multiple of the {size} ranks")
            if workspace_size_per_rank is not None:
                return workspace_size_per_rank
            if hidden_size is None:
                raise value_error(op, "hidden_size", None, "a number, or workspace_size_per_rank")
            return self.get_moe_workspace_size_per_rank(size, top_k, max_num_tokens, hidden_size)

        count = exchange.run(check)
        exchange.agree(f"{op}: bytes", count)
        exchange.agree(f"{op}: sizes", (max_num_tokens, num_experts))
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        where = exchange.run(lambda: _device_outside_captures(op, device))
        shape_and_value = (max_num_tokens, top_k), -1
        self._targets = exchange.run(lambda: torch.full(*shape_and_value, dtype=torch.int32, device=where))
        self._region: _Region | None = self._shared_region(exchange, count, where)
        self._region.users += 1

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int, top_k: int, max_num_tokens: int, hidden_size: int, extra_payload_bytes_per_token: int = 0
    ) -> int:
        """Return how many bytes each rank needs for 16-bit rows of ``hidden_size``.

        Each token also has an id and a float32 weight for each expert, and ``extra_payload_bytes_per_token``.
        """
        row = 2 * hidden_size
        sent = row + 8 * top_k + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(ep_size, max_num_tokens, sent, row)

    @staticmethod
    def _shared_region(exchange: Exchange, count: int, device: torch.device) -> _Region:
        """Return a region of this size that all ranks have, or make one.

        Sizes must be equal, because engines use workspaces of different sizes at the same time. Names are compared,
        so that ranks of different groups do not share a region.
        """

        def known() -> set[str]:
            fits = [one for one in _regions.values() if one.is_usable() and one._slot_bytes == whole_areas(count)]
            same = (exchange.size, exchange.rank, device)
            return {one.name for one in fits if (one.world_size, one.rank, one._device) == same}

        common = set.intersection(*exchange.vote(known))
        if common:
            return _regions[min(common), exchange.rank]
        region = _Region(exchange, count, device)
        _regions[region.name, region.rank] = region
        return region

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: Sequence[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[torch.Tensor]:
        """Send the payloads of each token, once, to every rank that has one of its experts.

        Args:
            token_selected_experts: ``[tokens, top_k]``, int32, contiguous. Ids outside of the experts have no rank.
            input_payloads: one to six contiguous tensors ``[tokens, ...]`` of any dtypes. Dtypes and the shapes of
                tokens are equal on all ranks.
            runtime_max_tokens_per_rank: the most tokens of a rank in this call, equal on all ranks.
            invalid_token_expert_id: the id written to rows that received no token. Needs
                ``expert_id_payload_index``.
            expert_id_payload_index: number of the payload with ids, of int32.

        Returns:
            For each payload a tensor ``[ranks, runtime_max_tokens_per_rank, ...]`` in the workspace, valid until this
            rank calls :meth:`combine`: after that, peers may dispatch. Row ``(s, t)`` is token ``t`` of rank ``s`` if
            one of the token's experts is on this rank. Other rows keep old bytes.

        Raises:
            ValueError: invalid shapes or devices, payloads that do not fit, a dispatch without its combine, or a
                destroyed object. Nothing was sent.
            TypeError: invalid dtypes.
            GroupError: an earlier call failed, see :meth:`check`. On the CPU, this call.
            GradientError: a tensor requires a gradient.
        """
        op, region = "MoeAlltoAll.dispatch", self._alive("dispatch")
        check_dims(op, "token_selected_experts", token_selected_experts, 2)
        tokens, most = token_selected_experts.shape[0], runtime_max_tokens_per_rank
        if region.dispatched is not None:
            raise value_error(op, "workspace", "a second dispatch", "combine() after each dispatch()")
        if not tokens <= most <= self.max_num_tokens:
            raise value_error(op, "runtime_max_tokens_per_rank", most, f"{tokens} to {self.max_num_tokens}")
        if not 1 <= len(input_payloads) <= MAX_PAYLOADS:
            raise value_error(op, "input_payloads", f"{len(input_payloads)} tensors", f"1 to {MAX_PAYLOADS}")
        if token_selected_experts.shape[1] != self.top_k:
            got = f"{token_selected_experts.shape[1]} columns"
            raise value_error(op, "token_selected_experts", got, f"{self.top_k} as top_k")
        ids = self._ids(op, input_payloads, invalid_token_expert_id, expert_id_payload_index)
        rows = [_as_bytes(op, one, tokens) for one in input_payloads]
        places, end = list[int](), whole_areas(region.world_size * most * 4)
        for one in rows:
            places.append(end)
            end += whole_areas(region.world_size * most * one.shape[1])
        _check_room(op, region, end, region.returned)
        region._call(
            _moe_dispatch,
            token_selected_experts,
            *rows,
            *[None] * (MAX_PAYLOADS - len(rows)),
            self._targets,
            region._order,
            region._table,
            most,
            self.num_experts,
            ids,
            invalid_token_expert_id or 0,
            None,
        )
        region.sent, region.dispatched = max(region.sent, end), (most, tokens, self._targets)
        return [
            region.bytes[place : place + region.world_size * most * one.shape[1]]
            .view(payload.dtype)
            .view(region.world_size, most, *payload.shape[1:])
            for place, one, payload in zip(places, rows, input_payloads, strict=True)
        ]

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        *,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the results of the last dispatch's tokens to their ranks and add them.

        The sum is in float32 and rounded once. The order is that of the ranks' first experts in the token's list.

        Args:
            payload: ``[ranks, runtime_max_tokens_per_rank, hidden]``, contiguous, float32, float16 or bfloat16: the
                sum over this rank's experts for each row that :meth:`dispatch` returned. Other rows are not read.
            runtime_max_tokens_per_rank: of the dispatch.
            payload_in_workspace: ignored: every tensor is sent without a copy.
            output: ``[tokens, hidden]``, contiguous, allocated by default.

        Returns:
            ``output``. A token without experts gets zeros. After a failure it is NaN.

        Raises:
            ValueError: invalid shapes or devices, a payload that does not fit, no dispatch, one of another object, or a
                destroyed object. Nothing was sent.
            TypeError: invalid dtypes.
            GroupError: an earlier call failed, see :meth:`check`. On the CPU, this call.
            GradientError: a tensor requires a gradient.
        """
        op, region = "MoeAlltoAll.combine", self._alive("combine")
        check_dims(op, "payload", payload, 3)
        if region.dispatched is None:
            raise value_error(op, "workspace", "no dispatch", "dispatch() before each combine()")
        most, tokens, targets = region.dispatched
        if targets is not self._targets:
            raise value_error(op, "workspace", "a dispatch of another object", "combine() of the object of dispatch()")
        if runtime_max_tokens_per_rank != most or payload.shape[1] != most:
            got = f"{runtime_max_tokens_per_rank} with a payload of {payload.shape[1]}"
            raise value_error(op, "runtime_max_tokens_per_rank", got, f"{most} as dispatch had")
        if output is None:
            output = payload.new_empty(tokens, payload.shape[2])
        if output.dim() != 2 or output.shape[0] != tokens:
            raise value_error(op, "output", f"shape {list(output.shape)}", [tokens, payload.shape[2]])
        count = whole_areas(payload.numel() * payload.itemsize)
        _check_room(op, region, count, region.sent)
        region._call(_moe_combine, payload, output, targets, region._order, region._table, None)
        region.returned, region.dispatched = max(region.returned, count), None
        return output

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor ``[ranks, runtime_max_tokens_per_rank, hidden_size]`` for results.

        It is ordinary memory: :meth:`combine` sends any tensor without a copy.
        """
        region = self._alive("get_combine_payload_tensor_in_workspace")
        if dtype not in DTYPES:
            raise type_error("MoeAlltoAll", "dtype", dtype, "float32, float16 or bfloat16")
        shape = (region.world_size, runtime_max_tokens_per_rank, hidden_size)
        return torch.empty(shape, dtype=dtype, device=region._device)

    def check(self) -> None:
        """Raise the error of the first failed call that used this object's workspace.

        Raises:
            GroupError: see :meth:`TRTLLMAllReduceFusionWorkspace.check`.
        """
        self._alive("check").check()

    def abort(self) -> None:
        """End running and later waits of this rank, from any thread. The object is unusable afterwards."""
        self._alive("abort").abort()

    def destroy(self) -> None:
        """Release the memory after this rank's kernels, if no other object shares it. Repeated calls do nothing.

        Tensors of :meth:`dispatch` are invalid afterwards.
        """
        region, self._region = self._region, None
        if region is None:
            return
        region.users -= 1
        if region.users == 0:
            region.destroy()

    def _alive(self, method: str) -> _Region:
        if is_dynamo_compiling():  # a graph would not know that a call writes what an earlier one returned
            raise UnsupportedError(f"MoeAlltoAll.{method}: cannot be traced, wanted a call outside of torch.compile")
        if self._region is None:
            raise value_error(f"MoeAlltoAll.{method}", "workspace", "one after destroy()", "a new one")
        return self._region

    @staticmethod
    def _ids(op: str, payloads: Sequence[torch.Tensor], invalid: int | None, index: int | None) -> int:
        """Return the number of the payload with ids, or -1."""
        if (invalid is None) != (index is None):
            got = f"{invalid} with {index}"
            raise value_error(op, "invalid_token_expert_id", got, "both, it and expert_id_payload_index, or neither")
        if index is None:
            return -1
        if not 0 <= index < len(payloads):
            raise value_error(op, "expert_id_payload_index", index, f"0 to {len(payloads) - 1}")
        if payloads[index].dtype != torch.int32:
            raise type_error(op, f"input_payloads[{index}]", payloads[index].dtype, "int32")
        return index


def _check_room(op: str, region: _Region, count: int, other: int) -> None:
    """Check that the bytes of a call and those of the other function fit side by side: peers may still read them."""
    if count + other > region._slot_bytes:
        got = f"{count} bytes with {other} of the other function"
        raise value_error(op, "workspace_size_per_rank", got, f"at most {region._slot_bytes}")


def _as_bytes(op: str, payload: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the bytes of a payload, by row."""
    check_tensor(op, "input_payloads", payload)
    if payload.dim() < 1 or payload.shape[0] != tokens:
        got = f"shape {list(payload.shape)}"
        raise value_error(op, "input_payloads", got, f"{tokens} rows as token_selected_experts has")
    if not payload.is_contiguous():
        raise value_error(op, "input_payloads", "a tensor that is not contiguous", "a contiguous one")
    if payload.requires_grad and torch.is_grad_enabled():
        raise GradientError(f"{op}: has no gradient, wanted tensors that require none, or torch.no_grad()")
    columns = payload.shape[1:].numel()
    return payload.detach().view(tokens, columns).view(torch.uint8)


def _device_outside_captures(op: str, device: torch.device | str | int | None) -> torch.device:
    found = device_of(device)
    if found.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"{op}: a CUDA graph is being captured: make it before")
    return found


def _bytes_at(address: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the bytes of mapped memory as a tensor that does not own them.

    ``__cuda_array_interface__`` would need numpy.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
