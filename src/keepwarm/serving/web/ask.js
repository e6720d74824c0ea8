// The view for questions. It shows the answer as it is written, where its time went, and why no more was reused.

import {get, post, stream} from "./api.js";
import {$, h, notice} from "./dom.js";
import {theEdit} from "./edit.js";
import {bar, chips, comparison, phaseList, why} from "./timing.js";
import {chosenSet} from "./tools.js";
import {setUpTour} from "./tour.js";

const KEPT = 10; // results that stay on the page
let running = null;

async function turns(question, session, set) {
  const asked = {role: "user", content: question};
  if (!session) return [asked];
  const {sessions} = await get("/v1/sessions");
  if (!sessions.some((one) => one.name === session)) return [asked];
  const {messages} = await get("/v1/sessions/messages", {name: session});
  const before = set ? messages.filter((one) => one.role !== "system") : messages;
  return [...before, asked];
}

function show(card) {
  $("results").prepend(card);
  while ($("results").children.length > KEPT) $("results").lastElementChild.remove();
}

function busy(on) {
  $("ask-button").disabled = $("compare").disabled = on;
  $("stop").hidden = !on;
}

/** `system` is what stands before the question, in place of the chosen set and the session's turns. */
async function asking(work, system = null) {
  if (running || !$("ask-form").reportValidity()) return null;
  running = new AbortController();
  notice("");
  busy(true);
  const question = $("question").value;
  const session = system ? null : $("session").value.trim() || null;
  const set = system ? null : chosenSet();
  try {
    const messages = system ? [{role: "system", content: system}, {role: "user", content: question}] : await turns(question, session, set);
    const body = {messages, max_new_tokens: Number($("max-tokens").value), ...(set ? {tools: set} : {})};
    return await work({question, session, body, signal: running.signal});
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message);
    return null;
  } finally {
    running = null;
    busy(false);
  }
}

/** Puts a question in the box, to be changed or asked. */
function use(question) {
  $("question").value = question;
  $("question").focus();
}

async function ask({question, session, body, signal}) {
  const answer = h("p", {class: "answer writing"});
  const below = h("div", {class: "below"});
  const card = h("article", {class: "panel result", "aria-label": "Answer", "aria-busy": "true"}, h("p", {class: "asked"}, question), answer, below);
  show(card);
  let whole = null;
  try {
    await stream("/query", {...body, stream: true}, (name, data) => {
      if (name === "token") answer.append(data.text);
      else if (name === "error") throw new Error(data.error.message);
      else if (name === "done") {
        whole = data;
        answer.textContent = data.answer;
        below.append(chips(data),
          ...data.tool_calls.map((call) => h("p", {class: "call"}, h("span", {class: "note"}, "calls "), h("code", {}, `${call.name}(${JSON.stringify(call.arguments)})`))),
          bar("Time", data), phaseList(data), why(data));
      }
    }, {session, signal});
  } finally {
    answer.classList.remove("writing");
    card.removeAttribute("aria-busy"); // screen readers now read the whole answer
    if (signal.aborted) below.append(h("p", {class: "note"}, "Stopped."));
  }
  const edit = whole && (await theEdit(body, whole, use));
  if (edit) below.append(edit);
  return whole;
}

async function compare({session, body, signal}) {
  const waiting = h("article", {class: "panel result", "aria-label": "Comparison"}, h("p", {class: "answer writing"}, "Computing without the cache, then with it… "));
  show(waiting);
  try {
    waiting.replaceWith(comparison(await post("/query/compare", body, {session, signal})));
  } catch (error) {
    waiting.remove();
    throw error;
  }
}

export function setUpAsk() {
  setUpTour((system, question) => { $("question").value = question; return asking(ask, system); });
  $("ask-form").addEventListener("submit", (event) => { event.preventDefault(); asking(ask); });
  $("compare").addEventListener("click", () => asking(compare));
  $("stop").addEventListener("click", () => running?.abort());
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); asking(ask); }
  });
}
