"""The causes that can make a step longer than its floor, each with its name in words and its page of docs.

CAUSES["host_launches"].title       # "host launches"
page_of("host_launches")            # "docs/guide/slow/host_launches.md"
"""

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """`title`: its name in tables and sentences. `advice`: the change in words, where no field of a config is the change.

    `lines`: what to write in one's own script, as the cause's page has it; none where only words help.
    `advice_on_cpu`: the advice for a CPU, where it is another.
    """

    title: str
    advice: str
    lines: tuple[str, ...] = ()
    advice_on_cpu: str = ""


CAUSES: Mapping[str, Cause] = {
    "host_launches": Cause(
        "host launches",
        "capture the step as a CUDA graph, compile the model, or take a larger batch",
        ("step = CapturedStep(train, optimizer=optimizer, module=model)", "block.compile()"),
        advice_on_cpu="compile the model, or take a larger batch",
    ),
    "synchronisations": Cause(
        "synchronisations",
        "read values less often, or after the next step was launched; copy batches with non_blocking=True",
        ("if step % 100 == 0: print(loss.item())", "batch.to(device, non_blocking=True)"),
    ),
    "data": Cause(
        "waiting for data",
        "more workers (num_workers), a cheaper transform, or batches made ahead of time",
        ("DataLoader(..., num_workers=N, persistent_workers=True, prefetch_factor=4)",),
    ),
    "host_copies": Cause(
        "copies from the host",
        "pin the batch's memory and copy it with non_blocking=True, a step ahead",
        ("DataLoader(..., pin_memory=True)", "batch.to(device, non_blocking=True)"),
    ),
    "exposed_messages": Cause(
        "exposed messages", "fewer or larger messages, begun earlier: compare strategies with parallel", ("no_sync()",)
    ),
    "accumulation_sync": Cause(
        "gradient sync in each accumulation pass", "send gradients in the last pass alone: no_sync() around the others"
    ),
    "stragglers": Cause("stragglers", "give every rank the same work, and look at the slowest rank's machine"),
    "recomputation": Cause("recomputation", "recompute fewer blocks, or a cheaper part of each, if memory allows"),
    "casts": Cause(
        "casts and copies",
        "compile the blocks, or keep 16-bit weights, so that values are not converted apart",
        ("block.compile()",),
    ),
    "unfused": Cause("unfused memory-bound ops", "compile the blocks, or take fused ops", ("block.compile()",)),
    "attention_kernel": Cause(
        "attention kernel",
        "take an attention that does not write scores to memory",
        ("torch.nn.functional.scaled_dot_product_attention",),
    ),
    "attention_mask": Cause(
        "attention with a mask",
        "tell attention that it is causal in place of giving it a mask, where no sequence is padded or packed",
        (
            "scaled_dot_product_attention(query, key, value, is_causal=True)",
            'AttentionInterface.register("causal", sdpa_attention_forward)',
            'model.set_attn_implementation("causal")',
        ),
    ),
    "matmul_shapes": Cause(
        "matmul shapes",
        "more tokens in a batch, and widths and a vocabulary that are multiples of 128, or at least of 8",
    ),
    "precision": Cause(
        "precision",
        "compute matmuls in bf16, or in tf32 where weights must stay fp32",
        ('torch.autocast("cuda", torch.bfloat16)',),
    ),
    "optimizer": Cause(
        "optimizer",
        "take a fused AdamW, which reads and writes everything once",
        ("torch.optim.AdamW(..., fused=True)",),
    ),
    "small_kernels": Cause(
        "gaps between small kernels", "compile the blocks: fewer kernels have fewer gaps", ("block.compile()",)
    ),
    "recompiles": Cause(
        "recompiles",
        "mark changing sizes as dynamic, or pad them to a few sizes",
        ("torch.compile(..., dynamic=True)", "torch._dynamo.mark_dynamic(tensor, dimension)"),
    ),
    "allocator": Cause(
        "allocator",
        "keep shapes alike, set expandable_segments:True, or need less memory",
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
    ),
    "garbage_collector": Cause(
        "garbage collector",
        "gc.freeze() once the model is built, then collect every some hundred steps",
        ("gc.collect()", "gc.freeze()"),
    ),
    "clocks": Cause("clocks and power", "see what lowered the clock: power limit, heat, or a fixed clock"),
    "another_process": Cause("another process", "end the other process, or measure on a machine of your own"),
}
"""Name -> cause; the name is that of its page."""
_PAGES = "docs/guide/slow"


def advice_of(cause: str, *, on_device: bool) -> str:
    """The change in words, for a step on a GPU or on a CPU."""
    advice = CAUSES[cause].advice
    return advice if on_device else CAUSES[cause].advice_on_cpu or advice


def page_of(cause: str) -> str:
    """The cause's page, from the root of the repository."""
    return f"{_PAGES}/{cause}.md"
