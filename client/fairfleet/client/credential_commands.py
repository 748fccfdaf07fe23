"""`fairfleet pki | enroll | token | renew`: who may take part, and how they prove it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fairfleet.client.enrolling import enrol
from fairfleet.client.enrolling import renew as renew_over_network
from fairfleet.client.operator_commands import Credentials as CredentialsOption
from fairfleet.client.operator_commands import Insecure, Server, linked
from fairfleet.client.replica import MARK
from fairfleet.client.settings import host_and_port
from fairfleet.common.addresses import with_port
from fairfleet.common.certificates import fingerprint
from fairfleet.common.credentials import Credentials, read_credentials
from fairfleet.common.durations import duration
from fairfleet.common.enrolment_token import EnrolmentToken, read_token
from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Identity, Role, is_name
from fairfleet.common.pki_folder import CA, PkiFolder
from fairfleet.common.provisioning import Fleet

PORT = 8440
FOLDER = Path("fairfleet-pki")
SHOWN = 6  # files that are named one by one
STANDARD_OUTPUT = Path("-")

Pki = Annotated[Path, typer.Option("--pki", help="The folder of `fairfleet pki init`.")]
Ttl = Annotated[str, typer.Option(help="For how long it is valid, for example 90d or 12h.")]
Names = Annotated[list[str], typer.Argument(help="DNS names and IP addresses that clients call the server by.")]
MaybeNames = Annotated[list[str] | None, typer.Argument(help="Other names than before.")]
Address = Annotated[str | None, typer.Option(help="host:port of the server, as clients reach it.")]
Output = Annotated[Path | None, typer.Option("--output", help="The file to write, or -; default: NAME.fleet here.")]

pki_app = typer.Typer(
    no_args_is_help=True, help="The certificate authority of a federation, and its server's certificate."
)


@pki_app.command("init")
def pki_init(
    names: Names,
    pki: Pki = FOLDER,
    address: Address = None,
    operator: Annotated[str, typer.Option(help="Name of the first operator.")] = "operator",
    ttl: Annotated[str, typer.Option(help="Of the server's certificate.")] = "365d",
    ca_ttl: Annotated[str, typer.Option(help="Of the CA.")] = "3650d",
    operator_ttl: Annotated[str, typer.Option(help="Of the operator's certificate.")] = "90d",
) -> None:
    """Make a certificate authority, the server's certificate, and an operator's credentials.

    Examples:

      fairfleet pki init fleet.example

      fairfleet pki init fleet.example 10.0.0.5 --address fleet.example:443
    """
    folder = PkiFolder(pki)
    at = _address(address or f"{f'[{names[0]}]' if ':' in names[0] else names[0]}:{PORT}")
    who = _identity(Role.OPERATOR, operator)
    lasts = duration(operator_ttl)
    folder.create(names, at, ca_ttl=duration(ca_ttl), server_ttl=duration(ttl))
    file = pki / f"{operator}.fleet"
    folder.enroll(who, lasts, None).save(file)
    print(f"{pki}: a CA, the server's certificate for {', '.join(folder.server_names())}, and {file}")
    print(f"CA fingerprint (SHA-256): {fingerprint((pki / CA).read_bytes())}")
    print("\nNext:")
    print(f"  fairfleet server --pki {pki} --listen 0.0.0.0:{at.rpartition(':')[2]} …")
    print(f"  fairfleet enroll NAME --pki {pki}              for every client")
    print(f"  fairfleet status --credentials {file}")
    print(f"\nKeep {pki / 'ca.key'} safe, best not on the server: whoever has it can be anybody.")


@pki_app.command("renew")
def pki_renew(
    names: MaybeNames = None,
    pki: Pki = FOLDER,
    ttl: Annotated[str, typer.Option(help="Of the server's certificate.")] = "365d",
) -> None:
    """Give the server a new certificate, for the same names or for others. A running server takes it up by itself.

    Example:

      fairfleet pki renew --pki fairfleet-pki
    """
    told = PkiFolder(pki).renew_server(names or (), duration(ttl))
    print(f"{pki}: a new certificate for {', '.join(told)}; a server that reads this folder uses it from now on")


@pki_app.command("provision")
def pki_provision(
    folder: Annotated[Path, typer.Argument(help="Gets the folders ca, server, operator and clients.")],
    names: Names,
    address: Annotated[str, typer.Option(help="host:port of the server, as clients reach it.")],
    operator_address: Annotated[str | None, typer.Option(help="As operators reach it, if not the same.")] = None,
    clients: Annotated[int, typer.Option(min=0, max=100_000, help="How many clients.")] = 10,
    client_name: Annotated[str, typer.Option(help=f"{MARK} becomes 0, 1, …")] = f"client-{MARK}",
) -> None:
    """Make the credentials of a whole fleet, or renew them, each in the folder of whoever needs it.

    For init containers: run it before every start. What is there and good for long is left alone.

    Example:

      fairfleet pki provision /pki server --address server:8440 --clients 100
    """
    each = [client_name.replace(MARK, str(number)) for number in range(clients)]
    if len({_identity(Role.CLIENT, name) for name in each}) < clients:
        raise UsageError(f"--client-name {client_name!r} is the same for all: put {MARK} where the number belongs")
    made = Fleet(folder, names, _address(address), _address(operator_address or address), each).provision()
    print(f"{folder}: {_counted(made)}; {clients} clients at {address}, server for {', '.join(names)}")


def _counted(made: list[str]) -> str:
    if not made:
        return "everything was there"
    return (
        f"made {', '.join(made)}"
        if len(made) <= SHOWN
        else f"made {', '.join(made[:SHOWN])} and {len(made) - SHOWN} more"
    )


def enroll(
    name: Annotated[str | None, typer.Argument(help="The client's name. Left out with --token.")] = None,
    ttl: Ttl = "90d",
    address: Address = None,
    pki: Pki = FOLDER,
    operator: Annotated[bool, typer.Option("--operator", help="For an operator, not a client.")] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar="FAIRFLEET_TOKEN", help="From `fairfleet token`; - reads it from standard input."),
    ] = None,
    output: Output = None,
) -> None:
    """Make the credentials of a client: where the CA is, by name; on the device itself, with a one-time token.

    With a token the key is made here and never leaves this machine.

    Examples:

      fairfleet enroll kitchen-camera

      fairfleet enroll kitchen-camera --ttl 30d --address fleet.example:8440

      fairfleet enroll --token fft1.eyJ…

      (umask 077; docker compose run --rm pki enroll kitchen-camera --pki /pki/ca --output - > kitchen-camera.fleet)
    """
    if token is not None:
        if name is not None or operator:
            raise UsageError("a token says whom it is for: leave NAME and --operator out")
        found = read_token(sys.stdin.read() if token == "-" else token)
        file = _new_file(output, found.client)
        made = enrol(found, _address(address) if address else None)
    else:
        if name is None:
            raise UsageError("give the client's NAME, or on a device --token TOKEN")
        who = _identity(Role.OPERATOR if operator else Role.CLIENT, name)
        file = _new_file(output, name)
        made = PkiFolder(pki).enroll(who, duration(ttl), _address(address) if address else None)
    if file == STANDARD_OUTPUT:
        sys.stdout.write(made.text())
        return
    made.save(file)
    _say(made, file)


def token(
    client: Annotated[str, typer.Argument(help="The name that the device will have.")],
    server: Server = None,
    credentials: CredentialsOption = None,
    insecure: Insecure = False,
    ttl: Annotated[str, typer.Option(help="For how long the token can be used.")] = "1h",
    certificate_ttl: Annotated[str, typer.Option(help="For how long the certificate is valid.")] = "90d",
    address: Annotated[str | None, typer.Option(help="host:port of the enrolment port, as devices reach it.")] = None,
) -> None:
    """Make a one-time token, with which a device gets a certificate for a key of its own.

    Example:

      fairfleet token kitchen-camera --credentials fairfleet-pki/operator.fleet
    """
    with linked(server, credentials, insecure) as link:
        told = link.make_token(client, duration(ttl).total_seconds(), duration(certificate_ttl).total_seconds())
        at = _address(address) if address else with_port(link.address, told.port)
        made = EnrolmentToken(client, at, link.address, told.secret, told.ca)
    print(f"For {client}, once, within {ttl}. On the device:", file=sys.stderr)
    print("  fairfleet enroll --token TOKEN\n", file=sys.stderr)
    print(made.text())


def renew(
    file: Annotated[Path, typer.Argument(help="NAME.fleet, or NAME; the file is replaced.")],
    pki: Annotated[
        Path | None, typer.Option(help="Where the CA is: sign here. Left out: ask the server, with these credentials.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="With --pki: for how long it is valid. Else: as long as before.")] = "90d",
    server: Server = None,
) -> None:
    """Renew credentials before they end. A client that runs takes the new file up by itself.

    Examples:

      fairfleet renew kitchen-camera.fleet                       (on the device; the server must hold the CA's key)

      fairfleet renew kitchen-camera.fleet --pki fairfleet-pki   (where the CA is; then bring the file to the device)
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder: whoever made it renews what is in it (cert-manager, for example)")
    file = file if file.exists() else file.with_name(f"{file.name.removesuffix('.fleet')}.fleet")
    if pki is None:
        made = renew_over_network(file, server)
    else:
        present = read_credentials(file)
        made = PkiFolder(pki).enroll(present.identity, duration(ttl), present.address)
    made.save(file)
    print(f"{file}: {made.identity}, valid until {made.ends:%Y-%m-%d %H:%M} UTC")


def _say(made: Credentials, file: Path) -> None:
    print(f"{file}: {made.identity} at {made.address}, valid until {made.ends:%Y-%m-%d %H:%M} UTC")
    if made.identity.role is Role.OPERATOR:
        print(f"\nNext:\n  fairfleet status --credentials {file}")
    else:
        print(f"\nNext, on the device:\n  fairfleet client --credentials {file.name} --task my_task:task")
    print(f"\nThe file holds a private key: move it, do not copy it. Before it ends: fairfleet renew {file.name}")


def _identity(role: Role, name: str) -> Identity:
    if not is_name(name):
        raise UsageError(f"name {name!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
    return Identity(role, name)


def _address(text: str) -> str:
    if not host_and_port(text):
        raise UsageError(f"--address {text!r} is not of the form host:port, for example fleet.example:8440")
    return text


def _new_file(output: Path | None, name: str) -> Path:
    file = output or Path(f"{name}.fleet")
    if file.exists():
        raise UsageError(f"{file} exists already; remove it, give another --output, or `fairfleet renew` it")
    return file
