"""Steps on logits and probabilities. Some are several steps in one function of :mod:`flashinfer.sampling`."""

from __future__ import annotations

from typing import Any

import torch

from .. import sampling
from .._sampling.draws import Draws, draw
from .op import Op, ParameterizedOp, step_error
from .types import TensorType


def _draws(op: Op, runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that all functions with draws share."""
    arguments = {name: runtime.get(name) for name in ("indices", "generator", "seed", "offset", "slot")}
    return arguments | {"deterministic": op.params.get("deterministic", True)}


def _of_rows(op: Op, name: str, number: Any, like: torch.Tensor) -> Any:
    """Return a number, or a tensor with one number for each row.

    Raises:
        ValueError: a tensor of another shape, or on another device.
    """
    if not isinstance(number, torch.Tensor) or number.dim() == 0:
        return number
    if number.shape != like.shape[:1]:
        raise step_error(op, name, f"shape {list(number.shape)}", f"[{like.shape[0]}], one for each row")
    if number.device != like.device:
        raise step_error(op, name, f"one on {number.device}", f"the input's device, {like.device}")
    return number


def _column(op: ParameterizedOp, name: str, runtime: dict[str, Any], like: torch.Tensor) -> Any:
    """Return a parameter of a call, broadcast along the rows of ``like``."""
    number = _of_rows(op, name, op.parameter(name, runtime), like)
    return number.to(like.dtype).unsqueeze(-1) if isinstance(number, torch.Tensor) and number.dim() == 1 else number


class TemperatureOp(ParameterizedOp):
    """Division of logits by ``temperature``."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return tensor / _column(self, "temperature", runtime, tensor)  # type: ignore[no-any-return]


class SoftmaxOp(Op):
    """Step with :func:`flashinfer.sampling.softmax`."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.softmax(tensor, None, self.params.get("enable_pdl"))


class ProbsTopKOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_k_renorm_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.top_k_renorm_probs(tensor, self.parameter("top_k", runtime))


class LogitsTopKOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_k_mask_logits`."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.top_k_mask_logits(tensor, self.parameter("top_k", runtime))


class TopPOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_p_renorm_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.top_p_renorm_probs(tensor, self.parameter("top_p", runtime))


class MinPOp(ParameterizedOp):
    """Probabilities of at least ``min_p`` times the largest, normalised."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        least = tensor.amax(dim=-1, keepdim=True) * _column(self, "min_p", runtime, tensor)
        filtered = torch.where(tensor >= least, tensor, 0)
        return filtered / filtered.sum(dim=-1, keepdim=True)


class ProbsSampleOp(Op):
    """Step with :func:`flashinfer.sampling.sampling_from_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.sampling_from_probs(tensor, **_draws(self, runtime))  # type: ignore[return-value]


class LogitsSampleOp(Op):
    """Step with :func:`flashinfer.sampling.sampling_from_logits`."""

    IN, OUT = TensorType.LOGITS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.sampling_from_logits(tensor, **_draws(self, runtime))


class FusedTemperatureSoftmaxOp(ParameterizedOp):
    """Temperature and softmax in one read of the logits."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        return sampling.softmax(tensor, self.parameter("temperature", runtime), self.params.get("enable_pdl"))


class FusedProbsTopKSampleOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_k_sampling_from_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        top_k = self.parameter("top_k", runtime)
        return sampling.top_k_sampling_from_probs(tensor, top_k, **_draws(self, runtime))  # type: ignore[return-value]


class FusedProbsTopPSampleOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_p_sampling_from_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        top_p = self.parameter("top_p", runtime)
        return sampling.top_p_sampling_from_probs(tensor, top_p, **_draws(self, runtime))  # type: ignore[return-value]


class FusedProbsMinPSampleOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.min_p_sampling_from_probs`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        min_p = self.parameter("min_p", runtime)
        return sampling.min_p_sampling_from_probs(tensor, min_p, **_draws(self, runtime))  # type: ignore[return-value]


class FusedProbsTopKTopPSampleOp(ParameterizedOp):
    """Step with :func:`flashinfer.sampling.top_k_top_p_sampling_from_probs` and joint filters."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        top_k, top_p = self.parameter("top_k", runtime), self.parameter("top_p", runtime)
        return sampling.top_k_top_p_sampling_from_probs(  # type: ignore[return-value]
            tensor, top_k, top_p, filter_apply_order="joint", **_draws(self, runtime)
        )


class FusedSoftmaxFilterSampleOp(ParameterizedOp):
    """Softmax with or without temperature, the filters named by ``filters``, and a draw, in one read.

    With ``masks`` the logits are masked by ``top_k`` before the softmax, like :class:`LogitsTopKOp`.
    """

    IN, OUT = TensorType.LOGITS, TensorType.INDICES

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        masks = self.params.get("masks", False)
        numbers = {name: self.parameter(name, runtime) for name in self.params["filters"]}
        arguments = _draws(self, runtime)
        if isinstance(arguments["indices"], torch.Tensor):  # the draw rejects other types
            # Steps before the draw work on rows, even if there are as many draws as rows.
            rows = arguments["indices"].long().clamp(0, tensor.shape[0] - 1)
            for name in ("temperature", "top_k") if masks else ("temperature",):
                number = _of_rows(self, name, numbers.get(name), tensor)
                if isinstance(number, torch.Tensor) and number.dim() == 1:
                    numbers[name] = number[rows]
        del arguments["deterministic"]
        draws = Draws(check_nan=False, **arguments)
        return draw(  # type: ignore[return-value]
            self.name, "logits", tensor, draws, top_k_first=masks, **numbers
        )
