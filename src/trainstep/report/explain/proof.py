"""Shows a proof: its answer, the predicted and measured gain of each change, and the winning options as TOML.

proof_answer(label, proof), proof_table(step, proof), proof_toml(label, proof, ...)
"""

from typing import Any

from trainstep.config.run import TIMING_FIELDS
from trainstep.explain.causes import CAUSES, page_of
from trainstep.explain.proof import AGAIN, TOGETHER, Proof, Tried
from trainstep.plan.time.interval import Interval
from trainstep.plan.trials import ANOTHER_LOSS
from trainstep.records.record import Environment
from trainstep.report.explain.budgets import Explained, range_words
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import MS, RATIO, TEXT, listed, ms_words
from trainstep.report.kit.output_file import FIRST_LINES
from trainstep.report.kit.tables import Column, Line, Table
from trainstep.report.kit.visible import one_line
from trainstep.report.step.preset import GOES_ON, interval_words, step_fields, toml_value

_NOT_OF_PARALLEL = TIMING_FIELDS - {"sync"} | {"workload", "window_steps", "check_agreement"}
"""The start's options that are not of the step itself, in a proof of parallel, where `sync` is the strategy."""


def proof_answer(label: str, proof: Proof, out_config: str | None = None, command: str | None = None) -> Answer:
    """The answer: what was proved, how many predictions held, and how to use it. `command`: runs the script with the changes."""
    left = f" {GOES_ON}" if proof.untried or proof.unfinished else ""
    left += f" Not tried: {listed(proof.untried)}." if proof.untried else ""
    left += f" Not finished: {listed(proof.unfinished)}." if proof.unfinished else ""
    best = proof.best
    use = ""
    if best is not None:
        verb = "parallel" if proof.start.get("workload") == "parallel" else "bench"
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.candidate.fields.items())
        use = f"Take `{options}`."
        if out_config is not None:
            use = f"`trainstep {verb} --config {out_config}` takes these options."
        elif command is not None:
            use = f"`{command}` runs the script with these changes; the script itself stays as it is."
    return Answer(workload="explain", verdict=f"{label}: {_verdict(proof)}{_held_words(proof)}{left}", suggestion=use)


def _verdict(proof: Proof) -> str:
    if proof.trouble:
        return f"nothing was proved, because the original cannot be used: {proof.trouble}"
    if proof.start_s is None:
        return "nothing was tried yet."
    best = proof.best
    if best is None:
        refuted = [tried.candidate.name for tried in proof.helped]
        if refuted:
            return f"{listed(refuted)} seemed faster, and no second comparison confirmed it."
        if proof.promising:
            seem = listed([tried.candidate.name for tried in proof.promising])
            return f"{seem} seemed faster, without a verdict so far, and nothing else was."
        return _none_words(proof)
    gain = best.measured(proof.measured_s)
    assert gain is not None, "what helped was compared"
    per = " per token" if "batch_size" in best.candidate.fields else ""
    predicted = f", predicted {ms_words(best.candidate.gain.time_s)}" if best.candidate.gain else ""
    confirmed = ""
    if proof.together is None:
        confirmed = " Not yet compared together."
    elif best is proof.together and not proof.takes_all:
        confirmed = f" {proof.may_join[0].candidate.name} alone seemed faster still."
    elif not proof.takes_all:
        whole = proof.together
        is_alone = whole.candidate.fields in [tried.candidate.fields for tried in proof.may_join]
        confirmed = f" {whole.candidate.name}, {AGAIN if is_alone else 'together'}: {whole.step.word}."
        confirmed += "" if best in proof.again else " Not yet compared a second time."
    return (
        f"with {_fields_words(best)} a step takes {interval_words(best.step)} of the original's time{per}: "
        f"{ms_words(gain.time_s)} less ({range_words(gain)}) of {ms_words(proof.measured_s)}{predicted}.{confirmed}"
    )


