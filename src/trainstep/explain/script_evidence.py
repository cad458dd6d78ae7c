"""What was measured of a script's step: records of `trainstep run`, put together.

Nobody knows the script's model, so its work has no floor by formula: the budget takes its kernels as they run.
"""

import statistics
from collections.abc import Sequence

from trainstep.config.script import Part
from trainstep.explain.evidence import Evidence, Place, rows_of, spread_of, work_of
from trainstep.records.record import Record

_INSTALLED = "site-packages"


def script_evidence(records: Sequence[Record]) -> Evidence:
    """The evidence of one rank's run, in the order of its steps. ValueError for a run without a timed step.

    Times are means: a batch or a compilation that comes late once in many steps costs the run its mean and no median. On a CPU the
    step's other parts are its work, less the garbage collector.
    """
    samples: dict[str, list[float]] = {}
    for record in records:
        for name, column in record.samples.items():
            samples.setdefault(name, []).extend(column.values)
    times = samples.get("step", [])
    if not times:
        raise ValueError("run: it has no timed step, only warm-ups; let it run longer")
    last = next((record for record in reversed(records) if record.fact("inspected_step") is not None), records[-1])
    on_device = records[-1].config["device"] == "cuda"
    places: dict[str, Place] = {}
    waits = list(rows_of(last.tables.get("waits")))
    if waits:
        wait = max(waits, key=lambda row: row["time_s"] or 0.0)
        places["synchronisations"] = Place(file=wait["file"], line=wait["line"], source=wait["source"])
    again = [row for record in records for row in rows_of(record.tables.get("compilations")) if row["reason"]]
    if again:
        row = max(again, key=lambda row: (_INSTALLED not in row["file"], row["time_s"]))
        places["recompiles"] = Place(file=row["file"], line=row["line"], source=row["reason"])
    measured_s = statistics.fmean(times)
    seen = len(times)
    recompile_s = min(sum(row["time_s"] for row in again) / seen, measured_s)
    data_s = statistics.fmean(samples.get(Part.DATA, [0.0]))
    collector_s = statistics.fmean(samples.get("garbage_collection", [0.0]))
    work = work_of(last.tables) if on_device else {}
    device = [statistics.fmean(column) for name, column in samples.items() if name.startswith("device_") and column]
    busy_s: float | None = sum(work.values()) or (sum(device) if on_device and device else None)
    if not on_device:
        busy_s = max(0.0, measured_s - data_s - recompile_s - collector_s)
    return Evidence(
        measured_s=measured_s,
        spread=spread_of(tuple(times)),
        on_device=on_device,
        work=work,
        busy_s=busy_s,
        exposed_s=last.fact("exposed_s") or 0.0,
        data_s=data_s,
        blocked_s=sum(row["time_s"] or 0.0 for row in waits) if on_device else 0.0,
        recompile_s=recompile_s,
        allocator_s=sum(row["allocation_s"] for row in rows_of(last.tables.get("host"))),
        collector_s=collector_s,
        pieces=last.fact("pieces", 0.0),
        places=places,
    )
