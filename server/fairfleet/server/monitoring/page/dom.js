// Elements are built without markup in strings, so the name of a client is never read as markup.
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Creates the children again only when the list of keys changes, so a redraw loses no click and no focus. */
export function keyed(host, keys, make = () => null, update = () => {}) {
  const list = JSON.stringify(keys);
  if (host.dataset.keys !== list) {
    host.dataset.keys = list;
    host.replaceChildren(...keys.map(make));
  }
  keys.forEach((key, place) => update(host.children[place], key, place));
}

export function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

/** Shows lines of [name, value] next to the pointer; null hides them. */
export function tip(event, title, lines) {
  const box = $("tip");
  box.hidden = title == null;
  if (box.hidden) return;
  box.replaceChildren(h("b", null, title), ...lines.map(([name, value]) => h("div", null, h("span", null, name), h("span", null, value))));
  const { offsetWidth: width, offsetHeight: height } = box;
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY - height / 2, innerHeight - height - 4))}px`;
}
