// node client.mjs URL: what a JavaScript program does with the Space, as in the README.
import { Client } from "@gradio/client";

const client = await Client.connect(process.argv[2]);

const texts = [];
for await (const message of client.submit("/generate", { prompt: "Once upon a time", max_new_tokens: 32, temperature: 0 })) {
  if (message.type === "data") texts.push(message.data[0]); // the whole text so far
  if (message.type === "status" && message.stage === "complete") break;
}

const verdicts = [];
for await (const message of client.submit("/compare", { prompt: "The lighthouse stood", new_tokens: 8 })) {
  if (message.type === "data") verdicts.push(message.data[0]);
  if (message.type === "status" && message.stage === "complete") break;
}

const stats = (await client.predict("/stats")).data[0];
const refused = await client.predict("/generate", { prompt: "", max_new_tokens: 1 }).catch((error) => error.message);

console.log(JSON.stringify({ texts, verdict: verdicts.at(-1), queue: stats.queue, refused }));
process.exit(0);
