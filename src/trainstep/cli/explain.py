"""`trainstep explain`: why a step takes its time, as a floor and a ranked list of excesses."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainstep.cli.options import TIMEOUT_S, GridOptions, limits, read_limits, with_fields
from trainstep.cli.profile import profile_cells
from trainstep.cli.running.prove_options import ProveOptions
from trainstep.config.grid import Cell, groups_along
from trainstep.config.profile import ProfileConfig
from trainstep.records.record import Record

if TYPE_CHECKING:
    from trainstep.plan.time.calibration import Calibration
    from trainstep.report.kit.rows import Row


@with_fields(ProfileConfig)
def explain(
    paths: Annotated[list[Path] | None, Parameter(consume_multiple=True, json_list=False)] = None,
    /,
    *,
    calibration: Path | None = None,
    proof: ProveOptions = ProveOptions(),
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Say why a step takes its time: what its work needs at least, then each excess in ms with its cause, the longest first.

    With files of records (of bench, profile, parallel, numerics, run), nothing runs without --prove; of many steps,
    five have their tables shown. So with a trace of torch's profiler: its steps are found by their marks or by what
    repeats, as `profile --from` does. Without, the options are those of `profile`: the step is profiled, and then
    explained. The floor is the model's work at the speeds that a calibration measured: one comes with trainstep for
    H200 and is scaled for other known GPUs. Each excess has the change that removes it, the predicted gain with its
    interval, and a page of docs/guide/slow/. Floor, excesses and what is unexplained add up to the measured step.

    Examples:

        trainstep explain --model small --context 256 --precision bf16_autocast

        trainstep explain results/h200/profile.jsonl --json

        trainstep explain runs/train.jsonl --page why.html    (a run of your own script, by trainstep run)

        trainstep explain --model small --prove --allow-precision bf16_autocast --budget-minutes 20 --out-config fast.toml

        trainstep explain runs/train.jsonl --prove --budget-minutes 20    (your own script is started again, and changed)

        trainstep explain trace.json.gz    (of torch.profiler, best with record_shapes=True)

    Parameters
    ----------
    paths
        Files of records, or folders: every *.jsonl in them. Traces: .json, .json.gz, or .sqlite of `nsys export --type sqlite`.
    calibration
        File that `trainstep doctor --measure --out FILE` wrote on the GPU of the steps; by default the GPU's own.
    timeout_s
        Seconds after which a cell is killed, by default 600; with files the limit for reading, 60.
    memory_limit_gib
        GiB of memory that a CPU cell may use, by default 90 % of the machine's; with files the reader's, 1.86.
    """
    measured = _calibration(calibration)
    if proof.prove:
        return _prove(paths, measured, proof, timeout_s, memory_limit_gib, how, fields)
    if name := next(iter(proof.given()), None):
        raise ValueError(f"{name}: has no effect without --prove; add that, or leave it out")
    if paths:
        return _explain_files(paths, measured, timeout_s, memory_limit_gib, how, fields)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib)
    here, cells = profile_cells(fields, memory_limit_gib, forks=not how.dry_run)
    if measured is not None:
        from trainstep.explain.floor import check_calibration

        check_calibration(measured, device=cells[0].config["device"], gpu=here.gpu)
    store = how.open_store("explain")

    from trainstep.cli.cells import check_kept, check_page, run_cells, show_dry_run, unfinished
    from trainstep.measure.harness.local import run_groups
    from trainstep.report.kit.rows import rows_of

    check_page(how.page, store.path)
    groups = groups_along(cells, None)
    if how.dry_run:
        return show_dry_run(groups, store, environment=here, options=how, rerun=not how.resume, as_json=how.json)
    check_kept(cells, "keep_trace")

    def execute(waiting: Sequence[Sequence[Cell]], tell: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return run_groups(waiting, bounds, tell)

    records = run_cells(groups, store, execute, environment=here, options=how, rerun=not how.resume)
    code = _show(rows_of([(str(store.path), record) for record in records]), measured, how)
    print(f"records: {store.path}", file=sys.stderr if how.json else sys.stdout, flush=True)
    return unfinished(groups, records, store, how) or code


def _prove(
    paths: Sequence[Path] | None,
    measured: "Calibration | None",
    proof: ProveOptions,
    timeout_s: float | None,
    memory_limit_gib: float | None,
    how: GridOptions,
    fields: Mapping[str, str | None],
) -> int:
    """Prove the step of records, or of the options. Returns the exit code."""
    from trainstep.cli.running.prove import prove_model, prove_rows, request_of

    if how.resume:
        raise ValueError("resume: --prove always goes on with what its file of records has; leave it out")
    asked = request_of(proof)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib, processes=proof.processes)
    if not paths:
        return prove_model(fields, measured, bounds, memory_limit_gib, asked, how)
    given = {**fields, "config": how.config}
    if name := next((name for name, value in given.items() if value is not None), None):
        raise ValueError(f"{name}: the step is that of the records, so that it would have no effect; leave it out")
    return prove_rows(_read(paths, None, None), measured, bounds, asked, how)


