"""First losses are those on the initial model, or those at the first participation."""

from __future__ import annotations

from fairfleet.common.reports import TrainReport
from fairfleet.server.aggregation.participation import ParticipationBook
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.rules import Report


def trained(
    loss: float, initial_loss: float | None = None, after: float | None = None
) -> TrainReport:
    return TrainReport(
        samples=5,
        loss_before=loss,
        loss_after=after,
        initial_loss=initial_loss,
        steps=1,
        learning_rate=0.1,
    )


def commit(
    book: ParticipationBook, number: int, rule_loss: LossOfRule = "before", **reports: TrainReport
) -> dict[str, Report]:
    """Let clients take part in a round, and return what the rule saw."""
    seen = {
        client: book.report_of(client, number, report, rule_loss)
        for client, report in reports.items()
    }
    book.committed(seen)
    return seen


def test_a_late_client_is_divided_by_its_loss_on_the_initial_model() -> None:
    """At its first participation the model is better than the initial one."""
    book = ParticipationBook(initial=True)
    assert not book.lacks_initial_loss("ann", 0)
    assert commit(book, 0, ann=trained(2.0))["ann"].first_loss == 2.0
    assert book.lacks_initial_loss("bob", 7)
    assert not book.lacks_initial_loss("ann", 7)
    seen = commit(book, 7, ann=trained(0.5), bob=trained(0.5, initial_loss=3.0))
    assert (seen["ann"].first_loss, seen["bob"].first_loss) == (2.0, 3.0)
    assert not book.lacks_initial_loss("bob", 8)
    again = commit(book, 8, ann=trained(0.4, 9.0), bob=trained(0.4, 9.0))  # unasked
    assert (again["ann"].first_loss, again["bob"].first_loss) == (2.0, 3.0)
    assert again["bob"].participations == 2


def test_a_client_that_cannot_measure_the_initial_model_has_the_loss_of_its_first_round() -> None:
    book = ParticipationBook(initial=True)
    assert commit(book, 7, bob=trained(0.5))["bob"].first_loss == 0.5
    assert not book.lacks_initial_loss("bob", 8)
    assert commit(book, 8, bob=trained(0.4))["bob"].first_loss == 0.5


def test_first_losses_can_be_those_at_the_first_participation() -> None:
    book = ParticipationBook()
    assert commit(book, 7, bob=trained(0.5, 3.0))["bob"].first_loss == 0.5
    assert commit(book, 8, bob=trained(0.4))["bob"].first_loss == 0.5
    assert not book.lacks_initial_loss("cat", 9)


def test_a_loss_after_training_is_never_a_first_loss() -> None:
    """It would be that of another model than the initial or the received one."""
    for initial, of_late_client in ((True, 3.0), (False, 0.5)):
        book = ParticipationBook(initial=initial)
        begun = commit(book, 0, "after", ann=trained(2.0, after=1.5))["ann"]
        assert (begun.loss, begun.first_loss) == (1.5, 2.0)
        late = commit(book, 7, "after", bob=trained(0.5, 3.0, after=0.25))["bob"]
        assert (late.loss, late.first_loss) == (0.25, of_late_client)
