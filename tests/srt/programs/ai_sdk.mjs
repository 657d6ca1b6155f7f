// Vercel's AI SDK with its default client, which uses OpenAI's Responses API and names earlier items by their ids.
import { createOpenAI } from "@ai-sdk/openai";
import { writeFileSync } from "node:fs";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";

const readNote = tool({
  description: "Read the note.",
  inputSchema: jsonSchema({ type: "object", properties: { note: { type: "string" } } }),
  execute: async ({ note }) => `The note ${note} says: hello`,
});
const writeAnswer = tool({
  description: "Write the answer.",
  inputSchema: jsonSchema({ type: "object", properties: { word: { type: "string" } } }),
  execute: async ({ word }) => writeFileSync("answer.txt", word) ?? "written",
});
const { text } = await generateText({
  model: createOpenAI({ apiKey: process.env.OPENAI_API_KEY, baseURL: process.env.OPENAI_BASE_URL })("policy"),
  tools: { readNote, writeAnswer },
  stopWhen: stepCountIs(5),
  maxRetries: 0,
  prompt: process.env.PROMPT,
});
console.log(text);
