"""Generate the protobuf and gRPC stubs from the .proto files: `make proto`.

The output is committed, so that neither users nor devices need the compiler. The compiler has an
environment of its own, because it needs protobuf 6 (proto/generate-requirements.txt). A test runs
this program into an empty folder and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
PLUGINS = Path(sys.executable).parent  # of the virtual environment, which need not be on the PATH


def generate(output: Path) -> None:
    """Write the stubs of all messages and services, with their types, below an existing folder."""
    folder = PROTO / "fairfleet/proto/v1"
    compile_files(["python", "mypy"], output, sorted(folder.glob("*.proto")))
    services = [folder / f"{name}.proto" for name in ("fleet", "operator", "enrolment")]
    compile_files(["grpc_python", "mypy_grpc"], output, services)


def compile_files(generators: list[str], output: Path, sources: list[Path]) -> None:
    """Run protoc with these generators; exit with an error if it fails."""
    plugins = [
        f"--plugin=protoc-gen-{name}={PLUGINS / f'protoc-gen-{name}'}"
        for name in generators
        if "mypy" in name
    ]
    flags = [f"--{name}_out={output}" for name in generators]
    if protoc.main(["protoc", f"-I{PROTO}", *plugins, *flags, *map(str, sources)]) != 0:
        raise SystemExit("protoc failed; its messages are above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO)
