"""Certificates of another authority, in folders as Kubernetes mounts them.

The certificates are made with openssl and have the fields of k8s/components/cert-manager. cert-
manager does not run in this test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, until

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl here")


class Issuer:
    """A CA like cert-manager's: ECDSA by default, RSA for the keys of its CSI driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ca.key")
        self._openssl(
            "req",
            "-x509",
            "-key",
            "ca.key",
            "-subj",
            "/CN=fairfleet-ca",
            "-days",
            "9",
            "-out",
            "ca.crt",
        )

    def certify(
        self, key: list[str], alternatives: str, usage: str, days: int = 2
    ) -> dict[str, bytes]:
        """Return a kubernetes.io/tls secret with the CA certificate in it."""
        self._openssl("genpkey", *key, "-out", "tls.key")
        self._openssl("req", "-new", "-key", "tls.key", "-subj", "/", "-out", "request")
        (self.folder / "extensions").write_text(
            f"subjectAltName=critical,{alternatives}\nextendedKeyUsage={usage}\n"
        )
        signed = (
            "-in",
            "request",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "extensions",
        )
        self._openssl("x509", "-req", *signed, "-days", str(days), "-out", "tls.crt")
        return {
            name: (self.folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")
        }

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


RSA = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
ECDSA = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]


def mount(folder: Path, files: dict[str, bytes], generation: int) -> None:
    """Write a volume as the kubelet does: names are links through one link, replaced atomically."""
    data = folder / f"..{generation}"
    data.mkdir(parents=True)
    for name, content in files.items():
        (data / name).write_bytes(content)
        (data / name).chmod(0o440)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    temp_link = folder / "..data_tmp"
    temp_link.symlink_to(data.name)
    os.replace(temp_link, folder / "..data")


@pytest.mark.slow
def test_a_federation_continues_while_mounted_certificates_are_rotated(fleet: Fleet) -> None:
    issuer = Issuer(fleet.folder / "issuer")
    server = issuer.certify(ECDSA, "DNS:fairfleet-server,IP:127.0.0.1", "serverAuth")
    pki, credentials = fleet.folder / "pki", fleet.folder / "credentials"
    mount(
        pki,
        {
            "ca.crt": server["ca.crt"],
            "server.crt": server["tls.crt"],
            "server.key": server["tls.key"],
        },
        1,
    )
    names = ("fairfleet-client-0", "fairfleet-client-1")
    for name in names:
        mount(
            credentials / name,
            issuer.certify(RSA, f"URI:fairfleet://client/{name}", "clientAuth"),
            1,
        )
    operator = fleet.folder / "operator"
    mount(operator, issuer.certify(ECDSA, "URI:fairfleet://operator/operator", "clientAuth"), 1)

    fleet.init()
    fleet.start_server(rounds=100_000, pki=pki)
    fleet.identity_of = lambda name: [
        "--credentials",
        str(credentials / name),
        "--server",
        fleet.address,
    ]  # type: ignore[method-assign]
    for name in names:
        fleet.start_client(name, step_seconds=0.02)
    fleet.wait_for_version(2)
    assert {c["client"] for c in fleet.records()[-1]["contributions"]} == set(names)
    shown = fleet.run(
        "clients", "--json", "--credentials", str(operator), "--server", fleet.address
    )
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in names)

    mount(
        credentials / names[0],
        issuer.certify(RSA, f"URI:fairfleet://client/{names[0]}", "clientAuth", days=5),
        2,
    )
    until(
        lambda: "took up the renewed credentials" in fleet.log(f"{names[0]}.log"),
        "the client to notice",
    )
    reached = fleet.version()
    fleet.wait_for_version(reached + 2)
    until(lambda: len(fleet.records()[-1]["contributions"]) == 2, "both to go on")


def test_a_folder_without_an_address_or_a_file_is_reported(fleet: Fleet) -> None:
    issuer = Issuer(fleet.folder / "issuer")
    folder = fleet.folder / "mine"
    mount(folder, issuer.certify(ECDSA, "URI:fairfleet://client/a", "clientAuth"), 1)
    done = fleet.run("client", "--task", "tasks:shift", "--credentials", str(folder))
    assert done.returncode == 2
    assert "does not say where the server is: give --server host:port" in done.stderr
    (folder / "ca.crt").unlink()
    done = fleet.run(
        "client", "--task", "tasks:shift", "--credentials", str(folder), "--server", fleet.address
    )
    assert done.returncode == 2
    assert "ca.crt" in done.stderr
    done = fleet.run("renew", str(folder))
    assert done.returncode == 2
    assert "it is renewed by the program that made it" in done.stderr
