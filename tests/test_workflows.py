"""Workflows, hooks before a commit, issue templates, the changelog and the version agree with the code.

The files are parsed; no test contacts the service that runs them.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainstep
from makefile import recipe, targets, targets_named
from sources import ROOT
from trainstep.cli import app

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TEMPLATES = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ACTION = re.compile(r"^[\w.-]+/[\w./-]+@v\d+$")

pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="an sdist carries no .github")


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def jobs(path: Path) -> dict[str, Any]:
    return dict(read(path)["jobs"])


def scripts(path: Path) -> str:
    """The scripts of all steps of a workflow."""
    return "\n".join(step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_complete_and_has_few_permissions(path: Path):
    workflow = read(path)
    assert workflow["name"]
    assert workflow.get("on", workflow.get(True)), "YAML 1.1 reads `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert job["timeout-minutes"] <= 120, name
        assert "permissions" not in job, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert ACTION.match(step.get("uses", "a/b@v1")), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_existing_files_and_targets(path: Path):
    text = path.read_text()
    assert targets_named(scripts(path)) <= targets()
    files = re.findall(r"(?:results|sweeps|scripts|\.ci)/[\w./-]*\w|pyproject\.toml|constraints\.txt", text)
    assert files
    assert not [name for name in files if not (ROOT / name).exists()]


def test_workflows_run_what_contributors_run():
    [checks] = [path for path in WORKFLOWS if path.stem == "checks"]
    run = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs(checks).items()}
    assert targets_named(run["test"]) == {"check", "test"}
    assert targets_named(run["docs"]) == {"docs"}
    assert "python -m build" in run["package"]
    assert re.findall(r"bare/bin/trainstep (\S+)", run["package"]) == ["--version", "--help", "report"]
    [slow] = [path for path in WORKFLOWS if path.stem == "slow"]
    assert "bash .ci/run" in scripts(slow)


def test_releases_of_python_agree():
    """Workflows, classifiers and the lower bound name the same releases of Python."""
    matrix = jobs(GITHUB / "workflows" / "checks.yml")["test"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    classified = [f"3.{line.removeprefix(prefix)}" for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    minors = [int(version.partition(".")[2]) for version in classified]
    assert minors == list(range(minors[0], minors[-1] + 1)), "no release is left out"
    assert {row["python"] for row in matrix["include"]} <= set(classified)
    assert [row["os"] for row in matrix["include"] if row["os"].startswith("macos")]


def test_the_record_that_the_bare_wheel_reports_is_readable(capsys: pytest.CaptureFixture[str]):
    [name] = re.findall(r'report "\$GITHUB_WORKSPACE/(\S+)"', scripts(GITHUB / "workflows" / "checks.yml"))
    assert app.run(["report", str(ROOT / name)]) == 0
    assert capsys.readouterr().out


def test_hooks_before_a_commit_are_those_of_make_check():
    [repository] = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "a local hook fetches nothing and uses the versions of constraints.txt"
    assert [hook["entry"] for hook in repository["hooks"]] == recipe("check")
    for hook in repository["hooks"]:
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == ("system", False, True), hook["id"]


def test_ci_builds_the_documentation():
    run = (ROOT / ".ci" / "run").read_text()
    assert "TRAINSTEP_REQUIRE_DOCS=1" in run
    assert {"docs-tools", "check", "test", "test-slow"} <= targets_named(run) <= targets()


def fields(path: Path) -> dict[str, Any]:
    """The fields of an issue template by id."""
    template = read(path)
    assert {"name", "description", "labels", "body"} <= template.keys()
    by_id = {field["id"]: field for field in template["body"] if field["type"] != "markdown"}
    assert len(by_id) == len(template["body"])
    assert all(field["attributes"]["label"] for field in by_id.values())
    return by_id


def test_issue_templates_ask_for_the_machine():
    asking = {path.stem: fields(path)["doctor"] for path in TEMPLATES}
    assert set(asking) == {"bug", "measurement", "feature"}
    for name, field in asking.items():
        assert "trainstep doctor --json" in field["attributes"]["label"]
        assert field["attributes"]["render"] == "json"
        assert field.get("validations", {}).get("required", False) == (name != "feature")
    app.build_app(["doctor"]).parse_args(["doctor", "--json"], exit_on_error=False, print_error=False)


def test_a_template_without_the_field_is_noticed(tmp_path: Path):
    path = tmp_path / "bug.yml"
    path.write_text("name: a\ndescription: b\nlabels: [c]\nbody: [{type: textarea, id: x, attributes: {label: y}}]\n")
    assert "doctor" not in fields(path)


def test_the_changelog_has_this_version():
    """Unreleased stands first, then releases from the newest to the oldest; the version is one of them, or is to be released."""
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)", heading) for heading in headings[1:])
    versions = [parts(heading) for heading in headings[1:]]
    assert versions == sorted(versions, reverse=True)
    if versions:
        assert parts(trainstep.__version__) >= versions[0]
    else:
        assert f"This will be {trainstep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def parts(version: str) -> list[int]:
    """[0, 1, 0] for '0.1.0 (2026-11-30)'."""
    return [int(number) for number in version.partition(" ")[0].split(".")]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"{trainstep.__version__}\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("make check test\n", {"check", "test"}),
        ("make oldest-triton axe-core </dev/null", {"oldest-triton", "axe-core"}),
        ("`make docs` makes it", {"docs"}),
        ("cmake test; make PYTHON=x", set()),
    ],
)
def test_targets_are_found_in_text(text: str, named: set[str]):
    assert targets_named(text) == named
