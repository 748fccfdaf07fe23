"""Faults and attacks of a simulated fleet: dropouts, stragglers, late joiners, attackers.

Everything is drawn from the seed and the round, never from earlier events, so two rules that are
compared on the same seed meet the same faults.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from fairfleet.common.errors import UsageError
from fairfleet.common.training_plan import Plan

Share = Annotated[float, Field(ge=0, le=1)]
AttackKind = Literal["loss_bias", "loss_scaling", "update_scaling", "sign_flip", "label_noise"]


class BehaviourSettings(BaseModel):
    """Settings that are frozen and refuse unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stragglers(BehaviourSettings):
    """A share of the clients trains a random number of epochs instead of the plan's."""

    share: Share = 0.5
    epochs: tuple[PositiveInt, PositiveInt] = (1, 5)

    @model_validator(mode="after")
    def _check_order(self) -> Stragglers:
        if self.epochs[0] > self.epochs[1]:
            raise ValueError(
                f"epochs are the fewest and the most, found {self.epochs[0]} and {self.epochs[1]}"
            )
        return self


class LateJoiners(BehaviourSettings):
    """A share of the clients joins in a random round up to `by_round`."""

    share: Share = 0.2
    by_round: PositiveInt = 10


class Attack(BehaviourSettings):
    """An attack by some clients, from a round on.

    `clients` are names, or a share of the fleet drawn at random. A share above 0 is at least one
    client, as it is for stragglers and late joiners.

    loss_bias adds `strength` to the reported loss, and loss_scaling multiplies the loss by it.
    update_scaling multiplies the update by `strength`, and sign_flip by minus `strength`.
    label_noise replaces the share `strength` of the training labels by random ones.

    With `every_round` the attackers take part in every round from `since_round` on, and are never
    lost: each takes a place of the cohort, and the rest of it is selected as usual.
    """

    kind: AttackKind
    clients: Share | tuple[str, ...] = 0.1
    strength: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    since_round: NonNegativeInt = 0
    every_round: bool = False

    @model_validator(mode="after")
    def _check_noise_is_a_share(self) -> Attack:
        if self.kind == "label_noise" and (self.strength > 1 or self.since_round):
            raise ValueError(
                f"label_noise has strength {self.strength} and since_round {self.since_round}; its "
                "strength is a share of the labels, at most 1, and it begins in round 0"
            )
        return self


class Behaviour(BehaviourSettings):
    """All faults and attacks of a fleet."""

    dropout: Share = Field(
        default=0.0, description="probability that a selected client is lost in a round"
    )
    stragglers: Stragglers | None = None
    late: LateJoiners | None = None
    attacks: tuple[Attack, ...] = ()


class FleetBehaviour:
    """The behaviour of the clients of one fleet under one seed."""

    def __init__(self, behaviour: Behaviour, names: Sequence[str], seed: int) -> None:
        self.behaviour, self.names, self.seed = behaviour, tuple(names), seed
        late, slow = behaviour.late, behaviour.stragglers
        self._slow = self._draw(slow.share, "stragglers") if slow else frozenset[str]()
        self._first_round: dict[str, int] = {}
        if late:
            random = self._random("arrival")
            joining = sorted(self._draw(late.share, "late"))
            self._first_round = {
                name: int(random.integers(1, late.by_round + 1)) for name in joining
            }
        self.attackers = [
            (attack, self._attackers(index, attack))
            for index, attack in enumerate(behaviour.attacks)
        ]

    @property
    def dishonest(self) -> frozenset[str]:
        """The names of all clients that attack in some round."""
        return frozenset[str]().union(*(names for _, names in self.attackers))

    def present(self, round_number: int) -> list[str]:
        """Return the names of the clients that have joined by this round."""
        return [name for name in self.names if self._first_round.get(name, 0) <= round_number]

    def delivers(self, client: str, round_number: int) -> bool:
        """Return whether a client, if it is selected, delivers an update in this round."""
        dropout = self.behaviour.dropout
        if not dropout or client in self.certain(round_number):
            return True
        return self._random("dropout", round_number, client).random() >= dropout

    def certain(self, round_number: int) -> frozenset[str]:
        """Return the attackers that take part in this round without being selected."""
        certain = frozenset[str]().union(
            *(
                names
                for attack, names in self.attackers
                if attack.every_round and round_number >= attack.since_round
            )
        )
        return certain & frozenset(self.present(round_number)) if certain else certain

    def plan(self, plan: Plan, client: str, round_number: int) -> Plan:
        """Return a client's plan for this round, with its own batches and number of epochs."""
        own = plan.for_client(client, round_number)
        if client in self._slow and self.behaviour.stragglers:
            fewest, most = self.behaviour.stragglers.epochs
            epochs = int(self._random("pace", round_number, client).integers(fewest, most + 1))
            own = own.model_copy(update={"epochs": epochs, "steps": 0})
        return own

    def reported_loss(self, loss: float, client: str, round_number: int) -> float:
        """Return the loss that a client reports, which is false for some attackers."""
        for attack in self._attacks_of(client, round_number):
            if attack.kind == "loss_bias":
                loss += attack.strength
            elif attack.kind == "loss_scaling":
                loss *= attack.strength
        return loss

    def update_factor(self, client: str, round_number: int) -> float:
        """Return the factor that a client multiplies its update by before sending it."""
        factor = 1.0
        for attack in self._attacks_of(client, round_number):
            if attack.kind == "update_scaling":
                factor *= attack.strength
            elif attack.kind == "sign_flip":
                factor *= -attack.strength
        return factor

    def labels(self, y: list[NDArray[np.int64]], classes: int) -> list[NDArray[np.int64]]:
        """Return each client's training labels, with noise for clients that attack by it."""
        for attack, names in self.attackers:
            if attack.kind == "label_noise":
                y = [
                    self._noisy(own, name, attack.strength, classes) if name in names else own
                    for name, own in zip(self.names, y, strict=True)
                ]
        return y

    def _noisy(
        self, y: NDArray[np.int64], name: str, share: float, classes: int
    ) -> NDArray[np.int64]:
        random = self._random("labels", name)
        return np.where(random.random(len(y)) < share, random.integers(0, classes, len(y)), y)

    def _attacks_of(self, client: str, round_number: int) -> list[Attack]:
        return [
            attack
            for attack, names in self.attackers
            if client in names and round_number >= attack.since_round
        ]

    def _attackers(self, index: int, attack: Attack) -> frozenset[str]:
        if isinstance(attack.clients, tuple):
            if unknown := set(attack.clients) - set(self.names):
                raise UsageError(
                    f"attackers {sorted(unknown)} are no clients; there are "
                    f"{', '.join(self.names[:5])}…"
                )
            return frozenset(attack.clients)
        return self._draw(attack.clients, "attack", index)

    def _draw(self, share: float, *purpose: str | int) -> frozenset[str]:
        """Draw a share of the clients; a share above 0 gives at least one client."""
        count = max(round(share * len(self.names)), int(share > 0))
        return frozenset(
            self.names[k] for k in self._random(*purpose).permutation(len(self.names))[:count]
        )

    def _random(self, *purpose: str | int) -> np.random.Generator:
        words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in purpose]
        return np.random.default_rng([self.seed, *words])
