// Shows where one request's time went, how much of its prompt was found, and why reuse ended there.

import {count, h, legend, ms, tierName} from "./dom.js";

// The stages cover all the time before the first token. "prepare" is rendering, tokenizing and building constraints.
const PHASES = [
  ["prepare", ["compile", "constrain"]], ["queue", ["queue"]], ["link", ["link"]], ["load", ["load"]],
  ["prefill", ["prefill"]], ["decode", ["decode"]],
];

function phases(answer, decode) {
  return PHASES.filter(([name]) => decode || name !== "decode")
    .map(([name, parts]) => [name, parts.reduce((sum, part) => sum + (answer.timings[part] ?? 0), 0)]);
}

/** Makes one bar. `scale` is the number of milliseconds of the whole width. */
export function bar(title, answer, {decode = true, scale = null} = {}) {
  const parts = phases(answer, decode);
  const total = parts.reduce((sum, [, time]) => sum + time, 0);
  const all = scale ?? total;
  const said = parts.map(([name, time]) => `${name} ${ms(time)}`).join(", ");
  return h("div", {class: "timing"},
    h("div", {class: "timing-title"}, h("span", {}, title), h("span", {class: "number"}, ms(decode ? answer.total_ms : answer.ttft_ms))),
    h("div", {class: "bar", role: "img", "aria-label": `${title}: ${said}`},
      parts.map(([name, time]) => h("span", {class: `part ${name}`, title: `${name} ${ms(time)}`, style: {width: `${(100 * time) / all}%`}}))),
  );
}

export function phaseList(answer, decode = true) {
  return h("ul", {class: "legend", "aria-label": "Phases"},
    phases(answer, decode).map(([name, time]) => h("li", {}, h("span", {class: `swatch ${name}`}), `${name} `, h("span", {class: "number"}, ms(time)))));
}

export function chips(answer) {
  const tiers = Object.entries(answer.cached_by_tier).filter(([, tokens]) => tokens);
  const from = tiers.length ? ` from ${tiers.map(([tier, tokens]) => (tiers.length > 1 ? `${tierName(tier)} (${count(tokens)})` : tierName(tier))).join(", ")}` : "";
  return h("p", {class: "chips"},
    h("span", {class: answer.cached_tokens ? "chip hot" : "chip"}, `${count(answer.cached_tokens)} of ${count(answer.prompt_tokens)} tokens reused${from}`),
    h("span", {class: "chip"}, `first token ${ms(answer.ttft_ms)}`),
    h("span", {class: "chip"}, answer.exactness),
    h("span", {class: "chip"}, `${count(answer.completion_tokens)} written, ${answer.finish_reason}`),
    answer.uncached_reason && h("span", {class: "chip"}, `uncached: ${answer.uncached_reason}`));
}

const WHY = {
  tokens_differ: "The text differs from what is stored", never_stored: "New from here on", cuts_differ: "Cut elsewhere",
  salt_differs: "Stored under another salt", model_changed: "Another model", arithmetic_differs: "Another arithmetic",
  evicted: "Given up for space", expired: "Its time to live ended", corrupt: "Failed verification", reuse_off: "Reuse is off",
  template_changed: "The chat template changed", loading_is_slower: "Computing is faster than loading",
  uncacheable: "Runs without the cache", stored_quantized: "Stored quantized", within_a_step: "The last step is always computed", no_snapshot: "No snapshot this far",
  chunks_diverged: "Chunks would change the answer",
};

let told = 0;

/** Shows why reuse ended: the prompt as a strip, and both texts at the place where they differ. */
export function why(answer) {
  told += 1;
  const found = answer.miss;
  const share = (100 * answer.cached_tokens) / answer.prompt_tokens;
  const strip = h("div", {class: "strip", role: "img", "aria-label": `${count(answer.cached_tokens)} of ${count(answer.prompt_tokens)} prompt tokens were reused`},
    answer.segments.map((one) => {
      const cached = Math.min(Math.max(answer.cached_tokens - one.start, 0), one.end - one.start) / (one.end - one.start);
      const name = one.kind === "tail" ? "" : one.kind;
      return h("span", {class: "piece", title: `${one.kind} ${one.name}: tokens ${one.start} to ${one.end}`, style: {"flex-grow": one.end - one.start}},
        h("span", {class: "fill", style: {width: `${100 * cached}%`}}), h("span", {class: "word"}, name));
    }));
  const computed = answer.prompt_tokens - answer.cached_tokens;
  const rest = `The last ${computed === 1 ? "token is" : `${count(computed)} tokens are`} always computed.`;
  const nothing = "Nothing of a prompt so short can be reused";
  const side = (word, kind, tag, parts) => h("div", {class: `side ${kind}`}, h("span", {class: "who"}, word),
    h("code", {}, parts.map(([text, differs]) => (differs ? h(tag, {}, text) : text))));
  return h("section", {class: "why", "aria-label": `Why it missed, answer ${told}`},
    h("h3", {}, found ? (WHY[found.reason] ?? found.reason) : answer.cached_tokens ? "Everything that can be reused was" : nothing),
    h("p", {class: "note"}, `${share.toFixed(0)} % of the prompt was reused. `, !found && rest,
      found && found.detail && `${found.detail[0].toUpperCase()}${found.detail.slice(1)}.`,
      found && found.changed && ` It lies in the ${found.segment}${found.character === null ? "" : `, at character ${count(found.character)}`}.`),
    strip,
    found && found.stored_parts.length > 0 && h("div", {class: "diff"},
      side("stored", "old", "del", found.stored_parts), side("asked", "new", "ins", found.wanted_parts)));
}

export function comparison(found) {
  const scale = Math.max(found.cold.ttft_ms, found.warm.ttft_ms);
  const same = found.bit_identical ? "Same answer, same logits to the bit." : found.same_answer ? "Same answer." : "The answers differ.";
  const list = h("ul", {class: "legend", "aria-label": "Phases"});
  legend(list, PHASES.filter(([name]) => name !== "decode").map(([name]) => [name, name]));
  return h("article", {class: "panel result", "aria-label": "Cold beside warm"},
    found.warm.cached_tokens
      ? h("div", {class: "speedup"},
        h("strong", {}, `${found.ttft_speedup >= 10 ? Math.round(found.ttft_speedup) : found.ttft_speedup.toFixed(1)}×`),
        h("div", {}, h("p", {}, "faster to the first token"), h("p", {class: "note"}, same)))
      : h("div", {}, h("h3", {}, "Nothing of this prompt was stored yet"), h("p", {class: "note"}, `${same} Ask again, or register what many questions share.`)),
    bar("Cold, without the cache", found.cold, {decode: false, scale}),
    bar(`Warm, ${count(found.warm.cached_tokens)} of ${count(found.warm.prompt_tokens)} tokens reused`, found.warm, {decode: false, scale}),
    list, h("p", {class: "answer"}, found.warm.answer));
}
