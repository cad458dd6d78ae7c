"""What a roofline says in words: which ceiling bounds which work, and what of the hardware makes it so, where it does.

Every sentence rests on this run's numbers: a part of the GPU is explained only where it bounds something here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trainstep.records.record import Record
from trainstep.report.device_work import Ceilings, CountedWork, device_time_s, roof_name
from trainstep.report.forms import in_percent, listed, percent, rate_words, three_digits

_NEAR = 0.6
"""From this share of its roof on, work counts as bound by it; under it something else holds it back as well."""
_BEYOND = 1.02
_SHORT_S = 20e-6
"""A call shorter than this is of the order of what starting and draining a kernel takes, a few microseconds."""
_IDLE = 0.3


class Case(NamedTuple):
    """A sentence that is said of all the work it holds for."""

    holds: Callable[[CountedWork, float, bool], bool]
    """Takes work, its share of the roof, and whether memory is its roof."""
    sentence: str
    """`{work}`, `{shares}` and the like are filled in from that work: the names in `_said`."""


def device_sentences(record: Record, work: Sequence[CountedWork], ceilings: Ceilings | None) -> list[str]:
    """The paragraphs beside a cell's roofline."""
    if not work:
        return ["No work of this cell has a formula for its FLOPs and bytes, so there is no roofline."]
    on_gpu = record.config.get("device") == "cuda"
    if ceilings is None:
        return [_no_ceilings(record, on_gpu), _covered(record, work)]
    explained = _said(_ON_GPU if on_gpu else _ON_CPU, work, ceilings)
    aside = [_without_tensor_cores(work, ceilings), _idle(record)] if on_gpu else []
    found = [_roofs(work, ceilings, on_gpu), _covered(record, work), *explained, *aside]
    return [sentence for sentence in found if sentence]


def bound_words(one: CountedWork, ceilings: Ceilings) -> str:
    """What bounds it, in a table's words."""
    share = ceilings.share(one)
    if share is None:
        return f"no ceiling for {one.dtype}"
    if ceilings.is_memory_bound(one):
        return "caches" if share > _BEYOND else "memory" if share >= _NEAR else "under memory's roof"
    return f"{one.dtype} arithmetic" if share >= _NEAR else f"under {one.dtype}'s roof"


def _no_ceilings(record: Record, on_gpu: bool) -> str:
    chip = record.environment.gpu if on_gpu else record.environment.cpu
    return (
        f"{'No data sheet of' if on_gpu else 'What'} {chip} {'is known here' if on_gpu else 'can do was not measured'}, so there "
        "is no roof: `trainstep doctor --measure --out ceilings.jsonl` measures it, and a report of both files draws it."
    )


def _roofs(work: Sequence[CountedWork], ceilings: Ceilings, on_gpu: bool) -> str:
    dtypes = dict.fromkeys(one.dtype for one in work if one.dtype in ceilings.arithmetic)
    kind = "cuda" if on_gpu else "cpu"
    peaks = [f"{rate_words(ceilings.arithmetic[one].rate, 'flop/s')} in {roof_name(one, kind)}" for one in dtypes]
    sources = {ceilings.memory.source, *(ceilings.arithmetic[one].source for one in dtypes)}
    ridges = [f"{three_digits(ceilings.ridge(one))} ({one})" for one in dtypes]
    memory = "The GPU's own memory (HBM on data-centre cards) moves" if on_gpu else "The cores copy"
    return (
        f"{memory} {rate_words(ceilings.memory.rate, 'bytes/s')}; arithmetic reaches {' and '.join(peaks)} "
        f"({'; '.join(sorted(sources))}). Work with fewer FLOPs per byte than {' or '.join(ridges)} is bound by memory, work "
        "with more by arithmetic."
    )


def _covered(record: Record, work: Sequence[CountedWork]) -> str:
    total_s = device_time_s(record)
    share = sum(one.time_s for one in work) / total_s if total_s else 0.0
    return (
        f"The marks are {percent(min(1.0, share))} % of the time of all work; the rest (element-wise kernels, copies, norms, "
        "reductions) has no formula here for its FLOPs and bytes."
    )


def _said(cases: Sequence[Case], work: Sequence[CountedWork], ceilings: Ceilings) -> Iterator[str]:
    """The sentence of each case that some work is in."""
    placed = [(one, share, ceilings.is_memory_bound(one)) for one in work if (share := ceilings.share(one)) is not None]
    for case in cases:
        held = [(one, share) for one, share, in_memory in placed if case.holds(one, share, in_memory)]
        if not held:
            continue
        of_case = [one for one, _ in held]
        yield case.sentence.format(
            work=_named(of_case),
            shares=_range([in_percent(share) for _, share in held], "{:.0f}") + " %",
            intensities=_range([one.intensity for one in of_case], "{:.3g}"),
            rates=listed(dict.fromkeys(rate_words(one.bytes_per_s, "bytes/s") for one in of_case)),
            calls=listed(dict.fromkeys(f"{three_digits(one.call_s * 1e6)} µs" for one in of_case)),
            units=listed(dict.fromkeys(roof_name(one.dtype, "cuda") for one in of_case)),
            s="s" if len(of_case) == 1 else "",
            es="es" if len(of_case) == 1 else "",
        )


