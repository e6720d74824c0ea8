// Builds elements. Every text is inserted as text, so nothing that a model or a user wrote ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "circle", "path", "line", "text", "title"]);

export const $ = (id) => document.getElementById(id);

/** Makes an element: h("p", {class: "note", onclick: f}, "text", child). `style` is an object, set through the CSSOM. */
export function h(tag, props = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const put = (parent, ...children) => parent.replaceChildren(...children.flat().filter(Boolean));

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(Math.round(value));
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${(value / size).toFixed(value / size < 10 ? 1 : 0)} ${unit}`;
  return `${value} B`;
}

export function ms(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export const tierName = (tier) => (tier === "ram" ? "RAM" : tier);

export function age(seconds) {
  const s = Math.max(0, seconds);
  if (s < 5) return "now";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (s >= size) return `${Math.floor(s / size)} ${unit}`;
  return `${Math.floor(s)} s`;
}

export const ago = (seconds) => (age(seconds) === "now" ? "now" : `${age(seconds)} ago`);

/** Asks in a dialog. Resolves to true if the answer was yes. */
export function sure(title, text, yes) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  $("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), {once: true}));
}

export function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Makes a colour key from pairs of a class and a word. */
export const legend = (list, pairs) => put(list, pairs.map(([kind, word]) => h("li", {}, h("span", {class: `swatch ${kind}`}), word)));

/** Returns round numbers from nothing up to a highest value or just above it. */
export function ticks(most) {
  const rough = most / 4;
  const size = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= rough) ?? 1;
  return Array.from({length: Math.ceil(most / step) + 1}, (_, i) => i * step);
}
