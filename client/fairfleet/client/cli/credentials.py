"""`fairfleet pki`, `enroll`, `token` and `renew`: who may take part, and with which certificate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fairfleet.client.cli.observe import connect
from fairfleet.client.cli.options import CredentialsFile, Insecure, Server
from fairfleet.client.device.enrolment import enrol
from fairfleet.client.device.enrolment import renew as renew_over_network
from fairfleet.client.device.replica import MARK
from fairfleet.client.settings import host_and_port
from fairfleet.common.cli.durations import parse_duration
from fairfleet.common.errors import UsageError
from fairfleet.common.names import check_name
from fairfleet.common.net.addresses import with_port
from fairfleet.common.pki.certificates import fingerprint
from fairfleet.common.pki.credentials import Credentials, read_credentials
from fairfleet.common.pki.enrolment_token import EnrolmentToken, read_token
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import CA, PkiFolder
from fairfleet.common.pki.provisioning import ProvisionedFleet

PORT = 8440
FOLDER = Path("fairfleet-pki")
SHOWN = 6  # more files than this are counted, not named
STANDARD_OUTPUT = Path("-")

Pki = Annotated[Path, typer.Option("--pki", help="Folder made by `fairfleet pki init`.")]
Ttl = Annotated[str, typer.Option(help="Validity of the certificate, for example 90d or 12h.")]
ServerTtl = Annotated[str, typer.Option(help="Validity of the server's certificate.")]
CaTtl = Annotated[str, typer.Option(help="Validity of the CA.")]
OperatorTtl = Annotated[str, typer.Option(help="Validity of the operator's certificate.")]
Names = Annotated[
    list[str], typer.Argument(help="DNS names and IP addresses by which clients reach the server.")
]
NewNames = Annotated[
    list[str] | None,
    typer.Argument(help="New DNS names and IP addresses of the server.", show_default="as before"),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address by which clients reach the server.",
        show_default="as in the folder of the CA",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="The file to write; - is standard output.",
        show_default="NAME.fleet in this directory",
    ),
]

pki_app = typer.Typer(
    no_args_is_help=True,
    help="Create the federation's CA and the server's certificate.",
)


@pki_app.command("init")
def pki_init(
    names: Names,
    pki: Pki = FOLDER,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address by which clients reach the server.",
            show_default=f"the first name, port {PORT}",
        ),
    ] = None,
    operator: Annotated[str, typer.Option(help="Name of the first operator.")] = "operator",
    ttl: ServerTtl = "365d",
    ca_ttl: CaTtl = "3650d",
    operator_ttl: OperatorTtl = "90d",
) -> None:
    """Create a CA, the server's certificate and an operator's credentials.

    Examples:

      fairfleet pki init fleet.example

      fairfleet pki init fleet.example 10.0.0.5 --address fleet.example:443
    """
    folder = PkiFolder(pki)
    host = f"[{names[0]}]" if ":" in names[0] else names[0]
    server_address = _address(address or f"{host}:{PORT}")
    identity = _identity(Role.OPERATOR, operator)
    validity = parse_duration(operator_ttl)
    folder.create(
        names, server_address, ca_ttl=parse_duration(ca_ttl), server_ttl=parse_duration(ttl)
    )
    file = pki / f"{operator}.fleet"
    folder.enroll(identity, validity, None).save(file)
    _print_next_steps(pki, folder.server_names(), file, server_address.rpartition(":")[2])


def _print_next_steps(pki: Path, names: Sequence[str], file: Path, port: str) -> None:
    print(f"{pki}: a CA, the server's certificate for {', '.join(names)}, and {file}")
    print(f"CA fingerprint (SHA-256): {fingerprint((pki / CA).read_bytes())}")
    print("\nNext:")
    print(f"  fairfleet server --pki {pki} --listen 0.0.0.0:{port} …")
    print(f"  fairfleet enroll NAME --pki {pki}              for every client")
    print(f"  fairfleet status --credentials {file}")
    print(
        f"\nKeep {pki / 'ca.key'} secret, if possible not on the server: "
        "with this key anyone can impersonate every client and operator."
    )


@pki_app.command("renew")
def pki_renew(names: NewNames = None, pki: Pki = FOLDER, ttl: ServerTtl = "365d") -> None:
    """Give the server a new certificate.

    It is for the same names as before, or for those given. A running server loads it automatically.

    Example:

      fairfleet pki renew --pki fairfleet-pki
    """
    renewed_names = PkiFolder(pki).renew_server(names or (), parse_duration(ttl))
    print(
        f"{pki}: a new certificate for {', '.join(renewed_names)}; "
        "a server that reads this folder uses it from now on"
    )


@pki_app.command("provision")
def pki_provision(
    folder: Annotated[
        Path, typer.Argument(help="Folder in which ca, server, operator and clients are created.")
    ],
    names: Names,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address by which clients reach the server.")
    ],
    operator_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address by which operators reach the server.",
            show_default="the same",
        ),
    ] = None,
    clients: Annotated[int, typer.Option(min=0, max=100_000, help="Number of clients.")] = 10,
    client_name: Annotated[
        str, typer.Option(help=f"Names of the clients; {MARK} becomes 0, 1, …")
    ] = f"client-{MARK}",
) -> None:
    """Create or renew the credentials of a whole fleet.

    Each process gets a folder with what it needs. The command is for init containers: run it before
    every start. Credentials that exist and are valid for long are not changed.

    Example:

      fairfleet pki provision /pki server --address server:8440 --clients 100
    """
    client_names = [client_name.replace(MARK, str(number)) for number in range(clients)]
    if len({_identity(Role.CLIENT, name) for name in client_names}) < clients:
        raise UsageError(
            f"--client-name {client_name!r} is the same for all clients: "
            f"put {MARK} where the number belongs"
        )
    created = ProvisionedFleet(
        folder, names, _address(address), _address(operator_address or address), client_names
    ).provision()
    print(
        f"{folder}: {_summary(created)}; "
        f"{clients} clients at {address}, server for {', '.join(names)}"
    )


def _summary(created: list[str]) -> str:
    if not created:
        return "everything was there"
    if len(created) <= SHOWN:
        return f"made {', '.join(created)}"
    return f"made {', '.join(created[:SHOWN])} and {len(created) - SHOWN} more"


def enroll(
    name: Annotated[
        str | None, typer.Argument(help="Name of the client. Not with --token.", show_default=False)
    ] = None,
    ttl: Ttl = "90d",
    address: Address = None,
    pki: Pki = FOLDER,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="Enroll an operator, not a client.", show_default="off"),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FAIRFLEET_TOKEN",
            help="Token from `fairfleet token`; - reads it from standard input.",
            show_default="none",
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Create the credentials of a client or an operator.

    Without a token, run it where the CA is, and move the file to the device. With a one-time token,
    run it on the device: the private key is made there and never leaves it.

    Examples:

      fairfleet enroll kitchen-camera

      fairfleet enroll kitchen-camera --ttl 30d --address fleet.example:8440

      fairfleet enroll --token fft1.eyJ…
    """
    server_address = _address(address) if address else None
    if token is not None:
        if name is not None or operator:
            raise UsageError("the token contains the name: leave out NAME and --operator")
        _enroll_with_token(token, server_address, output)
    elif name is None:
        raise UsageError("give the NAME of the client or, on a device, --token TOKEN")
    else:
        identity = _identity(Role.OPERATOR if operator else Role.CLIENT, name)
        file = _new_file(output, name)
        validity = parse_duration(ttl)
        _deliver(PkiFolder(pki).enroll(identity, validity, server_address), file)


