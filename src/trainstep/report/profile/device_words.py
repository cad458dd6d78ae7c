"""Explains a roofline in sentences: which ceiling bounds which work, and the part of the hardware that causes it.

Every sentence rests on the record's numbers: a part of the GPU is explained only if it bounds work of this record.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trainstep.grouping import grouped
from trainstep.records.record import Record
from trainstep.report.kit.forms import in_percent, listed, percent, rate_words, three_digits
from trainstep.report.profile.device_work import Ceilings, CountedWork, device_time_s, roof_name

_NEAR = 0.6
"""The least share of its roof at which work counts as bound by it; below, something else slows it too."""
_BEYOND = 1.02
"""A share of memory's roof above this means that data came from caches."""
_SHORT_S = 20e-6
"""The starting and draining of a kernel, a few microseconds, is a large part of a call shorter than this."""
_IDLE = 0.3
"""The least idle share of a step that is worth a sentence."""


class Case(NamedTuple):
    """A sentence about all work that meets a condition."""

    holds: Callable[[CountedWork, float, bool], bool]
    """The condition; takes work, its share of the roof, and whether memory is its roof."""
    sentence: str
    """A template with the fields that `_case_sentences` fills in from the work: `{work}`, `{shares}`..."""


def device_sentences(record: Record, work: Sequence[CountedWork], ceilings: Ceilings | None) -> list[str]:
    """The paragraphs beside a cell's roofline."""
    if not work:
        return ["No work of this cell has a formula for its FLOPs and bytes, so there is no roofline."]
    on_gpu = record.config.get("device") == "cuda"
    if ceilings is None:
        return [_no_ceilings(record, on_gpu), _covered(record, work)]
    explained = _case_sentences(_ON_GPU if on_gpu else _ON_CPU, work, ceilings)
    gpu_sentences = [_without_tensor_cores(work, ceilings), _idle(record)] if on_gpu else []
    paragraphs = [_roofs(work, ceilings, on_gpu), _covered(record, work), *explained, *gpu_sentences]
    return [sentence for sentence in paragraphs if sentence]


def bound_words(work: CountedWork, ceilings: Ceilings) -> str:
    """The limit of the work, in a table's words."""
    share = ceilings.share(work)
    if share is None:
        return f"no ceiling for {work.dtype}"
    if ceilings.is_memory_bound(work):
        return "caches" if share > _BEYOND else "memory" if share >= _NEAR else "under memory's roof"
    return f"{work.dtype} arithmetic" if share >= _NEAR else f"under {work.dtype}'s roof"


def _no_ceilings(record: Record, on_gpu: bool) -> str:
    environment = record.environment
    reason = f"No data sheet of {environment.gpu} is known" if on_gpu else f"{environment.cpu} was not measured"
    return (
        f"{reason}, so there is no roof: `trainstep doctor --measure --out ceilings.jsonl` measures it, and a report of both "
        "files draws it."
    )


def _roofs(work: Sequence[CountedWork], ceilings: Ceilings, on_gpu: bool) -> str:
    """The ceilings of memory and arithmetic, and the intensity at which they meet."""
    dtypes = dict.fromkeys(item.dtype for item in work if item.dtype in ceilings.arithmetic)
    kind = "cuda" if on_gpu else "cpu"
    peaks = [f"{rate_words(ceilings.arithmetic[dtype].rate, 'flop/s')} in {roof_name(dtype, kind)}" for dtype in dtypes]
    sources = {ceilings.memory.source, *(ceilings.arithmetic[dtype].source for dtype in dtypes)}
    ridges = [f"{three_digits(ceilings.ridge(dtype))} ({dtype})" for dtype in dtypes]
    memory = "The GPU's memory (HBM on data-centre cards) moves" if on_gpu else "The cores copy"
    return (
        f"{memory} {rate_words(ceilings.memory.rate, 'bytes/s')}; arithmetic reaches {' and '.join(peaks)} "
        f"({'; '.join(sorted(sources))}). Work with fewer FLOPs per byte than {' or '.join(ridges)} is bound by memory, and "
        f"work "
        "with more by arithmetic."
    )


def _covered(record: Record, work: Sequence[CountedWork]) -> str:
    """The share of the device's time that the roofline covers."""
    total_s = device_time_s(record)
    share = sum(item.time_s for item in work) / total_s if total_s else 0.0
    return (
        f"The marks cover {percent(min(1.0, share))} % of the time of all work; trainstep has no formula for the FLOPs and "
        f"bytes "
        "of the rest (element-wise kernels, copies, norms, reductions)."
    )


def _case_sentences(cases: Sequence[Case], work: Sequence[CountedWork], ceilings: Ceilings) -> Iterator[str]:
    """The sentences of the cases that apply to some of the work."""
    placed = [
        (item, share, ceilings.is_memory_bound(item)) for item in work if (share := ceilings.share(item)) is not None
    ]
    for case in cases:
        matches = [(item, share) for item, share, in_memory in placed if case.holds(item, share, in_memory)]
        if not matches:
            continue
        items = [item for item, _ in matches]
        yield case.sentence.format(
            work=_work_names(items),
            shares=_range([in_percent(share) for _, share in matches], "{:.0f}") + " %",
            intensities=_range([item.intensity for item in items], "{:.3g}"),
            rates=listed(dict.fromkeys(rate_words(item.bytes_per_s, "bytes/s") for item in items)),
            calls=listed(dict.fromkeys(f"{three_digits(item.call_s * 1e6)} µs" for item in items)),
            units=listed(dict.fromkeys(roof_name(item.dtype, "cuda") for item in items)),
            s="s" if len(items) == 1 else "",
            es="es" if len(items) == 1 else "",
        )


