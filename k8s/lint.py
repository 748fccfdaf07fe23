"""Check all builds of k8s/ with checkov, and fail for every finding that is not intended.

    python k8s/lint.py CHECKOV      (`make lint` calls it; CHECKOV is the program)

INTENDED lists the intended findings with their reasons. An entry that is no longer found also
fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from builds import BASE, BUILDS, NoKubectl, build

SERVER, CLIENT = "StatefulSet.fairfleet.fairfleet-server", "StatefulSet.fairfleet.fairfleet-client"
TAGS = "a tag is a version and is never moved"
DIGESTS = "whoever pushes the images sets digests: `kustomize edit set image`"
INTENDED = {
    (CLIENT, "CKV_K8S_8"): "a client listens on no port, so there is nothing to probe",
    (CLIENT, "CKV_K8S_9"): "a client listens on no port, so there is nothing to probe",
    (CLIENT, "CKV_K8S_11"): "no CPU limit: the node decides what a client may use",
    (SERVER, "CKV_K8S_11"): "no CPU limit: a throttled server delays the whole fleet",
    (CLIENT, "CKV_K8S_15"): TAGS,
    (SERVER, "CKV_K8S_15"): TAGS,
    (CLIENT, "CKV_K8S_43"): DIGESTS,
    (SERVER, "CKV_K8S_43"): DIGESTS,
}
Finding = tuple[str, str]  # (resource, identifier of the check)


def complaints(checkov: str, manifests: dict[str, str]) -> list[str]:
    """Return a line for each unintended finding in the manifests, and for each stale entry."""
    report = _report(checkov, manifests)
    failed = report["results"]["failed_checks"]
    findings: dict[Finding, Any] = {
        (check["resource"], check["check_id"]): check for check in failed
    }
    unintended = [
        f"{Path(check['file_path']).stem}: {check['resource']}: "
        f"{check['check_id']} {check['check_name']}"
        for finding, check in findings.items()
        if finding not in INTENDED
    ]
    stale = [
        f"k8s/lint.py: {resource}: {check} is no longer found"
        for resource, check in INTENDED
        if (resource, check) not in findings
    ]
    unread = report["summary"]["parsing_errors"]
    errors = [f"checkov could not read {unread} of the builds"] if unread else []
    return [*unintended, *stale, *errors]


def _report(checkov: str, manifests: dict[str, str]) -> Any:
    with TemporaryDirectory() as folder:
        for name, text in manifests.items():
            (Path(folder) / f"{name}.yaml").write_text(text)
        words = [
            "--framework",
            "kubernetes",
            "--skip-download",
            "--quiet",
            "--compact",
            "--output",
            "json",
        ]
        # Its exit code is 1 for any finding. The report lists them.
        done = subprocess.run(
            [checkov, "--directory", folder, *words], capture_output=True, text=True, check=False
        )
    report = json.loads(done.stdout or "null")
    if not report or "results" not in report:
        raise RuntimeError(f"checkov printed no report: {done.stdout}{done.stderr}")
    return report


def main(checkov: str) -> str:
    """Return the unintended findings as text; empty if there are none."""
    try:
        return "\n".join(complaints(checkov, {name: build(name) for name in (BASE, *BUILDS)}))
    except NoKubectl as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
