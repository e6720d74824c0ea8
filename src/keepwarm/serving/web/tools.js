// Registered sets: one can choose one, register one (a sample, by paste or by upload), and remove one.

import {get, post, remove} from "./api.js";
import {$, bytes, count, h, ms, notice, plural, put, sure} from "./dom.js";

let chosen = "";

export const chosenSet = () => chosen || null;

export async function showSets() {
  const sets = await get("/tools");
  if (!sets.some((one) => one.name === chosen)) chosen = "";
  const choice = (name, note) => h("div", {class: "choice"},
    h("label", {},
      (() => {
        const input = h("input", {type: "radio", name: "set", value: name, onchange: () => { chosen = name; }});
        input.checked = name === chosen;
        return input;
      })(),
      h("span", {class: "choice-text"}, h("span", {}, name || "No tools"), h("span", {class: "note"}, note))),
    name && h("button", {class: "quiet", type: "button", "aria-label": `Remove the set ${name}`, onclick: () => forget(name)}, "✕"));
  put($("sets"), choice("", "nothing but what is asked"),
    sets.map((one) => choice(one.name, `${plural(one.tools.length, "tool")}, version ${one.version}`)));
}

async function forget(name) {
  if (!(await sure(`Remove ${name}?`, "The set is forgotten, with the KV that only it needs.", "Remove"))) return;
  try { await remove("/tools", {name}); } catch (error) { notice(error.message); }
  await showSets();
}

async function fillSamples() {
  const samples = await get(new URL("./samples.json", import.meta.url).pathname);
  put($("samples"), samples.map((one) => h("button", {type: "button", class: "chip", onclick: () => {
    $("set-name").value = one.name;
    $("set-system").value = one.system;
    $("set-tools").value = JSON.stringify(one.tools, null, 2);
    $("question").value ||= one.question;
    $("register-error").textContent = "";
  }}, `${one.title}, ${plural(one.tools.length, "tool")}`)));
}

async function register(event) {
  event.preventDefault();
  const error = $("register-error");
  error.textContent = "";
  const body = {name: $("set-name").value};
  try {
    body.tools = JSON.parse($("set-tools").value);
    if (!Array.isArray(body.tools)) body.tools = body.tools.tools ?? [body.tools];
  } catch (problem) {
    error.textContent = `This is not JSON: ${problem.message}`;
    $("set-tools").focus();
    return;
  }
  if ($("set-system").value) body.system = $("set-system").value;
  $("register-send").disabled = true;
  $("register-send").textContent = "Compiling…";
  try {
    const made = await post("/tools", body);
    chosen = made.name;
    const how = {compiled: "compiled", extended: "extended from an earlier version", loaded: `loaded from ${made.tier}`}[made.status];
    $("registered").textContent = `${made.name}: ${count(made.prefix_tokens)} tokens ${how} in ${ms(made.ms)}, ${bytes(made.bytes)} of KV.`;
    $("register").close();
    await showSets();
    $("question").focus();
  } catch (problem) {
    error.textContent = problem.message;
  } finally {
    $("register-send").disabled = false;
    $("register-send").textContent = "Compile and keep";
  }
}

export function setUpTools() {
  $("register-open").addEventListener("click", () => { $("register-error").textContent = ""; $("register").showModal(); fillSamples(); });
  $("register-form").addEventListener("submit", register);
  $("set-file").addEventListener("change", async () => {
    const [file] = $("set-file").files;
    if (!file) return;
    $("set-tools").value = await file.text();
    $("set-name").value ||= file.name.replace(/\.json$/, "").replace(/[^A-Za-z0-9._-]/g, "-");
  });
}
