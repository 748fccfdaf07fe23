// The conflict map: cosines between the updates of the newest round, and of each with the direction, over
// the whole model or in one layer.
import { $, h, keyed, text, tip } from "./dom.js";
import { state } from "./state.js";
import { number, plural } from "./words.js";

const PAUSE_MS = 2000; // between two requests, because rounds may be shorter

let layer = "";
let shown = null; // round and layer on the screen
let requestedAt = 0;
let conflictMap = null;

export async function refresh(force = false) {
  const round = state.rounds.at(-1)?.round;
  if (round == null) return nothing("The map appears with the first round.");
  if (!force && (shown === `${round}/${layer}` || Date.now() - requestedAt < PAUSE_MS)) return;
  requestedAt = Date.now();
  try {
    const answer = await fetch(`/api/conflicts${layer === "" ? "" : `?layer=${layer}`}`);
    if (answer.status === 404) layer = ""; // the model has no such layer
    if (!answer.ok) throw new Error(answer.statusText);
    conflictMap = await answer.json();
    if (!(layer in conflictMap.layers)) layer = ""; // after a restart only the whole model's map is known
  } catch {
    return; // the stream shows that the server does not answer; the next round requests the map again
  }
  shown = `${conflictMap.round}/${layer}`;
  draw();
}

function nothing(words) {
  $("map").replaceChildren(h("p", { class: "none" }, words));
  keyed($("layers"), []);
  $("layers-caption").hidden = true;
}

export function draw() {
  if (!conflictMap) return;
  choices();
  const harmed = conflictMap.conflicting, level = conflictMap.diagnostics ?? "unknown";
  const where = layer === "" ? "" : ` in ${conflictMap.layers[layer]}`;
  text("conflicts-lead", conflictMap.round == null ? "" : harmed == null ? `Round ${conflictMap.round + 1}: conflicts were not computed (diagnostics ${level}).` : `Round ${conflictMap.round + 1}: ${harmed ? `the direction harms ${harmed} of ${plural(conflictMap.clients.length, "client")}${where}` : `the direction harms none of ${plural(conflictMap.clients.length, "client")}${where}`}.`);
  strip();
  if (!conflictMap.cosines.length && harmed == null) return nothing(`There is no map at diagnostics ${level}: the inner products of the updates were not computed.`);
  if (!conflictMap.cosines.length) return nothing(`With more than 100 clients in a round there is no map. ${harmed} of them are in conflict with the direction; the table below shows who.`);
  const order = conflictMap.clients.map((_, place) => place).sort((a, b) => conflictMap.direction[a] - conflictMap.direction[b]);
  paint(order);
}

/** Draws the map. The client that conflicts most is first; the right column is the direction. */
function paint(order) {
  const count = order.length, host = $("map"), cell = Math.max(2, Math.floor(Math.min(258, host.clientWidth - 60) / count));
  const gap = Math.max(4, cell >> 1), side = Math.max(cell, 10), width = cell * count + gap + side;
  const scale = devicePixelRatio || 1;
  const canvas = h("canvas", { width: width * scale, height: cell * count * scale, role: "img", "aria-label": "cosines between clients" });
  canvas.style.width = `${width}px`;
  const brush = canvas.getContext("2d"), colors = palette();
  brush.scale(scale, scale);
  order.forEach((row, down) => {
    order.forEach((column, across) => fill(brush, colors(conflictMap.cosines[row][column]), across * cell, down * cell, cell, cell));
    fill(brush, colors(conflictMap.direction[row]), cell * count + gap, down * cell, side, cell);
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const down = Math.floor((event.clientY - box.top) / (box.height / count)), x = ((event.clientX - box.left) * width) / box.width;
    const across = Math.floor(x / cell), row = order[down];
    if (row == null) return tip();
    if (across < count) return tip(event, `${conflictMap.clients[row]} × ${conflictMap.clients[order[across]]}`, [["cosine", number(conflictMap.cosines[row][order[across]])]]);
    return x < cell * count + gap ? tip() : tip(event, conflictMap.clients[row], [["with the direction", number(conflictMap.direction[row])]]);
  });
  canvas.addEventListener("pointerleave", () => tip());
  host.replaceChildren(h("div", null, canvas, h("div", { class: "scale" }, "against", h("i"), "along", h("span", null, "· right column: the direction"))));
}

function fill(brush, color, x, y, width, height) {
  const space = height > 6 ? 1 : 0;
  brush.fillStyle = color;
  brush.fillRect(x, y, width - space, height - space);
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/\w\w?/g).map((part) => parseInt(part.length === 1 ? part + part : part, 16));
  const [clash, middle, agree] = [rgb("--clash"), rgb("--soft"), rgb("--agree")];
  return (cosine) => {
    const end = cosine < 0 ? clash : agree, share = Math.min(1, Math.abs(cosine)) ** 0.8;
    return `rgb(${middle.map((from, place) => Math.round(from + (end[place] - from) * share)).join(" ")})`;
  };
}

function choices() {
  const options = [["", "whole model"], ...conflictMap.layers.map((name, place) => [String(place), `${name} · ${conflictMap.harmed[place]} harmed`])];
  const names = Object.fromEntries(options);
  keyed($("layer"), options.map(([value]) => value), (value) => h("option", { value }), (option, value) => {
    if (option.textContent !== names[value]) option.textContent = names[value];
  });
  $("layer").value = layer;
}

function strip() {
  const most = Math.max(1, conflictMap.clients.length);
  const harmed = (place) => conflictMap.harmed[place];
  keyed($("layers"), conflictMap.layers, (name, place) => h("button", {
    type: "button", onclick: () => pick(String(place) === layer ? "" : String(place)),
    onpointermove: (event) => tip(event, name, [["clients harmed", String(harmed(place))]]), onpointerleave: () => tip(),
  }), (cell, name, place) => {
    cell.setAttribute("aria-label", `${name}: ${harmed(place)} harmed`);
    cell.setAttribute("aria-pressed", String(String(place) === layer));
    cell.style.setProperty("--share", harmed(place) / most);
  });
  $("layers-caption").hidden = !conflictMap.layers.length;
}

function pick(value) {
  layer = value;
  refresh(true);
}

export function start() {
  $("layer").addEventListener("change", (event) => pick(event.target.value));
}
