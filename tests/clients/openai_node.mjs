// Tests the server with OpenAI's SDK for Node. `with_servers.py` starts the servers, and compares the images that this program writes.

import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI, { toFile } from "openai";

const { MAIN, BUSY, KEY, IMAGES, OUT } = process.env;
const SHAPES = "a green heart on the left and a blue star on the right on a yellow background";
const STAR = "a large red star on a blue background";
const SIZE = "96x64";
const version = JSON.parse(fs.readFileSync("node_modules/openai/package.json", "utf8")).version;

const tests = [];
const test = (name, work) => tests.push([name, work]);

/** A client that keeps the status, headers and time of each answer. */
function client(options = {}) {
  const answers = [];
  const note = async (url, init) => {
    const answer = await fetch(url, init);
    answers.push({ status: answer.status, headers: answer.headers, time: performance.now() });
    return answer;
  };
  const made = new OpenAI({ baseURL: `${MAIN}/v1`, apiKey: "none", timeout: 60_000, fetch: note, ...options });
  return Object.assign(made, { answers });
}

const busy = (options = {}) => client({ baseURL: `${BUSY}/v1`, apiKey: KEY, ...options });
const image = (name) => fs.createReadStream(path.join(IMAGES, name));
const bytes = (name) => fs.readFileSync(path.join(IMAGES, name));

let files = 0;

/** Stores an image, which is later compared with the command line's image of the same request. */
function compare(data, request) {
  const file = `${files++}.${request.output_format ?? "png"}`;
  fs.writeFileSync(path.join(OUT, file), data);
  fs.appendFileSync(path.join(OUT, "requests.jsonl"), JSON.stringify({ file, ...request }) + "\n");
}

/** The file of an image or of an event. */
function content({ b64_json }) {
  assert.equal(typeof b64_json, "string");
  return Buffer.from(b64_json, "base64");
}

/** Checks the exception that a call raises. */
async function failure(kind, status, code, param, call, words = "") {
  const error = await call().then(
    () => assert.fail(`${code} was expected`),
    (error) => error,
  );
  assert.ok(error instanceof kind, `${error.stack} is no ${kind.name}`);
  assert.deepEqual([error.status, error.code, error.param], [status, code, param], error.message);
  assert.ok(error.requestID, "the error has no request id");
  assert.ok(error.type, "the error has no type");
  assert.ok(error.message.includes(words), `the message has no "${words}": ${error.message}`);
  return error;
}

/** Waits until an image is made and this many images wait. */
async function queueHas(waiting) {
  for (const end = performance.now() + 20_000; performance.now() < end; await sleep(20)) {
    const status = await fetch(`${BUSY}/kiln/status`, { headers: { authorization: `Bearer ${KEY}` } });
    const { queue } = await status.json();
    if (queue.waiting === waiting && queue.predicted_ms > 0) return;
  }
  assert.fail(`the queue does not come to ${waiting} images`);
}

function checkUsage(usage, edits = false) {
  const { input_tokens, output_tokens, total_tokens, input_tokens_details } = usage;
  assert.ok(output_tokens > 0 && input_tokens_details.text_tokens > 0);
  assert.equal(input_tokens_details.image_tokens > 0, edits);
  assert.equal(input_tokens, input_tokens_details.text_tokens + input_tokens_details.image_tokens);
  assert.equal(total_tokens, input_tokens + output_tokens);
}

/** Reads a stream, checks its events, and returns the last one. */
async function completed(stream, name, partialImages) {
  const events = [];
  for await (const event of stream) events.push(event);
  const kinds = [...Array(partialImages).fill(`${name}.partial_image`), `${name}.completed`];
  assert.deepEqual(events.map((event) => event.type), kinds);
  for (const [index, event] of events.slice(0, -1).entries()) {
    assert.equal(event.partial_image_index, index);
    assert.equal(content(event).toString("latin1", 1, 4), "PNG");
  }
  const last = events.at(-1);
  assert.deepEqual([last.size, last.output_format], [SIZE, "png"]);
  checkUsage(last.usage, name === "image_edit");
  return last;
}

test("formats", async () => {
  for (const output_format of ["png", "jpeg", "webp"]) {
    const fields = { prompt: STAR, size: SIZE, output_format, seed: 7 };
    const images = await client().images.generate({ model: "gpt-image-1", ...fields });
    assert.deepEqual([images.size, images.output_format, images.data[0].seed], [SIZE, output_format, 7]);
    assert.equal(images.data[0].url ?? null, null);
    checkUsage(images.usage);
    assert.equal(images.kiln.steps, 4);
    compare(content(images.data[0]), fields);
  }
});

