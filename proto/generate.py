"""Generates the protobuf and gRPC stubs from the .proto files: `make proto`.

The output is committed, so that neither users nor devices need the compiler. A test runs this
into an empty folder and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PLUGINS = Path(sys.executable).parent  # of the virtual environment, which need not be on the PATH


def generate(into: Path) -> None:
    folder = HERE / "fairfleet/proto/v1"
    run(["python", "mypy"], into, sorted(folder.glob("*.proto")))
    services = [folder / f"{name}.proto" for name in ("fleet", "operator", "enrolment")]
    run(["grpc_python", "mypy_grpc"], into, services)


def run(outputs: list[str], into: Path, sources: list[Path]) -> None:
    plugins = [f"--plugin=protoc-gen-{name}={PLUGINS / f'protoc-gen-{name}'}" for name in outputs if "mypy" in name]
    flags = [f"--{name}_out={into}" for name in outputs]
    if protoc.main(["protoc", f"-I{HERE}", *plugins, *flags, *map(str, sources)]) != 0:
        raise SystemExit("protoc failed; its messages are above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
