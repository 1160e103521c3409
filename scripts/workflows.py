"""Checks the files that the hosting site reads: .github, CITATION.cff and the release notes.

Run it with .deps/venv/bin/python. If actionlint is on PATH, actionlint checks the workflows, too.
"""
import pathlib
import re
import shutil
import subprocess
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = pathlib.Path(sys.executable).parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def failure_of(command, **options):
    """Runs a checker. Returns its output if the checker finds errors, else an empty string."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
    return (done.stdout + done.stderr).strip() if done.returncode else ""


def faults_of_step(step):
    """Returns the faults of one step of a workflow: its action, or its shell commands."""
    action, commands = step.get("uses"), step.get("run")
    if action is not None and not re.fullmatch(r"[\w./-]+@v\d+", action):
        yield f"{action} is not pinned by its major version, such as actions/checkout@v5"
    if commands is None:
        return
    # GitHub pastes the text of an expression into the shell commands, where the text could be executed.
    if "${{" in commands:
        yield "the commands contain ${{ }}: pass the value through env"
    yield failure_of([TOOLS / "shellcheck", "--shell=bash", "--external-sources", "-"], input=commands)
    for script in re.findall(r"(?<![\w/])scripts/[\w.]*\w", commands):
        if not (ROOT / script).is_file():
            yield f"{script} does not exist"


def faults_of_workflow(path):
    workflow = yaml.safe_load(path.read_text())
    if "permissions" not in workflow:
        yield "the workflow does not limit its permissions"
    for name, job in workflow["jobs"].items():
        needs = job.get("needs", [])
        for other in [needs] if isinstance(needs, str) else needs:
            if other not in workflow["jobs"]:
                yield f"job {name} needs {other}, which does not exist"
        for number, step in enumerate(job["steps"], 1):
            yield from (f"job {name}, step {number}: {fault}" for fault in faults_of_step(step) if fault)


def all_faults():
    for schema, files in SCHEMAS.items():
        yield failure_of([TOOLS / "check-jsonschema", "--builtin-schema", schema, *files])
    for path in WORKFLOWS:
        yield from (f"{path.relative_to(ROOT)}: {fault}" for fault in faults_of_workflow(path))
    if shutil.which("actionlint"):
        yield failure_of(["actionlint", *WORKFLOWS])
    version = re.search(r'TESSERA_VERSION "(.*)"', (ROOT / "include/tessera/version.h").read_text())[1]
    yield failure_of(["scripts/release_notes", version])
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        yield f"CITATION.cff has another version than include/tessera/version.h, {version}"


faults = [fault for fault in all_faults() if fault]
for found in faults:
    print("error:", found)
sys.exit(bool(faults))