def _calibration(path: Path | None) -> "Calibration | None":
    if path is None:
        return None
    from trainstep.plan.time.stored import read_calibration

    return read_calibration(path)


def _explain_files(
    paths: Sequence[Path],
    measured: "Calibration | None",
    timeout_s: float | None,
    memory_limit_gib: float | None,
    how: GridOptions,
    fields: Mapping[str, str | None],
) -> int:
    """Read the records and explain them. ValueError for options that have no effect there. Returns the exit code."""
    given = {**fields, **how.given, "page": None}
    name = next((name for name, value in given.items() if value is not None and value is not False), None)
    if name is not None:
        raise ValueError(f"{name}: records are read, nothing runs, so that it would have no effect; leave it out")
    return _show(_read(paths, timeout_s, memory_limit_gib), measured, how)


def _read(paths: Sequence[Path], timeout_s: float | None, memory_limit_gib: float | None) -> "Sequence[Row]":
    """The rows of the files, read within limits."""
    from trainstep.cli.streams import tell_reading
    from trainstep.reading import limited_here
    from trainstep.report.explain.trace_row import is_trace, rows_of_traces
    from trainstep.report.kit.rows import read_rows, record_files

    if script := next((path for path in paths if path.suffix == ".py"), None):
        raise ValueError(
            f"{script} is a script: `trainstep run {script}` makes a record that explain reads; give that record"
        )
    traces = [path for path in paths if is_trace(path)]
    records = [path for path in paths if not is_trace(path)]
    tell_reading([*traces, *(file for path in records for file in record_files(path))])
    reading = read_limits(timeout_s, memory_limit_gib)
    rows = rows_of_traces(traces, reading)
    if records:
        with limited_here(reading, ", ".join(map(str, records))):
            rows += read_rows(records)
    return rows


def _show(rows: "Sequence[Row]", measured: "Calibration | None", how: GridOptions) -> int:
    """Print the verdict and the budgets, and write the page. ValueError if no record can be explained."""
    from trainstep.cli.streams import show_found
    from trainstep.report.explain.budgets import (
        explain_answers,
        explain_rows,
        explain_sections,
        explain_tables,
        first_tables,
    )
    from trainstep.report.kit.output_file import check_output, write_output

    if how.page is not None:
        check_output("page", how.page, "html")
    explained, refusals = explain_rows(rows, measured)
    if not explained:
        raise ValueError(
            next(iter(refusals), "records: there are none to explain; give a file of bench, profile or run")
        )
    answers = explain_answers(explained)
    notes = [f"Not explained, {count} record{'s' if count > 1 else ''}: {why}" for why, count in refusals.items()]
    every = explain_tables(explained)
    shown, left_out = (every, []) if how.every else first_tables(explained)
    show_found(answers, shown, as_json=how.json, every=how.every, notes=[*notes, *left_out], for_programs=every)
    if how.page is not None:
        from trainstep.report.page import page as make_page

        text = make_page(
            rows, title="Why the step takes its time", lead=explain_sections(explained), lead_answers=answers
        )
        write_output("page", how.page, "html", text)
        print(f"page: {how.page}", file=sys.stderr if how.json else sys.stdout, flush=True)
    return 0