def _enroll_with_token(text: str, address: str | None, output: Path | None) -> None:
    enrolment_token = read_token(sys.stdin.read() if text == "-" else text)
    file = _new_file(output, enrolment_token.client)
    _deliver(enrol(enrolment_token, address), file)


def _deliver(credentials: Credentials, file: Path) -> None:
    if file == STANDARD_OUTPUT:
        sys.stdout.write(credentials.text())
        return
    credentials.save(file)
    _print_enrolled(credentials, file)


def token(
    client: Annotated[str, typer.Argument(help="The name that the device will have.")],
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    ttl: Annotated[str, typer.Option(help="How long the token can be used.")] = "1h",
    certificate_ttl: Ttl = "90d",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address by which devices reach the enrolment port.",
            show_default="the server's host and enrolment port",
        ),
    ] = None,
) -> None:
    """Create a one-time token that enrolls a device.

    The device gets a certificate for a private key that it makes itself.

    Example:

      fairfleet token kitchen-camera --credentials fairfleet-pki/operator.fleet
    """
    with connect(server, credentials, insecure) as connection:
        response = connection.make_token(
            client,
            parse_duration(ttl).total_seconds(),
            parse_duration(certificate_ttl).total_seconds(),
        )
        enrolment_address = (
            _address(address) if address else with_port(connection.address, response.port)
        )
        enrolment_token = EnrolmentToken(
            client, enrolment_address, connection.address, response.secret, response.ca
        )
    print(f"For {client}, once, within {ttl}. On the device:", file=sys.stderr)
    print("  fairfleet enroll --token TOKEN\n", file=sys.stderr)
    print(enrolment_token.text())


