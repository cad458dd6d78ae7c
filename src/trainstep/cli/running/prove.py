"""`trainstep explain --prove`: measures the gains that the explanation predicts, resumably, and writes the winning options.

The step comes from a record, or is profiled first. explain/prove.py decides what is tried; measure/harness/lab.py first
looks up what the file of records has, and measures the rest.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.cli.cells import FAULTED, UNFINISHED, check_kept, check_page, interrupt_says, run_cells, show_dry_run
from trainstep.cli.options import GridOptions, this_machine
from trainstep.cli.profile import profile_cells
from trainstep.cli.running.preset import allowed_precisions, lab_of, tell
from trainstep.cli.running.progress import duration_words
from trainstep.cli.running.prove_options import ProveOptions
from trainstep.cli.streams import outliving_reader, show_found
from trainstep.config.grid import Cell, groups_along
from trainstep.explain.floor import check_calibration
from trainstep.explain.proof import Candidate, Proof
from trainstep.explain.prove import Predict, candidates, predictor, prove, start_of
from trainstep.explain.trace_evidence import check_provable
from trainstep.measure.harness.lab import Lab
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.sweep import check_same_place
from trainstep.plan.cell_config import planned_config
from trainstep.plan.time.calibration import Calibration
from trainstep.records.record import Environment, Record
from trainstep.records.store import RUNS, Store
from trainstep.report.explain.budgets import (
    Explained,
    explain_answers,
    explain_rows,
    explain_sections,
    explain_tables,
    furthest,
)
from trainstep.report.explain.proof import option_lines, proof_answer, proof_section, proof_table, proof_toml
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import Section
from trainstep.report.kit.output_file import check_output, write_output
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.page import page as make_page

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits
    from trainstep.measure.run.changed.script_lab import ScriptLab

_FILE = "explain-prove.jsonl"
_SCRIPT = "run"
_PROVABLE = ("train_step", "profile", "parallel", "numerics")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks a proof for."""

    out_config: Path | None
    precisions: Sequence[str]
    batch_sizes: Sequence[int]
    script_steps: int | None = None
    """Steps of each process of a script; None: as many as usual."""


def request_of(proof: ProveOptions) -> Request:
    """The request of the command line's texts. ValueError names the option."""
    if proof.out_config is not None:
        check_output("out_config", proof.out_config, "proof")
    sizes = []
    for word in [] if proof.allow_batch_size is None else proof.allow_batch_size.split(","):
        if not word.strip().isdecimal() or not int(word):
            raise ValueError(f"allow_batch_size: {word.strip()!r} is not a positive number; write sizes as 8,16")
        sizes.append(int(word))
    precisions = allowed_precisions(proof.allow_precision)
    return Request(
        out_config=proof.out_config,
        precisions=precisions,
        batch_sizes=list(dict.fromkeys(sizes)),
        script_steps=proof.script_steps,
    )


