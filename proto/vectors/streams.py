"""Writes streams.json in this folder: streams, digests, changes, error feedback and local plans.

    python proto/vectors/streams.py

Bytes are hexadecimal; vectors of floats are hexadecimal too, as little-endian float32. `message` is
a serialized Chunk. Only the data of int8 is one of many right ones: it depends on random numbers. A
reader has to get all decoded values, sums and digests bit for bit. The parameters of `plans` depend
on the order of float32 operations, so they agree to within 1e-5.

The values of `large` follow from their index i. Parameters and buffers are (i % 251 - 125) / 64,
counters are i - 1000.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from fairfleet.client.training.batches import batches
from fairfleet.client.training.numpy_solvers import Descent
from fairfleet.client.update.error_feedback import ErrorFeedback
from fairfleet.common.chunk_stream import (
    Decoder,
    Digest,
    Pieces,
    digest_of,
    encode,
    model_pieces,
    split,
    update_pieces,
)
from fairfleet.common.codecs import codec_named, round_to, steady_codec
from fairfleet.common.tensors import Model, Section, Signature, TensorSpec, Vector, add_change
from fairfleet.common.training_plan import Plan

FORMAT = "fairfleet-streams-1"
SEED = 7  # of the rounding of int8
CHECKSUM_LENGTHS = (1, 3, 8, 9, 16, 17, 128, 129, 240, 241, 1025)
LARGE = (2 * 262_144 + 3, 262_145, 131_074)  # parameters, buffers, counters
PLANS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "weight decay and proximal term": {"weight_decay": 0.1, "proximal_mu": 0.5},
    "momentum": {"momentum": 0.9},
    "nesterov momentum and weight decay": {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
    },
    "adam": {"solver": "adam"},
    "adam with weight decay": {"solver": "adam", "weight_decay": 0.1},
}
BATCHES = ((10, 4, 2, 0), (9, 4, 2, 0), (9, 4, 0, 5), (3, 8, 1, 0), (5, 0, 2, 0), (1, 4, 3, 0))


class Recorder:
    """Collects the chunks that an encoder writes."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def __call__(self, head: bytes, data: bytes | memoryview) -> None:
        self.messages.append(head + bytes(data))


def floats(values: Vector) -> str:
    """Return values as hexadecimal little-endian float32."""
    return values.astype("<f4").tobytes().hex()


def signature(parameters: int, buffers: int, counters: int) -> Signature:
    """Return the signature of a model with one tensor per section."""
    return Signature(
        (
            TensorSpec("weight", (parameters,), "float32", Section.PARAMETERS, "layer"),
            TensorSpec("mean", (buffers,), "float32", Section.BUFFERS, "layer"),
            TensorSpec("steps", (counters,), "int64", Section.COUNTERS, "layer"),
        )
    )


def model(parameters: list[float], buffers: list[float], counters: list[int]) -> Model:
    """Return a small model."""
    result = Model.empty(signature(len(parameters), len(buffers), len(counters)))
    result.parameters[:], result.buffers[:], result.counters[:] = parameters, buffers, counters
    return result


def large_model() -> Model:
    """Return a model with several chunks in every section."""
    result = Model.empty(signature(*LARGE))
    for values in (result.parameters, result.buffers):
        values[:] = (np.arange(len(values)) % 251 - 125) / 64
    result.counters[:] = np.arange(len(result.counters)) - 1000
    return result


def described(value: Model) -> dict[str, Any]:
    """Return the values of a small model."""
    return {
        "parameters": floats(value.parameters),
        "buffers": floats(value.buffers),
        "counters": value.counters.tolist(),
    }


