// Charts as SVG, without a library: lines with bands, bars, and small lines in tiles.
import { h, s, tip } from "./dom.js";

const LEFT = 46, TOP = 10, BOTTOM = 24;

/** Returns about `count` round numbers that cover low..high. */
export function ticks(low, high, count) {
  if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
}

export function none(host, words) {
  host.replaceChildren(h("p", { class: "none" }, words));
}

const path = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function frame(host, right) {
  const width = host.clientWidth, height = host.clientHeight;
  const box = { width, height, left: LEFT, right: width - right, top: TOP, bottom: height - BOTTOM };
  return [box, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" })];
}

/** Removes trailing zeros: 80.0 % becomes 80 %, 0.500 becomes 0.5. */
const short = (words) => words.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

function axes(svg, box, marks, y, format) {
  for (const mark of marks) {
    svg.append(
      s("line", { class: "grid", x1: box.left, x2: box.right, y1: y(mark), y2: y(mark) }),
      s("text", { x: box.left - 8, y: y(mark) + 4, "text-anchor": "end" }, short(format(mark))),
    );
  }
}

function bottomLabels(svg, box, x, low, high, name) {
  const marks = ticks(low, high, Math.max(2, Math.round((box.right - box.left) / 110))).filter((mark) => mark >= low && mark <= high && Number.isInteger(mark));
  for (const mark of marks.length ? marks : [high]) svg.append(s("text", { x: x(mark), y: box.height - 6, "text-anchor": "middle" }, `${mark === marks[0] || !marks.length ? `${name} ` : ""}${mark}`));
}

/** Writes the names at the ends of lines, moved apart where they would overlap. */
function endLabels(svg, box, ends) {
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, place) => (end.labelY = Math.max(end.y + 4, place ? ends[place - 1].labelY + 14 : 0)));
  for (const { labelY, y, x, name, color } of ends) {
    svg.append(s("circle", { class: `end ${color}`, cx: x, cy: y, r: 3.2 }), s("text", { class: `label ${color}`, x: x + 9, y: labelY }, name));
  }
}

/**
 * spec: x (numbers), xName, lines [{name, color, values, thin}], bands [{color, low, high}], format, floor and ceiling (of y, optional).
 * A value may be null: the line has a gap there.
 */
export function lines(host, spec) {
  const [box, svg] = frame(host, 92);
  const known = [...spec.lines.map((line) => line.values), ...(spec.bands ?? []).flatMap((band) => [band.low, band.high])].flat().filter((value) => value != null);
  let low = Math.min(...known), high = Math.max(...known);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [Math.max(spec.floor ?? -Infinity, low - room), Math.min(spec.ceiling ?? Infinity, high + room)];
  const marks = ticks(low, high, Math.max(2, Math.round((box.bottom - box.top) / 52)));
  [low, high] = [marks[0], marks.at(-1)];
  const first = spec.x[0], last = spec.x.at(-1);
  const x = (value) => box.left + ((box.right - box.left) * (last > first ? value - first : 0.5)) / (last > first ? last - first : 1);
  const y = (value) => box.bottom - ((box.bottom - box.top) * (value - low)) / (high - low);
  axes(svg, box, marks, y, spec.format);
  bottomLabels(svg, box, x, first, last, spec.xName);
  for (const band of spec.bands ?? []) {
    const there = band.high.map((value, place) => [x(spec.x[place]), y(value)]);
    const back = band.low.map((value, place) => [x(spec.x[place]), y(value)]).reverse();
    svg.append(s("path", { class: `band ${band.color}`, d: `${path([...there, ...back])}Z` }));
  }
  const ends = [];
  for (const line of spec.lines) {
    const points = line.values.map((value, place) => (value == null ? null : [x(spec.x[place]), y(value)])).filter(Boolean);
    if (!points.length) continue;
    svg.append(s("path", { class: `line ${line.color}${line.thin ? " thin" : ""}`, d: path(points) }));
    ends.push({ x: points.at(-1)[0], y: points.at(-1)[1], name: line.name, color: line.color });
  }
  endLabels(svg, box, ends);
  hover(svg, box, spec.x.map(x), (event, place) =>
    tip(event, `${spec.xName} ${spec.x[place]}`, spec.lines.map((line) => [line.name, spec.format(line.values[place])])));
  host.replaceChildren(svg);
}