def prove_model(
    fields: Mapping[str, str | None],
    calibration: Calibration | None,
    bounds: "Limits",
    memory_limit_gib: float | None,
    request: Request,
    how: GridOptions,
) -> int:
    """Profile the step of the options, unless the file of records has it, and prove what its explanation predicts."""
    began_s = time.monotonic()
    here, cells = profile_cells(fields, memory_limit_gib, forks=not how.dry_run)
    if len(cells) > 1:
        raise ValueError(f"prove: takes one step, and these options are {len(cells)}; give each option one value")
    if calibration is not None:
        check_calibration(calibration, device=cells[0].config["device"], gpu=here.gpu)
    store = proof_store(how, request)
    groups = groups_along(cells, None)
    if how.dry_run and cells[0].key not in store.latest():
        note = "Then each change of its explanation is measured against it."
        return show_dry_run(groups, store, environment=here, options=how, as_json=how.json, note=note)

    check_kept(cells, "keep_trace")

    def execute(waiting: Sequence[Sequence[Cell]], told: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return run_groups(waiting, bounds, told)

    if how.dry_run:
        records = [store.latest()[cells[0].key]]
    else:
        records = run_cells(groups, store, execute, environment=here, options=how, retry_failed=True)
    explained, refusals = explain_rows(rows_of([(str(store.path), record) for record in records]), calibration)
    if not explained:
        raise ValueError(next(iter(refusals)))
    return _prove(explained[0], store, bounds, request, how, here, began_s)


def prove_rows(
    rows: Sequence[Row],
    calibration: Calibration | None,
    bounds: "Limits",
    request: Request,
    how: GridOptions,
) -> int:
    """Prove the explanation of a record's step: of several, the one furthest above its floor."""
    began_s = time.monotonic()
    explained, refusals = explain_rows(rows, calibration)
    if not explained:
        raise ValueError(next(iter(refusals), "records: there are none to explain; give a file of bench or profile"))
    step = furthest(explained)[0]
    record = step.row.record
    if record.workload == _SCRIPT:
        from trainstep.cli.running.prove_script import prove_script

        return prove_script(step, request, bounds, how, began_s)
    if request.script_steps is not None:
        raise ValueError("script_steps: the step is built again and takes --steps of its record; leave it out")
    check_provable(record)
    if record.workload not in _PROVABLE:
        raise ValueError(
            f"prove: a record of {record.workload} cannot be built again; give one of {', '.join(_PROVABLE)}, or --model"
        )
    here = same_machine(record, how)
    if len(explained) > 1:
        tell(f"of {len(explained)} steps, the one furthest above its floor is proved: {step.label}", how)
    return _prove(step, proof_store(how, request), bounds, request, how, here, began_s)


def same_machine(record: Record, how: GridOptions) -> Environment:
    """This machine. ValueError if it is not like the one on which the record's step ran."""
    device, ranks = str(record.config["device"]), int(record.config.get("ranks", 1))
    if record.config.get("nodes", 1) > 1:
        raise ValueError(
            "prove: the step ran on several nodes, and a proof runs on one; give a record of a step on one node"
        )
    forks = not how.dry_run and ranks == 1
    instead = "--model, which explains a step of this machine"
    if record.workload == _SCRIPT:
        instead = "a run of the script on this machine, by `trainstep run`"
    here, _ = this_machine(device, instead=instead, forks=forks)
    if device == "cuda" and ranks > here.gpu_count:
        raise ValueError(
            f"prove: the step ran on {ranks} GPUs, and here {here.gpu_count} can be used; take a machine with {ranks}, or {instead}"
        )
    if device == "cuda" and here.gpu != record.environment.gpu and not how.allow_mixed:
        raise ValueError(
            f"prove: the step was measured on {record.environment.gpu}, and here is {here.gpu}; take {instead}, or --allow-mixed"
        )
    return here


def proof_store(how: GridOptions, request: Request) -> Store:
    store = how.store(how.out or RUNS / _FILE, "explain")
    check_page(how.page, store.path)
    for name, path in (("out", store.path), ("page", how.page)):
        if (
            request.out_config is not None
            and path is not None
            and os.path.realpath(path) == os.path.realpath(request.out_config)
        ):
            raise ValueError(f"out_config: {path} is the file of --{name} too; give the options another name")
    return store


def _prove(
    step: Explained,
    store: Store,
    bounds: "Limits",
    request: Request,
    how: GridOptions,
    here: Environment,
    began_s: float,
) -> int:
    """Measure what is to be tried, and show it. Returns the exit code."""
    record, budget = step.row.record, step.budget
    config = planned_config(record.workload, record.config)
    start = start_of(record.workload, config)
    predict = predictor(config, step.calibration, budget.measured_s)
    changes = candidates(
        budget,
        config,
        predict,
        precisions=request.precisions,
        batch_sizes=request.batch_sizes,
        gpu_memory_bytes=here.gpu_memory_bytes if config.run.device == "cuda" else None,
    )
    if not how.allow_mixed:
        check_same_place(store, here)
    lab = lab_of(store, bounds, how, str(record.config["device"]), began_s=began_s)
    lab.start = start
    if how.dry_run:
        return show_plan(step, measure(step, changes, lab, predict, how), changes, lab, how)
    with store.locked(), interrupt_says(lambda: f"finished measurements are kept in {store.path}; run it again"):
        tell(f"{step.label}: {len(changes)} changes to prove, records: {store.path}", how)
        proof = measure(step, changes, lab, predict, how)
    return _show(step, proof, store, request, how, here)


def measure(
    step: Explained,
    changes: Sequence[Candidate],
    lab: "Lab | ScriptLab",
    predict: Predict,
    how: GridOptions,
    *,
    needs_losses: bool = True,
) -> Proof:
    """Prove the changes with a lab whose `start` is set, and print a line for each change that is measured."""

    def reserve(comparisons: int) -> None:
        lab.reserved = comparisons

    def announce(place: int, of: int, candidate: Candidate) -> None:
        if not how.dry_run:
            tell(_progress_words(lab, place, of, candidate), how)

    return prove(
        lab.start,
        changes,
        step.budget.measured_s,
        predict,
        key_of=lab.key_of,
        trial=lab.trial,
        compare=lab.compare,
        reserve=reserve,
        announce=announce,
        needs_losses=needs_losses,
    )


def _progress_words(lab: "Lab | ScriptLab", place: int, of: int, candidate: Candidate) -> str:
    """`[2/6] capture step; about 3 min left`: more on a noisy machine; the last is all changes together."""
    left_s = lab.left_s(of - place + 1)
    return f"[{place}/{of}] {candidate.name}; about {duration_words(left_s)} left"


def show_plan(
    step: Explained, proof: Proof, changes: Sequence[Candidate], lab: "Lab | ScriptLab", how: GridOptions
) -> int:
    """Print what the file of records has, what would be measured next, and about how long that takes."""
    each_s = lab.trial_s(proof.start) + lab.comparison_s(proof.start)
    # Two trials of the start come first, and a comparison of what helped together is the last.
    around_s = 2 * lab.trial_s(proof.start) + lab.comparison_s(proof.start) if proof.untried else 0.0
    left_s = len(proof.untried) * each_s + around_s
    known = [{"change": tried.candidate.name, "outcome": tried.step.word} for tried in proof.singles]
    with outliving_reader(sys.stdout):
        if how.json:
            plan = {"dry_run": True, "label": step.label, "known": known, "to_try": proof.untried, "expected_s": left_s}
            print(json.dumps({**plan, "records": str(lab.store.path)}, indent=1))
            return 0
        left = (
            f"{len(proof.untried)} to try, about {duration_words(left_s)} or more"
            if proof.untried
            else "nothing left to try"
        )
        print(f"{step.label}: {len(changes)} change{'' if len(changes) == 1 else 's'}, {left}")
        for tried in proof.singles:
            print(f"  {tried.candidate.name}: {tried.step.word}: {tried.step.reason}")
        for name in proof.untried:
            print(f"  {name}: to try")
        print(f"records: {lab.store.path} (nothing was run)", flush=True)
    return 0


def _show(step: Explained, proof: Proof, store: Store, request: Request, how: GridOptions, here: Environment) -> int:
    """Print the answers, the tables and the winning options; write the file of options and the page. Returns the exit code."""
    wins = proof.best is not None
    out_config = request.out_config if wins else None
    answer = proof_answer(step.label, proof, None if out_config is None else str(out_config))
    answers = [answer, *explain_answers([step])]
    tables = [*([proof_table(step, proof)] if proof.singles else []), *explain_tables([step])]
    stream = sys.stderr if how.json else sys.stdout
    show_found(answers, tables, as_json=how.json, every=how.every)
    if wins and not how.json:
        with outliving_reader(sys.stdout):
            print("", "The winning options, as a file for --config:", *option_lines(proof), "", sep="\n")
    lines = [f"records: {store.path}"]
    if out_config is not None:
        command = shlex.join(["trainstep", *sys.argv[1:]])
        toml = proof_toml(step.label, proof, command=command, records=str(store.path), here=here, answer=answer)
        write_output("out_config", out_config, "proof", toml)
        lines.append(f"options: {out_config}")
    elif request.out_config is not None:
        lines.append(f"options: no change is certainly faster, so {request.out_config} was not written")
    if how.page is not None:
        write_proof_page(step, [proof_section(step, proof, answer), *explain_sections([step])], answers, how.page)
        lines.append(f"page: {how.page}")
    with outliving_reader(stream):
        print(*lines, sep="\n", file=stream, flush=True)
    if proof.untried:
        return UNFINISHED
    return FAULTED if proof.trouble else 0


def write_proof_page(step: Explained, sections: Sequence[Section], answers: Sequence[Answer], path: Path) -> None:
    text = make_page([step.row], title="What the changes gained", lead=list(sections), lead_answers=list(answers))
    write_output("page", path, "html", text)
