"""Tests of programs made of our functions: a model in eager and compiled training, and one in a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import flashinfer

# torch's own, where Inductor is imported and where it writes a package.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]

VOCABULARY, WIDTH, HEADS, HEAD_DIM, INNER = 61, 48, 3, 64, 80  # 64: attention on CUDA has no smaller heads


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_and_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, pos_ids: torch.Tensor) -> torch.Tensor:
        normed = flashinfer.rmsnorm(x, self.norm, eps=1e-5)
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in self.qkv(normed).chunk(3, -1))
        q, k = flashinfer.apply_rope_pos_ids(q, k, pos_ids)
        dtype = torch.float16 if x.is_cuda else x.dtype  # attention on CUDA has no float32
        attended = flashinfer.single_prefill_with_kv_cache(*(t.to(dtype) for t in (q, k, v)), causal=True)
        y, residual = self.out(attended.to(x.dtype).flatten(1)), x.clone()  # the first norm needs x as it was
        flashinfer.fused_add_rmsnorm(y, residual, self.mlp_norm, eps=1e-5)
        return residual + self.down(flashinfer.silu_and_mul(self.gate_and_up(y)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.gamma, self.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, pos_ids = self.embedding(tokens) * 1.0, torch.arange(tokens.shape[0], device=tokens.device)
        for layer in self.layers:
            x = layer(x, pos_ids)
        return flashinfer.layernorm(x, self.gamma, self.beta) @ self.embedding.weight.t()


def losses_of(model: nn.Module, step, batches: list[torch.Tensor]) -> list[float]:
    # SGD: Adam scales tiny gradients up to full steps, so rounding would change the losses.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = step(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_compiled_training_has_the_losses_of_eager(device):
    torch._dynamo.reset()
    counters.clear()
    model = Model().to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # Learnable: each token follows from the one before.
    batches = [(torch.arange(size, device=device) * 7 + i) % VOCABULARY for i, size in enumerate((24, 31, 40, 57) * 5)]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:-1]), tokens[1:])

    eager = losses_of(model, step, batches)
    model.load_state_dict(start)
    compiled = losses_of(model, torch.compile(step, fullgraph=True, dynamic=True), batches)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=2e-3, atol=2e-3)
    assert eager[-1] < 0.5 * eager[0], "nothing was learned"


def test_gradients_of_a_model_are_those_of_torchs_functions(device, monkeypatch):
    """The reference is the same model of torch's functions, in float64 on the CPU."""
    model, reference = Model().to(device), Model().double()
    reference.load_state_dict(model.state_dict())
    tokens = torch.randint(0, VOCABULARY, (33,))
    loss = F.cross_entropy(model(tokens[:-1].to(device)), tokens[1:].to(device))
    loss.backward()

    def rms_norm(x, weight, eps):
        return F.rms_norm(x, (WIDTH,), weight, eps)

    def fused_add_rms_norm(x, residual, weight, eps):
        total = x + residual
        residual.copy_(total)
        x.copy_(rms_norm(total, weight, eps))

    def rope(q, k, pos_ids):
        angles = pos_ids[:, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = (torch.complex(*one.chunk(2, -1)) * turn for one in (q, k))
        return tuple(torch.cat([one.real, one.imag], -1) for one in pairs)

    def attention(q, k, v, causal):
        attended = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=causal)
        return attended.transpose(0, 1)

    monkeypatch.setattr(flashinfer, "rmsnorm", rms_norm)
    monkeypatch.setattr(flashinfer, "single_prefill_with_kv_cache", attention)
    monkeypatch.setattr(flashinfer, "fused_add_rmsnorm", fused_add_rms_norm)
    monkeypatch.setattr(flashinfer, "apply_rope_pos_ids", rope)
    monkeypatch.setattr(flashinfer, "silu_and_mul", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    monkeypatch.setattr(flashinfer, "layernorm", lambda x, gamma, beta: F.layer_norm(x, (WIDTH,), gamma, beta, 1e-6))
    F.cross_entropy(reference(tokens[:-1]), tokens[1:]).backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        rtol, atol = (1e-4, 1e-5) if device == "cpu" else (1e-2, 1e-3)  # half types in attention
        torch.testing.assert_close(got.grad.cpu().double(), want.grad, rtol=rtol, atol=atol)


LOAD = """
import sys, torch, flashinfer, flashinfer._ops.declare
import torch._inductor.codecache  # torch 2.10 needs the import

def refuse(spec, *_):
    raise RuntimeError(f"{spec.name} is not available")

package, inputs, outputs, *broken = sys.argv[1:]
if broken:
    flashinfer._ops.declare.load = refuse
loaded = torch._inductor.aoti_load_package(package)
torch.save([loaded(tokens) for tokens in torch.load(inputs)], outputs)
"""


def load_plainly(device: str, folder: Path) -> int:
    """Load a package of torch's functions only in a new process. Return the exit status."""
    program = torch.export.export(nn.Linear(64, 64).to(device), (torch.randn(24, 64, device=device),))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "plain.pt2"))
    load = "import sys, torch, torch._inductor.codecache; torch._inductor.aoti_load_package(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", load, package], capture_output=True).returncode


def test_a_package_runs_in_a_process_of_its_own(device, tmp_path: Path):
    torch._dynamo.reset()
    if device == "cuda" and (ended := load_plainly(device, tmp_path)) != 0:
        pytest.skip(f"torch {torch.__version__} does not load a package of its own functions here: exit {ended}")
    model = Model().to(device).eval()
    example = torch.randint(0, VOCABULARY, (24,), device=device)
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        inputs = [torch.randint(0, VOCABULARY, (size,), device=device) for size in (5, 24, 60)]
        want = [model(tokens) for tokens in inputs]
    torch.save(inputs, tmp_path / "inputs")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        """Load the package in a new process, with this process's modules, settings and path."""
        command = [sys.executable, "-X", "faulthandler", "-c", LOAD, package, tmp_path / "inputs", tmp_path / "outputs"]
        path = os.pathsep.join([str(Path(flashinfer.__file__).parents[1]), *filter(None, sys.path)])
        return subprocess.run([*command, *more], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})

    done = run()
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
    for got, value in zip(torch.load(tmp_path / "outputs"), want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-4)

    # The first operator fails. torch 2.11 prints the error and continues with an invalid tensor.
    done = run("broken")
    assert done.returncode != 0 and f"norm_{device} is not available" in done.stderr, done.stderr
