// A clerk with a handbook and a tool, over /v1/responses. `--continue` goes on from the response that is kept.
import { readFileSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const kept = `${homedir()}/response.txt`;
let before = process.argv[2] === "--continue" ? readFileSync(kept, "utf8") : undefined;
let input = process.argv.at(-1);
const parameters = {
  type: "object",
  properties: { pier: { type: "integer" } },
  required: ["pier"],
  additionalProperties: false,
};

for (let step = 0; step < 5; step++) {
  const stream = client.responses.stream({
    model: process.env.OPENAI_MODEL,
    instructions: readFileSync("handbook.txt", "utf8"),
    input,
    previous_response_id: before,
    tools: [
      { type: "function", name: "boats_at", description: "Tell which boats lie at a pier.", parameters, strict: true },
    ],
  });
  for await (const event of stream) if (event.type === "response.output_text.delta") process.stdout.write(event.delta);
  const response = await stream.finalResponse();
  before = response.id;
  input = response.output
    .filter((item) => item.type === "function_call")
    .map(({ call_id }) => ({ type: "function_call_output", call_id, output: "Two boats lie there." }));
  console.log(`\n${JSON.stringify(response.usage)}`);
  if (input.length === 0) break;
}
writeFileSync(kept, before);
