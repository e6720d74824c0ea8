// The first visit: three prompts that can be run, which show a cold answer, a warm one, and a miss.

import {$, count, h, ms, put} from "./dom.js";

const RULES = Array.from({length: 14}, (_, i) => `Pier ${i + 1} takes ships of up to ${40 + 15 * i} metres, and costs ${30 + 8 * i} crowns a night. Its watch begins at ${5 + (i % 4)} in the morning.`).join("\n");
const TEXT = `You are the clerk of a harbour. These are its rules.\n${RULES}`; // a message of its own: whatever the arithmetic, a prompt may part behind it
const STEPS = [
  {name: "Ask about a text", system: TEXT, question: "Which pier takes the longest ships?",
    says: "A model reads every word of a prompt before it writes the first one of its answer. Here it reads the rules of a harbour and a question."},
  {name: "Ask something else about it", system: TEXT, question: "What does a night at pier 4 cost?",
    says: "This prompt begins with the same text. As far as it is stored, it need not be read again, so the first word comes sooner."},
  {name: "Change its first line", system: TEXT.replace("clerk", "master"), question: "What does a night at pier 4 cost?",
    says: "What changes early costs most: a beginning is the same only up to the first different word. The answer below will say where it differs, and which edit would have hit."},
];
const LABELS = {
  exact: "The answer is the same to the last bit as without the cache.",
  prefix: "Their KV was computed in other steps or on another machine, so the last bits may differ from an answer without the cache.",
  quantized: "Their KV is stored rounded, so the answer may differ from one without the cache.",
  blended: "Some of their KV comes from another context and was repaired, so the answer may differ from one without the cache.",
};
let at = 0;
let run = null;
const took = [];
let outcome = ""; // what the last answer says of itself

/** Says what an answer shows: how much of its prompt was not read again, and what that means for its bits. */
export function shows({cached_tokens: cached, prompt_tokens: all, exactness}) {
  if (!cached) return `Nothing was reused: all ${count(all)} tokens of this prompt were read.`;
  return `${count(cached)} of ${count(all)} tokens were not read again. ${LABELS[exactness] ?? `The answer is labelled ${exactness}.`}`;
}

function show() {
  const step = STEPS[at];
  put($("tour-steps"), STEPS.map((one, i) => h("li", {class: i < at ? "done" : "", "aria-current": i === at ? "step" : null}, one.name,
    took[i] ? h("span", {class: "note"}, took[i]) : null)));
  const text = step ? step.says : "That is all there is to it. The cache map shows what is stored now, as a tree of shared beginnings. Any client of OpenAI's or Anthropic's protocols uses the same cache.";
  put($("tour-says"), outcome && h("span", {class: "outcome"}, outcome), h("span", {}, text));
  $("tour-prompt").textContent = step ? `${step.system}\n\n${step.question}` : "";
  $("tour-shown").hidden = !step;
  $("tour-run").hidden = !step;
  $("tour-run").textContent = step ? `Run: ${step.name.toLowerCase()}` : "";
  $("tour-map").hidden = Boolean(step);
}

async function next() {
  $("tour-run").disabled = true;
  try {
    const answer = await run(STEPS[at].system, STEPS[at].question);
    if (!answer) return;
    took[at] = `first token ${ms(answer.ttft_ms)}, ${count(answer.cached_tokens)} of ${count(answer.prompt_tokens)} reused`;
    outcome = shows(answer);
    at += 1;
    show();
  } finally {
    $("tour-run").disabled = false;
    (at < STEPS.length ? $("tour-run") : $("tour-map")).focus({preventScroll: true});
  }
}

/** `ask` runs a prompt of a system message and a question, and returns its answer; null if there is none. */
export function setUpTour(ask) {
  run = ask;
  $("tour").hidden = localStorage.getItem("keepwarm-toured") !== null;
  $("tour-run").addEventListener("click", next);
  $("tour-hide").addEventListener("click", () => {
    localStorage.setItem("keepwarm-toured", "1");
    $("tour").hidden = true;
    $("question").focus();
  });
  show();
}
