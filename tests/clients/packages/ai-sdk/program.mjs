// An agent with a handbook and a tool. `--continue` goes on with the conversation that is kept in the home folder.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { z } from "zod";

const keepwarm = createOpenAICompatible({ name: "keepwarm", baseURL: process.env.OPENAI_BASE_URL, includeUsage: true });
const kept = `${homedir()}/conversation.json`;
const goesOn = process.argv[2] === "--continue" && existsSync(kept);
const said = goesOn ? JSON.parse(readFileSync(kept, "utf8")) : [];
said.push({ role: "user", content: process.argv.at(-1) });

const result = streamText({
  model: keepwarm(process.env.OPENAI_MODEL),
  system: readFileSync("handbook.txt", "utf8"),
  messages: said,
  stopWhen: stepCountIs(5),
  maxRetries: 0,
  onError({ error }) {
    console.error(error);
    process.exitCode = 1;
  },
  tools: {
    boats_at: tool({
      description: "Tell which boats lie at a pier.",
      inputSchema: z.object({ pier: z.number().int() }),
      execute: async ({ pier }) => `Two boats lie at pier ${pier}.`,
    }),
  },
});
for await (const text of result.textStream) process.stdout.write(text);
const { messages } = await result.response;
writeFileSync(kept, JSON.stringify([...said, ...messages]));
const usage = await result.totalUsage;
console.log(`\n${JSON.stringify(usage)}`);
