"""A small language model of DeltaNet layers on flashinfer's operators; train_delta_net.py trains it.

A layer is q, k, v -> short convolution -> delta rule -> norm -> projection, as in DeltaNet and Gated
DeltaNet. With ``gated`` the state decays and the norm has a gate. Sequences run in the chunk form. A further
token runs as a step on the states after the sequence, which change in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import flashinfer
from flashinfer import delta_rule

WIDTH = 4  # taps of the short convolution


@dataclass
class States:
    """State of a layer after the tokens so far."""

    conv: torch.Tensor  # [B, channels, WIDTH - 1]
    memory: torch.Tensor  # [B, heads, K, V]


class Mixer(nn.Module):
    def __init__(self, hidden: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * hidden, WIDTH) / WIDTH**0.5)
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden // heads))
        self.out = nn.Linear(hidden, hidden, bias=False)
        if gated:
            self.decay = nn.Linear(hidden, heads, bias=False)
            self.A_log = nn.Parameter(torch.linspace(1.0, 8.0, heads).log())
            self.dt_bias = nn.Parameter(torch.full((heads,), -4.0))
            self.gate = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, scale: float | None, keep: bool) -> tuple[torch.Tensor, States | None]:
        """Compute whole sequences, ``[B, T, hidden]``; with ``keep`` also return the states after them."""
        mixed = self.qkv(x).transpose(1, 2)
        kept = flashinfer.causal_conv1d_fn(mixed, self.conv, activation="silu", return_final_states=keep)
        mixed, conv = kept if keep else (kept, None)
        q, k, v = (one.unflatten(-1, (self.heads, -1)) for one in mixed.transpose(1, 2).chunk(3, dim=-1))
        beta = self.beta(x).sigmoid()
        how = dict(scale=scale, output_final_state=keep, use_qk_l2norm_in_kernel=True)
        if self.gated:
            gate = dict(g=self.decay(x), A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True)
            o, memory = delta_rule.chunk_gated_delta_rule(q, k, v, beta=beta, **gate, **how)
        else:
            o, memory = delta_rule.chunk_delta_rule(q, k, v, beta, **how)
        return self.project(x, o), States(conv, memory) if keep else None

    def step(self, x: torch.Tensor, states: States, scale: float | None) -> torch.Tensor:
        """Compute one token of each sequence, ``[B, 1, hidden]``; ``states`` change."""
        mixed = flashinfer.causal_conv1d_update(self.qkv(x)[:, 0], states.conv, self.conv, activation="silu")
        q, k, v = (one.unflatten(-1, (self.heads, -1)) for one in mixed[:, None].chunk(3, dim=-1))
        gate = dict(g=self.decay(x), A_log=self.A_log, dt_bias=self.dt_bias) if self.gated else {}
        o = delta_rule.delta_rule_step(
            q, k, v, states.memory, beta=self.beta(x), beta_is_logit=True, scale=scale, use_qk_l2norm_in_kernel=True,
            **gate,
        )  # fmt: skip
        return self.project(x, o)

    def project(self, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        if self.gated:
            normed = flashinfer.gated_rmsnorm(o, self.gate(x).unflatten(-1, (self.heads, -1)), self.norm)
        else:
            normed = flashinfer.rmsnorm(o, self.norm)
        return self.out(normed.flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.before_mixer, self.before_mlp = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.mixer = Mixer(hidden, heads, gated)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, scale: float | None, keep: bool) -> tuple[torch.Tensor, States | None]:
        mixed, states = self.mixer(flashinfer.rmsnorm(x, self.before_mixer), scale, keep)
        return self.mlp(x + mixed), states

    def step(self, x: torch.Tensor, states: States, scale: float | None) -> torch.Tensor:
        return self.mlp(x + self.mixer.step(flashinfer.rmsnorm(x, self.before_mixer), states, scale))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(flashinfer.silu_and_mul(self.up(flashinfer.rmsnorm(x, self.before_mlp))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, hidden: int = 128, layers: int = 2, heads: int = 4, gated: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, gated) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)

    def forward(self, tokens: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return logits, ``[B, T, vocabulary]``, of ``tokens``, ``[B, T]``."""
        return self.prefill(tokens, scale, keep=False)[0]

    def prefill(
        self, tokens: torch.Tensor, scale: float | None = None, keep: bool = True
    ) -> tuple[torch.Tensor, list[States | None]]:
        """Return logits, and the states of all layers for :meth:`step`."""
        x, states = self.embedding(tokens), []
        for block in self.blocks:
            x, one = block(x, scale, keep)
            states.append(one)
        return self.logits(x), states

    def step(self, tokens: torch.Tensor, states: list[States], scale: float | None = None) -> torch.Tensor:
        """Return logits, ``[B, vocabulary]``, of the next ``tokens``, ``[B]``; ``states`` change."""
        x = self.embedding(tokens)[:, None]
        for block, one in zip(self.blocks, states, strict=True):
            x = block.step(x, one, scale)
        return self.logits(x)[:, 0]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return flashinfer.rmsnorm(x, self.norm) @ self.embedding.weight.t()

    def loss(self, tokens: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return the loss of each token except the first, from the tokens before it."""
        return F.cross_entropy(self(tokens[:, :-1], scale).flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """Return the prompt, ``[B, T]``, and the ``count`` most likely tokens after it, each by a step."""
        logits, states = self.prefill(prompt)
        tokens = [prompt, logits[:, -1:].argmax(-1)]
        while len(tokens) <= count:
            tokens.append(self.step(tokens[-1][:, 0], states).argmax(-1, keepdim=True))
        return torch.cat(tokens, 1)