def stream(pieces: Pieces, *, with_messages: bool = True) -> dict[str, Any]:
    """Return the chunks, the size and the digest of a stream."""
    recorder = Recorder()
    encoded = encode(pieces, recorder)
    chunks = []
    for message in recorder.messages:
        chunk, data = split(message)
        fields: dict[str, Any] = {
            "offset_bytes": chunk.offset_bytes,
            "bytes": len(data),
            "checksum": chunk.checksum.hex(),
            "section": int(chunk.section),
            "first_element": chunk.first_element,
            "elements": chunk.elements,
        }
        chunks.append(fields | ({"message": message.hex()} if with_messages else {}))
    return {"chunks": chunks, "size_bytes": encoded.size_bytes, "digest": encoded.digest.hex()}


def in_parts(value: Model, elements: int) -> Pieces:
    """Yield the raw32 stream of a model in chunks of a few elements, as another writer may."""
    raw32 = codec_named("raw32")
    for section, values in (
        (Section.PARAMETERS, value.parameters),
        (Section.BUFFERS, value.buffers),
    ):
        for first in range(0, len(values), elements):
            part = values[first : first + elements]
            yield section, first, len(part), raw32.encode(part)
    for first in range(0, len(value.counters), elements):
        part = value.counters[first : first + elements]
        yield Section.COUNTERS, first, len(part), part.astype("<i8").tobytes()


def checksums() -> list[dict[str, str]]:
    """Return data of lengths for which XXH3 takes different paths, with their checksums."""
    data = [bytes((31 * i + 7) % 256 for i in range(length)) for length in CHECKSUM_LENGTHS]
    return [{"data": entry.hex(), "checksum": xxh3_128_hexdigest(entry)} for entry in data]


SMALL = model([0.5, -1.25, 3.0, 0.1, -0.0], [0.25, 1e-3, 7.0], [12, -3])
TRAINED = model([0.75, -1.5, 3.0, 0.3, 1e-8], [0.5, 2e-3, 6.0], [13, 0])


def streams() -> list[dict[str, Any]]:
    """Return streams of models and of updates."""
    empty_digest = Digest().value().hex()
    int8 = codec_named("int8")
    return [
        {"of": "a model", "codec": "raw32", "model": described(SMALL)}
        | stream(model_pieces(SMALL)),
        {"of": "the same model in chunks of two elements", "codec": "raw32"}
        | {"model": described(SMALL)}
        | stream(in_parts(SMALL, 2)),
        {"of": "a model of parameters only", "codec": "raw32"}
        | {"model": described(model([1.0, 2.0], [], []))}
        | stream(model_pieces(model([1.0, 2.0], [], []))),
        {"of": "an update", "codec": "raw32"}
        | {"received": described(SMALL), "trained": described(TRAINED)}
        | stream(update_pieces(SMALL, TRAINED, codec_named("raw32"))),
        {"of": "an update", "codec": "int8"}
        | {"received": described(SMALL), "trained": described(TRAINED)}
        | stream(update_pieces(SMALL, TRAINED, int8, SEED)),
        {"of": "a large model", "codec": "raw32", "large": list(LARGE)}
        | stream(model_pieces(large_model()), with_messages=False),
        {"of": "no chunks", "chunks": [], "size_bytes": 0, "digest": empty_digest},
    ]


def changes() -> list[dict[str, Any]]:
    """Return changes of a model, with and without rounding of the result."""
    return [
        change_of("int8", halvings, rounded)
        for halvings, rounded in ((0, ""), (3, ""), (1, "fp16"), (1, "bf16"), (2, "int8"))
    ]


