"""From a round's rows to the next model in memory: what server and simulation share.

Nothing here is durable or visible to clients. A staged result is finite, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from fairfleet.common.tensors import Model, Section, Signature, TensorSpec
from fairfleet.server.aggregation.aggregator import (
    EVERYTHING,
    AddNoise,
    Aggregation,
)
from fairfleet.server.aggregation.buffers import merge_state
from fairfleet.server.aggregation.finite import check_model, check_sum, take_step
from fairfleet.server.aggregation.isolation import Attempt
from fairfleet.server.aggregation.results import AggregatedStep, ServerState
from fairfleet.server.rules import Blocks, Recipe, Report, StepTrials


@dataclass(frozen=True)
class StagedStep:
    """A round's result in a model's memory: the next model, or a change for clients to try."""

    step: AggregatedStep
    trials: StepTrials | None = None  # the memory holds the longest change, not the next model


def stage_step(
    aggregation: Aggregation,
    reports: Mapping[str, Report],
    current: Model,
    out: Model,
    *,
    state: ServerState,
    trained: Mapping[str, Model],
    halvings: int | None = None,
    add_noise: AddNoise | None = None,
    attempt: Attempt = EVERYTHING,
) -> StagedStep:
    """Aggregate into `out` and return the step that was made.

    `trained` has the clients' models, whose buffers and counters are merged; it may be empty for
    models without any. With `halvings`, or if the rule wants a line search, and unless the step
    is zero, `out` gets the longest change to try, of which 2^-k is tried for k = 0 to halvings.
    Otherwise `out` becomes the next model. Raises NonFiniteResult or a rule's error.
    """
    step = aggregation.step(
        reports, state, out=out.parameters, add_noise=add_noise, attempt=attempt
    )
    if step.buffers is not None and trained:
        counted = {client: trained[client] for client in step.reports}
        findings = merge_state(out, current, counted, step.buffers)
        step = replace(step, findings=(*step.findings, *findings))
    trials = step.trials or (None if halvings is None else StepTrials(halvings))
    if trials is None or not step.vector.any():
        take_step(current, step.vector, out)
        return StagedStep(step)
    np.multiply(out.parameters, np.float32(-(2.0**trials.doublings)), out=out.parameters)
    check_model(out)
    check_sum(current, out)
    return StagedStep(step, trials)


def layer_sizes(signature: Signature, blocks: Blocks = "tensors") -> list[int]:
    """Return the sizes of the blocks in which a rule sees a model."""
    return [
        sum(tensor.size for tensor in tensors) for _, tensors in layer_tensors(signature, blocks)
    ]


def layer_names(signature: Signature, blocks: Blocks = "tensors") -> list[str]:
    """Return the names of the blocks in which a rule sees a model."""
    return [name for name, _ in layer_tensors(signature, blocks)]


def layer_tensors(signature: Signature, blocks: Blocks) -> list[tuple[str, list[TensorSpec]]]:
    """Return the name and the parameter tensors of each block.

    A module is all neighbouring tensors whose names agree up to the last dot, such as `2.weight`
    and `2.bias`. A name without a dot is a module of its own, but `weight` and `bias` are one.
    """
    tensors = [tensor for tensor, _ in signature.spans(Section.PARAMETERS) if tensor.size]
    if blocks == "tensors":
        return [(tensor.name, [tensor]) for tensor in tensors]
    groups = [(name, list(group)) for name, group in groupby(tensors, module_of)]
    return [(group[0].name if len(group) == 1 else name, group) for name, group in groups]


def module_of(tensor: TensorSpec) -> str:
    """Return the name of the tensor's module."""
    return "model" if tensor.name in ("weight", "bias") else tensor.layer


def uses_history(recipe: Recipe) -> bool:
    """Return whether the rule uses updates of absent clients."""
    return recipe.rule.window(known_clients=1_000_000, clients=1) > 0
