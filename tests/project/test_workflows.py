"""Test that the workflows of the public CI agree with the project. `make release-check` runs actionlint on them."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="reads workflows: pip install '.[docs]'")

ROOT = Path(__file__).resolve().parents[2]
# YAML reads the key `on` as True.
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS = {(file, name): job for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()}


def list_commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("key", JOBS, ids="/".join)
def test_make_targets_exist(key):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = [name for run in list_commands(JOBS[key]) for name in re.findall(r"^ *make ([\w-]+)", run, re.M)]
    named += [target.split()[0] for target in JOBS[key].get("strategy", {}).get("matrix", {}).get("target", [])]
    assert set(named) <= targets


def test_the_matrix_has_every_supported_version():
    job = JOBS["ci.yml", "test"]
    matrix = job["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert set(matrix["python"]) == set(supported)
    assert {system.split("-")[0] for system in matrix["system"]} == {"ubuntu", "macos", "windows"}
    oldest = re.search(r"^torch==.*$", (ROOT / "constraints-oldest.txt").read_text(), re.M)[0]
    assert matrix["torch"] == ["oldest", "newest"] and f"'{oldest}'" in job["env"]["TORCH"]


def test_pull_request_workflows_have_read_only_permissions():
    for file, workflow in WORKFLOWS.items():
        rights = [workflow["permissions"]] + [job.get("permissions", {}) for job in workflow["jobs"].values()]
        if "pull_request" in workflow[True]:
            assert rights[0] == {"contents": "read"} and not any(rights[1:]), file
            assert "self-hosted" not in str(workflow["jobs"]), file


def test_only_a_checked_tag_is_published():
    assert WORKFLOWS["release.yml"][True] == {"push": {"tags": ["v*"]}}
    publish = JOBS["release.yml", "publish"]
    assert publish["needs"] == "check" and publish["permissions"] == {"id-token": "write"}
    assert any("make release-check" in run for run in list_commands(JOBS["release.yml", "check"]))