def _without_tensor_cores(work: Sequence[CountedWork], ceilings: Ceilings) -> str:
    """fp32's matmuls beside what matrix units would allow."""
    matmuls = [one for one in work if one.dtype == "fp32" and not ceilings.is_memory_bound(one)]
    faster = {name: ceilings.arithmetic[name].rate for name in ("tf32", "bf16") if name in ceilings.arithmetic}
    if not matmuls or not faster or "fp32" not in ceilings.arithmetic:
        return ""
    base = ceilings.arithmetic["fp32"].rate
    gains = listed([f"{rate / base:.1f} times fp32's with {name}" for name, rate in faster.items()])
    return (
        "Tensor cores, the matrix units in each SM, stand idle here: fp32's matmuls run on the CUDA cores. The peak would be "
        f"{gains}; `trainstep numerics` says what they do to accuracy."
    )


_ON_CPU = (
    Case(
        lambda _, share, in_memory: in_memory and share > _BEYOND,
        "Caches: {work} got {shares} of what copying large arrays reaches: at this size the data stay in the cores' "
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
        "Far from both: {work}, {shares} of the roof; small operands leave most of the time to calling them and to "
        "sharing them out between cores.",
    ),
)
_ON_GPU = (
    Case(
        lambda _, share, in_memory: in_memory and share > _BEYOND,
        "Caches: {work} got {shares} of what memory alone could deliver. What the kernel before had just written was "
        "still in the L2 cache, which all SMs share, and did not come from memory.",
    ),
    Case(
        lambda _, share, in_memory: in_memory and _NEAR <= share <= _BEYOND,
        "Memory bounds {work}: {intensities} FLOP per byte, {rates}, {shares} of the roof. Faster arithmetic would "
        "not help, only fewer bytes: fused with its neighbours, a kernel keeps intermediate results in registers and "
        "shared memory (as FlashAttention does with softmax), and narrower numbers are fewer bytes.",
    ),
    Case(
        lambda one, share, _: share < _NEAR and one.call_s < _SHORT_S,
        "SMs and warps: {work} stay{s} at {shares} of the roof, with calls of {calls}. A GPU hides its waiting: each "
        "SM (its processors) switches between many warps, groups of 32 threads in step. A call of a few microseconds "
        "ends before all SMs have enough warps at work, and starting and draining it is part of its time: fewer, "
        "larger calls (a larger batch, fused kernels) come nearer to the roof.",
    ),
    Case(
        lambda one, share, in_memory: in_memory and share < _NEAR and one.call_s >= _SHORT_S,
        "Coalescing or more passes: {work} reach{es} {shares} of memory's roof although calls are long. Either more "
        "bytes move than the least (several kernels where one would do), or neighbouring threads of a warp read "
        "addresses that are not neighbours: memory answers in pieces of 32 bytes, of which most are then thrown away. "
        "`ncu --section MemoryWorkloadAnalysis` tells which; a profile cannot.",
    ),
    Case(
        lambda _, share, in_memory: not in_memory and share >= _NEAR,
        "Arithmetic bounds {work}: {intensities} FLOP per byte, {shares} of the peak of {units}. A chip under full "
        "load rarely holds its highest clock, so the peak itself is out of reach.",
    ),
    Case(
        lambda one, share, in_memory: not in_memory and share < _NEAR and one.call_s >= _SHORT_S,
        "Under arithmetic's roof: {work} could keep {units} busy ({intensities} FLOP per byte) but reach{es} "
        "{shares}. A matmul is cut into tiles, one for an SM at a time: with few tiles some SMs have none, or the "
        "last round leaves most of them idle; more tokens a step make more tiles.",
    ),
)


def _idle(record: Record) -> str:
    """No roof bounds a step that waits for its host."""
    busy, step = record.samples.get("busy"), record.samples.get("step")
    if busy is None or step is None or not busy.values or not step.values:
        return ""
    idle = 1 - (sum(busy.values) / len(busy.values)) / (sum(step.values) / len(step.values))
    if idle <= _IDLE:
        return ""
    return (
        f"None of this bounds the step itself: the device stands idle for {in_percent(idle):.0f} % of it, and a kernel nearer to "
        "its roof would only wait longer for the next launch."
    )


def _named(work: Sequence[CountedWork]) -> str:
    """`softmax (forward and backward) and AdamW`."""
    phases: dict[str, list[str]] = {}
    for one in work:
        phases.setdefault(one.name, []).append(one.phase)
    return listed(
        name if found == ["optimizer"] else f"{name} ({listed(dict.fromkeys(found))})" for name, found in phases.items()
    )


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
