"""Whether fast options train a small model as plain fp32 does: 300 steps on real text, each option beside fp32 under three seeds.

    python results/h200/convergence.py run results/h200/convergence.csv      # a GPU, two minutes; goes on where it stopped
    python results/h200/convergence.py table results/h200/convergence.csv    # Markdown
    python results/h200/convergence.py plot results/h200/convergence.csv results/h200/convergence.svg

Every run has the same batches in the same order. The seeds of fp32 differ in the initial weights; an option has those of the first
seed. A curve is the loss in means of 20 steps. The spread is the largest distance of two seeds' curves; an option's distance is
that of its curve from the first seed's. It trains alike if its distance is not longer than the spread.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

STEPS, MEAN_OF = 300, 20
SEEDS = (0, 1, 2)
FASTEST: dict[str, Any] = {
    "attention": "trainstep",
    "adamw": "trainstep",
    "ops": "fused",
    "compile": "block",
    "capture": "step",
    "precision": "bf16_autocast",
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "attention trainstep": {"attention": "trainstep"},
    "ops fused": {"ops": "fused"},
    "adamw trainstep": {"adamw": "trainstep"},
    "update in_backward": {"adamw": "trainstep", "update": "in_backward"},
    "compile block": {"compile": "block"},
    "compile model": {"compile": "model"},
    "capture step": {"capture": "step"},
    "recompute selective": {"recompute": "selective"},
    "recompute block": {"recompute": "block"},
    "tf32": {"precision": "tf32"},
    "bf16_autocast": {"precision": "bf16_autocast"},
    "bf16_master": {"precision": "bf16_master"},
    "bf16": {"precision": "bf16"},
    "all, bf16_autocast": FASTEST,
    "all, bf16_master": {**FASTEST, "precision": "bf16_master"},
    "narrow blocks, bf16_autocast": {**FASTEST, "recompute": "selective", "narrow_blocks": 4},
    "dW in fp32, bf16_master": {**FASTEST, "precision": "bf16_master", "chunk_tokens": 256},
    "dW in bf16, bf16_master": {**FASTEST, "precision": "bf16_master", "chunk_tokens": 256, "loss_sum_dtype": "own"},
}
"""Name -> options of the run. `chunk_tokens`: of the loss, so that dW is summed over 16 chunks; for 256 words it would take one."""


def run(file: Path, device: str) -> None:
    """Append a row a run: its name, and the loss of each step."""
    import torch

    from trainstep.config.model import ModelConfig
    from trainstep.config.run import RunConfig
    from trainstep.ops import linear_cross_entropy
    from trainstep.training.build import build_step

    model = ModelConfig(d_model=256, d_ff=704, layers=4, heads=4, vocab_size=256)
    plain = RunConfig(model=model, batch_size=16, data="stdlib", learning_rate=1e-3, attention="sdpa", device=device)
    runs: dict[str, dict[str, Any]] = {f"fp32, seed {seed}": {"seed": seed} for seed in SEEDS}
    runs |= {name: dict(options) for name, options in OPTIONS.items()}
    usual = linear_cross_entropy.usual_chunk_tokens
    done = set(curves(file)) if file.exists() else set()
    batches = build_step(plain)
    for name, options in runs.items():
        if name in done:
            continue
        torch._dynamo.reset()
        chunk_tokens = options.pop("chunk_tokens", None)
        linear_cross_entropy.usual_chunk_tokens = usual if chunk_tokens is None else lambda *_, of=chunk_tokens: of
        assembly = build_step(replace(plain, **options))
        losses = torch.stack([assembly.take(batches.micro_batches(step)).clone() for step in range(STEPS)])
        with file.open("a", newline="") as out:
            csv.writer(out).writerow([name, *(f"{loss:.5f}" for loss in losses.tolist())])
        print(name, f"{losses[-MEAN_OF:].mean():.4f}", flush=True)


def curves(file: Path) -> dict[str, list[float]]:
    """Name of a run -> its loss in means of 20 steps."""
    with file.open(newline="") as rows:
        losses = {name: [float(loss) for loss in losses] for name, *losses in csv.reader(rows)}
    return {
        name: [sum(values[first : first + MEAN_OF]) / MEAN_OF for first in range(0, len(values), MEAN_OF)]
        for name, values in losses.items()
    }


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest distance of two curves, after the first mean: there every model still learns which bytes are frequent."""
    return max(abs(a - b) for a, b in zip(one[1:], other[1:], strict=True))


def table(file: Path) -> str:
    found = curves(file)
    seeds = [found[f"fp32, seed {seed}"] for seed in SEEDS]
    spread = max(distance(one, other) for one, other in combinations(seeds, 2))
    lines = [
        f"Spread of {len(SEEDS)} seeds in fp32: {spread:.4f}. Loss: mean of the last {MEAN_OF} of {STEPS} steps.",
        "",
        "| run | loss | distance from fp32 | of the spread | alike |",
        "|---|---|---|---|---|",
    ]
    for name, curve in found.items():
        far = distance(curve, seeds[0])
        lines.append(
            f"| {name} | {curve[-1]:.4f} | {far:.4f} | {far / spread:.2f} | {'yes' if far <= spread else 'no'} |"
        )
    return "\n".join(lines)


def plot(file: Path, picture: Path) -> None:
    """Each option's distance from the first seed's curve, with sign, over the steps; the other seeds in grey."""
    found = curves(file)
    first = found.pop(f"fp32, seed {SEEDS[0]}")
    gaps = {name: [a - b for a, b in zip(curve, first, strict=True)][1:] for name, curve in found.items()}
    most = max(abs(gap) for values in gaps.values() for gap in values)
    width, height, left, top = 720, 360, 60, 20

    def points(values: Sequence[float]) -> str:
        across = (width - left - 190) / (len(values) - 1)
        return " ".join(
            f"{left + i * across:.1f},{top + (1 - gap / most) * height / 2:.1f}" for i, gap in enumerate(values)
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 60}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height + 60}" fill="white"/>',
        f'<text x="{left}" y="12">loss less that of fp32, seed 0 (means of {MEAN_OF} steps)</text>',
    ]
    for share in (-1, -0.5, 0, 0.5, 1):
        y = top + (1 - share) * height / 2
        parts.append(f'<line x1="{left}" x2="{width - 190}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share * most:+.3f}</text>')
    parts.append(f'<text x="{left}" y="{top + height + 18}">step {MEAN_OF}</text>')
    parts.append(f'<text x="{width - 190}" y="{top + height + 18}" text-anchor="end">step {STEPS}</text>')
    for index, (name, values) in enumerate(sorted(gaps.items(), key=lambda item: not item[0].startswith("fp32"))):
        seed = name.startswith("fp32")
        colour = "#999" if seed else f"hsl({index * 47 % 360}, 70%, 42%)"
        dash = ' stroke-dasharray="5 3"' if seed else ""
        parts.append(
            f'<polyline points="{points(values)}" fill="none" stroke="{colour}"{dash}><title>{name}</title></polyline>'
        )
        parts.append(f'<text x="{width - 180}" y="{top + 12 + 16 * index}" fill="{colour}">{name}</text>')
    picture.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in ("run", "table", "plot"):
        print(__doc__, file=sys.stderr)
        return 2
    verb, file = arguments[0], Path(arguments[1])
    if verb == "run":
        run(file, *(arguments[2:] or ["cuda"]))
    elif verb == "table":
        print(table(file))
    else:
        plot(file, Path(arguments[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
