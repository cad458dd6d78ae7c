"""Finds how to start a recorded script again: `command_of(record)` of a record of `trainstep run`. ValueError if it cannot be."""

import os
import shlex
from dataclasses import dataclass

from trainstep.measure.run.script import find_script
from trainstep.records.record import Record


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """How a recorded script is started again."""

    words: tuple[str, ...]
    """The words of `trainstep run` after its own options: the script and its arguments."""
    folder: str
    file: str
    """Path of the script, or of the module's file."""
    ranks: int
    source: str
    """SHA-256 of the script as it is now."""
    changed: bool
    """Whether the script has changed since the record."""
    record: Record


def command_of(record: Record) -> ScriptCommand:
    """How to start the script of a record again. ValueError if that is impossible."""
    name, ranks = str(record.config["script"]), int(record.config.get("ranks", 1))
    if not str(record.fact("command", "")).startswith("trainstep run"):
        raise ValueError(
            "prove: the record is of a watch in code, which does not say how its program is started; run the script by "
            "`trainstep run`, and give that record"
        )
    if record.fact("applied") or record.fact("stopped_after"):
        raise ValueError("prove: the record is of a run with --apply or --stop-after; give one of the script as it is")
    if ranks > 1 and record.fact("local_ranks") != ranks:
        raise ValueError(
            f"prove: the run had {ranks} ranks that were not all on one machine, or does not say so; a proof starts ranks by "
            "torchrun on this machine: run the script so, and give that record"
        )
    folder = str(record.fact("script_folder") or os.getcwd())
    head = ("-m", name[3:]) if name.startswith("-m ") else (name,)
    words = (*head, *shlex.split(str(record.config.get("arguments", ""))))
    before = os.getcwd()
    try:
        os.chdir(folder)
        script = find_script(words)
    except OSError as error:
        raise ValueError(f"prove: the run's folder {folder} cannot be entered: {error.strerror}") from None
    finally:
        os.chdir(before)
    known = record.fact("script_source")
    return ScriptCommand(
        words=words,
        folder=folder,
        file=script.file,
        ranks=ranks,
        source=script.source,
        changed=bool(known) and known != script.source,
        record=record,
    )
