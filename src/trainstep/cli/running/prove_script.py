"""`trainstep explain RUN.jsonl --prove`: starts the recorded script again, changes it from outside, and measures what that gains.

explain/script_changes.py decides which changes are tried, explain/prove.py what becomes of them, and
measure/run/changed/script_lab.py runs the processes.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.cli.cells import FAULTED, UNFINISHED, interrupt_says
from trainstep.cli.options import GridOptions
from trainstep.cli.running.preset import tell
from trainstep.cli.running.prove import Request, measure, proof_store, same_machine, show_plan, write_proof_page
from trainstep.cli.streams import outliving_reader, show_found
from trainstep.config.script import text_of_changes
from trainstep.explain.proof import Candidate, Proof
from trainstep.explain.script_changes import PRECISIONS, ScriptPlace, place_of, script_candidates, workers_for
from trainstep.explain.script_patch import Patch, keywords_of_pages, lines_to_write, patch_of, winning_patch
from trainstep.measure.harness.sweep import check_same_place
from trainstep.measure.machine.environment import cores
from trainstep.measure.run.changed.script_command import ScriptCommand, command_of
from trainstep.measure.run.changed.script_lab import FEWEST_PAIRS, ScriptLab
from trainstep.reading import read_file
from trainstep.records.record import Record
from trainstep.report.explain.budgets import Explained, explain_answers, explain_sections, explain_tables
from trainstep.report.explain.proof import proof_answer, proof_section, proof_table
from trainstep.report.explain.script import patch_table, script_answer, script_table
from trainstep.report.kit.charts import Section
from trainstep.report.kit.visible import visible

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits

_STEPS = 40
_LEAST_STEPS = 8
"""The fewest steps of a process: four of them are warm-ups, one of these after the turn begins."""
_SUGGESTED = "The lines are those of the causes' pages, with predicted gains; the proof's table says what was measured."


def prove_script(step: Explained, request: Request, bounds: "Limits", how: GridOptions, began_s: float) -> int:
    """Prove what explain predicts of a script. Where it cannot be started again, show the lines to write. Returns the exit code."""
    _check(request)
    record = step.row.record
    try:
        command = command_of(record)
    except ValueError as error:
        return _show_lines(step, str(error).removeprefix("prove: "), how)
    here = same_machine(record, how)
    store = proof_store(how, request)
    if not how.allow_mixed:
        check_same_place(store, here)
    steps = _STEPS if request.script_steps is None else request.script_steps
    lab = ScriptLab(
        store,
        command,
        steps=steps,
        pairs=bounds.processes or FEWEST_PAIRS,
        timeout_s=bounds.timeout_s,
        say=lambda line: tell(line, how),
        facts={"command": shlex.join(["trainstep", *sys.argv[1:]])},
        here=here,
        budget_minutes=how.budget_minutes,
        began_s=began_s,
        dry_run=how.dry_run,
    )
    if how.dry_run:
        proof, changes = _measured(step, lab, request, how)
        return show_plan(step, proof, changes, lab, how)
    with store.locked(), interrupt_says(lambda: f"finished processes are kept in {store.path}; run it again"):
        for line in _before_words(
            step, command, f"{steps} steps{' or more' if lab.may_share else ''}", str(store.path)
        ):
            tell(line, how)
        proof, _ = _measured(step, lab, request, how)
        proof.unfinished = _unfinished(proof, lab)
    return _show(step, proof, lab, how)


def _unfinished(proof: Proof, lab: ScriptLab) -> list[str]:
    """The changes that the budget cut off, without those that are taken with all or compared a second time."""
    done = [tried.candidate.fields for tried in proof.again]
    if proof.together is not None and proof.takes_all:
        together = proof.together.candidate.fields.items()
        done += [tried.candidate.fields for tried in proof.promising if tried.candidate.fields.items() <= together]
    names = [text_of_changes(lab.changes({**proof.start, **fields})) for fields in done]
    return [name for name in lab.cut_off if name not in names]


def _check(request: Request) -> None:
    """ValueError for options that have no effect on a script, or that cannot be applied from outside."""
    if request.out_config is not None:
        raise ValueError("out_config: a script of your own has no options that a file could hold; leave it out")
    if name := next((name for name in request.precisions if name not in PRECISIONS), None):
        raise ValueError(
            f"allow_precision: {name} cannot be applied to a script from outside; {' and '.join(PRECISIONS)} can"
        )
    if request.script_steps is not None and request.script_steps < _LEAST_STEPS:
        raise ValueError(f"script_steps: must be at least {_LEAST_STEPS}, not {request.script_steps}")


def _before_words(step: Explained, command: ScriptCommand, steps: str, records: str) -> list[str]:
    """The lines to show before the script runs. `steps`: how many each process takes, in words."""
    ranks = f" on {command.ranks} ranks" if command.ranks > 1 else ""
    words = [
        f"{step.label}: `{shlex.join(command.words)}` is started again and again in {command.folder}{ranks}, {steps} "
        "each time, with all that it does to files; records: " + records
    ]
    if command.changed:
        words.append("the script was changed since it was recorded: what is measured is the script as it is now")
    return words


def _measured(step: Explained, lab: ScriptLab, request: Request, how: GridOptions) -> tuple[Proof, Sequence[Candidate]]:
    """The proof, and the changes that it tries. The original's first process says which precision and batch the script has."""
    first = lab.first()
    precision = None if first is None or first.failure else first.fact("script_precision")
    batch_size = None if first is None or first.failure else first.fact("loader_batch_size", 0)
    known = {"precision": precision, "batch_size": batch_size if request.batch_sizes else None}
    lab.start = {name: value for name, value in known.items() if value}
    place = _place(step.row.record, first, precision, batch_size)
    changes = script_candidates(step.budget, place, request.precisions, request.batch_sizes)
    if not how.dry_run:
        tell(f"{len(changes)} changes to prove", how)
    if first is not None and first.failure is None:
        lab.measure_in_rounds([{**lab.start, **candidate.fields} for candidate in changes if not candidate.refusal])
    return measure(step, changes, lab, lambda _: None, how, needs_losses=False), changes


