"""`fairfleet rules` lists the rules; the exit code of `rules check` is the result of a folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fairfleet.server.cli.rules import rules_app
from fairfleet.server.rules import listings

run = CliRunner().invoke


def test_every_rule_is_listed_with_a_line_and_its_parameters() -> None:
    shown = run(rules_app, [], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for name in listings():
        assert name in shown.stdout
    listed = json.loads(run(rules_app, ["--json"]).stdout)
    assert set(listed) == set(listings())
    assert listed["fedfv"]["parameters"]["alpha"] == 0.1
    assert all(about["summary"] for about in listed.values())


@pytest.mark.slow
def test_the_shared_vectors_pass(vector_folder: Path) -> None:
    done = run(rules_app, ["check", str(vector_folder), "--json"])
    assert done.exit_code == 0
    summary = json.loads(done.stdout)
    assert (summary["cases"], summary["passed"], summary["failed"]) == (1077, 1077, 0)
    assert summary["rules"]["fedlf"]["worst_error"] < 1e-10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small folder of test vectors whose rows are not in the order of ids."""
    rng = np.random.default_rng(0)
    rows, past = rng.standard_normal((3, 11)), rng.standard_normal((1, 11))
    random_set = {
        "kind": "random",
        "m": 3,
        "d": 11,
        "layers": [4, 7],
        "t": 2,
        "clients": [9, 4, 7],
        "n": [1, 2, 3],
    }
    random_set |= {"losses": [1.0, 1.0, 0.5], "hist_client": [8], "hist_round": [1]}
    a = np.array([[1.0, 3.0], [2.0, 1.0]])
    cases = [
        {
            "id": "fedavg/x/0",
            "rule": "fedavg",
            "set": "x",
            "params": {},
            "check": "exact",
            "rtol": 1e-9,
            "atol": 0.0,
        },
        {
            "id": "fedavg/s/0",
            "rule": "fedavg",
            "set": "s",
            "params": {"weighting": "uniform"},
            "check": "exact",
        }
        | {"rtol": 1e-9, "participants": [[0, 2], [1]]},
        {"id": "fedmgda/q/0", "rule": "fedmgda", "set": "q", "params": {}, "check": "sound"}
        | {"require": [{"finite": True}, {"no_conflict": 1e-6}, {"progress": True}]},
        {"id": "fedfv/x/0", "rule": "fedfv", "set": "x", "params": {"tau": 1}, "check": "sound"}
        | {"require": [{"finite": True}, {"norm_le": 100.0}]},
    ]
    sequence = rng.standard_normal((2, 3, 5))
    sets = {
        "x": random_set,
        "s": {
            "kind": "sequence",
            "T": 2,
            "m": 3,
            "d": 5,
            "n": [1, 1, 1],
            "losses": [[1.0] * 3] * 2,
        },
        "q": {"kind": "quadratic", "m": 2, "d": 2},
    }
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    inputs = {
        "x.G": rows,
        "x.H": past,
        "s.G": sequence,
        "q.A": a,
        "q.x_star": np.zeros((2, 2)),
        "q.theta": np.ones(2),
    }
    np.savez(tmp_path / "inputs.npz", **inputs)
    steps = np.array([(sequence[0, 0] + sequence[0, 2]) / 2, sequence[1, 1]])
    np.savez(
        tmp_path / "expected.npz",
        **{"fedavg|x|0": np.array([1, 2, 3]) / 6 @ rows, "fedavg|s|0": steps},
    )
    return tmp_path


def edit_cases(folder: Path, **change: object) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    cases[0] |= change
    (folder / "cases.json").write_text(json.dumps(cases))


def test_any_folder_of_the_format_can_be_checked(folder: Path) -> None:
    done = run(rules_app, ["check", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["passed"] == 4
    assert "4 of 4 cases passed" in run(rules_app, ["check", str(folder)]).stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rule": "fedsum"}, "no rule 'fedsum'"),
        ({"params": {"weights": 1}}, "did you mean 'weighting'"),
        ({"set": "y"}, "missing 'y'"),
        ({"check": "roughly"}, "expected 'exact' or 'sound'"),
        ({"id": "nowhere"}, "missing 'nowhere'"),
        ({"params": {"weighting": "uniform"}}, "wrong step"),
        ({"check": "sound", "require": [{"norm_le": 1e-9}]}, "does not hold: norm_le 1e-09"),
        ({"check": "sound", "require": [{"shine": True}]}, "'shine' is not known"),
    ],
)
def test_a_case_that_fails_is_named_with_its_reason_and_the_exit_code_is_one(
    folder: Path, change: dict[str, object], reason: str
) -> None:
    edit_cases(folder, **change)
    done = run(rules_app, ["check", str(folder), "--json"])
    assert done.exit_code == 1
    summary = json.loads(done.stdout)
    assert (summary["passed"], summary["failed"]) == (3, 1)
    failures = {
        case: why for about in summary["rules"].values() for case, why in about["failures"].items()
    }
    assert reason in next(iter(failures.values()))
    assert run(rules_app, ["check", str(folder)]).exit_code == 1


def test_a_wrong_expectation_is_noticed_even_if_it_is_not_a_number(folder: Path) -> None:
    steps = dict(np.load(folder / "expected.npz"))
    np.savez(folder / "expected.npz", **{**steps, "fedavg|x|0": np.full(11, np.nan)})
    assert run(rules_app, ["check", str(folder)]).exit_code == 1


def broken_folders(folder: Path) -> dict[str, Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, folder.parent / f"{folder.name} {name}"))

    none, short, cut, text, empty = (
        folder / "none",
        copy("short"),
        copy("cut"),
        copy("text"),
        copy("empty"),
    )
    (short / "expected.npz").unlink()
    (cut / "inputs.npz").write_bytes((folder / "inputs.npz").read_bytes()[:100])
    (text / "cases.json").write_text("{not json")
    (empty / "cases.json").write_text("[]")
    return {
        "has no sets.json": none,
        "has no expected.npz": short,
        "cannot be read": cut,
        "Expecting": text,
        "no case": empty,
    }


def test_a_folder_that_cannot_be_read_is_an_error_that_says_why(folder: Path) -> None:
    for message, path in broken_folders(folder).items():
        done = run(rules_app, ["check", str(path)])
        assert done.exit_code == 2
        assert message in done.output
