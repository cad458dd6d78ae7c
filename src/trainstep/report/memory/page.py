"""The sections on memory of a page: the step's timeline by category, the ledger, the largest allocations."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trainstep.records.ranks import facts_of_rank, fullest_rank, rank_name, table_of_rank
from trainstep.records.record import Record
from trainstep.report.kit.charts import Chart, Panels, Section, bar, label, lines_of, short_labels
from trainstep.report.kit.forms import byte_words, in_gib, in_ms
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import filled
from trainstep.report.memory.tables import (
    cell_tables,
    common_tables,
    ledger_of,
    ledger_table,
    rank_words,
    several_ranks,
)

_DETAILED = 8
"""The most cells with a section of their own; the common tables have the others."""
_MOST_OTHERS = 3
"""The most timelines of ranks other than the fullest."""
_SHOWN_ALLOCATIONS = 40
_FEW = 24
"""The most cells in one chart of bars."""
_COLOURS = {
    "parameters": "theme:blue",
    "optimizer state": "theme:green",
    "gradients": "theme:orange",
    "communication": "theme:purple",
    "workspaces": "theme:grey",
    "batch and buffers": "theme:ink",
    "autocast weight copies": "theme:purple",
    "activations": "theme:sky",
    "logits and loss": "theme:vermilion",
    "temporaries": "theme:soft",
    "rounding": "theme:line",
}
"""Category -> colour, from bottom to top: memory that stays is below memory that comes and goes."""
_PATTERNS = {"temporaries": "/", "workspaces": ".", "communication": "x"}


def memory_sections(rows: Sequence[Row]) -> list[Section]:
    """The sections that these records fill, with the fullest cell first."""
    recorded = [row for row in rows if row.record.tables.get("timeline")]
    chart = peaks_chart(recorded) if 1 < len(recorded) <= _FEW else None
    several = Section(
        title="Memory of a step",
        charts=(chart,) if chart else (),
        tables=tuple(common_tables(rows)),
    )
    fullest = max(recorded, key=lambda row: sum(ledger_of(row.record, "peak").values()), default=None)
    ordered = sorted(recorded, key=lambda row: row is not fullest)  # the sort is stable: the others keep their order
    return [several, *(cell_section(row) for row in ordered[:_DETAILED])]


def cell_section(row: Row) -> Section:
    """A cell's section: explanations, timeline, ledger and largest allocations; of several ranks the fullest comes first."""
    others = [rank for rank in range(several_ranks(row.record)) if rank != fullest_rank(row.record)]
    ledgers = (ledger_table(row, rank) for rank in others)
    return Section(
        title=f"Memory: {row.label()}",
        paragraphs=tuple(sentences(row.record)),
        charts=tuple(
            timeline_chart(row, rank)
            for rank in (None, *others[:_MOST_OTHERS])
            if table_of_rank(row.record, "timeline", rank)["time_s"]  # empty if the rank's history was full
        ),
        tables=(*cell_tables(row, allocations=_SHOWN_ALLOCATIONS), *filled(*ledgers)),
    )


def sentences(record: Record) -> list[str]:
    """Explanations of this record's numbers: the ranks, the peak, the three measures of memory, the residual stream."""
    paragraphs = (_ranks_words(record), _peak_words(record), _three_numbers(record), _stream_words(record))
    return [text for text in paragraphs if text]


def _ranks_words(record: Record) -> str:
    """The rank whose numbers are shown, the rank with the least, and the peak by formula; empty for one rank."""
    ranks = several_ranks(record)
    if not ranks:
        return ""
    peaks = [(facts_of_rank(record, rank).get("peak_allocated_bytes") or 0) for rank in range(ranks)]
    shown, least = fullest_rank(record), peaks.index(min(peaks))
    how = "each training alone" if record.config["sync"] == "none" else f"synchronised by {record.config['sync']}"
    sentence = (
        f"{ranks} ranks, {how}: {rank_name(record, shown)}, shown first, held most, {byte_words(peaks[shown])} at its peak; "
        f"{rank_name(record, least)} held least, {byte_words(peaks[least])}."
    )
    expected = record.fact("expected_peak_bytes")
    if expected is None:
        return sentence
    point = str(record.fact("expected_peak_point", "")).replace("_", " ")
    return f"{sentence} By formula its peak is {byte_words(expected)}, {point}."


def _peak_words(record: Record) -> str:
    """The phase of the peak, and the three largest categories there."""
    sizes = {name: size for name, size in ledger_of(record, "peak").items() if name in _COLOURS and size > 0}
    total = sum(sizes.values())
    if not total:
        return ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {byte_words(size)} ({100 * size / total:.0f} %)" for name, size in largest)
    return f"The step peaks in {record.fact('timeline_peak_phase')} at {byte_words(total)}: {named}."


