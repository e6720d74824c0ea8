// The cache map: a tree of shared beginnings. Token positions run from left to right. At the token where prompts differ,
// one continues in the row and the others are drawn below.

import {get, post, remove} from "/web/api.js";
import {$, age, ago, bytes, count, h, legend, notice, plural, put, sure, tierName} from "/web/dom.js";

const ROW = 44;
const BAR = 34;
const LEAST = [10, 34]; // pixels of the narrowest stretch between two ends: among many, and among few
const WORDS = 60; // characters of a stretch that name it
const TIERS = ["ram", "disk"];
let chosen = null;
let shown = [];
let seen = "";

const words = (one) => (one.text ?? "").trim().replace(/\s+/g, " ").slice(0, WORDS);
const nameOf = (one) => one.name || words(one) || `${count(one.tokens)} tokens`;

/** Sets rows and levels. The longest continuation stays in its parent's row; every other branch gets a row below. */
function arranged(stretches) {
  const children = new Map(stretches.map((one) => [one.id, []]));
  const roots = [];
  for (const one of stretches) (children.get(one.parent) ?? roots).push(one);
  const ends = new Map();
  const end = (one) => {
    if (!ends.has(one.id)) ends.set(one.id, Math.max(one.start + one.tokens, ...children.get(one.id).map(end)));
    return ends.get(one.id);
  };
  const order = (list) => list.sort((a, b) => end(b) - end(a) || a.id.localeCompare(b.id));
  const placed = [];
  let rows = 0;
  const place = (one, row, level, parent) => {
    const here = {...one, row, level, parentPlace: parent, children: []};
    placed.push(here);
    parent?.children.push(here);
    order(children.get(one.id)).forEach((child, at) => place(child, at ? rows++ : row, level + 1, here));
  };
  for (const root of order(roots)) place(root, rows++, 1, null);
  return {placed, rows};
}

/** Maps token positions to pixels: in proportion, except that no stretch is too narrow to be seen. */
function axis(placed, width) {
  const points = [...new Set(placed.flatMap((one) => [one.start, one.start + one.tokens]).concat(0))].sort((a, b) => a - b);
  const least = Math.min(LEAST[1], Math.max(LEAST[0], (0.6 * width) / points.length));
  const spare = Math.max(0, width - least * (points.length - 1));
  const last = points.at(-1) || 1;
  const at = new Map([[points[0], 0]]);
  for (let i = 1; i < points.length; i++) at.set(points[i], at.get(points[i - 1]) + least + (spare * (points[i] - points[i - 1])) / last);
  const within = (one, token) => at.get(one.start) + ((at.get(one.start + one.tokens) - at.get(one.start)) * (token - one.start)) / one.tokens - 1;
  return {at: (token) => at.get(token), within, width: at.get(last), points};
}

// The map does not show how often tenants use what all of them share.
const used = (one, now) => one.uses === null ? [] : [plural(one.uses, "hit"), `used ${ago(now - one.last_used)}`];

function said(one, now) {
  return [nameOf(one), `${plural(one.tokens, "token")} from position ${count(one.start)}`,
    one.prompts > 1 && `${count(one.prompts)} prompts begin so`, `in ${tierName(one.tier)}`, bytes(one.bytes),
    one.snapshots.length && `${plural(one.snapshots.length, "snapshot")} of ${bytes(one.snapshot_bytes)}`,
    ...used(one, now), one.pinned_until && "pinned", !one.own && "shared by all tenants"]
    .filter(Boolean).join(", ");
}

