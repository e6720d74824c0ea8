// The cache map: a tree of shared beginnings, one row for each stretch. Its bar lies on one axis of token positions, to
// scale. A row below another one, and further in, continues it from the token where prompts part.

import {get, post, remove} from "./api.js";
import {$, age, ago, bytes, count, h, legend, notice, plural, put, sure, ticks, tierName} from "./dom.js";
import {pollLive} from "./live.js";

const WORDS = 60; // characters of a stretch that name it
const DEEPEST = 8; // levels that are moved in; deeper ones stand below each other
const TIERS = ["ram", "disk"];
const closed = new Set(); // ids of rows whose continuations are not shown
let chosen = null;
let shown = [];
let drawn = null; // what the service said last
const told = new Map(); // what each row says, without ages, by its id

const words = (one) => (one.text ?? "").trim().replace(/\s+/g, " ").slice(0, WORDS);
const nameOf = (one) => one.name || words(one) || `${count(one.tokens)} tokens`;

/** Orders rows: each before its continuations, the longest of these first. Leaves out what is closed. */
function arranged(stretches) {
  const children = new Map(stretches.map((one) => [one.id, []]));
  const roots = [];
  for (const one of stretches) (children.get(one.parent) ?? roots).push(one);
  const ends = new Map();
  for (const one of stretches.toReversed()) ends.set(one.id, Math.max(one.start + one.tokens, ...children.get(one.id).map((child) => ends.get(child.id)))); // children stand after their parent
  const order = (list) => list.sort((a, b) => ends.get(b.id) - ends.get(a.id) || a.id.localeCompare(b.id));
  const rows = [];
  const place = (one, level, parent) => {
    const here = {...one, level, above: parent, children: []};
    rows.push(here);
    parent?.children.push(here);
    here.continued = children.get(one.id).length;
    if (!closed.has(one.id)) for (const child of order(children.get(one.id))) place(child, level + 1, here);
  };
  for (const root of order(roots)) place(root, 1, null);
  return {rows, last: Math.max(1, ...ends.values())};
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

function axis(last) {
  const marks = ticks(last).filter((mark) => mark < 0.82 * last);
  return h("div", {class: "axis", "aria-hidden": "true"}, h("span", {class: "axis-name"}, "tokens"),
    h("div", {class: "scale"}, [...marks, last].map((mark) => h("span", {style: {left: `${(100 * mark) / last}%`}}, count(mark)))));
}

const since = (one, now) => (one.uses === null ? "" : age(now - one.last_used));

function row(one, last, now) {
  const share = (tokens) => `${(100 * tokens) / last}%`;
  const more = one.prompts > 1 ? `${count(one.prompts)} prompts` : used(one, now)[0];
  return h("button", {
    type: "button", role: "treeitem", class: "run", "data-stretch": one.id, "aria-level": one.level, "aria-selected": one.id === chosen ? "true" : "false",
    "aria-expanded": one.continued ? String(!closed.has(one.id)) : null, title: said(one, now), tabindex: "-1",
  },
  h("span", {class: "unseen"}, said(one, now)),
  h("span", {class: "run-name", "aria-hidden": "true", style: {"padding-left": `${0.9 * (Math.min(one.level, DEEPEST) - 1)}rem`}},
    h("span", {class: "twist"}, one.continued ? (closed.has(one.id) ? "▸" : "▾") : ""),
    h("span", {class: "words"}, nameOf(one))),
  h("span", {class: "track"},
    h("span", {class: "lead", style: {width: share(one.start)}}),
    h("span", {class: `stretch ${one.tier}${one.own ? "" : " shared"}${one.pinned_until ? " pinned" : ""}`, "data-age": oldness(one, now), style: {left: share(one.start), width: share(one.tokens)}}),
    one.snapshots.map((position) => h("span", {class: "snapshot", title: `snapshot at ${count(position)}`, style: {left: share(position)}}))),
  h("span", {class: "run-more", "aria-hidden": "true"}, h("span", {}, plural(one.tokens, "token")), h("span", {}, [bytes(one.bytes), more].filter(Boolean).join(" · ")), h("span", {class: "since"}, since(one, now))));
}

/** How long a stretch was not used, in steps. The map does not know it of what all tenants share. */
function oldness(one, now) {
  const old = one.uses === null ? 0 : now - one.last_used;
  return [60, 600, 3600, 86400].filter((limit) => old >= limit).length;
}

/** Changes only what is different. What is read or pointed at keeps its words, or they would be read, or vanish, anew. */
function grow(element, one, now) {
  const stretch = element.querySelector(".stretch");
  if (stretch.dataset.age !== String(oldness(one, now))) stretch.dataset.age = oldness(one, now);
  const label = element.querySelector(".since");
  if (label.textContent !== since(one, now)) label.textContent = since(one, now);
  if (element.title === said(one, now) || element.matches(":focus, :hover")) return;
  element.title = element.querySelector(".unseen").textContent = said(one, now);
}

/** Makes a row say what a newer one does. It stays the same element, so the focus stays on it. */
function renew(element, newer) {
  for (const name of ["aria-level", "aria-expanded", "aria-selected", "title"]) {
    if (newer.hasAttribute(name)) element.setAttribute(name, newer.getAttribute(name));
    else element.removeAttribute(name);
  }
  put(element, [...newer.childNodes]);
}

/** Draws the rows in their order. A row that says the same as before is left alone, but for its age. */
function update(tree, rows, last, now) {
  const before = new Map([...tree.children].map((element) => [element.dataset.stretch, element]));
  const ids = new Set(rows.map((one) => one.id));
  for (const [id, element] of before) if (!ids.has(id)) { element.remove(); told.delete(id); }
  rows.forEach((one, i) => {
    const says = JSON.stringify([{...one, last_used: null, above: null, children: null}, last, closed.has(one.id)]);
    const element = before.get(one.id) ?? row(one, last, now);
    if (!before.has(one.id)) told.set(one.id, says);
    else if (told.get(one.id) !== says) { renew(element, row(one, last, now)); told.set(one.id, says); }
    grow(element, one, now);
    if (tree.children[i] !== element) tree.insertBefore(element, tree.children[i] ?? null);
  });
}

function draw() {
  const {stretches, now} = drawn;
  const held = document.activeElement?.dataset?.stretch;
  const {rows, last} = arranged(stretches);
  shown = rows;
  $("map-empty").hidden = rows.length > 0;
  if (!rows.length) { put($("map")); told.clear(); return; }
  const tree = $("map").querySelector(".tree") ?? h("div", {class: "tree", role: "tree", "aria-label": "Shared beginnings"});
  tree.style.setProperty("--step", `${(100 * ticks(last)[1]) / last}%`);
  update(tree, rows, last, now);
  if (!tree.isConnected) put($("map"), axis(last), tree);
  else if ($("map").dataset.last !== String(last)) $("map").firstChild.replaceWith(axis(last));
  $("map").dataset.last = last;
  const one = (id) => tree.querySelector(`[data-stretch="${id}"]`);
  const first = one(held) ?? tree.querySelector('.run[tabindex="0"]') ?? one(chosen) ?? tree.querySelector(".run");
  first.tabIndex = 0;
  if (held && document.activeElement !== first) first.focus({preventScroll: true});
}

function toggle(one) {
  if (!closed.delete(one.id)) closed.add(one.id);
  draw();
}

/** Makes a row the one that Tab reaches. */
function hold(target) {
  for (const other of $("map").querySelectorAll('.run[tabindex="0"]')) other.tabIndex = -1;
  target.tabIndex = 0;
}

function focus(one) {
  const target = one && $("map").querySelector(`[data-stretch="${one.id}"]`);
  if (!target) return;
  hold(target);
  target.focus();
}

/** Moves as in every tree: to the right a closed row opens, or its first continuation is reached; to the left back. */
function move(event, one) {
  const at = shown.indexOf(one);
  const opens = one.continued && closed.has(one.id);
  const to = {
    ArrowRight: () => (opens ? toggle(one) : focus(one.children[0])), ArrowLeft: () => (one.continued && !opens ? toggle(one) : focus(one.above)),
    ArrowDown: () => focus(shown[at + 1]), ArrowUp: () => focus(shown[at - 1]), Home: () => focus(shown[0]), End: () => focus(shown.at(-1)),
  };
  if (!(event.key in to)) return;
  event.preventDefault();
  to[event.key]();
}

export async function showMap() {
  drawn = await get("/v1/cache/tree");
  const {stretches, runs, left_out: left, bytes: total, snapshots, snapshot_bytes: states} = drawn;
  const part = left ? `, the ${count(runs - left)} latest used are drawn` : "";
  const beside = snapshots ? `, ${bytes(states)} of it in ${plural(snapshots, "snapshot")} of recurrent state (ticks)` : "";
  const says = runs ? `${plural(runs, "stored run")}, ${bytes(total)}${beside}${part}. Bars are to scale. A row further in continues the one above it, from the token where prompts part. The longer a bar was not used, the thinner it is.` : "";
  if ($("map-summary").textContent !== says) $("map-summary").textContent = says;
  draw();
  if (chosen && !stretches.some((one) => one.id === chosen)) nobody();
}

function nobody() {
  mark(null);
  put($("inspector"), h("h2", {id: "inspector-title"}, "Inspect"), h("p", {class: "note"}, "Choose a row: with the pointer, or with Tab, the arrow keys and Enter."));
}

/** Marks the chosen row where it is: nothing is drawn anew, so nothing moves. */
function mark(id) {
  chosen = id;
  for (const one of $("map").querySelectorAll(".run")) one.setAttribute("aria-selected", one.dataset.stretch === id ? "true" : "false");
}

async function inspect(id) {
  try {
    mark(id);
    await showMap(); // what left the store meanwhile is not asked for
    const stretch = drawn.stretches.find((other) => other.id === id);
    if (!stretch) { notice("This stretch has left the store meanwhile."); return; }
    const one = await get(`/v1/cache/entries/${stretch.run}?start=${stretch.start}&tokens=${stretch.tokens}`);
    if (chosen !== id) return; // another one was chosen meanwhile
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
    $("inspector").scrollTop = 0;
  } catch (error) {
    if (error.status !== 404) { notice(error.message); return; }
    notice("This stretch has left the store meanwhile.");
    await showMap();
  }
}

async function act(work, id) {
  try { await work(); } catch (error) { notice(error.message); }
  await inspect(id);
}

async function purge(one) {
  if (!(await sure("Purge what holds this?", `The run of ${plural(one.tokens, "token")} from ${count(one.start)} on, and all that stands on it, leave RAM and disk.`, "Purge"))) return;
  try { await remove(`/v1/cache/entries/${one.id}`); } catch (error) { notice(error.message); }
  await showMap();
  (shown.length ? $("map").querySelector('[tabindex="0"]') : $("purge-all"))?.focus({preventScroll: true});
}

export function setUpMap() {
  nobody();
  legend($("map-legend"), [...TIERS.map((tier) => [tier, tierName(tier)]), ["pin", "pinned"]]);
  const meant = (event) => shown.find((one) => one.id === event.target.closest(".run")?.dataset.stretch);
  $("map").addEventListener("click", (event) => {
    const one = meant(event);
    if (!one) return;
    hold(event.target.closest(".run"));
    if (one.continued && event.target.closest(".twist")) toggle(one);
    else inspect(one.id);
  });
  $("map").addEventListener("keydown", (event) => { const one = meant(event); if (one) move(event, one); });
  $("purge-all").addEventListener("click", async () => {
    if (!(await sure("Purge everything?", "All that this tenant stored, with its sets of tools and the numbers of its answers. Other tenants keep theirs.", "Purge all"))) return;
    try {
      const gone = await post("/v1/cache/purge");
      notice(`${plural(gone.runs, "run")} and ${plural(gone.sets, "set")} of tools are gone.`);
      await pollLive(false); // it forgets what the service has forgotten
    } catch (error) { notice(error.message); }
    nobody();
    await showMap();
  });
}