def _none_words(proof: Proof) -> str:
    """`of 2 changes that were decided, none is faster. workers=2 is refused: another loss.`"""
    compared = [known for tried in proof.singles if (known := tried.step.comparison) and known.ratio is not None]
    hopeless = [tried for tried in proof.singles if tried.step.word == "slower" and not tried.step.comparison]
    decided = len([known for known in compared if not known.is_cut_off]) + len(hopeless)
    words = f"of {decided} change{'' if decided == 1 else 's'} that {'was' if decided == 1 else 'were'} decided, none is faster"
    if not decided:
        words = "no comparison was finished" if compared else "no change could be compared"
    refused = [tried.candidate.name for tried in proof.singles if tried.step.word == ANOTHER_LOSS]
    verb = "is" if len(refused) == 1 else "are"
    return f"{words}." + (f" {listed(refused)} {verb} refused: {ANOTHER_LOSS}." if refused else "")


def _held_words(proof: Proof) -> str:
    """` Of 3 predicted gains that were measured, 2 held.`"""
    words = [word for tried in proof.singles if (word := tried.held(proof.measured_s))]
    if not words:
        return ""
    count, inside, unsure = len(words), words.count("yes"), words.count("cannot tell")
    open_words = f", and {unsure} cannot be told" if unsure else ""
    gains = "gain that was" if count == 1 else "gains that were"
    return f" Of {count} predicted {gains} measured, {inside} held{open_words}."


def _fields_words(tried: Tried) -> str:
    return listed([f"{name}={value}" for name, value in tried.candidate.fields.items()])


def proof_table(step: Explained, proof: Proof) -> Table:
    """A line for each change: its predicted and measured gain, and whether the prediction held.

    Then follow all changes together, and the changes that were compared a second time.
    """
    columns = [
        Column("change", TEXT, "name", names=True),
        Column("predicted (ms)", MS, "predicted_gain_s", optional=True, help="gain that explain predicts"),
        Column("from (ms)", MS, "predicted_gain_low_s", optional=True, help="the low end of the prediction's interval"),
        Column("to (ms)", MS, "predicted_gain_high_s", optional=True, help="the high end of the prediction's interval"),
        Column("measured (ms)", MS, "measured_gain_s", optional=True, help="gain that was measured; below 0 is slower"),
        Column("99 % from", MS, "measured_gain_low_s", optional=True),
        Column("99 % to", MS, "measured_gain_high_s", optional=True),
        Column("verdict", TEXT, "verdict"),
        Column("held", TEXT, "held", optional=True, help="whether the predicted interval holds the measured gain"),
        Column("ratio", RATIO, "ratio", optional=True, more=True),
        Column(
            "losses apart", TEXT, "losses_words", optional=True, more=True, help="relative, and what rounding explains"
        ),
        Column("alone (ms)", MS, "step_alone_s", optional=True, more=True, help="the fastest step of its trial"),
        Column("cause", TEXT, "cause_words", optional=True, more=True),
        Column("page", TEXT, "page", optional=True, more=True),
        Column("why", TEXT, "why", optional=True),
    ]
    lines = [_line(proof, tried, "change") for tried in proof.singles]
    if proof.together is not None:
        lines.append(_line(proof, proof.together, "together"))
    lines += [_line(proof, tried, "again") for tried in proof.again]
    raw = [{"cell": step.label, **line} for line in lines]
    rows = [Line(step.row, line) for line in lines]
    return Table.of(f"Gains, predicted and measured: {step.label}", rows, columns, note=_note(proof), raw=raw)


def _note(proof: Proof) -> str:
    spread = "" if proof.spread is None else f" Losses of two runs of the original differ by {proof.spread:.2g}."
    if proof.unchecked:
        spread = f" Whether a change keeps the losses cannot be checked: {proof.unchecked}."
    left_out = "".join(f" Left out of all together: {name}, because {why}." for name, why in proof.left_out)
    return (
        f"Gains are of the explained step's {ms_words(proof.measured_s)}; each change was interleaved with the original in fresh "
        f"processes.{spread}{left_out}"
    )


