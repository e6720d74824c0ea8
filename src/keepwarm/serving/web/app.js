// The page: it chooses the view, and shows the service's state, the theme and the dialog for the key. Each view has its
// own module.

import {forgetKey, get, hasKey, onKeyNeeded, setKey, setModel} from "./api.js";
import {setUpAsk} from "./ask.js";
import {$, notice} from "./dom.js";
import {pollLive, showLive} from "./live.js";
import {setUpMap, showMap} from "./map.js";
import {showSessions} from "./sessions.js";
import {setUpTools, showSets} from "./tools.js";

const EVERY = 2000; // milliseconds between two questions to the service
const PAUSE = 10; // seconds after an answer that says no, unless it says how many
const VIEWS = {ask: showSets, cache: showMap, live: async () => { await pollLive(true); showLive(); }, sessions: showSessions};
let ready = false;
let looks = 0;
let resume = 0; // nothing but the health is asked for before this time
let complaint = ""; // what is shown of a refusal, until a later answer says yes

const current = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "ask");

async function route() {
  const name = current();
  for (const view of Object.keys(VIEWS)) $(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${document.querySelector("nav a[aria-current]").textContent} · Keepwarm`;
  if (ready) try { await VIEWS[name](); } catch (error) { notice(error.message); }
}

function health(state, text) {
  $("health").dataset.state = state;
  $("health-text").textContent = text;
}

/** A choice where there are several; what is asked then goes to the chosen one, which is loaded for it. */
function showModels(models) {
  const choice = $("model");
  choice.hidden = models.length < 2;
  const before = choice.value;
  choice.replaceChildren(...models.map((one) => new Option(one.name)));
  if (models.some((one) => one.name === before)) choice.value = before;
  setModel(choice.hidden ? null : choice.value);
}

/** Asks for what the page begins with. */
async function begin() {
  const status = await get("/status");
  health("ready", status.models ? `${status.models.length} models` : status.model);
  showModels(status.models ?? []);
  ready = true;
  await route();
  if (current() !== "sessions") await showSessions();
}

async function refresh() {
  const {fresh, forgotten} = await pollLive(current() === "live");
  if (forgotten) { await begin(); return; } // it may be another service now
  looks += 1;
  if (current() === "cache" && (fresh || looks % 5 === 0)) await showMap(); // this lists the whole store, so it is done less often
}

/** Tells of a refusal where it does not go away by itself, and waits before it asks again. */
async function politely(work) {
  if (Date.now() < resume) return;
  try {
    await work();
    if (complaint && $("notice").textContent === complaint) notice("");
    complaint = "";
  } catch (error) {
    complaint = error.message;
    if ($("notice").textContent !== complaint) notice(complaint); // or a screen reader reads it each time
    resume = Date.now() + 1000 * (error.after ?? PAUSE);
  }
}

async function look() {
  let found = null;
  try {
    const answer = await fetch("/health");
    if (answer.ok) found = await answer.json();
  } catch { /* as if it said nothing */ }
  if (found?.status === "ready") {
    if (!ready) {
      if ($("health").dataset.state !== "ready") health("ready", "ready");
      await politely(begin);
    } else if (!document.hidden) await politely(refresh);
  } else {
    ready = false;
    resume = 0;
    if (found) health(found.status, found.progress ? `${found.status}: ${found.progress}` : found.status);
    else health("failed", "no answer");
  }
  setTimeout(look, ready ? EVERY : EVERY / 2);
}

function setUpTheme() {
  const names = ["auto", "light", "dark"];
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    $("theme-button").textContent = `Theme: ${name}`;
  };
  apply(names.includes(localStorage.getItem("keepwarm-theme")) ? localStorage.getItem("keepwarm-theme") : "auto");
  $("theme-button").addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    localStorage.setItem("keepwarm-theme", next);
    apply(next);
  });
}

let asking = null;

/** Asks for the key in one dialog, however many requests wait for it. */
function askForKey(message, used) {
  if (used !== sessionStorage.getItem("keepwarm-key")) return Promise.resolve(); // another request has got a key meanwhile
  asking ??= new Promise((resolve) => {
    $("key-error").textContent = hasKey() ? message : "";
    forgetKey();
    $("key").value = "";
    $("key-dialog").showModal();
    $("key-dialog").addEventListener("close", function closed() {
      if (!hasKey()) { $("key-dialog").showModal(); return; } // a browser lets one dismiss it, but nothing works without a key
      $("key-dialog").removeEventListener("close", closed);
      if (used) { location.reload(); return; } // what the page shows may be another tenant's
      asking = null;
      resolve();
    });
  });
  return asking;
}

function setUpModels() {
  $("model").addEventListener("change", () => setModel($("model").value));
}

function setUpKey() {
  onKeyNeeded(askForKey);
  $("key-button").hidden = !hasKey();
  $("key-button").addEventListener("click", () => { forgetKey(); location.reload(); });
  $("key-form").addEventListener("submit", () => {
    setKey($("key").value.trim());
    $("key").value = "";
    $("key-button").hidden = false;
  });
}

for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
setUpTheme();
setUpKey();
setUpModels();
setUpTools();
setUpAsk();
setUpMap();
addEventListener("hashchange", route);
route();
look();