def _three_numbers(record: Record) -> str:
    """Why allocated, reserved and nvidia-smi's memory differ; on a CPU, allocated and resident memory."""
    allocated = record.fact("peak_allocated_bytes")
    reserved, driver = record.fact("peak_reserved_bytes"), record.fact("driver_bytes")
    context = record.fact("context_bytes")
    if allocated is None:
        return ""
    if reserved is None:
        resident = record.fact("peak_rss_bytes")
        return (
            f"Two numbers on a CPU: tensors held {byte_words(allocated)} at most, while {byte_words(resident)} of the process "
            "was resident, with Python, torch's libraries and the profiler."
            if resident
            else ""
        )
    sentence = (
        f"Three numbers: tensors held {byte_words(allocated)} at most (allocated); the allocator had taken "
        f"{byte_words(reserved)} from the driver (reserved); the difference of {byte_words(reserved - allocated)} is blocks "
        "kept for reuse and pieces too small to use"
    )
    if driver is None or context is None:
        return f"{sentence}."
    return (
        f"{sentence}; nvidia-smi would show {byte_words(driver)}, because the CUDA context ({byte_words(context)} in an empty "
        f"process) and the kernels loaded into it ({byte_words(record.fact('kernels_bytes') or 0)}) are outside the allocator."
    )


def _stream_words(record: Record) -> str:
    held = record.fact("residual_stream_bytes")
    if held is None:
        return ""
    product = str(record.fact("residual_stream")).replace(" x ", " × ")
    return f"One tensor of the residual stream is {product} = {byte_words(held)}; activations are multiples of it."


def timeline_chart(row: Row, rank: int | None = None) -> Chart:
    """Bytes held over the step, stacked by category, with the phases marked; `rank` is by default the fullest."""
    table = table_of_rank(row.record, "timeline", rank)
    x = [in_ms(time_s) for time_s in table["time_s"]]
    panels = Panels(titles=[""], columns=1, x_title="host time since the step began (ms)", y_title="held (GiB)")
    for name, colour in _COLOURS.items():
        sizes = table.get(name, ())
        if any(sizes):
            panels.add(0, _area(name, x, sizes, colour))
    total = [sum(sizes) for sizes in zip(*(table[name] for name in _COLOURS if name in table), strict=True)]
    top = in_gib(max(total))
    panels.ranges[0] = (0.0, 1.12 * top)
    peak = total.index(max(total))
    edges, words = _phase_marks(table["phase"], x)
    arrow = {"showarrow": True, "arrowhead": 2, "ax": 0, "ay": -22}
    caption = (
        "Every byte that the allocator gave out in one step after the warm-ups, by category; time is that of the host, which "
        "issues the step."
    )
    return panels.chart(
        f"Memory over one step{rank_words(row.record, rank)}",
        caption,
        annotations=[*words, {"x": x[peak], "y": top, "text": f"peak {byte_words(max(total))}", **arrow}],
        shapes=edges,
    )


def _area(name: str, x: Sequence[float], sizes: Sequence[int], colour: str) -> dict[str, Any]:
    pattern = {"fillpattern": {"shape": _PATTERNS[name], "fgcolor": "theme:ink"}} if name in _PATTERNS else {}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": [in_gib(size) for size in sizes],
        "stackgroup": "held",
        "line": {"width": 0.6, "color": colour, "shape": "hv"},
        "fillcolor": colour,
        "hovertext": [lines_of(label(name), byte_words(size)) for size in sizes],
        "hoverinfo": "text",
        **pattern,
    }


def _phase_marks(phases: Sequence[str], x: Sequence[float]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line and the phase's name at the beginning of each phase."""
    edges, words = [], []
    for phase, run in groupby(zip(phases, x, strict=True), lambda moment: moment[0]):
        _, begin = next(run)
        if phase not in ("before the step", "between phases"):
            edge = {"type": "line", "x0": begin, "x1": begin, "yref": "paper", "y0": 0, "y1": 1}
            edges.append({**edge, "line": {"color": "theme:soft", "width": 1, "dash": "dot"}})
            place = {"x": begin, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
            words.append({**place, "text": label(phase.replace("_", " ")), "font": {"size": 12}})
    return edges, words


def peaks_chart(rows: Sequence[Row]) -> Chart:
    """A horizontal bar per cell: the bytes held at its peak by category."""
    labels = short_labels([row.label() for row in rows])
    panels = Panels(titles=[""], columns=1, x_title="held at the peak (GiB)", y_title="")
    panels.axis = {"type": "category", "autorange": "reversed", "categoryarray": labels}
    ledgers = [ledger_of(row.record, "peak") for row in rows]
    for name, colour in _COLOURS.items():
        sizes = [ledger.get(name, 0) for ledger in ledgers]
        if any(sizes):
            hover = [lines_of(text, f"{name}: {byte_words(size)}") for text, size in zip(labels, sizes, strict=True)]
            marker = {"pattern": {"shape": _PATTERNS.get(name, ""), "fgcolor": "theme:ink"}}
            x = [in_gib(size) for size in sizes]
            panels.add(0, bar(name, x, labels, colour=colour, hover=hover, marker=marker, orientation="h"))
    caption = "Memory that tensors held at the peak of a step, by category."
    height = 160 + 26 * len(labels)
    return panels.chart("Held at the peak", caption, barmode="stack", bargap=0.3, height=height, horizontal=True)