def _line(proof: Proof, tried: Tried, kind: str) -> dict[str, Any]:
    """A row of the table. It has all keys; their names give the units."""
    candidate, step = tried.candidate, tried.step
    gain = tried.measured(proof.measured_s)
    is_whole = kind == "together"
    apart = None if step.apart is None else f"{step.apart:.2g} of {step.allowed:.2g}"
    if proof.unchecked and step.comparison is not None:
        apart = "cannot tell"
    return {
        "kind": kind,
        "name": TOGETHER if is_whole else f"{candidate.name}, {AGAIN}" if kind == "again" else candidate.name,
        "fields": dict(candidate.fields),
        "cause": candidate.cause or None,
        "cause_words": CAUSES[candidate.cause].title if candidate.cause and not is_whole else None,
        "page": page_of(candidate.cause) if candidate.cause and not is_whole else None,
        **_ends("predicted_gain", candidate.gain),
        **_ends("measured_gain", gain, has_interval=tried.has_interval),
        "held": tried.held(proof.measured_s) or None,
        **step_fields(step),
        "losses_apart": step.apart,
        "losses_allowed": step.allowed,
        "losses_words": apart,
        "why": None if step.comparison and not step.comparison.is_cut_off else step.reason,
        "chosen": tried is proof.best,
    }


def _ends(name: str, interval: Interval | None, *, has_interval: bool = True) -> dict[str, float | None]:
    ends = interval if has_interval else None
    return {
        f"{name}_s": interval.time_s if interval else None,
        f"{name}_low_s": ends.low_s if ends else None,
        f"{name}_high_s": ends.high_s if ends else None,
    }


def proof_section(step: Explained, proof: Proof, answer: Answer) -> Section:
    """The proof on the page."""
    winning = [] if proof.best is None else ["The winning options: " + "; ".join(option_lines(proof)) + "."]
    return Section(
        title=f"What the changes gained: {step.label}",
        paragraphs=(answer.text, *winning),
        tables=(proof_table(step, proof),),
    )


def option_lines(proof: Proof) -> list[str]:
    """The chosen options as lines of TOML."""
    without = _NOT_OF_PARALLEL if proof.start.get("workload") == "parallel" else TIMING_FIELDS
    return [f"{name} = {toml_value(value)}" for name, value in proof.chosen.items() if name not in without]


def proof_toml(label: str, proof: Proof, *, command: str, records: str, here: Environment, answer: Answer) -> str:
    """The chosen options as TOML that `--config` of bench or parallel reads; comments have the gains and where the records are."""
    verb = "parallel" if proof.start.get("workload") == "parallel" else "bench"
    lines = [
        FIRST_LINES["proof"],
        f"# {label}, by: {command}",
        f"# On {here.gpu or here.cpu}, torch {here.torch}, commit {here.commit or 'unknown'}. Records: {records}",
        f"# {answer.verdict}",
        *(f"# {_comment(proof, tried)}" for tried in proof.singles),
        *(f"# not tried, the budget was spent: {name}" for name in proof.untried),
        f"# For: trainstep {verb} --config FILE",
        *option_lines(proof),
    ]
    return "\n".join(map(one_line, lines)) + "\n"


def _comment(proof: Proof, tried: Tried) -> str:
    gain, candidate = tried.measured(proof.measured_s), tried.candidate
    if gain is None:
        return f"{candidate.name}: {tried.step.word}: {tried.step.reason}"
    predicted = (
        f", predicted {ms_words(candidate.gain.time_s)} ({range_words(candidate.gain)})" if candidate.gain else ""
    )
    return f"{candidate.name}: {tried.step.word}: gain {ms_words(gain.time_s)} ({range_words(gain)}){predicted}"
