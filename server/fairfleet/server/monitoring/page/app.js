// The dashboard: receives a stream of changes and draws them, at most once per frame.
import * as clients from "./clients.js";
import * as conflicts from "./conflicts.js";
import { histogram, lines, none, spark, stacks } from "./charts.js";
import { $, h, keyed, text } from "./dom.js";
import { TILES } from "./explanations.js";
import { apply, evaluated, figures, measure, newest, own, sign, state, value } from "./state.js";
import { bytes, changed, clock, duration, number, percent, plural, points, whole } from "./words.js";

const RETRY_MS = 3000; // before a connection that the browser gave up is opened again

// ---- the connection ------------------------------------------------------------------------------

function connect() {
  const source = new EventSource("/api/live");
  source.onmessage = (event) => {
    apply(JSON.parse(event.data));
    link("live");
  };
  source.onerror = () => {
    link("lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

function link(how) {
  if (document.body.dataset.link !== "loading" || how === "live") document.body.dataset.link = how;
  else if (Date.now() - started > RETRY_MS) document.body.dataset.link = "lost";
  drawSoon();
}

// ---- drawing -------------------------------------------------------------------------------------

let due = false;

function drawSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

function draw() {
  banner();
  if (!state.status) {
    if (document.body.dataset.link === "lost") text("phase-text", "not connected");
    return;
  }
  top();
  const fresh = !state.rounds.length && !state.evaluations.length;
  document.body.classList.toggle("fresh", fresh);
  $("empty").hidden = !fresh;
  if (fresh) empty();
  else {
    tiles();
    hero();
    now();
    spread();
    rounds();
    clients.draw();
    conflicts.refresh();
  }
  events();
}

function phaseWords(status) {
  if (status.paused && status.phase !== "finished") return "paused";
  switch (status.phase) {
    case "waiting": return status.missing ? `waiting for ${plural(status.missing, "more client")}` : "waiting";
    case "training": return `training · ${status.received} of ${status.received + status.asked} updates`;
    case "aggregating": return `aggregating ${plural(status.received, "update")}`;
    case "verifying": return `trying the step · waiting for ${status.asked}`;
    case "evaluating": return `evaluating · waiting for ${status.asked}`;
    default: return status.phase;
  }
}

/** Rounds are counted from 1 in texts: version 3 means that the fourth round is under way. */
function roundWords({ phase, version, rounds_planned: planned }) {
  return phase === "finished" ? `${whole(version)} of ${plural(planned, "round")} done` : `round ${whole(Math.min(version + 1, planned))} of ${whole(planned)}`;
}

function top() {
  const { status } = state;
  document.title = `${status.federation} · FairFleet`;
  document.body.dataset.phase = status.phase;
  text("federation", status.federation);
  $("federation").title = `${status.federation_id} · server: ${status.software}`;
  text("about", `${status.rule} · ${plural(status.parameters, "parameter")} · ${whole(status.connected)} connected · ${roundWords(status)}${left(status)}${spent(status.privacy)}`);
  $("about").title = status.privacy ? `protects from ${status.privacy.against}; ${status.privacy.not_covered}` : "";
  text("phase-text", document.body.dataset.link === "lost" ? "not connected" : phaseWords(status));
  $("progress-done").style.width = `${(100 * status.version) / status.rounds_planned}%`;
  $("progress").setAttribute("aria-valuenow", status.version);
  $("progress").setAttribute("aria-valuemax", status.rounds_planned);
  text("moved", `${bytes(status.bytes_sent)} to clients, ${bytes(status.bytes_received)} from them, since the server's start`);
}

function spent(privacy) {
  if (!privacy) return "";
  const limit = privacy.max_epsilon === undefined ? "" : ` of ${privacy.max_epsilon}`;
  return ` · ε ${privacy.epsilon === null ? "∞" : privacy.epsilon.toPrecision(3)}${limit} at δ ${privacy.delta}`;
}

function left(status) {
  const recent = state.rounds.slice(-20);
  if (status.phase === "finished" || recent.length < 2) return "";
  const pace = (recent.at(-1).unix_seconds - recent[0].unix_seconds) / (recent.length - 1);
  return ` · about ${duration(pace * (status.rounds_planned - status.version))} left`;
}

function banner() {
  const box = $("banner"), { status } = state, lost = document.body.dataset.link === "lost";
  const finished = status?.phase === "finished";
  const words = finished ? `Finished at version ${status.version}: ${status.ended}${lost ? " (the server has ended since)" : ""}`
    : lost && !status ? "No connection to the server, and nothing was heard from it yet. Trying again."
    : lost ? "No connection to the server: what you see is what it last said. Trying again." : status?.held_because ? `No round begins: ${status.held_because}.` : status?.paused ? "Paused: no new round begins until somebody resumes." : "";
  box.hidden = !words;
  box.classList.toggle("good", finished);
  box.classList.toggle("calm", !finished && !lost);
  text("banner", words);
}

function empty() {
  const { status } = state;
  text("empty-title", status.missing ? "Waiting for clients" : "The first round has begun");
  const here = status.connected ? `${plural(status.connected, "client")} connected` : "No client is connected yet";
  text("empty-text", status.missing ? `${here}; the first round begins with ${plural(status.missing, "more")}.`.replace("mores", "more") : `${here}; charts appear when it is committed.`);
  const port = status.listen.split(":").at(-1);
  text("empty-server", `${location.hostname}:${port === "0" ? "PORT" : port}`);
}

// ---- tiles ---------------------------------------------------------------------------------------

function change(value, before, good, format) {
  if (value == null || before == null) return null;
  const difference = value - before, kind = Math.abs(difference) < 5e-5 ? "" : difference * good > 0 ? "up" : "down";
  const [figure, unit] = format(difference).split(" ");
  return h("span", { class: kind }, figure, unit && h("span", { class: "unit" }, ` ${unit}`));
}

function tile(id, kind, name, value, note, line, delta) {
  return h("div", { class: `tile ${kind}`, id: `tile-${id}`, title: TILES[id] }, h("div", { class: "name" }, h("span", null, name), delta), h("div", { class: "value" }, value), h("div", { class: "note" }, note), line);
}

function tiles() {
  const all = evaluated(), what = measure(), last = figures(newest(), what), before = figures(all.at(-2), what), round = state.rounds.at(-1);
  const accurate = what === "accuracy", format = accurate ? percent : number, good = sign(what);
  const delta = (key, sign) => change(last?.[key], before?.[key], sign, accurate ? changed : (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`);
  const history = (key) => all.map((entry) => figures(entry, what)?.[key]);
  const gap = (entry) => (entry ? Math.abs(entry.mean - entry.worst_10) : null);
  $("tiles").replaceChildren(
    tile("worst", "worst", "worst 10 %", format(last?.worst_10), last ? "of the worst served" : "no evaluation yet", spark(history("worst_10"), "worst-c"), delta("worst_10", good)),
    tile("mean", "mean", `mean ${what}`, format(last?.mean), last ? `of ${plural(last.clients, "client")}, version ${newest().version}` : "no evaluation yet", spark(history("mean"), "mean-c"), delta("mean", good)),
    tile("gap", "", "gap", (accurate ? points : number)(gap(last)), "what the mean hides", spark(all.map((entry) => gap(figures(entry, what))), "faint-c"), change(gap(last), gap(before), -1, accurate ? changed : number)),
    tile("angle", "", "unevenness", last ? `${last.angle_degrees.toFixed(1)}°` : format(null), last ? `Gini ${number(last.gini)} · Jain ${number(last.jain)}` : "angle to all alike", spark(history("angle_degrees"), "faint-c")),
    improvedTile(all),
    tile("conflicts", "", "in conflict", round?.conflicts != null ? `${round.conflicts} / ${round.updates}` : "–", conflictWords(round), spark(state.rounds.map((entry) => entry.conflicts), "worst-c")),
  );
}

/** Returns in how many layers the newest direction harms clients, and the longest streak of one client. */
function conflictWords(round) {
  if (!round) return "";
  if (round.conflicts == null) return `not computed: diagnostics ${round.diagnostics ?? "unknown"}`;
  const streak = Math.max(0, ...[...state.clients.values()].filter((row) => row.state !== "gone").map((row) => row.streak ?? 0));
  return [round.conflicting_layers == null ? "over the model" : `in ${plural(round.conflicting_layers, "layer")}`, `streak ${streak}`].join(" · ");
}

/** Shows value, note and line of one kind: of measured steps, or without any of evaluations. */
function improvedTile(all) {
  const measured = state.rounds.filter((entry) => entry.measured != null), step = measured.at(-1);
  if (!step) return tile("improved", "", "improved ρ", percent(newest()?.improved), "since the evaluation before", spark(all.map((entry) => entry.improved), "best-c"));
  const promised = step.promised == null ? "" : `, promised ${Math.round(100 * step.promised)} %`;
  return tile("improved", "", "improved ρ", percent(step.measured), `in round ${step.round + 1}${promised}`, spark(measured.map((entry) => entry.measured), "best-c"));
}

// ---- charts --------------------------------------------------------------------------------------

const STORIES = {
  accuracy: { name: "accuracy", there: () => newest()?.accuracy, entries: () => state.evaluations.filter((entry) => entry.accuracy), format: percent, lead: "On the clients' own test data. The shaded band runs from the worst-served tenth to the best." },
  loss: { name: "loss", there: () => newest()?.loss, entries: () => state.evaluations.filter((entry) => entry.loss), format: number, lead: "On the clients' own test data; lower is better." },
  training: { name: "training loss", there: () => state.rounds.length, format: number, lead: "Of the model that each round's clients received, on their training data; lower is better." },
};
// What the training losses are, where they were not measured exactly over all training data.
const LOSS_NOTES = {
  batches: " Means of batch losses over the first pass, while the model trains.",
  sampled: " Measured on a random sample of each client's data.",
  mixed: " Some were measured exactly, some are means of batch losses or of a sample.",
};
let story = null;

/** The charts to choose from: loss, accuracy and training loss, and the tasks' own measures, what clients are compared by first. */
function stories() {
  const more = own().map((name) => [name, { name, there: () => true, entries: () => state.evaluations.filter((entry) => figures(entry, name)), format: number, lead: `On the clients' own test data; ${sign(name) > 0 ? "higher" : "lower"} is better.` }]);
  const all = { ...STORIES, ...Object.fromEntries(more) }, what = measure();
  return what in all ? { [what]: all[what], ...all } : all;
}

function hero() {
  const known = stories(), possible = Object.keys(known).filter((key) => known[key].there());
  const chosen = possible.includes(story) ? story : possible[0];
  const make = (key) => h("button", { type: "button", role: "tab", onclick: () => { story = key; hero(); } }, known[key].name);
  keyed($("hero-tabs"), possible, make, (tab, key) => tab.setAttribute("aria-selected", String(key === chosen)));
  const note = chosen === "training" ? (LOSS_NOTES[state.rounds.at(-1)?.loss_measurement] ?? "") : "";
  text("hero-lead", known[chosen].lead + note);
  if (chosen === "training") return trainingLoss();
  const { entries, format } = known[chosen], found = entries();
  const of = (key) => found.map((entry) => figures(entry, chosen)[key]);
  lines($("hero-chart"), {
    x: found.map((entry) => entry.version), xName: "version", format, floor: chosen === "accuracy" || chosen === "loss" ? 0 : undefined, ceiling: chosen === "accuracy" ? 1 : undefined,
    bands: [{ color: "mean-c", low: of("worst_10"), high: of("best_10") }],
    lines: [{ name: "best 10 %", color: "best-c", values: of("best_10"), thin: true }, { name: "mean", color: "mean-c", values: of("mean") }, { name: "worst 10 %", color: "worst-c", values: of("worst_10") }, ...serverLine(chosen, found)],
  });
}

/** The server's own test data, if it has any, at the versions that it evaluated. */
function serverLine(what, found) {
  const known = new Map(state.server_evaluations.map((entry) => [entry.version, entry.measures[what]]));
  const values = found.map((entry) => known.get(entry.version) ?? null);
  return values.some((entry) => entry != null) ? [{ name: "server's test data", color: "three-c", values, thin: true }] : [];
}

function trainingLoss() {
  lines($("hero-chart"), {
    x: state.rounds.map((entry) => entry.round + 1), xName: "round", format: number,
    lines: [{ name: "mean", color: "mean-c", values: state.rounds.map((entry) => entry.loss_mean) }, { name: "worst 10 %", color: "worst-c", values: state.rounds.map((entry) => entry.loss_worst_10) }],
  });
}

function due_words() {
  const every = state.status.evaluate_every;
  return every ? `No evaluation yet: clients evaluate every ${plural(every, "round")} and at the end.` : "No evaluations: round.evaluate_every is 0.";
}

function failedWords({ version, outcomes }) {
  const parts = Object.entries({ failed: "failed", silent: "did not answer", no_test_data: "without test data" }).filter(([key]) => outcomes[key]);
  return `Version ${version}: no client gave a result (${parts.map(([key, words]) => `${whole(outcomes[key])} ${words}`).join(", ")}).`;
}

function now() {
  const last = newest(), what = measure(), tried = state.evaluations.at(-1);
  if (!last) { text("now-lead", ""); return none($("now-chart"), tried ? failedWords(tried) : due_words()); }
  const values = [...state.clients.values()].filter((row) => row.evaluated === last.version && value(row, what) != null).map((row) => value(row, what));
  if (!figures(last, what)) { text("now-lead", ""); return none($("now-chart"), `No client reports ${what}.`); }
  const { worst_10, mean, min, max } = figures(last, what), accurate = what === "accuracy", format = accurate ? (value) => `${Math.round(100 * value)} %` : number;
  const left_out = last.outcomes.failed + last.outcomes.silent + last.outcomes.no_test_data;
  text("now-version", `version ${last.version}`);
  text("now-lead", tried !== last ? failedWords(tried) : left_out ? `${plural(left_out, "client")} gave no result and ${left_out === 1 ? "is" : "are"} left out.` : `${what[0].toUpperCase()}${what.slice(1)} of ${plural(values.length, "client")}.`);
  const low = accurate ? Math.min(Math.floor(min * 10) / 10, 0.9) : min, high = accurate ? Math.max(Math.ceil(max * 10) / 10, low + 0.1) : max + (max > min ? 0 : 1);
  histogram($("now-chart"), values, {
    low, high, bins: Math.max(5, Math.min(24, Math.round(2 * Math.sqrt(values.length) + 2))), format,
    marks: [{ name: "mean", value: mean, color: "mean-c" }, { name: "worst 10 %", value: worst_10, color: "worst-c" }],
    worse: (from, to) => (sign(what) > 0 ? from <= worst_10 : to >= worst_10),
  });
}

function spread() {
  const what = measure(), found = state.evaluations.filter((entry) => figures(entry, what));
  if (!found.length) { text("spread-lead", ""); return none($("spread-chart"), due_words()); }
  text("spread-lead", "Every client between the outer edges, half of them in the dark band.");
  const of = (place) => found.map((entry) => figures(entry, what).quantiles[place]);
  lines($("spread-chart"), {
    x: found.map((entry) => entry.version), xName: "version", format: what === "accuracy" ? percent : number, floor: what === "accuracy" || what === "loss" ? 0 : undefined, ceiling: what === "accuracy" ? 1 : undefined,
    bands: [{ color: "mean-c", low: of(0), high: of(6) }, { color: "mean-c", low: of(1), high: of(5) }, { color: "mean-c", low: of(2), high: of(4) }],
    lines: [{ name: "highest", color: "faint-c", values: of(6), thin: true }, { name: "median", color: "mean-c", values: of(3) }, { name: "lowest", color: "faint-c", values: of(0), thin: true }],
  });
}

function rounds() {
  const recent = state.rounds.slice(-60);
  if (!recent.length) return none($("rounds-chart"), "No round yet.");
  const of = (key) => recent.map((entry) => entry[key]), mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const parts = [["training", "one-c", of("training_seconds")], ["aggregation", "two-c", of("aggregation_seconds")], ["verification", "four-c", of("verification_seconds")], ["commit", "three-c", of("commit_seconds")]].filter(([name, , values]) => name !== "verification" || values.some(Boolean));
  const fallbacks = recent.filter((entry) => entry.status !== "ok").length;
  const factor = recent.at(-1).factor, judged = admissionWords(recent);
  $("rounds-lead").replaceChildren(...parts.map(([name, color, values]) => h("span", { class: `key ${color}` }, `${name} ${duration(mean(values))}`)), h("span", null, [fallbacks && plural(fallbacks, "fallback"), factor != null && `newest step × ${factor}`, judged].filter(Boolean).join(" · ")));
  stacks($("rounds-chart"), of("round").map((round) => round + 1), parts.map(([name, color, values]) => ({ name, color, values })), duration);
}

/** Returns what admission did about unusual updates in these rounds. */
function admissionWords(recent) {
  const counts = {};
  for (const entry of recent) for (const [decision, count] of Object.entries(entry.admission)) counts[decision] = (counts[decision] ?? 0) + count;
  return Object.entries(counts).map(([decision, count]) => `${whole(count)} ${decision}`).join(", ");
}

let newestEvent = 0;

function events() {
  const last = state.events.at(-1)?.revision ?? 0;
  if (!last) return $("event-list").replaceChildren(h("li", { class: "faint" }, "Nothing has happened since the server's start."));
  if (last === newestEvent) return;
  newestEvent = last;
  $("event-list").replaceChildren(...state.events.slice().reverse().map((event) => h("li", { class: event.kind }, h("time", null, clock(event.unix_seconds)), h("span", null, event.text))));
}

// ---- light and dark ------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  document.documentElement.style.colorScheme = chosen;
  conflicts.draw();
}

$("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  theme();
});
dark.addEventListener("change", theme);
new ResizeObserver(drawSoon).observe(document.querySelector("main"));

const started = Date.now();
theme();
tiles();
clients.start();
conflicts.start();
connect();
setInterval(() => { if (state.status) { clients.draw(); conflicts.refresh(); } }, 2000);
