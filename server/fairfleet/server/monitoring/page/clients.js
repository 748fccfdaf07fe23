// The table of clients. Only visible rows exist in the page, so it stays fast with thousands of clients.
import { COLUMNS as explanations } from "./explanations.js";
import { $, h, keyed, text } from "./dom.js";
import { figures, measure, need, newest, sign, state, value } from "./state.js";
import { clock, duration, NONE, number, percent, plural } from "./words.js";

const HEIGHT = 36, BEYOND = 6; // pixels of a row; rows kept above and below the visible ones

const COLUMNS = [
  { name: "client", key: (row) => row.client, cell: (row) => h("span", { class: "name", title: [row.device, row.software].filter(Boolean).join(" · ") }, row.client) },
  { name: "state", key: (row) => row.state, cell: standing },
  { name: "accuracy", title: measure, key: need, cell: served },
  { name: "loss", class: "n", key: (row) => row.loss ?? -Infinity, down: true, cell: (row) => number(row.loss) },
  { name: "updates", class: "n", key: (row) => row.updates, cell: (row) => h("span", { title: "updates that count / times selected" }, `${row.updates} / ${row.asked}`) },
  { name: "coefficient", class: "n", key: (row) => row.coefficient ?? -Infinity, down: true, cell: (row) => number(row.coefficient) },
  { name: "cosine", class: "n", key: (row) => row.cosine ?? Infinity, cell: (row) => h("span", { class: row.cosine < -1e-9 ? "clash" : "", title: "of its update with the direction" }, number(row.cosine)) },
  { name: "conflicts", class: "n", key: (row) => row.conflicts, down: true, cell: conflicts },
  { name: "last seen", class: "n", key: (row) => row.seen_unix ?? 0, cell: seen },
];

const names = new Intl.Collator("en", { numeric: true }); // client-9 before client-10

let sorted = { column: COLUMNS[2], down: false };
let rows = [];
let wanted = "";

/** The word for a client's state; the API calls finished clients done. */
const stateWord = (row) => (row.state === "done" ? "finished" : row.state);

function standing(row) {
  const excluded = row.connected && row.not_selected_because, title = excluded || (row.state === "retired" ? row.not_selected_because : "");
  return h("span", { class: `state ${row.state}`, title }, h("i"), excluded ? `${stateWord(row)}, not selected` : stateWord(row));
}

function served(row) {
  const what = measure(), known = value(row, what), fleet = figures(newest(), what);
  if (known == null) return h("span", { class: "faint", title: row.failure }, row.failure || (row.evaluated == null ? "not evaluated" : `no ${what}`));
  const low = fleet && sign(what) * known <= sign(what) * fleet.worst_10 + 1e-12, title = row.failure || `version ${row.evaluated}`;
  if (what !== "accuracy") return h("div", { class: `meter${low ? " low" : ""}`, title }, h("b", null, number(known)));
  const fill = h("div", { class: "fill" });
  fill.style.width = `${100 * known}%`;
  return h("div", { class: `meter${low ? " low" : ""}`, title }, h("div", { class: "track" }, fill), h("b", null, percent(known)));
}

function conflicts(row) {
  if (row.conflicts == null) return h("span", { class: "faint", title: "not computed: see the setting diagnostics" }, NONE);
  return h("span", { class: row.streak ? "clash" : "", title: `${row.streak} in a row; counted over the newest 200 rounds` }, row.streak > 1 ? `${row.conflicts} (${row.streak}×)` : String(row.conflicts));
}

function seen(row) {
  if (row.connected) return "connected";
  const ago = row.seen_unix == null ? null : Date.now() / 1000 + state.skew - row.seen_unix;
  return h("span", { title: row.seen_unix == null ? "" : clock(row.seen_unix) }, ago == null ? NONE : `${duration(Math.max(0, ago))} ago`);
}

function head() {
  const make = (name, place) => h("span", { role: "columnheader", class: COLUMNS[place].class, title: explanations[name] }, h("button", { type: "button", onclick: () => choose(COLUMNS[place]) }));
  keyed($("table-head"), COLUMNS.map((column) => column.name), make, (cell, name, place) => {
    const mine = COLUMNS[place] === sorted.column, button = cell.firstChild;
    button.textContent = `${COLUMNS[place].title?.() ?? name}${mine ? (sorted.down ? " ↓" : " ↑") : ""}`;
    if (mine) button.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    else button.removeAttribute("aria-sort");
  });
}

function choose(column) {
  sorted = { column, down: column === sorted.column ? !sorted.down : Boolean(column.down) };
  head();
  draw();
}

/** How many clients have which software, where they differ: the progress of an upgrade. */
function versions() {
  const counts = new Map();
  for (const row of state.clients.values()) if (row.software) counts.set(row.software, (counts.get(row.software) ?? 0) + 1);
  if (counts.size < 2) return "";
  return ` · ${[...counts].sort((one, other) => other[1] - one[1]).map(([name, count]) => `${count} with ${name}`).join(", ")}`;
}

export function draw() {
  head();
  const key = sorted.column.key, sign = sorted.down ? -1 : 1;
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (row) => words.every((word) => `${row.client} ${row.device} ${row.software} ${stateWord(row)} ${row.not_selected_because ? "not selected" : ""}`.toLowerCase().includes(word));
  const keyed = [...state.clients.values()].filter(fits).map((row) => [key(row), row]);
  keyed.sort(([one, a], [other, b]) => sign * (typeof one === "string" ? names.compare(one, other) : one < other ? -1 : one > other ? 1 : 0) || names.compare(a.client, b.client));
  rows = keyed.map(([, row]) => row);
  const all = state.clients.size;
  text("clients-count", rows.length === all ? `${plural(all, "client")}${versions()}` : `${rows.length} of ${plural(all, "client")}`);
  $("table-space").style.height = `${Math.max(1, rows.length) * HEIGHT}px`;
  $("table-scroll").classList.toggle("short", rows.length < 12);
  show();
}

function show() {
  const view = $("table-scroll"), first = Math.max(0, Math.floor(view.scrollTop / HEIGHT) - BEYOND);
  const visible = rows.slice(first, first + Math.ceil((view.clientHeight || 432) / HEIGHT) + 2 * BEYOND);
  $("table-space").replaceChildren(...visible.map((row, place) => {
    const line = h("div", { class: "row", role: "row", "data-client": row.client }, ...COLUMNS.map((column) => h("span", { role: "cell", class: column.class, "data-column": column.name }, column.cell(row))));
    line.style.top = `${(first + place) * HEIGHT}px`;
    return line;
  }));
}

export function start() {
  head();
  $("table-scroll").addEventListener("scroll", () => requestAnimationFrame(show), { passive: true });
  $("search").addEventListener("input", (event) => { wanted = event.target.value; $("table-scroll").scrollTop = 0; draw(); });
}
