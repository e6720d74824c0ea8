// The native protocol. If a key is needed, it is kept in this tab's session storage and sent in a header.

const KEY = "keepwarm-key";
const ASKING = ["/query", "/query/compare", "/tools", "/v1/cache/explain"]; // of one model; the rest looks into the store of all
let askForKey = null;
let model = null; // where there are several

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const setModel = (name) => { model = name; };
export const forgetKey = () => sessionStorage.removeItem(KEY);
export const onKeyNeeded = (ask) => { askForKey = ask; };

export class Refused extends Error {
  /** `after`: in how many seconds to ask again, if the service says so. */
  constructor(status, message, after) { super(message); this.status = status; this.after = after; }
}

async function send(method, path, {body, params, session, signal} = {}) {
  if (model !== null && method === "POST" && ASKING.includes(path)) body = {...body, model};
  const query = params ? `?${new URLSearchParams(params)}` : "";
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    if (session) headers["x-session-id"] = session;
    const answer = await fetch(path + query, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), referrerPolicy: "no-referrer",
    });
    if (answer.status === 401 && askForKey) { await askForKey(await told(answer), key); continue; }
    if (!answer.ok) throw new Refused(answer.status, await told(answer), Number(answer.headers.get("retry-after")) || null);
    return answer;
  }
}

async function told(answer) {
  try { return (await answer.json()).error.message; } catch { return `the service answered ${answer.status}`; }
}

export const get = async (path, params) => (await send("GET", path, {params})).json();
export const post = async (path, body, more = {}) => (await send("POST", path, {body, ...more})).json();
export const remove = async (path, params) => (await send("DELETE", path, {params})).json();

/** Sends a POST and reads its stream of server-sent events. Calls `on(name, data)` for each event. */
export async function stream(path, body, on, more = {}) {
  const answer = await send("POST", path, {body, ...more});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      let name = "message";
      let data = "";
      for (const line of held.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) on(name, JSON.parse(data));
    }
  }
}
