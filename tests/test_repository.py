"""The files around the package agree with it: version, changelog, checks, workflow, templates."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import nemo_like

ROOT = Path(__file__).parents[1]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_changelog_is_short_and_its_latest_version_is_this_one_with_its_date() -> None:
    lines = read("CHANGELOG.md").splitlines()
    assert max(map(len, lines)) <= 120
    versions = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == "Unreleased"
    latest = re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", versions[1])
    assert latest and latest[1] == nemo_like.__version__
    of_latest = read("CHANGELOG.md").partition(f"## {versions[1]}\n")[2].partition("\n## ")[0]
    assert of_latest.count("\n") <= 150, "what a user of the version must know, a line each"
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == latest[1]
    assert str(citation["date-released"]) == latest[2]
    assert citation["license"] == "Apache-2.0"


def test_type_checkers_use_the_annotations_of_the_package() -> None:
    assert (ROOT / "nemo_like" / "py.typed").is_file()


def test_a_commit_is_checked_with_the_tools_of_make_format() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    checks = {" ".join(hook["entry"].split()[:2]) for hook in hooks}
    recipe = read("Makefile").partition("\nformat: $(STAMP)\n")[2].partition("\n\n")[0]
    commands = {line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()}
    assert checks == {" ".join(command.split()[:2]) for command in commands if command}


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_the_forms_of_an_issue_are_complete() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug", "feature"]
    for form in forms:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= content.keys()
        inputs = [each for each in content["body"] if each["type"] != "markdown"]
        assert all(each["id"] and each["attributes"]["label"] for each in inputs)


def test_the_readme_is_short() -> None:
    assert read("README.md").count("\n") <= 130
