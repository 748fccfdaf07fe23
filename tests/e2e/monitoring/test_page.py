"""The server's dashboard in a real browser, with a live federation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from benchmarks.simulated_clients import SimulatedClients
from fairfleet.common.fairness import Fairness
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.browser import CHROMIUM, Browser, Page, started_browser
from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import get
from tests.support.uneven_clients import start_uneven_clients

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="Debian's package chromium is not installed: scripts/install-test-packages"
)


MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
NOT_KNOWN = "\N{EN DASH}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return where a server answers whose federation is finished."""
    fleet, port = Fleet(tmp_path_factory.mktemp("finished")), free_port()
    try:
        fleet.init()
        fleet.start_server(
            http__port=port, rounds=4, round__minimum_clients=3, round__evaluate_every=2
        )
        start_uneven_clients(fleet)
        fleet.wait_clients()
        yield f"http://127.0.0.1:{port}"
    finally:
        fleet.end()


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def newest_evaluations(fleet: Fleet) -> dict[str, dict[str, float]]:
    rows = fleet.query(
        "select client, evaluation from evaluations "
        "where version = (select max(version) from evaluations)"
    )
    return {client: json.loads(text) for client, text in rows}


def cell(page: Page, client: str, column: str) -> str:
    return page.text(f'[data-client="{client}"] [data-column="{column}"]')


