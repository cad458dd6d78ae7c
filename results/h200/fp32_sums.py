"""Errors and times of attention in IEEE fp32, of one checkout a call: what record fp32_sums.txt holds before and after a change.

PYTHONPATH=CHECKOUT/src:tests python results/h200/fp32_sums.py errors LABEL fp32_sums.txt
PYTHONPATH=CHECKOUT/src:tests python results/h200/fp32_sums.py times LABEL fp32_sums.txt    # three rounds, checkouts in turn
python results/h200/fp32_sums.py table fp32_sums.txt > fp32_sums.md

`errors`: the largest of several seeds of error / bound, o and the three gradients, by the 2x rule of ops/reference.py, first as it
stands (`strict`), then with the allowance for terms that cancel (`terms`, tests/attention_cases.py). `times`: milliseconds of each
kernel between CUDA events, 15 calls after 3.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ERROR_SHAPES = [  # queries, keys, head width, causal, seeds
    (1, 1000, 64, False, 6),
    (1, 4097, 64, False, 6),
    (1, 4097, 128, False, 6),
    (1, 16384, 64, False, 6),
    (17, 8000, 80, True, 4),
    (32, 8000, 64, False, 4),
    (128, 8000, 64, False, 4),
    (2000, 2000, 64, True, 3),
    (4097, 4097, 64, True, 3),
    (4097, 4097, 128, False, 2),
    (12289, 12289, 64, True, 2),
    (12289, 12289, 64, False, 2),
    (12289, 12289, 128, True, 2),
    (12289, 12289, 128, False, 2),
    (16384, 17, 128, False, 3),
    (3000, 3000, 256, True, 2),
]
TIME_SHAPES = [  # batch, heads, positions, head width, causal
    (1, 1, 16384, 64, True),
    (1, 1, 16384, 128, True),
    (1, 16, 4096, 64, True),
    (1, 16, 4096, 128, True),
    (1, 16, 4096, 64, False),
    (8, 16, 512, 64, True),
    (1, 8, 4096, 32, True),
    (1, 8, 4096, 256, True),
]


def errors(label: str, out: Path) -> None:
    import torch

    from attention_cases import Case, _outputs, _reference, _terms
    from trainstep.ops.flash_attention.function import flash_attention
    from trainstep.ops.reference import allowed_error, largest_error

    def attend(q, k, v, *, causal, causal_alignment):
        return flash_attention(
            q, k, v, is_causal=causal, causal_alignment=causal_alignment, fp32_precision="ieee", return_lse=True
        )

    for queries, keys, head_dim, causal, seeds in ERROR_SHAPES:
        worst = defaultdict(lambda: {"strict": 0.0, "terms": 0.0})
        for seed in range(seeds):
            alignment = "bottom_right" if queries < keys else "top_left"
            case = Case(queries=queries, keys=keys, head_dim=head_dim, causal=causal, alignment=alignment, seed=seed)
            tensors = case.tensors("cuda")
            wide = [x.double() for x in tensors]
            ours, same = _outputs(attend, case, *tensors), _outputs(_reference, case, *tensors)
            exact = _outputs(_reference, case, *wide)
            terms = _terms(case, exact["o"], *wide)
            for name, output in ours.items():
                error = largest_error(output, exact[name])
                strict = allowed_error(same[name], exact[name], torch.float32)
                allowed = allowed_error(same[name], exact[name], torch.float32, terms=terms.get(name))
                worst[name]["strict"] = max(worst[name]["strict"], error / strict)
                worst[name]["terms"] = max(worst[name]["terms"], error / allowed)
            del ours, same, exact, terms, wide
            torch.cuda.empty_cache()
        shape = {"queries": queries, "keys": keys, "head_dim": head_dim, "causal": causal, "seeds": seeds}
        _write(out, {"label": label, "errors": worst, **shape})


def times(label: str, out: Path) -> None:
    import torch

    from trainstep.ops.flash_attention.portable.backward import bind_backward
    from trainstep.ops.flash_attention.portable.forward import bind_forward
    from trainstep.ops.flash_attention.portable.tiles import Arithmetic
    from trainstep.ops.flash_attention.problem import CallMeta, Problem

    for batch, heads, positions, head_dim, causal in TIME_SHAPES:
        torch.manual_seed(0)
        q, k, v, do = (torch.randn(batch, heads, positions, head_dim, device="cuda") for _ in range(4))
        o, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        lse, delta = (torch.empty(batch, heads, positions, device="cuda") for _ in range(2))
        problem = Problem(head_dim**-0.5, causal, False, Arithmetic.IEEE)
        forward = bind_forward(CallMeta.forward(q, k, v), problem, None)
        backward = bind_backward(CallMeta.backward(do, q, k, v, o), problem, None, None)
        calls = {"forward": (forward, (q, k, v, o, lse)), "delta": (backward["delta"], (o, do, delta))}
        for name, gradients in {"key_gradients": (dk, dv), "query_gradients": (dq,)}.items():
            calls[name] = (backward[name], (q, k, v, do, lse, delta, *gradients))
        found = {
            name: [_milliseconds(call, arguments) for _ in range(18)][3:] for name, (call, arguments) in calls.items()
        }
        shape = {"batch": batch, "heads": heads, "positions": positions, "head_dim": head_dim, "causal": causal}
        _write(out, {"label": label, "ms": found, **shape})


def _milliseconds(call, arguments) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call(*arguments)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _write(out: Path, line: dict) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps({key: value for key, value in line.items() if key != "ms"}), flush=True)


def _ratio(errors: dict | None, name: str) -> str:
    return "not run" if errors is None else f"{errors[name]['strict']:.2f} ({errors[name]['terms']:.2f})"


def table(path: Path) -> None:
    """Markdown: errors before / after, then medians of times and their ratio."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    labels = list(dict.fromkeys(line["label"] for line in lines))
    before, after = labels[0], labels[-1]
    ratios = defaultdict(dict)
    for line in lines:
        if "errors" in line:
            mask = "causal" if line["causal"] else "full"
            ratios[f"{line['queries']} x {line['keys']}, {line['head_dim']} wide, {mask}"][line["label"]] = line[
                "errors"
            ]
    names = ["o", "lse", "dq", "dk", "dv"]
    print(f"Error over the 2x rule's bound, strict (with allowance for cancelled terms), {before} -> {after}.\n")
    print("| queries x keys | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for shape, by_label in ratios.items():
        cells = [" -> ".join(_ratio(by_label.get(label), name) for label in (before, after)) for name in names]
        print(f"| {shape} | " + " | ".join(cells) + " |")
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in lines:
        if "ms" in line:
            mask = "causal" if line["causal"] else "full"
            shape = f"{line['batch']}, {line['heads']}, {line['positions']}, {line['head_dim']}, {mask}"
            for name, samples in line["ms"].items():
                found[shape][name][line["label"]] += samples
    print(f"\nMilliseconds, medians of all rounds, {before} -> {after} (ratio).\n")
    kernels = ["forward", "key_gradients", "query_gradients"]
    print("| batch, heads, positions, width | " + " | ".join(kernels) + " | all |\n|---|" + "---|" * (len(kernels) + 1))
    for shape, by_kernel in found.items():
        pairs = [[statistics.median(by_kernel[name][label]) for label in (before, after)] for name in kernels]
        pairs.append([sum(column) for column in zip(*pairs, strict=True)])
        print(f"| {shape} | " + " | ".join(f"{a:.3f} -> {b:.3f} ({b / a:.2f})" for a, b in pairs) + " |")


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "table":
        table(Path(rest[0]))
    else:
        {"errors": errors, "times": times}[mode](rest[0], Path(rest[1]))