function hover(svg, box, places, show) {
  const cross = s("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const pointerX = event.clientX - svg.getBoundingClientRect().left;
    let nearest = 0;
    places.forEach((x, place) => { if (Math.abs(x - pointerX) < Math.abs(places[nearest] - pointerX)) nearest = place; });
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", places[nearest]);
    cross.setAttribute("x2", places[nearest]);
    show(event, nearest);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(); });
}

/** Draws how many clients have which value, with marks at some values: [{name, value, color}]. */
export function histogram(host, values, { low, high, bins, format, marks, worse }) {
  const [box, svg] = frame(host, 14);
  const counts = new Array(bins).fill(0), width = (high - low) / bins || 1;
  for (const value of values) counts[Math.min(bins - 1, Math.max(0, Math.floor((value - low) / width)))] += 1;
  const steps = ticks(0, Math.max(...counts), 4).filter(Number.isInteger);
  const x = (value) => box.left + ((box.right - box.left) * (value - low)) / (high - low || 1);
  const y = (count) => box.bottom - ((box.bottom - box.top - 30) * count) / steps.at(-1);
  axes(svg, box, steps, y, String);
  counts.forEach((count, place) => {
    const from = low + place * width, left = x(from), right = x(from + width);
    const bar = s("rect", { class: `bar ${worse(from, from + width) ? "worst-c" : "mean-c"}`, x: left + 1, width: Math.max(1, right - left - 2), y: y(count), height: box.bottom - y(count), rx: 3 });
    bar.addEventListener("pointermove", (event) => tip(event, `${format(from)} to ${format(from + width)}`, [["clients", String(count)]]));
    bar.addEventListener("pointerleave", () => tip());
    svg.append(bar);
  });
  for (const value of [low, (low + high) / 2, high]) svg.append(s("text", { x: x(value), y: box.height - 6, "text-anchor": value === low ? "start" : value === high ? "end" : "middle" }, format(value)));
  marks.forEach(({ name, value, color }, place) => {
    const at = x(value), beyond = at > (box.left + box.right) / 2;
    svg.append(
      s("line", { class: `cross ${color}`, x1: at, x2: at, y1: box.top + 6 + 14 * place, y2: box.bottom }),
      s("text", { class: `label ${color}`, x: at + (beyond ? -5 : 5), y: box.top + 10 + 14 * place, "text-anchor": beyond ? "end" : "start" }, name),
    );
  });
  host.replaceChildren(svg);
}

/** Draws stacked bars: parts [{name, color, values}] for each of the titles. */
export function stacks(host, titles, parts, format) {
  const [box, svg] = frame(host, 10);
  const totals = titles.map((_, place) => parts.reduce((sum, part) => sum + part.values[place], 0));
  const middle = [...totals].sort((a, b) => a - b)[totals.length >> 1];
  const marks = ticks(0, Math.max(Math.min(Math.max(...totals), 4 * middle), 1e-9), 3); // one long round must not flatten the others
  const y = (value) => box.bottom - (box.bottom - box.top) * Math.min(1.04, value / marks.at(-1));
  const width = Math.min(26, (box.right - box.left) / titles.length);
  axes(svg, box, marks, y, format);
  titles.forEach((title, place) => {
    let below = 0;
    for (const part of parts) {
      const value = part.values[place], x = box.left + place * width;
      svg.append(s("rect", { class: `bar ${part.color}`, x: x + width * 0.1, width: width * 0.8, y: y(below + value), height: Math.max(0, y(below) - y(below + value)) }));
      below += value;
    }
  });
  svg.append(s("text", { x: box.left, y: box.height - 6 }, `round ${titles[0]}`), s("text", { x: box.left + width * titles.length, y: box.height - 6, "text-anchor": titles.length * width > 160 ? "end" : "start" }, titles.length > 1 ? String(titles.at(-1)) : ""));
  hover(svg, box, titles.map((_, place) => box.left + (place + 0.5) * width), (event, place) =>
    tip(event, `round ${titles[place]}`, parts.map((part) => [part.name, format(part.values[place])])));
  host.replaceChildren(svg);
}

export function spark(values, color) {
  const known = values.filter((value) => value != null).slice(-30);
  if (known.length < 2) return null;
  const low = Math.min(...known), high = Math.max(...known), width = 50, height = 22;
  const points = known.map((value, place) => [(place * width) / (known.length - 1), height - 2 - ((height - 4) * (value - low)) / (high - low || 1)]);
  return s("svg", { width, height, class: color, "aria-hidden": "true" }, s("path", { class: "line thin", d: path(points) }));
}