function draw(stretches, now) {
  const map = $("map");
  const held = document.activeElement?.dataset?.stretch;
  const {placed, rows} = arranged(stretches);
  shown = placed;
  $("map-empty").hidden = placed.length > 0;
  if (!placed.length) { put(map); return; }
  const scale = axis(placed, Math.max(240, map.clientWidth - 4));
  const height = rows * ROW + 22;
  const lines = h("svg", {class: "lines", width: scale.width, height, "aria-hidden": "true"});
  const ticks = scale.points.filter((_, i, all) => all.length < 9 || i % Math.ceil(all.length / 8) === 0 || i === all.length - 1);
  let free = -1;
  for (const token of ticks) {
    const x = scale.at(token);
    const last = token === ticks.at(-1);
    if (x < free || (!last && x > scale.width - 80)) continue;
    free = x + 44;
    lines.append(h("line", {x1: x, x2: x, y1: 16, y2: height}), h("text", {x: last ? scale.width : x, y: 11, "text-anchor": last ? "end" : "start"}, count(token)));
  }
  // A snapshot of the recurrent state is a tick below its stretch: computing can continue from there.
  for (const one of placed) {
    for (const position of one.snapshots) {
      const x = scale.within(one, position);
      lines.append(h("line", {class: "snapshot", x1: x, x2: x, y1: 22 + one.row * ROW + BAR, y2: 22 + one.row * ROW + BAR + 6}, h("title", {}, `snapshot at ${count(position)}`)));
    }
  }
  for (const one of placed) {
    const from = one.parentPlace;
    if (!from || from.row === one.row) continue;
    const x = scale.at(one.start);
    lines.append(h("path", {class: "branch", d: `M${x + 1} ${22 + from.row * ROW + BAR - 2} V${22 + one.row * ROW + 8}`}));
  }
  const tree = h("div", {class: "tree", role: "tree", "aria-label": "Shared beginnings", style: {width: `${scale.width}px`, height: `${height}px`}}, lines);
  for (const one of placed) {
    const old = now - one.last_used;
    const step = old < 60 ? 0 : old < 600 ? 1 : old < 3600 ? 2 : old < 86400 ? 3 : 4;
    const x = scale.at(one.start);
    const wide = scale.at(one.start + one.tokens) - x - 3;
    tree.append(h("button", {
      type: "button", role: "treeitem", class: `run ${one.tier} age${step}${one.own ? "" : " shared"}${one.pinned_until ? " pinned" : ""}`,
      "data-stretch": one.id, "aria-level": one.level, "aria-selected": one.id === chosen ? "true" : "false", "aria-label": said(one, now), title: said(one, now),
      tabindex: "-1", onclick: () => inspect(one.id), onkeydown: (event) => move(event, one),
      style: {left: `${x}px`, top: `${22 + one.row * ROW}px`, width: `${wide}px`, height: `${BAR}px`},
    }, wide > 44 && h("span", {class: "run-name"}, wide < 90 && !one.name ? count(one.tokens) : nameOf(one)),
    wide > 150 && h("span", {class: "run-more"}, one.prompts > 1 ? `${count(one.prompts)} prompts begin so · ${bytes(one.bytes)}` : [bytes(one.bytes), ...used(one, now).slice(0, 1)].join(" · "))));
  }
  put(map, tree);
  const first = tree.querySelector(`[data-stretch="${held ?? chosen}"]`) ?? tree.querySelector(".run");
  first.tabIndex = 0;
  if (held) first.focus({preventScroll: true});
}

