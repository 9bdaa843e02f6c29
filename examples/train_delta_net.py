"""Train a DeltaNet and a Gated DeltaNet on this repository's own documents, a character at a time.

    python examples/train_delta_net.py --steps 300 --compile --picture loss.svg

Lengths differ from batch to batch; one compiled graph serves all of them. The picture has the loss of each
model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from delta_net import LanguageModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def characters() -> tuple[torch.Tensor, str]:
    """Return the text as indices of its characters, and the characters."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text() for path in files)
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text]), alphabet


def batch(text: torch.Tensor, rows: int, length: int, draws: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - length - 1, (rows,), generator=draws)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()])


def train(
    model: LanguageModel, text: torch.Tensor, steps: int, compiled: bool, name: str = "", rows: int = 8,
    lengths: tuple[int, int] = (64, 256), rate: float = 2e-3, quiet: bool = False,
) -> list[float]:  # fmt: skip
    """Return the loss of each step. Batches are the same in every call."""
    device = model.norm.device
    loss_of = torch.compile(model.loss, fullgraph=True, dynamic=True) if compiled else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    draws, losses = torch.Generator().manual_seed(0), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), disable=quiet) as progress:
        task = progress.add_task(name, total=steps, loss="")
        for _ in range(steps):
            length = int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=draws))
            loss = loss_of(batch(text, rows, length, draws).to(device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
    return losses


def picture(curves: dict[str, list[float]], width: int = 640, height: int = 360) -> str:
    """Return curves of losses over steps as an SVG."""

    left, right, top, bottom = 48, width - 12, 12, height - 32
    most = max(max(losses) for losses in curves.values())
    steps = max(len(losses) for losses in curves.values())

    def x(step: float) -> float:
        return left + (right - left) * step / max(steps - 1, 1)

    def y(loss: float) -> float:
        return bottom - (bottom - top) * loss / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(int(most) + 1):
        parts.append(f'<path d="M{left} {y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for place in range(5):
        step = (steps - 1) * place / 4
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 20}" text-anchor="middle">{step:.0f}</text>')
    for number, (name, losses) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{right - 8}" y="{top + 16 * (number + 1)}" text-anchor="end" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("delta", "gated", "both"), default="both")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compile", action="store_true", help="one graph for all lengths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path("loss.svg"))
    parser.add_argument("--prompt", default="The ")
    options = parser.parse_args()
    text, alphabet = characters()
    curves = {}
    for name, gated in (("DeltaNet", False), ("Gated DeltaNet", True)):
        if options.model == ("delta" if gated else "gated"):
            continue
        torch.manual_seed(0)
        model = LanguageModel(len(alphabet), gated=gated).to(options.device)
        start = time.perf_counter()
        curves[name] = train(model, text, options.steps, options.compile, name)
        seconds = time.perf_counter() - start
        prompt = torch.tensor([[alphabet.index(one) for one in options.prompt]], device=options.device)
        written = "".join(alphabet[one] for one in model.generate(prompt, 80)[0].tolist())
        print(f"{name}: loss {curves[name][0]:.3f} to {curves[name][-1]:.3f} in {seconds:.0f} s; it writes {written!r}")
    options.picture.write_text(picture(curves))
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
