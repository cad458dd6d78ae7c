"""`trainstep doctor`: show this machine, what it can do, what is missing and how to get it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import Cell
from trainstep.records.record import Record
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.report.kit.answer import Answer

Row = tuple[str, str]
_DTYPES = ("fp32", "tf32", "bf16", "fp16")


def doctor(
    *,
    measure: bool = False,
    out: Path | None = None,
    json: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    quiet: bool = False,
) -> None:
    """Show this machine, its GPUs and their data sheets, packages and tools, and what is missing.

    Exit code 2 if the driver shows a GPU that torch cannot use, with the build of torch that fits.

    Parameters
    ----------
    measure
        Also measure how fast the machine multiplies and copies, and calibrate `trainstep plan` (a minute; on a GPU up to five).
    out
        With --measure: file of records to append the measurements to. `trainstep plan --calibration` takes it, and a report of it
        together with profiles draws their rooflines.
    json
        Print JSON, which begins with `answer`.
    device
        auto, cuda, or cpu; with cpu, a GPU that cannot be used is not an error.
    quiet
        Show only the results, not the progress.
    """
    from trainstep.measure.machine.inspection import calibration_cells, ceiling_cells, inspect_machine, with_ceilings

    if out is not None and not measure:
        raise ValueError("out: only --measure writes records; add --measure, or leave out --out")
    _tell("asking torch what it can do here: it is imported in a process of its own", quiet=quiet)
    inspection = inspect_machine(device=device, visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    measured: list[Answer] = []
    if measure and not inspection["problem"]:
        from trainstep.report.answers import answers
        from trainstep.report.kit.rows import rows_of

        machine = inspection["device"], len(inspection["gpus"])
        store = None if out is None else Store(out)
        with nullcontext() if store is None else store.locked():  # before the first measurement, so that none is lost
            cells = ceiling_cells(*machine)
            _tell(f"measuring {len(cells)} rates: about a minute", quiet=quiet)
            ceilings = _kept(measure_ceilings(cells), store)
            _tell("calibrating: seconds on a CPU, up to four minutes on a GPU", quiet=quiet)
            calibrated = _kept(measure_calibration(calibration_cells(*machine)), store)
        for record in calibrated:
            if record.failure is not None:
                _tell(f"{record.workload}: was not measured: {record.failure.message}", quiet=False)
        inspection = with_ceilings(inspection, ceilings)
        measured = answers(rows_of([(str(out or ""), record) for record in [*ceilings, *calibrated]]))
    from trainstep.report.kit.answer import plain_answers, print_answers

    shown = [*measured, machine_answer(inspection, is_measured=bool(measured))]
    if json:
        from trainstep.report.kit.visible import ascii_json

        print(ascii_json({"answer": plain_answers(shown), **inspection}, indent=2))
    else:
        print_answers(shown, sys.stdout)
        show(list(sections(inspection)))
    if inspection["problem"]:
        raise ValueError(inspection["problem"])


def machine_answer(inspection: dict[str, Any], *, is_measured: bool) -> "Answer":
    """Where trainstep measures here, what is missing, and what to do next."""
    from trainstep.report.kit.answer import Answer

    here, gpus = inspection["environment"], inspection["gpus"]
    missing = [
        f"{item['name']} ({item['purpose']})"
        for item in (*inspection["packages"], *inspection["tools"])
        if not item.get("version") and not item.get("path")
    ]
    lacks = f" Missing here: {', '.join(missing)}." if missing else " Nothing is missing."
    if inspection["problem"]:
        return Answer(workload="machine", verdict=f"trainstep cannot measure here: {inspection['problem']}.{lacks}")
    if inspection["device"] == "cuda":
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
        device = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''} ({names})"
        start = "`trainstep bench` times a step of small; "
    else:
        device = f"the CPU ({here['cpu']}, {here['cores']} cores), where every verb but tune runs"
        start = "`trainstep bench` times a step of tiny; "
    measure = "" if is_measured else "`trainstep doctor --measure` shows how fast this machine multiplies and copies."
    suggestion = f"{start}{measure}" if measure else start.removesuffix("; ") + "."
    return Answer(workload="machine", verdict=f"trainstep measures here on {device}.{lacks}", suggestion=suggestion)


def _tell(words: str, *, quiet: bool) -> None:
    if not quiet:
        with outliving_reader(sys.stderr):
            print(words, file=sys.stderr, flush=True)


def _kept(records: list[Record], store: Store | None) -> list[Record]:
    """The records, each of which is on disk when this returns."""
    if store is not None:
        for record in records:
            store.append(record)
    return records


def measure_calibration(cells: Sequence[Cell]) -> list[Record]:
    """One record for each cell, of a calibration and of messages between GPUs."""
    return measure_ceilings(cells)


def measure_ceilings(cells: Sequence[Cell]) -> list[Record]:
    """One record for each cell, measured in a worker process."""
    from trainstep.measure.harness.local import run_groups
    from trainstep.measure.harness.runner import Limits

    groups = run_groups([[cell] for cell in cells], Limits(), lambda cell, stage: None)
    return [record for records in groups for record in records]


def show(parts: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """Print sections: as tables on a terminal, as plain indented lines into a pipe."""
    from trainstep.report.kit.visible import one_line

    parts = [(one_line(title), [(label, one_line(value)) for label, value in rows]) for title, rows in parts]
    if not sys.stdout.isatty():
        for title, rows in parts:
            width = max(len(label) for label, _ in rows)
            print(title)
            print("".join(f"  {label:<{width}}  {value}\n" for label, value in rows), end="")
        return
    from rich.markup import escape
    from rich.table import Table

    from trainstep.report.kit.visible import VisibleConsole

    console = VisibleConsole(sys.stdout)
    for title, rows in parts:
        table = Table(title=escape(title), title_style="bold", title_justify="left", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(escape(label), escape(value))
        console.print(table)


def sections(inspection: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """The inspection as titled sections of rows: label and text."""
    yield "machine", _machine_rows(inspection)
    for index, gpu in enumerate(inspection["gpus"]):
        yield f"GPU {index}: {gpu['name']}", _gpu_rows(gpu)
    if inspection["ceilings"]:
        yield f"measured on this {inspection['device']}", [_ceiling_row(row) for row in inspection["ceilings"]]
    yield (
        "packages",
        [
            (package["name"], package["version"] or f"missing; for {package['purpose']}: {package['install']}")
            for package in inspection["packages"]
        ],
    )
    yield "tools", [(tool["name"], tool["path"] or f"missing; for {tool['purpose']}") for tool in inspection["tools"]]
    yield "records", [("folder", f"{inspection['records']} (or where --out says)")]


def _machine_rows(inspection: dict[str, Any]) -> list[Row]:
    here, torch = inspection["environment"], inspection["torch"]
    capability = f", {torch['cpu_capability']}" if torch["cpu_capability"] else ""
    threads = f", torch uses {torch['threads']} threads" if torch["threads"] else ""
    build = f"CUDA {here['cuda']}" if here["cuda"] else "CPU build"
    commit = f", commit {here['commit'][:12]}{' with changes' if here['dirty'] else ''}" if here["commit"] else ""
    rows = [
        ("system", here["os"]),
        ("CPU", f"{here['cpu']}{capability}"),
        ("cores", f"{here['cores']}{threads}"),
        ("memory", _gib(here["memory_bytes"])),
        ("GPUs", _gpus_words(inspection["driver"], len(inspection["gpus"]))),
        ("Python", here["python"]),
        ("torch", f"{here['torch']} ({build})" if here["torch"] else "missing"),
        ("trainstep", f"{here['trainstep']}{commit}, source {here['source']}"),
        ("device", inspection["device"]),
    ]
    if torch["error"]:
        rows.append(("torch says", torch["error"]))
    if inspection["problem"]:
        rows.append(("problem", inspection["problem"]))
    return rows


def _gpus_words(driver: dict[str, Any], gpu_count: int) -> str:
    if driver["error"]:
        return f"the driver does not answer: {driver['error']}"
    if not driver["version"]:
        return "none (no NVIDIA driver)"
    supports = f", for CUDA up to {'.'.join(map(str, driver['cuda']))}" if driver["cuda"] else ""
    return f"{gpu_count} visible, driver {driver['version']}{supports}"


def _gpu_rows(gpu: dict[str, Any]) -> list[Row]:
    rows = [("memory", _gib(gpu["memory_bytes"]))]
    if "sms" in gpu:
        rows += [
            ("compute capability", gpu["compute_capability"]),
            ("SMs", str(gpu["sms"])),
            ("L2 cache", f"{gpu['l2_bytes'] / 2**20:.0f} MiB"),
            ("shared memory per SM", f"{gpu['shared_memory_per_sm_bytes'] / 2**10:.0f} KiB"),
            ("shared memory per block", f"{gpu['shared_memory_per_block_bytes'] / 2**10:.0f} KiB"),
            ("registers per SM", f"{gpu['registers_per_sm']:,}"),
            ("reaches directly", ", ".join(f"GPU {peer}" for peer in gpu["peers"]) or "no other GPU"),
        ]
    sheet = gpu["data_sheet"]
    if sheet is None:
        return [*rows, ("data sheet", "unknown, so there is no MFU for this GPU")]
    peaks = ", ".join(
        f"{dtype} {_rate(sheet['peak_flops'][dtype], 'flop/s')}" for dtype in _DTYPES if dtype in sheet["peak_flops"]
    )
    return [
        *rows,
        ("data sheet", f"{sheet['name']}: {peaks}, memory {_rate(sheet['memory_bytes_per_s'], 'bytes/s')}"),
        ("its source", sheet["source"]),
    ]


def _ceiling_row(row: dict[str, Any]) -> Row:
    label = row["kind"].replace("_", " ") + (f" {row['dtype']}" if row["dtype"] else "")
    label += f" to GPU {row['peer']}" if row["peer"] else ""
    if row["rate"] is None:
        return label, f"failed: {row['failure']}"
    text = _rate(row["rate"], row["unit"])
    if row["of_data_sheet"]:
        text += f" of {_rate(row['data_sheet'], row['unit'])} on the data sheet ({row['of_data_sheet']:.0%})"
    return label, text + (f", {row['route']}" if row["route"] else "")


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _rate(value: float, unit: str) -> str:
    """`990 TFLOP/s`, `3.35 TB/s`: at least three significant digits."""
    base = "FLOP/s" if unit == "flop/s" else "B/s"
    prefix, scale = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    number = value / scale
    return f"{number:.3g} {prefix}{base}" if number < 999.5 else f"{number:.0f} {prefix}{base}"
