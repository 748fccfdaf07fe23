"""What a fleet does to a training beside training: clients drop out, work at their own pace, come late, or cheat.

Everything is drawn from the seed and the round, never from what happened before, so two rules compared on the same
seed meet the same troubles.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan

Share = Annotated[float, Field(ge=0, le=1)]
AttackKind = Literal["loss_bias", "loss_scaling", "update_scaling", "sign_flip", "label_noise"]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stragglers(Part):
    """So many of the clients, when asked, train a random number of epochs instead of the plan's."""

    share: Share = 0.5
    epochs: tuple[PositiveInt, PositiveInt] = (1, 5)

    @model_validator(mode="after")
    def _in_order(self) -> Stragglers:
        if self.epochs[0] > self.epochs[1]:
            raise ValueError(f"epochs are the fewest and the most, found {self.epochs[0]} and {self.epochs[1]}")
        return self


class LateJoiners(Part):
    """So many of the clients join in a random round up to `by_round`."""

    share: Share = 0.2
    by_round: PositiveInt = 10


class Attack(Part):
    """What some clients do wrong, from a round on. `clients` are names, or a share of the fleet drawn at random.

    A share above 0 is at least one client, here as for stragglers and late joiners.

    loss_bias adds `strength` to the reported loss, loss_scaling multiplies it; update_scaling multiplies the update,
    sign_flip by minus the strength; label_noise replaces that share of the training labels by random ones.
    """

    kind: AttackKind
    clients: Share | tuple[str, ...] = 0.1
    strength: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    since_round: NonNegativeInt = 0

    @model_validator(mode="after")
    def _noise_is_a_share(self) -> Attack:
        if self.kind == "label_noise" and (self.strength > 1 or self.since_round):
            raise ValueError("label_noise: strength is the share of labels, at most 1, and there from round 0 on")
        return self


class Behaviour(Part):
    dropout: Share = Field(default=0.0, description="how likely an asked client is lost in a round")
    stragglers: Stragglers | None = None
    late: LateJoiners | None = None
    attacks: tuple[Attack, ...] = ()


class Conduct:
    """A behaviour for one fleet and one seed."""

    def __init__(self, behaviour: Behaviour, names: Sequence[str], seed: int) -> None:
        self.behaviour, self.names, self.seed = behaviour, tuple(names), seed
        late, slow = behaviour.late, behaviour.stragglers
        self._slow = self._some(slow.share, "stragglers") if slow else frozenset[str]()
        self._first_round: dict[str, int] = {}
        if late:
            random = self._random("arrival")
            joining = sorted(self._some(late.share, "late"))
            self._first_round = {name: int(random.integers(1, late.by_round + 1)) for name in joining}
        self.attackers = [(attack, self._attackers(at, attack)) for at, attack in enumerate(behaviour.attacks)]

    @property
    def dishonest(self) -> frozenset[str]:
        return frozenset[str]().union(*(names for _, names in self.attackers))

    def present(self, round: int) -> list[str]:
        return [name for name in self.names if self._first_round.get(name, 0) <= round]

    def delivers(self, client: str, round: int) -> bool:
        lost = self.behaviour.dropout
        return not lost or self._random("dropout", round, client).random() >= lost

    def plan(self, plan: Plan, client: str, round: int) -> Plan:
        """The client's plan of this round, with its own batches and its own pace."""
        own = plan.for_client(client, round)
        if client in self._slow and self.behaviour.stragglers:
            fewest, most = self.behaviour.stragglers.epochs
            epochs = int(self._random("pace", round, client).integers(fewest, most + 1))
            own = own.model_copy(update={"epochs": epochs, "steps": 0})
        return own

    def reported(self, loss: float, client: str, round: int) -> float:
        for attack in self._attacks_of(client, round):
            if attack.kind == "loss_bias":
                loss += attack.strength
            elif attack.kind == "loss_scaling":
                loss *= attack.strength
        return loss

    def factor(self, client: str, round: int) -> float:
        """What the client's update is multiplied by before it is sent."""
        factor = 1.0
        for attack in self._attacks_of(client, round):
            if attack.kind == "update_scaling":
                factor *= attack.strength
            elif attack.kind == "sign_flip":
                factor *= -attack.strength
        return factor

    def labels(self, y: list[NDArray[np.int64]], classes: int) -> list[NDArray[np.int64]]:
        """Each client's training labels as it has them: noise for those who attack so."""
        for attack, names in self.attackers:
            if attack.kind == "label_noise":
                y = [
                    self._noisy(own, name, attack.strength, classes) if name in names else own
                    for name, own in zip(self.names, y, strict=True)
                ]
        return y

    def _noisy(self, y: NDArray[np.int64], name: str, share: float, classes: int) -> NDArray[np.int64]:
        random = self._random("labels", name)
        return np.where(random.random(len(y)) < share, random.integers(0, classes, len(y)), y)

    def _attacks_of(self, client: str, round: int) -> list[Attack]:
        return [attack for attack, names in self.attackers if client in names and round >= attack.since_round]

    def _attackers(self, at: int, attack: Attack) -> frozenset[str]:
        if isinstance(attack.clients, tuple):
            if unknown := set(attack.clients) - set(self.names):
                raise UsageError(f"attackers {sorted(unknown)} are no clients; there are {', '.join(self.names[:5])}…")
            return frozenset(attack.clients)
        return self._some(attack.clients, "attack", at)

    def _some(self, share: float, *purpose: str | int) -> frozenset[str]:
        count = max(round(share * len(self.names)), int(share > 0))  # asked for, there is somebody
        return frozenset(self.names[k] for k in self._random(*purpose).permutation(len(self.names))[:count])

    def _random(self, *purpose: str | int) -> np.random.Generator:
        words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in purpose]
        return np.random.default_rng([self.seed, *words])
