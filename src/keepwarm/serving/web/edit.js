// The edit that would have hit: the stored words in the place of the asked ones, and what the service says would then
// have been reused.

import {post} from "./api.js";
import {count, h} from "./dom.js";

const PLACES = 8; // of the same words in a question, that are tried

const raw = (parts) => parts.map(([text]) => text).join("").replaceAll("\\n", "\n").replaceAll("\\t", "\t");

/** Leaves out what follows the last difference. */
function upToLast(parts) {
  const last = parts.findLastIndex(([, differs]) => differs);
  return parts.slice(0, last + 1);
}

/**
 * Returns the question with the stored words in it, once for each place where they may belong, the first place first.
 * There are none if the difference does not lie in the question.
 */
export function edits(question, miss) {
  if (typeof question !== "string" || miss?.reason !== "tokens_differ" || !miss.stored_parts.length) return [];
  const [asked, stored] = [raw(upToLast(miss.wanted_parts)), raw(upToLast(miss.stored_parts))];
  let same = 0;
  while (same < asked.length && asked[same] === stored[same]) same += 1;
  const line = asked.slice(0, same).lastIndexOf("\n") + 1; // what stands before may be the template's
  for (const from of [0, line]) {
    const words = asked.slice(from);
    const last = (miss.in_segment ?? Infinity) - (same - from); // the template's words, if any, come before the question
    const found = [];
    for (let at = words ? question.indexOf(words) : -1; at >= 0 && at <= last; at = question.indexOf(words, at + 1)) {
      found.push(question.slice(0, at) + stored.slice(from) + question.slice(at + words.length));
    }
    if (found.length) return found;
  }
  return [];
}

/** Lists edits of the question, and of what the page put before all questions: where, and the text with the edit. */
function everywhere(messages, miss) {
  const last = messages.length - 1;
  return messages.toReversed().flatMap(({role, content}, back) => (back === 0 || role === "system" ? edits(content, miss).map((better) => [last - back, better]) : []));
}

/** Returns the edit at the place of the difference, and what the service says would be reused then; or null. */
async function located(body, miss) {
  for (const [at, better] of everywhere(body.messages, miss).slice(0, PLACES)) {
    const messages = body.messages.with(at, {...body.messages[at], content: better});
    const found = await post("/v1/cache/explain", {messages, ...(body.tools ? {tools: body.tools} : {})});
    const tooEarly = found.miss !== null && found.miss.character !== null && found.miss.character < miss.character;
    if (!tooEarly) return [at, better, found]; // later places would look good, too: the question itself is stored by now
  }
  return null;
}

const differing = (parts) => parts.filter(([, differs]) => differs).map(([text]) => text.trim()).filter(Boolean).join(" … ");

/** Says which edit would have hit, and how far, or nothing if none is known. `use` takes the edited question. */
export async function theEdit(body, answer, use) {
  const edit = await located(body, answer.miss);
  if (edit === null) return null;
  const [at, better, found] = edit;
  const ofQuestion = at === body.messages.length - 1;
  if (found.cached_tokens <= answer.cached_tokens) return null;
  const [old, fresh] = [differing(answer.miss.stored_parts), differing(answer.miss.wanted_parts)];
  const change = old && fresh ? [h("q", {}, old), " in place of ", h("q", {}, fresh)] : old ? [h("q", {}, old), " put in"] : [h("q", {}, fresh), " left out"];
  return h("div", {class: "edit"},
    h("p", {}, h("strong", {}, "The edit that would have hit: "), change, ofQuestion ? "" : ", in the system message", `. Then ${count(found.cached_tokens)} of ${count(found.prompt_tokens)} tokens would have been reused, not ${count(answer.cached_tokens)}.`),
    ofQuestion && h("button", {type: "button", onclick: () => use(better)}, "Put it in the box"));
}