test("headers", async () => {
  const fields = { prompt: STAR, size: SIZE, seed: 7, sampler_name: "euler", clip: { skip: 1 } };
  const { data, response, request_id } = await client()
    .images.generate(fields, { headers: { "X-Request-Id": "my-request_1" } })
    .withResponse();
  assert.equal(request_id, "my-request_1");
  assert.equal(data._request_id, "my-request_1");
  assert.equal(response.headers.get("x-kiln-seed"), "7");
  assert.ok(Number(response.headers.get("x-kiln-ms")) >= 0);
  const ignored = response.headers.get("x-kiln-ignored").split(",").map((name) => name.trim());
  assert.deepEqual(ignored.sort(), ["clip", "sampler_name"]);
});

test("url", async () => {
  const fields = { prompt: STAR, size: SIZE, seed: 7 };
  const images = await client().images.generate({ ...fields, response_format: "url" });
  assert.equal(images.data[0].b64_json ?? null, null);
  const answer = await fetch(images.data[0].url);
  assert.deepEqual([answer.status, answer.headers.get("content-type")], [200, "image/png"]);
  compare(Buffer.from(await answer.arrayBuffer()), fields);
});

test("several images", async () => {
  const fields = { prompt: STAR, size: SIZE };
  const images = await client().images.generate({ ...fields, n: 2, seed: 11 });
  assert.deepEqual(images.data.map(({ seed }) => seed), [11, 12]);
  for (const one of images.data) compare(content(one), { ...fields, seed: one.seed });
});

test("size of the model", async () => {
  const images = await client().images.generate({ prompt: STAR, size: "auto", seed: 7 });
  assert.equal(images.size, "256x256");
  compare(content(images.data[0]), { prompt: STAR, seed: 7 });
});

test("seeds", async () => {
  const random = await client().images.generate({ prompt: STAR, size: "64x64" });
  assert.ok(Number.isInteger(random.data[0].seed));
  // A number of JavaScript cannot hold this seed, so it is text.
  const images = await client().images.generate({ prompt: STAR, size: "64x64", seed: "18446744073709551615" });
  compare(content(images.data[0]), { prompt: STAR, size: "64x64", seed: "18446744073709551615" });
});

test("models", async () => {
  const names = [];
  for await (const model of client().models.list()) names.push(model.id);
  assert.ok(names.length > 0);
  assert.equal((await client().models.retrieve(names[0])).id, names[0]);
  await failure(OpenAI.NotFoundError, 404, "model_not_found", "model", () => client().models.retrieve("other"), names[0]);
});

test("edit", async () => {
  const images = await client().images.edit({ prompt: SHAPES, image: image("scene.png"), seed: 3 });
  assert.deepEqual([images.size, images.data[0].seed], [SIZE, 3]);
  checkUsage(images.usage, true);
  compare(content(images.data[0]), { prompt: SHAPES, seed: 3, images: ["scene.png"] });
});

test("edit of three images", async () => {
  // A file, bytes, and a misleading name and type.
  const list = [
    image("scene.png"),
    await toFile(bytes("ring.jpg")),
    await toFile(bytes("stripes.webp"), 'a "ü".txt', { type: "text/plain" }),
  ];
  const fields = { prompt: SHAPES, size: "64x80", output_format: "webp", seed: 3 };
  const images = await client().images.edit({ ...fields, image: list });
  compare(content(images.data[0]), { ...fields, images: ["scene.png", "ring.jpg", "stripes.webp"] });
});

test("edit with mask", async () => {
  const fields = { prompt: SHAPES, seed: 3 };
  const one = await client().images.edit({ ...fields, image: image("scene.png"), mask: image("mask.png") });
  compare(content(one.data[0]), { ...fields, images: ["scene.png"], mask: "mask.png" });
  const list = [image("scene.png"), image("ring.jpg")];
  const two = await client().images.edit({ ...fields, image: list, mask: image("mask.png") });
  compare(content(two.data[0]), { ...fields, images: ["scene.png", "ring.jpg"], mask: "mask.png" });
});

test("stream", async () => {
  const fields = { prompt: STAR, size: SIZE, seed: 7 };
  const stream = await client().images.generate({ ...fields, stream: true, partial_images: 2 });
  const last = await completed(stream, "image_generation", 2);
  assert.equal(last.seed, 7);
  compare(content(last), fields);
});

test("stream of an edit", async () => {
  const fields = { prompt: SHAPES, seed: 3 };
  const inputs = { image: image("scene.png"), mask: image("mask.png") };
  const stream = await client().images.edit({ ...fields, ...inputs, stream: true, partial_images: 1 });
  const last = await completed(stream, "image_edit", 1);
  compare(content(last), { ...fields, images: ["scene.png"], mask: "mask.png" });
});