def test_numbers_on_the_page_follow_the_store_without_a_reload(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    fleet.start_server(
        http__port=port,
        rounds=6,
        round__minimum_clients=3,
        round__evaluate_every=2,
        rule__name="fedfv",
        verification__halvings=1,
    )
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("#empty >> text=Waiting for clients")
        page.wait("#empty-text >> text=3 more")  # drawn with the first event, after the heading
        assert f":{fleet.port}" in page.text("#empty")
        start_uneven_clients(fleet)
        fleet.wait_clients()
        page.wait("body[data-phase=finished] #tile-mean >> text=version 6")
        stored, record = newest_evaluations(fleet), fleet.records()[-1]
        accuracy = Fairness.of([evaluation["accuracy"] for evaluation in stored.values()])
        assert page.text("#tile-mean .value") == percent(accuracy.mean)
        assert page.text("#tile-worst .value") == percent(accuracy.worst_10)
        gap = accuracy.mean - accuracy.worst_10
        assert page.text("#tile-gap .value") == f"{100 * gap:.1f} pp"
        assert page.text("#tile-mean .name").endswith(" pp"), "a change in percentage points"
        assert page.text("#tile-angle .value") == f"{accuracy.angle_degrees:.1f}°"
        conflicts = len(record["diagnostics"]["conflicts"])
        assert (
            page.text("#tile-conflicts .value") == f"{conflicts} / {len(record['contributions'])}"
        )
        for contribution in record["contributions"]:
            client = contribution["client"]
            assert cell(page, client, "accuracy") == percent(stored[client]["accuracy"])
            assert cell(page, client, "loss") == written(stored[client]["loss"])
            assert cell(page, client, "coefficient") == written(contribution["weight"])
            assert cell(page, client, "cosine") == written(record["diagnostics"]["cosines"][client])
            assert cell(page, client, "updates") == "6 / 6"
        rows = page.tab.locator("[data-client]").evaluate_all(
            "rows => rows.map(row => row.dataset.client)"
        )
        assert rows == sorted(stored, key=lambda client: stored[client]["accuracy"])
        page.wait("#conflicts-lead >> text=Round 6")
        sentence = f"harms {conflicts} of 3" if conflicts else "harms none of 3"
        assert sentence in page.text("#conflicts-lead")
        assert "verification" in page.text("#rounds-lead")
        assert f"step {TIMES} {record['verification']['factor']:g}" in page.text("#rounds-lead")
        answer = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
        measured = [row["measured"] for row in answer["rounds"] if row["measured"] is not None]
        assert page.text("#tile-improved .value") == percent(measured[-1])
        assert re.search(r"in round \d, promised \d+ %", page.text("#tile-improved .note"))
        for explained in (".tile", "#table-head > *"):
            assert page.count(explained) == page.count(f"{explained}[title]") > 0
        conflict_answer = json.loads(get(f"http://127.0.0.1:{port}/api/conflicts")[1])
        expected = record["diagnostics"]["client_cosines"]
        assert conflict_answer["cosines"] == [pytest.approx(line, abs=1e-3) for line in expected]
        assert page.count("#map canvas") == 1
        assert "all rounds are done" in page.text("#banner")
        assert page.errors == []
        assert {request.split("/")[2] for request in page.requests} == {f"127.0.0.1:{port}"}


def written(value: float) -> str:
    """Return a plain number as the page formats it."""
    size = abs(value)
    if size and (size < 0.001 or size >= 1e6):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+").replace("-", MINUS)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 3}f}".replace("-", MINUS)


@pytest.mark.slow
def test_a_client_that_retired_is_shown_so_and_why_rounds_stopped(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init(task="plain")
    privacy = {"where": "client", "clip": 1.0, "noise_multiplier": 2.0}
    settings = {f"privacy__{name}": value for name, value in privacy.items()}
    fleet.start_server(http__port=port, rounds=1000, **settings)
    for name, flags in (("ann", ("--max-epsilon", "10")), ("bob", ())):
        fleet.start_client(name, *flags, task="plain")
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait('[data-client="ann"] .state.retired')
        assert cell(page, "ann", "state") == "retired"
        title = page.tab.locator('[data-client="ann"] .state').get_attribute("title")
        assert title == "its privacy budget is spent, by its owner's limit"
        page.wait("#banner >> text=No round begins: 1 of 2 clients have retired")
        fleet.start_client("ann", task="plain")  # its owner gives up the limit
        page.wait('[data-client="ann"] .state:not(.retired)')
        assert page.errors == []


@pytest.mark.slow
def test_a_lost_connection_is_shown_and_restored_and_a_restart_leaves_no_gap(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {
        "http__port": port,
        "rounds": 10_000,
        "round__evaluate_every": 2,
        "lease_seconds": 30,
    }
    fleet.start_server(**settings)
    for name in ("ann", "bob"):
        fleet.start_client(name, step_seconds=0.05)
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("#tile-mean svg")
        page.wait("#layer option:nth-child(3)")
        page.tab.locator("#layer").select_option("1")
        page.wait("#conflicts-lead >> text=in bias")
        fleet.kill_server()
        page.wait("body[data-link=lost]")
        page.wait("#banner >> text=No connection")  # drawn with the next frame
        before = page.text("#tile-mean .value")
        assert before != NOT_KNOWN, "earlier data stays on the screen"
        fleet.start_server(**settings)
        page.wait("body[data-link=live]")
        version = fleet.version()
        until(lambda: f"round {version}" not in page.text("#about"), "the page to go on")
        first = page.evaluate(
            "async () => (await (await fetch('/api/state')).json()).evaluations[0].version"
        )
        assert first == 2, "evaluations before the restart are shown too"
        assert "undefined" not in page.text("#conflicts-lead")
        assert page.text('[data-client="ann"] [data-column="last seen"]') == "connected"


@pytest.mark.slow
def test_a_redraw_removes_neither_buttons_nor_options(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=10_000, round__evaluate_every=1)
    for name in ("ann", "bob"):
        fleet.start_client(name, step_seconds=0.05)
    touched = "#hero-tabs button, #layer option, #layers button, #table-head button"
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("#tile-mean svg")
        page.wait("#layers button")
        count = page.tab.locator(touched).evaluate_all(
            "all => all.map(e => { e.mark = true; }).length"
        )
        lead = page.text("#conflicts-lead")
        until(lambda: page.text("#conflicts-lead") != lead, "the map of a later round")
        assert (
            page.tab.locator(touched).evaluate_all("all => all.filter(e => e.mark).length") == count
        )


@pytest.mark.slow
def test_a_page_that_never_reached_the_server_shows_no_last_update_time(
    browser: Browser, finished: str
) -> None:
    with browser.page("about:blank") as page:
        page.tab.route("**/api/live", lambda route: route.abort())
        page.open(finished)
        page.wait("body[data-link=lost]")
        page.wait("#banner >> text=nothing was heard from it yet")
        assert page.text("#phase-text") == "not connected"


@pytest.mark.slow
def test_the_page_shows_an_evaluation_without_any_result(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=1, round__evaluate_every=1)
    for name in ("ann", "bob"):
        fleet.start_client(name, trouble="blind")
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("#now-chart >> text=no client gave a result (2 failed)")
        assert page.errors == []


@pytest.mark.slow
def test_the_page_loads_without_data_and_says_so(browser: Browser, finished: str) -> None:
    with browser.page("about:blank") as page:
        page.tab.route("**/api/live", lambda route: None)  # the request is never answered
        page.open(finished)
        page.wait("body[data-link=loading] .tile")
        assert page.text("#phase-text") == "connecting"
        assert (
            page.evaluate(
                "() => getComputedStyle(document.querySelector('#hero-chart')).animationName"
            )
            == "shimmer"
        )


@pytest.mark.slow
def test_the_theme_follows_the_system_and_the_choice_is_stored(
    browser: Browser, finished: str
) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with browser.page(finished, scheme="dark") as page:
        dark = page.evaluate(background)
        page.tab.locator("#theme").click()
        light = page.evaluate(background)
        page.tab.reload()
        assert page.evaluate(background) == light != dark


@pytest.mark.slow
def test_a_phone_shows_everything_without_horizontal_scrolling(
    browser: Browser, finished: str
) -> None:
    with browser.page(finished, width=390, height=844) as page:
        page.wait("#hero-chart path.line")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        reach = page.evaluate(
            "() => { const t = document.querySelector('.table'); "
            "t.scrollLeft = 9999; return t.scrollLeft; }"
        )
        assert reach > 0, "columns that do not fit can be scrolled to"
        for card in ("#tiles", "#hero", "#now", "#conflicts", "#spread", "#clients", "#events"):
            assert page.tab.locator(card).is_visible()


@pytest.mark.slow
def test_figures_that_were_not_computed_are_marked(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=2, round__evaluate_every=1, diagnostics="off")
    for name in ("ann", "bob"):
        fleet.start_client(name)
    fleet.wait_clients()
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("#conflicts-lead >> text=were not computed")
        assert page.text("#tile-conflicts .value") == "\u2013"
        assert "diagnostics off" in page.text("#tile-conflicts .note")
        assert "There is no map at diagnostics off" in page.text("#map")
        assert cell(page, "ann", "conflicts") == "\u2013"


@pytest.mark.slow
def test_a_layer_can_be_chosen_and_an_unknown_one_is_refused(
    browser: Browser, finished: str
) -> None:
    with browser.page(finished) as page:
        page.wait("#layer option:nth-child(3)")
        page.tab.locator("#layer").select_option("1")
        page.wait("#conflicts-lead >> text=in bias")
    assert get(f"{finished}/api/conflicts?layer=7")[0] == 404
    for wrong in ("-1", "x", "9" * 5000, "%C2%B2"):
        assert get(f"{finished}/api/conflicts?layer={wrong}")[0] == 400


def test_a_client_supplied_device_name_is_shown_as_text_only(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=1, round__minimum_clients=1)
    device = Device(fleet.address, "made-by-hand")
    device.join(device="<img src=x onerror=alert(1)>")
    device.train_task()
    chunks, encoded = device.encode()
    device.send(device.open(encoded).upload, chunks)
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait('[data-client="made-by-hand"]')
        assert page.count("main img") == 0
        assert page.errors == []
    device.channel.close()


@pytest.mark.parametrize("width", [390, 760, 1180, 1181, 1240, 1300, 1440])
def test_nothing_in_a_tile_overlaps(browser: Browser, finished: str, width: int) -> None:
    with browser.page(finished, width=width) as page:
        page.wait("#tile-improved .value >> text=%")
        overlaps = page.evaluate(
            """() => [...document.querySelectorAll(".tile")].filter((tile) => {
              const line = tile.querySelector("svg"), value = tile.querySelector(".value");
              const text = document.createRange();
              text.selectNodeContents(value);
              const [a, b] = [text.getBoundingClientRect(), line?.getBoundingClientRect()];
              const name = tile.querySelector(".name");
              return (b?.width && a.right > b.left) || name.scrollWidth > name.clientWidth
                || a.right > tile.getBoundingClientRect().right;
            }).map((tile) => `${tile.id} ${tile.innerText}`)"""
        )
        assert overlaps == []


@pytest.mark.slow
def test_a_thousand_clients_are_shown_in_pages_and_can_be_searched(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init(10)
    settings = {"round__minimum_clients": 1000, "round__clients": 20, "round__evaluate_every": 1}
    settings["limits__streams_per_connection"] = 2000  # all simulated clients share one
    fleet.start_server(http__port=port, rounds=2, lease_seconds=60, **settings)
    with SimulatedClients(fleet.address, 1000), browser.page(f"http://127.0.0.1:{port}/") as page:
        page.wait("body[data-phase=finished] #tile-mean >> text=version 2")
        assert page.text("#clients-count") == "1,000 clients"
        stored = newest_evaluations(fleet)
        assert len(stored) == 1000
        assert page.text("#tile-worst .value") == percent(
            Fairness.of([e["accuracy"] for e in stored.values()]).worst_10
        )
        assert 10 < page.count("[data-client]") < 60
        page.tab.locator("#table-scroll").evaluate(
            "view => { view.scrollTop = view.scrollHeight; }"
        )
        best = max(stored, key=lambda client: (stored[client]["accuracy"], client))
        page.wait(f'[data-client="{best}"]')
        page.tab.locator("#search").fill("0777")
        page.wait("#clients-count >> text=1 of 1,000 clients")
        assert cell(page, "client-0777", "accuracy") == percent(stored["client-0777"]["accuracy"])
        assert page.errors == []


def test_an_open_page_forgets_what_a_return_to_an_earlier_version_undoes(
    browser: Browser, fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {"round__evaluate_every": 1, "keep_models": 20, "http__port": port}
    fleet.start_server(rounds=5, **settings)
    with browser.page(f"http://127.0.0.1:{port}/") as page:
        for name in ("a", "b"):
            fleet.start_client(name)
        fleet.wait_clients()
        page.wait("body[data-phase=finished] #tile-mean >> text=version 5")
        request = pb.ContinueRequest(from_version=2, rounds=7)
        fleet.operator().Continue(request, timeout=20)
        page.wait("body[data-phase=waiting] #tile-mean >> text=version 2")
        page.wait("#event-list >> text=continues")
        assert cell(page, "a", "updates") == "2 / 5"  # that count, and selections
