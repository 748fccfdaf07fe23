"""The learning rate of each round: the server applies the decay, so any client can follow it."""

from __future__ import annotations

from tests.support.device import Device
from tests.support.fleet import Fleet

DECAY = 0.5
RATES = [0.1, 0.1 * DECAY, 0.1 * DECAY**2]


def test_every_client_receives_the_decayed_rate_of_the_round_also_after_a_restart(
    fleet: Fleet,
) -> None:
    fleet.init()
    settings = {
        "rounds": 3,
        "round__minimum_clients": 1,
        "round__evaluate_every": 0,
        "plan__learning_rate": 0.1,
        "plan__learning_rate_decay": DECAY,
    }
    fleet.start_server(**settings)
    rates = list[float]()
    for version in (1, 2, 3):
        if version == 3:
            fleet.kill_server()
            fleet.start_server(**settings)
        device = Device(fleet.address, "old")  # it lists no features
        device.join()
        rates.append(device.train_task().plan.learning_rate)
        assert not device.task.required_features
        chunks, encoded = device.encode()
        device.send(device.open(encoded).upload, chunks)
        fleet.wait_for_version(version)
        device.channel.close()
    assert rates == RATES


def test_a_training_reports_the_rate_of_its_round(fleet: Fleet) -> None:
    fleet.init(task="softmax")
    fleet.start_server(
        rounds=3,
        round__minimum_clients=1,
        round__evaluate_every=0,
        plan__learning_rate=0.1,
        plan__learning_rate_decay=DECAY,
    )
    fleet.start_client("ann", task="softmax")
    fleet.wait_for_version(3)
    reports = [record["contributions"][0]["report"] for record in fleet.records()]
    assert [report["learning_rate"] for report in reports] == RATES
