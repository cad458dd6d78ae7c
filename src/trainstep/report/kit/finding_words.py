"""Says a finding of `explain` in words: its excess, what was seen, and the change.

excess_words(finding, budget.measured_s, "step")    # host launches, 78.0 ms, 3.0 % of the step
"""

from trainstep.explain.budget import Finding
from trainstep.explain.causes import CAUSES, advice_of
from trainstep.report.kit.forms import ms_words, percent


def excess_words(finding: Finding, whole_s: float, whole: str) -> str:
    """`host launches, 78.0 ms, 3.0 % of the step`."""
    share = f", {percent(finding.excess.time_s / whole_s)} % of the {whole}" if whole_s else ""
    return f"{CAUSES[finding.cause].title}, {ms_words(finding.excess.time_s)}{share}"


def evidence_words(finding: Finding) -> str:
    """The finding's evidence in words, with its times filled in."""
    words = finding.evidence
    for name, time_s in finding.times_s.items():
        words = words.replace(f"{{{name}}}", ms_words(time_s))
    return words


def change_words(finding: Finding, *, on_device: bool) -> str:
    """The change as options, or the cause's advice in words."""
    if not finding.change:
        return advice_of(finding.cause, on_device=on_device)
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in finding.change.items())
    return f"`{options}` is taken already; no further option is known" if finding.is_taken else f"`{options}`"