test("stream that is left", async () => {
  // The images would take many seconds. Leaving the loop cancels them.
  const stream = await client().images.generate({ prompt: STAR, n: 10, stream: true, partial_images: 3 });
  for await (const _ of stream) break;
  const start = performance.now();
  await client().images.generate({ prompt: STAR, size: "64x64", seed: 7 });
  assert.ok(performance.now() - start < 5000, "images that nobody waits for were not canceled");
});

test("errors", async () => {
  const rows = [
    [{ size: "100x64" }, "invalid_value", "size", "x64"],
    [{ n: 11 }, "invalid_value", "n", "10"],
    [{ background: "transparent" }, "unsupported_value", "background", "opaque"],
    [{ partial_images: 2 }, "invalid_value", "partial_images", "stream"],
    [{ stream: true, size: "large" }, "invalid_value", "size", "auto"],
    [{ seed: 1.5 }, "invalid_value", "seed", "-1"],
  ];
  for (const [fields, code, param, words] of rows) {
    const call = () => client().images.generate({ prompt: STAR, ...fields });
    const error = await failure(OpenAI.BadRequestError, 400, code, param, call, words);
    assert.equal(error.type, "invalid_request_error");
  }
  const other = () => client().images.generate({ prompt: STAR, model: "stable-diffusion-3" });
  await failure(OpenAI.NotFoundError, 404, "model_not_found", "model", other, "builtin");
});

test("damaged images", async () => {
  const text = Buffer.from("This is no image.");
  const row = async (param, list, mask) => {
    const inputs = { image: await Promise.all(list.map((one) => toFile(one))), ...(mask && { mask: await toFile(mask) }) };
    const call = () => client().images.edit({ prompt: SHAPES, ...inputs });
    await failure(OpenAI.BadRequestError, 400, "invalid_image", param, call);
  };
  const good = bytes("scene.png");
  await row("image[0]", [text]);
  await row("image[2]", [good, good, text]);
  await row("mask", [good], text);
  await row("mask", [good], bytes("small-mask.png"));
});

test("error of the server", async () => {
  // A retry would fail as well, so the answer forbids it.
  const sender = client();
  const call = () => sender.images.generate({ prompt: STAR, size: SIZE, lora: "overflow" });
  await failure(OpenAI.InternalServerError, 500, "not_finite", null, call);
  const answers = sender.answers.map(({ status, headers }) => [status, headers.get("x-should-retry")]);
  assert.deepEqual(answers, [[500, "false"]]);
});

test("keys", async () => {
  const call = () => busy({ apiKey: "sk-another-key" }).images.generate({ prompt: STAR, size: SIZE });
  const error = await failure(OpenAI.AuthenticationError, 401, "invalid_api_key", null, call);
  assert.match(error.headers.get("www-authenticate"), /^Bearer/);
  const fields = { prompt: STAR, size: SIZE, seed: 7 };
  const images = await busy().images.generate(fields);
  compare(content(images.data[0]), fields);
});

test("retry when the queue is full", async () => {
  // Each request has a seed of its own: one that is the same as a waiting one would share its image.
  const small = (seed) => ({ prompt: STAR, size: "64x64", seed });
  const running = busy().images.generate({ prompt: STAR, seed: 7, steps: 16 });
  await queueHas(0);
  const waiting = busy().images.generate(small(8));
  await queueHas(1);
  const hasty = () => busy({ maxRetries: 0 }).images.generate(small(9));
  await failure(OpenAI.RateLimitError, 429, "queue_full", null, hasty);
  // On a busy machine the image may take longer than predicted, and two tries may not be enough.
  const patient = busy({ maxRetries: 20 });
  const late = await patient.images.generate(small(7));
  const statuses = patient.answers.map(({ status }) => status);
  assert.deepEqual([...new Set(statuses)], [429, 200]);
  for (const [index, { headers, time }] of patient.answers.slice(0, -1).entries()) {
    const seconds = Number(headers.get("retry-after"));
    assert.ok(seconds >= 1 && seconds <= 60, `Retry-After is ${seconds}`);
    assert.ok(patient.answers[index + 1].time - time > seconds * 1000 - 100, "the SDK did not wait");
  }
  compare(content(late.data[0]), small(7));
  compare(content((await waiting).data[0]), small(8));
  compare(content((await running).data[0]), { prompt: STAR, seed: 7, steps: 16 });
});

let failed = 0;
for (const [name, work] of tests) {
  const start = performance.now();
  let result = "ok";
  try {
    await work();
  } catch (error) {
    console.log(error.stack, error.cause ?? "");
    failed += 1;
    result = "FAILED";
  }
  console.log(`openai-node ${version}: ${name}: ${result}, ${((performance.now() - start) / 1000).toFixed(1)} s`);
}
process.exit(failed ? 1 : 0);
