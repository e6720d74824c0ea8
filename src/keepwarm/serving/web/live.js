// Live charts, drawn in SVG: the origin of the latest prompts' KV, and the time to the first token.

import {get} from "./api.js";
import {$, count, h, legend, ms, put, ticks} from "./dom.js";

const MOST = 60; // the most answers in a chart
const HIGH = 190;
const LEFT = 52;
const SOURCES = [["device", "device"], ["ram", "RAM"], ["disk", "disk"], ["remote", "remote"], ["computed", "computed"]];
let answers = [];
let last = 0;
let series = null; // another one after a restart and after a purge

/** Asks for new answers. Returns whether there were any, and whether the service has forgotten the earlier ones. */
export async function pollLive(visible) {
  let told = await get("/v1/cache/recent", {after: last});
  const forgotten = series !== null && told.series !== series;
  series = told.series;
  if (forgotten) {
    answers = [];
    const again = last > 0;
    last = 0; // before anything is awaited: another call may be under way
    if (again) told = await get("/v1/cache/recent", {after: 0});
  }
  const found = told.answers.filter((one) => one.number > last); // another call may have asked at the same time
  if (found.length) {
    last = found.at(-1).number;
    answers = answers.concat(found).slice(-200);
  }
  const fresh = found.length > 0;
  if (visible && (fresh || forgotten || !$("tokens-chart").firstChild)) showLive();
  return {fresh, forgotten};
}

function sources(one) {
  const found = {device: 0, ram: 0, disk: 0, remote: 0, computed: one.prompt_tokens - one.cached_tokens};
  for (const [tier, tokens] of Object.entries(one.cached_by_tier)) found[tier in found ? tier : "remote"] += tokens;
  return found;
}

