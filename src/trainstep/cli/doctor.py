"""`trainstep doctor`: what this machine is, what it can do, what is missing and how to get it."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.records.record import Record
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.report.answers import Answer

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
        Also measure how fast it multiplies and copies (a minute).
    out
        With --measure: file of records to append what was measured to (no other file); a report of it and of profiles draws
        their rooflines.
    json
        Print JSON; with --measure it begins with `answer`.
    device
        auto, cuda, or cpu: a GPU that cannot be used is then no error.
    quiet
        Show only what was seen, not what is being done.
    """
    from trainstep.measure.inspection import ceiling_cells, inspect_machine, with_ceilings

    if out is not None and not measure:
        raise ValueError("out: there is something to write with --measure only")
    tell = _tell_nothing if quiet else _tell
    tell("asking torch what it can do here: it is imported in a process of its own")
    inspection = inspect_machine(device=device, visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    found: list[Answer] = []
    if measure and not inspection["problem"]:
        from trainstep.report.answers import answers
        from trainstep.report.rows import rows_of

        cells = ceiling_cells(inspection["device"], len(inspection["gpus"]))
        tell(f"measuring {len(cells)} rates: a minute or so")
        records = measure_ceilings(cells) if out is None else _into(Store(out), cells)
        inspection = with_ceilings(inspection, records)
        found = answers(rows_of([(str(out or ""), record) for record in records]))
    if json:
        from trainstep.report.answer_text import plain_answers
        from trainstep.report.visible import ascii_json

        print(ascii_json({"answer": plain_answers(found), **inspection} if measure else inspection, indent=2))
    else:
        if found:
            from trainstep.report.answer_text import print_answers

            print_answers(found, sys.stdout)
        show(list(sections(inspection)))
    if inspection["problem"]:
        raise ValueError(inspection["problem"])


def _tell(words: str) -> None:
    """What is being done, on standard error."""
    with outliving_reader(sys.stderr):
        print(words, file=sys.stderr, flush=True)


def _tell_nothing(_words: str) -> None:
    pass


def _into(store: Store, cells: Sequence[Cell]) -> list[Record]:
    """Measure and append the records, with the store held from before the first measurement."""
    with store.locked():
        records = measure_ceilings(cells)
        for record in records:
            store.append(record)
    return records


def measure_ceilings(cells: Sequence[Cell]) -> list[Record]:
    """One record for each cell, measured in a worker process."""
    from trainstep.measure.executor_local import run_groups
    from trainstep.measure.runner import Limits

    groups = run_groups([[cell] for cell in cells], Limits(), lambda cell, stage: None)
    return [record for records in groups for record in records]


def show(parts: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """Print sections: as tables on a terminal, as plain indented lines into a pipe."""
    from trainstep.report.visible import one_line

    parts = [(one_line(title), [(label, one_line(value)) for label, value in rows]) for title, rows in parts]
    if not sys.stdout.isatty():
        for title, rows in parts:
            width = max(len(label) for label, _ in rows)
            print(title)
            print("".join(f"  {label:<{width}}  {value}\n" for label, value in rows), end="")
        return
    from rich.markup import escape
    from rich.table import Table

    from trainstep.report.console import VisibleConsole

    console = VisibleConsole(sys.stdout)
    for title, rows in parts:
        table = Table(title=escape(title), title_style="bold", title_justify="left", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(escape(label), escape(value))
        console.print(table)


def sections(inspection: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """The inspection as titled rows of words for a person."""
    yield "machine", _machine_rows(inspection)
    for index, gpu in enumerate(inspection["gpus"]):
        yield f"GPU {index}: {gpu['name']}", _gpu_rows(gpu)
    if inspection["ceilings"]:
        yield f"measured on this {inspection['device']}", [_ceiling_row(row) for row in inspection["ceilings"]]
    yield "packages", [_package_row(package) for package in inspection["packages"]]
    yield "tools", [(tool["name"], tool["path"] or f"missing; for {tool['purpose']}") for tool in inspection["tools"]]
    yield "records", [("folder", f"{inspection['records']} (or where --out says)")]


def _machine_rows(inspection: dict[str, Any]) -> list[Row]:
    here, torch = inspection["environment"], inspection["torch"]
    capability = f", {torch['cpu_capability']}" if torch["cpu_capability"] else ""
    threads = f", torch uses {torch['threads']} threads" if torch["threads"] else ""
    build = f"CUDA {here['cuda']}" if here["cuda"] else "CPU build"
    rows = [
        ("system", here["os"]),
        ("CPU", f"{here['cpu']}{capability}"),
        ("cores", f"{here['cores']}{threads}"),
        ("memory", _gib(here["memory_bytes"])),
        ("GPUs", _gpus_in_words(inspection)),
        ("Python", here["python"]),
        ("torch", f"{here['torch']} ({build})" if here["torch"] else "missing"),
        ("trainstep", _trainstep_in_words(here)),
        ("device", inspection["device"]),
    ]
    if torch["error"]:
        rows.append(("torch says", torch["error"]))
    if inspection["problem"]:
        rows.append(("problem", inspection["problem"]))
    return rows


def _gpus_in_words(inspection: dict[str, Any]) -> str:
    driver = inspection["driver"]
    if driver["error"]:
        return f"the driver does not answer: {driver['error']}"
    if not driver["version"]:
        return "none (no NVIDIA driver)"
    supports = f", for CUDA up to {'.'.join(map(str, driver['cuda']))}" if driver["cuda"] else ""
    return f"{len(inspection['gpus'])} visible, driver {driver['version']}{supports}"


def _trainstep_in_words(here: dict[str, Any]) -> str:
    commit = f", commit {here['commit'][:12]}{' with changes' if here['dirty'] else ''}" if here["commit"] else ""
    return f"{here['trainstep']}{commit}, source {here['source']}"


def _gpu_rows(gpu: dict[str, Any]) -> list[Row]:
    rows = [("memory", _gib(gpu["memory_bytes"]))]
    if "sms" in gpu:
        rows += [
            ("compute capability", gpu["compute_capability"]),
            ("SMs", str(gpu["sms"])),
            ("L2 cache", f"{gpu['l2_bytes'] / 2**20:.0f} MiB"),
            ("shared memory an SM", f"{gpu['shared_memory_per_sm_bytes'] / 2**10:.0f} KiB"),
            ("shared memory a block", f"{gpu['shared_memory_per_block_bytes'] / 2**10:.0f} KiB"),
            ("registers an SM", f"{gpu['registers_per_sm']:,}"),
            ("reaches directly", ", ".join(f"GPU {peer}" for peer in gpu["peers"]) or "no other GPU"),
        ]
    sheet = gpu["data_sheet"]
    if sheet is None:
        return [*rows, ("data sheet", "not known here, so no MFU for this GPU")]
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


def _package_row(package: dict[str, str | None]) -> Row:
    missing = f"missing; for {package['purpose']}: {package['install']}"
    return str(package["name"]), package["version"] or missing


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _rate(value: float, unit: str) -> str:
    """`990 TFLOP/s`, `3.35 TB/s`: three significant digits or more."""
    base = "FLOP/s" if unit == "flop/s" else "B/s"
    prefix, scale = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    number = value / scale
    return f"{number:.3g} {prefix}{base}" if number < 999.5 else f"{number:.0f} {prefix}{base}"
