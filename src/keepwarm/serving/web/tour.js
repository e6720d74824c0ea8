// The first visit: three prompts that can be run, which show a cold answer, a warm one, and a miss.

import {$, count, h, ms, put} from "./dom.js";

const RULES = Array.from({length: 14}, (_, i) => `Pier ${i + 1} takes ships of up to ${40 + 15 * i} metres, and costs ${30 + 8 * i} crowns a night. Its watch begins at ${5 + (i % 4)} in the morning.`).join("\n");
const TEXT = `You are the clerk of a harbour. These are its rules.\n${RULES}\n\n`;
const STEPS = [
  {name: "Ask about a text", prompt: `${TEXT}Which pier takes the longest ships?`,
    says: "A model reads every word of a prompt before it writes the first one of its answer. Here it reads the rules of a harbour and a question, all for the first time."},
  {name: "Ask something else about it", prompt: `${TEXT}What does a night at pier 4 cost?`,
    says: "The text is stored now. Only what follows the last common word has to be read, so the first word comes sooner, and the answer is the same to the last bit."},
  {name: "Change its first line", prompt: `${TEXT.replace("clerk", "master")}What does a night at pier 4 cost?`,
    says: "What changes early costs most: after the first different word nothing can be reused. The answer below says where it differs, and which edit would have hit."},
];
let at = 0;
let run = null;
const took = [];

function show() {
  const step = STEPS[at];
  put($("tour-steps"), STEPS.map((one, i) => h("li", {class: i < at ? "done" : "", "aria-current": i === at ? "step" : null}, one.name,
    took[i] ? h("span", {class: "note"}, took[i]) : null)));
  $("tour-says").textContent = step ? step.says : "That is all there is to it. The cache map shows what is stored now, as a tree of shared beginnings. Any client of OpenAI's or Anthropic's protocols uses the same cache.";
  $("tour-prompt").textContent = step ? step.prompt : "";
  $("tour-shown").hidden = !step;
  $("tour-run").hidden = !step;
  $("tour-run").textContent = step ? `Run: ${step.name.toLowerCase()}` : "";
  $("tour-map").hidden = Boolean(step);
}

async function next() {
  $("tour-run").disabled = true;
  try {
    const answer = await run(STEPS[at].prompt);
    if (!answer) return;
    took[at] = `first token ${ms(answer.ttft_ms)}, ${count(answer.cached_tokens)} of ${count(answer.prompt_tokens)} reused`;
    at += 1;
    show();
  } finally {
    $("tour-run").disabled = false;
    (at < STEPS.length ? $("tour-run") : $("tour-map")).focus({preventScroll: true});
  }
}

/** `ask` runs a prompt, and returns its answer; null if there is none. */
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
