"""An image of Prometheus from Debian's program, for machines without a registry.

User, folders, flags and health check are those of the upstream image, so that docker-compose.yml is
tested as it is.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.containers.engine import Engine
from tests.deploy.settings import compose_services

DOCKERFILE = """
ARG BASE
FROM ${BASE}
COPY prometheus wget /bin/
RUN install --directory --owner=65534 --group=65534 /prometheus
USER 65534
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
WGET = (
    "#!/usr/bin/env python3\n"
    "import sys, urllib.request\n"
    "urllib.request.urlopen(sys.argv[-1], timeout=3)\n"
)


def provide_prometheus(engine: Engine, base: str) -> None:
    """Make the image, unless it exists or the machine's own engine can pull it."""
    image = compose_services()["prometheus"]["image"]
    if not engine.own or engine.attempt("image", "inspect", image).returncode == 0:
        return
    program = shutil.which("prometheus")
    assert program, "prometheus: scripts/install-test-packages"
    with tempfile.TemporaryDirectory(prefix="ff-") as temporary:
        folder = Path(temporary)
        shutil.copy(program, folder / "prometheus")
        (folder / "wget").write_text(WGET)
        (folder / "wget").chmod(0o755)
        (folder / "Dockerfile").write_text(DOCKERFILE)
        engine.run(
            "build",
            "--network",
            "host",
            "--build-arg",
            f"BASE={base}",
            "--tag",
            image,
            temporary,
            seconds=300,
        )