def renew(
    file: Annotated[Path, typer.Argument(help="NAME.fleet, or NAME. The file is replaced.")],
    pki: Annotated[
        Path | None,
        typer.Option(help="Folder of the CA that signs.", show_default="none: the server signs"),
    ] = None,
    ttl: Annotated[
        str,
        typer.Option(help="Validity of the certificate, with --pki. Otherwise it is as before."),
    ] = "90d",
    server: Server = None,
) -> None:
    """Renew credentials before they expire.

    Run it on the device, if the server holds the CA's key. Otherwise run it with --pki where the CA
    is, and move the file to the device. A running client loads the new file automatically.

    Examples:

      fairfleet renew kitchen-camera.fleet

      fairfleet renew kitchen-camera.fleet --pki fairfleet-pki
    """
    if file.is_dir():
        raise UsageError(
            f"{file} is a folder: it is renewed by the program that made it, "
            "for example cert-manager"
        )
    file = file if file.exists() else file.with_name(f"{file.name.removesuffix('.fleet')}.fleet")
    if pki is None:
        renewed = renew_over_network(file, server)
    else:
        present = read_credentials(file)
        renewed = PkiFolder(pki).enroll(present.identity, parse_duration(ttl), present.address)
    renewed.save(file)
    print(f"{file}: {renewed.identity}, valid until {renewed.ends:%Y-%m-%d %H:%M} UTC")


def _print_enrolled(credentials: Credentials, file: Path) -> None:
    expiry = f"{credentials.ends:%Y-%m-%d %H:%M} UTC"
    print(f"{file}: {credentials.identity} at {credentials.address}, valid until {expiry}")
    if credentials.identity.role is Role.OPERATOR:
        print(f"\nNext:\n  fairfleet status --credentials {file}")
    else:
        print("\nNext, on the device:")
        print(f"  fairfleet client --credentials {file.name} --task my_task:task")
    print(
        "\nThe file holds a private key: move it, do not copy it. "
        f"Before it expires: fairfleet renew {file.name}"
    )


def _identity(role: Role, name: str) -> Identity:
    return Identity(role, check_name(name, f"{role} name", UsageError))


def _address(text: str) -> str:
    if not host_and_port(text):
        raise UsageError(
            f"--address {text!r} is not of the form host:port, for example fleet.example:8440"
        )
    return text


def _new_file(output: Path | None, name: str) -> Path:
    file = output or Path(f"{name}.fleet")
    if file.exists():
        raise UsageError(
            f"{file} exists already; remove it, give another --output, or run `fairfleet renew`"
        )
    return file
