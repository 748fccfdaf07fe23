"""The rules give the steps and the intermediate values of the test vectors.

Every rule has vectors in the shared folder, or hand-checked ones in tests/rules/vectors.
"""

from collections import Counter

import numpy as np
import pytest

from fairfleet.server.aggregation.conformance import Vectors, check, check_case, load, play
from fairfleet.server.rules import listings
from tests.support.paths import SHARED
from tests.support.samples.rule_vectors import own_cases, play_own

OWN = own_cases()
RULES_OF_OWN_CASES = sorted(OWN)
# Rules with cases in the shared folder; it may be missing, so they are named here.
NAMES = sorted((set(listings()) - set(OWN)) | {"fedmgda", "fedfv", "fednova"})


@pytest.mark.parametrize("rule", RULES_OF_OWN_CASES)
def test_every_hand_checked_case_of_the_rule_passes(rule: str) -> None:
    assert OWN[rule]
    for case in OWN[rule]:
        for outcome, want in play_own(rule, case):
            np.testing.assert_allclose(
                outcome.step, want, rtol=1e-9, atol=1e-12, err_msg=f"{case['id']}: {case['why']}"
            )


def test_every_registered_rule_has_vectors() -> None:
    assert set(OWN) <= set(listings())
    if not (SHARED / "vectors" / "cases.json").is_file():
        pytest.skip(f"no shared test vectors in {SHARED / 'vectors'}")
    shared = {case["rule"] for case in load(SHARED / "vectors").cases}
    assert set(listings()) - shared - set(OWN) == set()


@pytest.mark.parametrize("rule", NAMES)
def test_every_shared_case_of_the_rule_passes(shared_vectors: Vectors, rule: str) -> None:
    verdicts = [
        check_case(shared_vectors, case) for case in shared_vectors.cases if case["rule"] == rule
    ]
    assert verdicts
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_every_case_and_every_rule_is_checked(shared_vectors: Vectors) -> None:
    ran = Counter(verdict.rule for verdict in check(shared_vectors))
    assert ran.total() == 1077
    assert set(ran) == set(NAMES)


def cases(shared_vectors: Vectors, rule: str, key: str):
    """Yield the rule's cases that expect a value for `key`: case, expected value, played case."""
    for case in shared_vectors.cases:
        if case["rule"] == rule and key in case.get("expect", {}):
            yield case, case["expect"][key], play(shared_vectors, case)


@pytest.mark.parametrize("rule", NAMES)
def test_the_status_is_the_expected_one(shared_vectors: Vectors, rule: str) -> None:
    for case, status, played in cases(shared_vectors, rule, "status"):
        assert played.outcomes[0].diagnostics.status == status, case["id"]


@pytest.mark.parametrize(
    ("rule", "key"), [("fedfv", "order"), ("fedfv", "kept"), ("fedlf", "tau"), ("krum", "selected")]
)
def test_intermediate_choices_are_the_expected_ones(
    shared_vectors: Vectors, rule: str, key: str
) -> None:
    for case, want, played in cases(shared_vectors, rule, key):
        assert played.choices[0].choice.notes[key] == want, case["id"]


def test_fedlf_merges_the_expected_layers(shared_vectors: Vectors) -> None:
    for case, want, played in cases(shared_vectors, "fedlf", "groups"):
        if case["expect"]["status"] in ("ok", "p_dropped"):
            edges = np.cumsum([0, *played.entries[0].layers])
            merged = [
                [edges[first], edges[last]]
                for first, last in played.choices[0].choice.notes["groups"]
            ]
            assert merged == want, case["id"]


def test_fedlf_uses_the_expected_history(shared_vectors: Vectors) -> None:
    for case, want, played in cases(shared_vectors, "fedlf", "hist_used"):
        clients = shared_vectors.sets[case["set"]].get("hist_client", [])
        names = {f"absent {clients[index]}" for index in want}
        assert set(played.choices[0].choice.notes["hist_used"]) == names, case["id"]


def test_afl_carries_its_weights_from_round_to_round(shared_vectors: Vectors) -> None:
    for case, want, played in cases(shared_vectors, "afl", "lam_used"):
        used = [choice.choice.notes["lam"] for choice in played.choices]
        np.testing.assert_allclose(used, want, rtol=1e-12, err_msg=case["id"])
        final = np.array(list(played.outcomes[-1].state.rule.weights.values()))
        np.testing.assert_allclose(final / final.sum(), case["expect"]["lam_final"], rtol=1e-12)


def test_adafedadam_reports_its_certainty(shared_vectors: Vectors) -> None:
    for case, want, played in cases(shared_vectors, "adafedadam", "certainty"):
        np.testing.assert_allclose(
            [choice.choice.certainty for choice in played.choices], want, rtol=1e-12
        )
        numbers = played.outcomes[-1].state.optimizer.numbers
        assert numbers["c_m"] == pytest.approx(case["expect"]["cm_final"], rel=1e-12)
        assert numbers["c_v"] == pytest.approx(case["expect"]["cv_final"], rel=1e-12)


def test_fedmdfg_is_guided_when_expected_and_finds_the_expected_rate(
    shared_vectors: Vectors,
) -> None:
    for case, want, played in cases(shared_vectors, "fedmdfg", "active"):
        assert [choice.choice.notes["guided"] for choice in played.choices] == np.atleast_1d(
            want
        ).tolist()
        if "lr" in case["expect"]:
            after = played.entries[0].losses_after(played.steps[0])
            np.testing.assert_allclose(after, case["expect"]["losses_after"], rtol=1e-9)


def test_coefficients_are_the_expected_ones_where_they_are_unique(shared_vectors: Vectors) -> None:
    for rule in ("fedavg", "fedavg_n", "qfedavg", "term", "drfl", "fedgini", "fednova", "krum"):
        for case, want, played in cases(shared_vectors, rule, "coef"):
            eta = case["params"].get("eta", 1.0)
            np.testing.assert_allclose(
                played.choices[0].choice.coefficients * eta, want, rtol=1e-9, atol=1e-300
            )