def change_of(codec: str, halvings: int, rounded: str) -> dict[str, Any]:
    """Return one change, the model before it and the model after it."""
    size = 300  # two blocks
    before, sent = Model.empty(signature(size, 2, 1)), Model.empty(signature(size, 2, 1))
    before.parameters[:] = [(i * 37 % 101 - 50) / 7 for i in range(size)]
    if rounded:
        round_to(steady_codec(rounded), before.parameters)
    sent.parameters[:] = [(i * 53 % 97 - 48) / 900 for i in range(size)]
    sent.buffers[:], sent.counters[:] = [0.5, -2.0], [9]
    recorder = Recorder()
    encoded = encode(model_pieces(sent, codec_named(codec)), recorder)
    decoder = Decoder(Model.empty(before.signature), codec_named(codec))
    for message in recorder.messages:
        decoder.take(message)
    decoder.finish(encoded.digest)
    after = Model.empty(before.signature)
    add_change(before, decoder.into, halvings, out=after)
    if rounded:
        round_to(steady_codec(rounded), after.parameters)
    return {
        "codec": codec,
        "halvings": halvings,
        "rounded": rounded,
        "before": described(before) | {"digest": digest_of(before).hex()},
        "messages": [message.hex() for message in recorder.messages],
        "change_digest": encoded.digest.hex(),
        "decoded": floats(decoder.into.parameters),
        "after": described(after) | {"digest": digest_of(after).hex()},
    }


class LastResidual:
    """Keeps in memory what an update loses to its codec."""

    def __init__(self) -> None:
        self.digest = b""
        self.parts: list[Vector] = []

    def add(self, values: Vector) -> None:
        """Append one part."""
        self.parts.append(values.copy())


def error_feedback() -> list[dict[str, Any]]:
    """Return successive updates in int8; the residual changes only if an update counts."""
    size, codec = 300, codec_named("int8")
    residual, rounds = np.zeros(size, np.float32), []
    for number, counts in enumerate((True, False, True)):
        received = np.array([(i * 37 % 101 - 50) / 7 for i in range(size)], np.float32)
        trained = received + np.array(
            [((i + number) * 53 % 97 - 48) / 900 for i in range(size)], np.float32
        )
        vector = received - trained
        kept = LastResidual()
        feedback = ErrorFeedback(residual, kept)
        feedback.before(0, vector)
        data, decoded = bytes(codec.encode(vector, (SEED, number))), np.empty(size, np.float32)
        codec.decode(data, decoded)
        entry = {
            "received": floats(received),
            "trained": floats(trained),
            "residual_before": floats(residual),
            "encoded_vector": floats(vector),
            "data": data.hex(),
            "decoded": floats(decoded),
            "counts": counts,
        }
        feedback.after(vector, decoded)
        residual = kept.parts[0] if counts else residual
        rounds.append(entry | {"residual_after": floats(residual)})
    return rounds


def plans() -> dict[str, Any]:
    """Return the sizes of batches, and the parameters after steps with given gradients."""
    start = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    gradients = np.array(
        [[0.5, -1.0, 2.0, 0.25], [0.25, 0.5, -1.0, 0.25], [1, 1, 1, 1]], np.float32
    )
    return {
        "batches": [
            {"samples": n, "batch_size": size, "epochs": epochs, "steps": steps}
            | {"sizes": [len(batch) for batch in batches(plan, n)]}
            for n, size, epochs, steps in BATCHES
            for plan in [Plan(batch_size=size, epochs=epochs, steps=steps)]
        ],
        "steps": [
            {"of": name, "learning_rate": 0.1, **fields}
            | {"received": floats(start), "gradients": [floats(g) for g in gradients]}
            | {"parameters": [floats(values) for values in trajectory(fields, start, gradients)]}
            for name, fields in PLANS.items()
        ],
    }


def trajectory(
    fields: dict[str, Any], start: Vector, gradients: NDArray[np.float32]
) -> Iterator[Vector]:
    """Yield the parameters after each step; the gradients are those of the batches' losses."""
    parameters = start.copy()
    descent = Descent(Plan(learning_rate=0.1, **fields), parameters, start)
    for gradient in gradients:
        descent.step(gradient)
        yield parameters.copy()


def document() -> dict[str, Any]:
    """Return everything that is in streams.json."""
    return {
        "format": FORMAT,
        "about": (__doc__ or "").replace("\n", " ").strip(),
        "checksums": checksums(),
        "streams": streams(),
        "changes": changes(),
        "error_feedback": error_feedback(),
        "plans": plans(),
    }


if __name__ == "__main__":
    text = json.dumps(document(), indent=1)
    Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