def _without_tensor_cores(work: Sequence[CountedWork], ceilings: Ceilings) -> str:
    """The gain of tensor cores if the matmuls are in fp32; else empty."""
    matmuls = [item for item in work if item.dtype == "fp32" and not ceilings.is_memory_bound(item)]
    faster = {name: ceilings.arithmetic[name].rate for name in ("tf32", "bf16") if name in ceilings.arithmetic}
    if not matmuls or not faster or "fp32" not in ceilings.arithmetic:
        return ""
    base = ceilings.arithmetic["fp32"].rate
    gains = listed([f"{rate / base:.1f} times fp32's with {name}" for name, rate in faster.items()])
    return (
        "Tensor cores, the matrix units in each SM, are idle in this step: fp32's matmuls run on the CUDA cores. The peak "
        "would "
        f"be {gains}; `trainstep numerics` shows the effect on accuracy."
    )


_ON_CPU = (
    Case(
        lambda _, share, in_memory: in_memory and share > _BEYOND,
        "Caches: {work} reached {shares} of the rate of copying large arrays, because at this size the data stay in the cores' "
        "caches.",
    ),
    Case(
        lambda _, share, in_memory: in_memory and _NEAR <= share <= _BEYOND,
        "Memory bounds {work}: {shares} of the roof.",
    ),
    Case(
        lambda _, share, in_memory: not in_memory and share >= _NEAR,
        "The cores' vector units bound {work}: {shares} of the measured matmul.",
    ),
    Case(
        lambda _, share, __: share < _NEAR,
        "Far from both roofs: {work}, {shares} of the roof; with small operands most of the time goes to calls and to "
        "distributing work over cores.",
    ),
)
_ON_GPU = (
    Case(
        lambda _, share, in_memory: in_memory and share > _BEYOND,
        "Caches: {work} got {shares} of what memory alone could deliver, because data that the previous kernel had just "
        "written came from the L2 cache, which all SMs share.",
    ),
    Case(
        lambda _, share, in_memory: in_memory and _NEAR <= share <= _BEYOND,
        "Memory bounds {work}: {intensities} FLOP per byte, {rates}, {shares} of the roof. Faster arithmetic would "
        "not help, only fewer bytes: a kernel fused with its neighbours keeps intermediate results in registers and "
        "shared memory (as FlashAttention does with softmax), and narrower numbers have fewer bytes.",
    ),
    Case(
        lambda one, share, _: share < _NEAR and one.call_s < _SHORT_S,
        "SMs and warps: {work} stay{s} at {shares} of the roof, with calls of {calls}. A GPU hides waiting times: each SM "
        "(a processor) switches between many warps, groups of 32 threads that run together. A call of a few microseconds "
        "ends before all SMs have enough warps, and starting and draining it are part of its time: fewer, larger calls (a "
        "larger batch, fused kernels) come nearer to the roof.",
    ),
    Case(
        lambda one, share, in_memory: in_memory and share < _NEAR and one.call_s >= _SHORT_S,
        "Coalescing or more passes: {work} reach{es} {shares} of memory's roof although calls are long. Either more bytes "
        "move than necessary (several kernels instead of one), or neighbouring threads of a warp read addresses that are "
        "not neighbours: memory delivers pieces of 32 bytes, most of which are then unused. `ncu --section "
        "MemoryWorkloadAnalysis` shows which; a profile cannot.",
    ),
    Case(
        lambda _, share, in_memory: not in_memory and share >= _NEAR,
        "Arithmetic bounds {work}: {intensities} FLOP per byte, {shares} of the peak of {units}. A chip under full "
        "load rarely holds its highest clock, so the peak itself is out of reach.",
    ),
    Case(
        lambda one, share, in_memory: not in_memory and share < _NEAR and one.call_s >= _SHORT_S,
        "Under arithmetic's roof: {work} could keep {units} busy ({intensities} FLOP per byte) but reach{es} {shares}. A "
        "matmul is cut into tiles, and an SM computes one tile at a time: with few tiles some SMs have none, or the last "
        "round leaves most SMs idle; more tokens per step make more tiles.",
    ),
)


def _idle(record: Record) -> str:
    """How long the device is idle, if the step waits for its host; else empty."""
    busy, step = record.samples.get("busy"), record.samples.get("step")
    if busy is None or step is None or not busy.values or not any(step.values):
        return ""
    idle = 1 - (sum(busy.values) / len(busy.values)) / (sum(step.values) / len(step.values))
    if idle <= _IDLE:
        return ""
    return (
        f"None of this bounds the step itself: the device is idle for {in_percent(idle):.0f} % of it, and a faster kernel "
        f"would "
        "only wait longer for the next launch."
    )


def _work_names(work: Sequence[CountedWork]) -> str:
    """`softmax (forward and backward) and AdamW`."""
    by_name = grouped(work, lambda item: item.name)
    names = []
    for name, items in by_name.items():
        phases = [item.phase for item in items]
        names.append(name if phases == ["optimizer"] else f"{name} ({listed(dict.fromkeys(phases))})")
    return listed(names)


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