def _place(record: Record, first: Record | None, precision: str | None, batch_size: int | None) -> ScriptPlace:
    """The recorded run's place, but on this machine, and with what the original's first process says."""
    place = place_of(record)
    return replace(
        place,
        cores=cores(),
        precision=precision,
        batch_size=batch_size,
        compiles=place.compiles or bool(first is not None and first.fact("compiled_graphs")),
        fusable_parts=first.fact("fusable_parts") if first is not None else None,
    )


def _show(step: Explained, proof: Proof, lab: ScriptLab, how: GridOptions) -> int:
    """Print what was proved, the command of the winning changes and their patch; write the page. Returns the exit code."""
    best = proof.best
    won = {} if best is None else lab.changes({**proof.start, **best.candidate.fields})
    command = None
    if won:
        command = shlex.join(["trainstep", "run", "--apply", text_of_changes(won), *lab.command.words])
    to_write = lines_to_write(step.budget)
    text, path = _script(lab.command.folder, lab.command.file)
    patch = winning_patch(path, text, won)
    answer = proof_answer(step.label, proof, command=command)
    answers = [answer, *explain_answers([step])]
    lines = [script_table(step, to_write, note=_SUGGESTED)] if to_write else []
    tables = [*([proof_table(step, proof)] if proof.singles else []), *lines, *explain_tables([step])]
    show_found(answers, tables, as_json=how.json, every=how.every, for_programs=[*tables, patch_table(step, patch)])
    stream = sys.stderr if how.json else sys.stdout
    if how.page is not None:
        written = [f"Patch: {patch.text}", patch.words] if patch.text else []
        section = Section(
            title=f"What to write: {step.label}", paragraphs=tuple(filter(None, written)), tables=tuple(lines)
        )
        sections = [proof_section(step, proof, answer), *([section] if lines else []), *explain_sections([step])]
        write_proof_page(step, sections, answers, how.page)
    with outliving_reader(stream):
        if patch.text and not how.json:
            print(
                f"\nThe winning changes by lines of the script:\n{_visible_lines(patch.text)}{patch.words}", file=stream
            )
        if command is not None and not how.json:
            print(f"\nThe winning changes:\n{visible(command)}\n", file=stream)
        print(f"records: {lab.store.path}", file=stream)
        print(
            *([f"page: {how.page}"] if how.page else []),
            sep="\n",
            end="\n" if how.page else "",
            file=stream,
            flush=True,
        )
    if proof.untried or proof.unfinished:
        return UNFINISHED
    return FAULTED if proof.trouble else 0


def _show_lines(step: Explained, reason: str, how: GridOptions) -> int:
    """Show the lines of each cause's page, for a script that cannot be started again. Returns the exit code."""
    to_write = lines_to_write(step.budget)
    folder = str(step.row.record.fact("script_folder", ""))
    file = os.path.join(folder, str(step.row.record.config["script"]))
    workers = workers_for(step.row.record.environment.cores, ranks=step.row.record.config.get("ranks", 1))
    text, path = _script(folder, file)
    patch = patch_of(path, text, keywords_of_pages([item.cause for item in to_write], workers=workers))
    answers = [script_answer(step, to_write, patch, reason), *explain_answers([step])]
    tables = [script_table(step, to_write), *explain_tables([step])]
    for_programs = [*tables, patch_table(step, Patch(text=patch))]
    show_found(answers, tables, as_json=how.json, every=how.every, for_programs=for_programs)
    with outliving_reader(sys.stdout):
        print(f"\n{_visible_lines(patch)}" if patch and not how.json else "", end="", flush=True)
    if how.page is not None:
        paragraphs = (answers[0].text, *([f"Patch: {patch}"] if patch else []))
        section = Section(title=f"What to write: {step.label}", paragraphs=paragraphs, tables=(tables[0],))
        write_proof_page(step, [section, *explain_sections([step])], answers, how.page)
        print(f"page: {how.page}", file=sys.stderr if how.json else sys.stdout, flush=True)
    return FAULTED


def _visible_lines(patch: str) -> str:
    """The patch with control characters written out, but for the ends of lines, without which it would not apply."""
    return "\r\n".join(visible(lines) for lines in patch.split("\r\n"))


def _script(folder: str, file: str) -> tuple[str, str]:
    """A script's text, empty if it is not here, and its path from the run's folder."""
    try:
        text = read_file(Path(file)).decode()
    except (OSError, ValueError):  # `-m module` that is not started here, another machine's path, or no text
        text = ""
    inside = os.path.relpath(os.path.realpath(file), os.path.realpath(folder))
    return text, file.lstrip("/") if inside.startswith("..") else inside