function frame(chart, label, marks, y, text) {
  const width = Math.max(280, chart.clientWidth);
  const svg = h("svg", {width: "100%", height: HIGH, viewBox: `0 0 ${width} ${HIGH}`, role: "img", "aria-label": label});
  for (const mark of marks) svg.append(h("line", {class: "grid", x1: LEFT, x2: width, y1: y(mark), y2: y(mark)}), h("text", {class: "tick", x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end"}, text(mark)));
  return {svg, width};
}

function tokensChart(list) {
  const marks = ticks(Math.max(...list.map((one) => one.prompt_tokens), 1));
  const y = (value) => HIGH - 8 - ((HIGH - 22) * value) / marks.at(-1);
  const reused = list.reduce((sum, one) => sum + one.cached_tokens, 0);
  const asked = list.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const {svg, width} = frame($("tokens-chart"), `${list.length} answers, ${count(reused)} of ${count(asked)} prompt tokens reused`, marks, y, count);
  const step = Math.min(44, (width - LEFT) / list.length);
  list.forEach((one, i) => {
    let base = 0;
    const group = h("g", {}, h("title", {}, `${count(one.cached_tokens)} of ${count(one.prompt_tokens)} reused, ${one.protocol}${byModel(one)}`));
    for (const [name, tokens] of Object.entries(sources(one))) {
      if (tokens) group.append(h("rect", {class: `fill-${name}`, x: LEFT + i * step + 1, width: Math.max(1, step - Math.min(4, step / 3)), y: y(base + tokens), height: Math.max(0, y(base) - y(base + tokens))}));
      base += tokens;
    }
    svg.append(group);
  });
  put($("tokens-chart"), svg);
}

// Where there are several models, each answer names its own.
const named = (list) => list.some((one) => one.model);
const byModel = (one) => (one.model ? `, ${one.model}` : "");

// Nearly every prompt shares its first tokens with another one, so a hit is one of which at least half was reused.
const hit = (one) => 2 * one.cached_tokens >= one.prompt_tokens;

/** Draws each answer at its prompt's length, so that hits and misses of like length stand above each other. */
function ttftChart(list) {
  const low = Math.floor(Math.log10(Math.max(1, Math.min(...list.map((one) => one.ttft_ms)))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...list.map((one) => one.ttft_ms), 10))));
  const marks = Array.from({length: high - low + 1}, (_, i) => 10 ** (low + i));
  const floor = HIGH - 30;
  const y = (value) => floor - ((floor - 14) * (Math.log10(Math.max(value, 10 ** low)) - low)) / (high - low);
  const {svg, width} = frame($("ttft-chart"), `Time to first token of ${list.length} answers by the length of their prompts, the last ${ms(list.at(-1).ttft_ms)}`, marks, y, ms);
  const across = ticks(Math.max(...list.map((one) => one.prompt_tokens), 1));
  const x = (tokens) => LEFT + 8 + ((width - LEFT - 32) * tokens) / across.at(-1);
  for (const mark of across) svg.append(h("text", {class: "tick", x: x(mark), y: HIGH - 10, "text-anchor": "middle"}, count(mark)));
  for (const one of list)
    svg.append(h("circle", {class: hit(one) ? "mark-hit" : "mark-miss", cx: x(one.prompt_tokens), cy: y(one.ttft_ms), r: 4.5},
      h("title", {}, `${ms(one.ttft_ms)}, ${count(one.cached_tokens)} of ${count(one.prompt_tokens)} tokens reused${byModel(one)}`)));
  put($("ttft-chart"), svg);
}

function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/** Groups answers by model and by the length of their prompts: each group ends at twice the length at which it begins. */
export function alike(list) {
  const groups = new Map();
  for (const one of list) {
    const from = 2 ** Math.floor(Math.log2(Math.max(1, one.prompt_tokens)));
    const model = one.model ?? "";
    const key = `${from} ${model}`;
    const group = groups.get(key) ?? {model, from, hits: [], misses: []};
    groups.set(key, group);
    (hit(one) ? group.hits : group.misses).push(one.ttft_ms);
  }
  return [...groups.values()].sort((a, b) => a.model.localeCompare(b.model) || a.from - b.from)
    .map((one) => ({...one, sooner: one.hits.length && one.misses.length ? middle(one.misses) / middle(one.hits) : null}));
}

const times = (ratio) => (ratio === null ? "–" : `${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(1)}×`);

function alikeTable(groups) {
  const cell = (values) => (values.length ? `${ms(middle(values))}, of ${values.length}` : "–");
  const head = [...(named(groups) ? ["Model"] : []), "Prompt tokens", "Mostly reused", "Mostly computed", "Sooner"];
  put($("alike-table"), h("thead", {}, h("tr", {}, head.map((word) => h("th", {scope: "col"}, word)))),
    h("tbody", {}, groups.map((one) => h("tr", {}, named(groups) && h("th", {scope: "row"}, one.model), h("th", {scope: "row"}, `${count(one.from)} to ${count(2 * one.from - 1)}`),
      [cell(one.hits), cell(one.misses), times(one.sooner)].map((text) => h("td", {}, text))))));
}

/** Shows why reuse ended, and what that cost. */
function ended(one) {
  const reason = one.miss_reason === "none" ? "all was reused" : one.miss_reason.replaceAll("_", " ");
  return one.missed_tokens ? `${reason}, ${count(one.missed_tokens)} tokens lost` : reason;
}

export function showLive() {
  const list = answers.slice(-MOST);
  const asked = answers.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const reused = answers.reduce((sum, one) => sum + one.cached_tokens, 0);
  const total = (word, value) => h("div", {}, h("dt", {}, word), h("dd", {}, value));
  put($("totals"), total("Answers", count(answers.length)), total("Prompt tokens", count(asked)),
    total("Reused", asked ? `${((100 * reused) / asked).toFixed(0)} %` : "–"),
    total("First token sooner, at like length", times(middle(alike(answers).map((one) => one.sooner).filter((one) => one !== null)))));
  legend($("tokens-legend"), SOURCES);
  legend($("ttft-legend"), [["hit", "at least half reused"], ["miss", "less than half"]]);
  if (!list.length) {
    for (const id of ["tokens-chart", "ttft-chart"]) put($(id), h("p", {class: "empty"}, "No answers yet."));
    put($("live-table"));
    put($("alike-table"));
    return;
  }
  tokensChart(list);
  ttftChart(list);
  alikeTable(alike(answers));
  const head = ["Time", ...(named(list) ? ["Model"] : []), "Protocol", "Prompt", "Reused", "First token", "Label", "Why reuse ended"];
  put($("live-table"), h("thead", {}, h("tr", {}, head.map((word) => h("th", {scope: "col"}, word)))),
    h("tbody", {}, list.toReversed().map((one) => h("tr", {}, [
      new Date(one.at * 1000).toLocaleTimeString(), ...(named(list) ? [one.model] : []), one.protocol, count(one.prompt_tokens), count(one.cached_tokens), ms(one.ttft_ms), one.exactness, ended(one),
    ].map((cell) => h("td", {}, cell))))));
}
