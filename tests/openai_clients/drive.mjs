// Drives the AI SDK as drive.py drives other clients: `node drive.mjs FOLDER BASE_URL MODEL`, with its packages in FOLDER.
import { createRequire } from "node:module";

const [folder, baseURL, model] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const { generateObject, generateText, jsonSchema, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({ name: "charonia", baseURL, apiKey: "unused", supportsStructuredOutputs: true });
const asked = { maxRetries: 0, prompt: "Name a moon of Jupiter." };
const parameters = { type: "object", properties: { city: { type: "string", enum: ["Paris"] } }, required: ["city"] };
const moon = {
  type: "object",
  properties: { name: { type: "string", enum: ["Io", "Europa"] } },
  required: ["name"],
  additionalProperties: false,
};

function expect(fits, got) {
  if (!fits) throw new Error(`unexpected: ${JSON.stringify(got)?.slice(0, 300)}`);
}

// A conversation after which a small model calls the function.
const called = ["Rome", "Oslo", "Bern"].flatMap((city) => [
  { role: "user", content: `Weather in ${city}?` },
  { role: "assistant", content: [{ type: "tool-call", toolCallId: city, toolName: "weather", input: { city } }] },
  { role: "tool", content: [{ type: "tool-result", toolCallId: city, toolName: "weather", output: { type: "text", value: "sunny" } }] },
]);

const features = {
  async chat() {
    const answer = await generateText({ ...asked, model: provider(model), maxOutputTokens: 8, temperature: 0 });
    expect(answer.text && answer.usage.outputTokens === 8, answer.usage);
  },
  async stream() {
    const answer = streamText({ ...asked, model: provider(model), maxOutputTokens: 8 });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    expect(text, text);
  },
  async tools() {
    const weather = tool({ description: "Weather", inputSchema: jsonSchema(parameters) });
    const answer = await generateText({
      maxRetries: 0,
      messages: [...called, { role: "user", content: "Weather in Paris?" }],
      model: provider(model),
      maxOutputTokens: 60,
      tools: { weather },
      toolChoice: "required",
    });
    expect(answer.toolCalls[0]?.input.city === "Paris", answer.toolCalls);
  },
  async structured() {
    const answer = await generateObject({
      ...asked, model: provider(model), maxOutputTokens: 60, schema: jsonSchema(moon),
    });
    expect(["Io", "Europa"].includes(answer.object.name), answer.object);
  },
  async error() {
    try {
      await generateText({ ...asked, model: provider("none") });
    } catch (error) {
      return expect(error.message.includes("does not exist"), error.message);
    }
    expect(false, "an answer");
  },
  async cancel() {
    const stop = new AbortController();
    const answer = streamText({
      ...asked, model: provider(model), maxOutputTokens: 3000, abortSignal: stop.signal, onError: () => {},
      prompt: "Write the numbers from 1 to 1000.", temperature: 0, // an answer that the client leaves before its end
    });
    for await (const piece of answer.textStream) {
      if (piece) break;
    }
    stop.abort();
  },
};

const found = {};
for (const [name, act] of Object.entries(features)) {
  console.error(name);
  try {
    await act();
    found[name] = "";
  } catch (error) {
    console.error(error);
    found[name] = String(error);
  }
}
console.log(JSON.stringify(found));
process.exit(0);
