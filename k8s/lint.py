"""Shows everything that is built of k8s/ to checkov, and fails for what it finds unless it is meant.

python k8s/lint.py CHECKOV      (`make lint` calls it; CHECKOV is the program)

What is meant is in MEANT, with the reason. Something there that is no longer found is a failure, too.
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
TAGS = "a tag is a version and never moves"
DIGESTS = "digests are for whoever pushed the images: `kustomize edit set image`"
MEANT = {
    (CLIENT, "CKV_K8S_8"): "a client serves nothing that could be probed; that it runs is all there is to know",
    (CLIENT, "CKV_K8S_9"): "the same",
    (CLIENT, "CKV_K8S_11"): "no limit on processors: what a client may use of its node is for the node to settle",
    (SERVER, "CKV_K8S_11"): "no limit on processors: a throttled server holds up the fleet",
    (CLIENT, "CKV_K8S_15"): TAGS,
    (SERVER, "CKV_K8S_15"): TAGS,
    (CLIENT, "CKV_K8S_43"): DIGESTS,
    (SERVER, "CKV_K8S_43"): DIGESTS,
}
Finding = tuple[str, str]  # of which resource, which check


def complaints(checkov: str, manifests: dict[str, str]) -> list[str]:
    """What is wrong with the manifests, by the name of their build; nothing if all is as it is meant."""
    report = _report(checkov, manifests)
    failed = report["results"]["failed_checks"]
    found: dict[Finding, Any] = {(check["resource"], check["check_id"]): check for check in failed}
    wrong = [
        f"{Path(check['file_path']).stem}: {check['resource']}: {check['check_id']} {check['check_name']}"
        for finding, check in found.items()
        if finding not in MEANT
    ]
    stale = [f"k8s/lint.py: {of}: {check} is no longer found" for of, check in MEANT if (of, check) not in found]
    unread = report["summary"]["parsing_errors"]
    return [*wrong, *stale, *([f"checkov could not read {unread} of the builds"] if unread else [])]


def _report(checkov: str, manifests: dict[str, str]) -> Any:
    with TemporaryDirectory() as folder:
        for name, text in manifests.items():
            (Path(folder) / f"{name}.yaml").write_text(text)
        words = ["--framework", "kubernetes", "--skip-download", "--quiet", "--compact", "--output", "json"]
        # Its exit code is 1 for any finding: the report says which.
        done = subprocess.run([checkov, "--directory", folder, *words], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout or "null")
    if not report or "results" not in report:
        raise RuntimeError(f"checkov has no report: {done.stdout}{done.stderr}")
    return report


def main(checkov: str) -> str:
    try:
        return "\n".join(complaints(checkov, {name: build(name) for name in (BASE, *BUILDS)}))
    except NoKubectl as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