function focus(one) {
  const target = one && $("map").querySelector(`[data-stretch="${one.id}"]`);
  if (!target) return;
  for (const other of $("map").querySelectorAll(".run")) other.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

function move(event, one) {
  const at = shown.indexOf(one);
  const to = {
    ArrowRight: one.children[0], ArrowLeft: one.parentPlace, ArrowDown: shown[at + 1], ArrowUp: shown[at - 1], Home: shown[0], End: shown.at(-1),
  };
  if (!(event.key in to)) return;
  event.preventDefault();
  focus(to[event.key]);
}

export async function showMap({again = false} = {}) {
  const {stretches, runs, left_out: left, bytes: total, snapshots, snapshot_bytes: states, now} = await get("/v1/cache/tree");
  const mark = JSON.stringify([stretches, chosen, $("map").clientWidth, Math.floor(now / 30)]);
  if (again && mark === seen) return;
  seen = mark;
  const part = left ? `, the ${count(runs - left)} latest used are drawn` : "";
  const beside = snapshots ? `, ${bytes(states)} of it in ${plural(snapshots, "snapshot")} of recurrent state (ticks)` : "";
  $("map-summary").textContent = runs ? `${plural(runs, "stored run")}, ${bytes(total)}${beside}${part}. Left to right: token positions; prompts part where their tokens do. Faded: not used for long.` : "";
  legend($("map-legend"), [...TIERS.map((tier) => [tier, tierName(tier)]), ["pin", "pinned"]]);
  draw(stretches, now);
  if (chosen && !stretches.some((one) => one.id === chosen)) { chosen = null; nobody(); }
}

function nobody() {
  put($("inspector"), h("h2", {id: "inspector-title"}, "Inspect"), h("p", {class: "note"}, "Choose a stretch: with the pointer, or with Tab, the arrow keys and Enter."));
}

async function inspect(id) {
  try {
    const stretch = shown.find((other) => other.id === id);
    if (!stretch) { chosen = null; nobody(); return; }
    chosen = id;
    const one = await get(`/v1/cache/entries/${stretch.run}?start=${stretch.start}&tokens=${stretch.tokens}`);
    const now = Date.now() / 1000;
    const fact = (word, value) => [h("dt", {}, word), h("dd", {}, value)];
    put($("inspector"),
      h("h2", {id: "inspector-title"}, nameOf(stretch)),
      h("dl", {class: "facts"},
        fact("Tokens", `${count(stretch.tokens)}, from ${count(stretch.start)} on`),
        fact("Shared", stretch.prompts > 1 ? `${count(stretch.prompts)} stored prompts begin so` : "one stored prompt"),
        fact("Stored in", `a run of ${plural(one.tokens, "token")} from ${count(one.start)} on, ${bytes(one.bytes)}${stretch.runs > 1 ? `, and parts of ${count(stretch.runs - 1)} more` : ""}`),
        stretch.snapshots.length > 0 && fact("Snapshots", `at ${stretch.snapshots.map(count).join(", ")}: ${bytes(stretch.snapshot_bytes)} of recurrent state`),
        fact("Tier", tierName(one.tier)), ...(one.uses === null ? [] : [fact("Hits", count(one.uses)), fact("Used", ago(now - one.last_used))]),
        fact("Stored", ago(now - one.created)), one.pinned_until && fact("Pinned", `for ${age(one.pinned_until - now)} more`),
        fact("Id", h("code", {}, one.id.slice(0, 12)))),
      one.own
        ? h("div", {class: "actions start"},
          one.pinned_until
            ? h("button", {type: "button", onclick: () => act(() => remove("/v1/cache/pin", {id: one.id}), id)}, "Unpin")
            : h("button", {type: "button", onclick: () => act(() => post("/v1/cache/pin", {id: one.id, ttl: 3600}), id)}, "Pin for an hour"),
          h("button", {type: "button", class: "danger", onclick: () => purge(one)}, "Purge…"))
        : h("p", {class: "note"}, "Shared by all tenants: only the operator changes it."),
      h("h3", {}, "Text"),
      h("pre", {class: "text", tabindex: "0", role: "region", "aria-label": "Text of this stretch"}, one.text + (one.text_cut ? " …" : "")));
    await showMap();
  } catch (error) {
    notice(error.message);
  }
}

async function act(work, id) {
  try { await work(); } catch (error) { notice(error.message); }
  await showMap();
  await inspect(id);
}

async function purge(one) {
  if (!(await sure("Purge what holds this?", `The run of ${plural(one.tokens, "token")} from ${count(one.start)} on, and all that stands on it, leave RAM and disk.`, "Purge"))) return;
  try { await remove(`/v1/cache/entries/${one.id}`); } catch (error) { notice(error.message); }
  await showMap();
  (shown.length ? $("map").querySelector('[tabindex="0"]') : $("purge-all"))?.focus();
}

export function setUpMap() {
  nobody();
  new ResizeObserver(() => { if (shown.length && !$("view-cache").hidden) showMap({again: true}).catch(() => {}); }).observe($("map"));
  $("purge-all").addEventListener("click", async () => {
    if (!(await sure("Purge everything?", "All that this tenant stored, with its sets of tools and the numbers of its answers. Other tenants keep theirs.", "Purge all"))) return;
    try {
      const gone = await post("/v1/cache/purge");
      notice(`${plural(gone.runs, "run")} and ${plural(gone.sets, "set")} of tools are gone.`);
    } catch (error) { notice(error.message); }
    chosen = null;
    nobody();
    await showMap();
  });
}
