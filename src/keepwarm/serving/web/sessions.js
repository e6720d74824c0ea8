// The view of the conversations that the service remembers. One can list, read, continue and forget them.

import {get, remove} from "./api.js";
import {$, ago, count, h, notice, plural, put, sure} from "./dom.js";

let chosen = null;

export async function showSessions() {
  const {sessions} = await get("/v1/sessions");
  put($("session-names"), sessions.map((one) => h("option", {value: one.name})));
  const now = Date.now() / 1000;
  put($("session-list"), sessions.length
    ? sessions.map((one) => h("button", {type: "button", class: "item", "aria-pressed": one.name === chosen ? "true" : "false", onclick: () => open(one.name)},
      h("span", {}, one.name),
      h("span", {class: "note"}, `${plural(one.turns, "turn")}, ${count(one.tokens)} tokens, ${ago(now - one.used)}${one.settled ? ", settled" : ""}`)))
    : h("p", {class: "note"}, "None yet."));
}

function said(one) {
  const text = h("p", {}, typeof one.content === "string" ? one.content : JSON.stringify(one.content ?? one.tool_calls));
  const who = h("span", {class: "who"}, one.role);
  return h("li", {class: `said ${one.role === "user" ? "user" : ""}`},
    one.role === "system" ? h("details", {}, h("summary", {class: "who"}, `system, ${count(text.textContent.length)} characters`), text) : [who, text]);
}

async function open(name) {
  try {
    const {messages} = await get("/v1/sessions/messages", {name});
    chosen = name;
    put($("session-view"),
      h("div", {class: "head"}, h("h2", {}, name), h("div", {class: "actions"},
        h("button", {type: "button", class: "danger", onclick: () => forget(name)}, "Forget…"),
        h("button", {type: "button", class: "primary", onclick: () => { $("session").value = name; location.hash = "#ask"; $("question").focus(); }}, "Continue"))),
      h("ol", {class: "talk"}, messages.map(said)));
    await showSessions();
  } catch (error) {
    notice(error.message);
  }
}

async function forget(name) {
  if (!(await sure(`Forget ${name}?`, "Its messages go. Its KV stays until the store gives it up, or you purge it.", "Forget"))) return;
  try { await remove("/v1/sessions", {name}); } catch (error) { notice(error.message); }
  chosen = null;
  put($("session-view"), h("p", {class: "empty"}, "Choose a session."));
  await showSessions();
}
