/** The page of a server: asks one model or two for the same response, and shows how it comes about. */

import { complete, models, ServerError } from "./client.js";
import { choices } from "./dom.js";
import { Viewer } from "./viewer.js";

const find = (id) => document.getElementById(id);
const form = find("ask");
const viewer = new Viewer(find("viewer"), {
  prompts: false,
  keys: [
    [["/"], "to the prompt"],
    [["ctrl", "enter"], "denoise"],
    [["esc"], "stop"],
  ],
});

let served = [];
let running = null; // what stops the responses that are coming

/** Fields of a request that are only sent where something was entered, and how each is read. */
const SETTINGS = {
  threshold: Number,
  max_tokens: Number,
  steps: Number,
  temperature: Number,
  seed: Number,
  policy: String,
};

function settings() {
  const entered = Object.entries(SETTINGS).map(([name, read]) => [name, form.elements[name].value.trim(), read]);
  return Object.fromEntries(entered.filter(([, text]) => text).map(([name, text, read]) => [name, read(text)]));
}

// -- what is told above the canvas ----------------------------------------------------------------------------------

function tell(text, again = null) {
  find("message").hidden = !text;
  find("message-text").textContent = text;
  find("again").hidden = !again;
  find("again").onclick = again;
}

function explain(error) {
  if (error.status === 401 || error.status === 403) {
    find("key-field").hidden = false;
    form.elements.key.focus();
    tell("This server asks for an API key. Enter it below; it is kept in this page only.", load);
  } else if (!served.length && error.status === 503) {
    const seconds = error.retryAfter ?? 1;
    tell(`Not ready yet: ${error.message} Asking again in ${Math.ceil(seconds)} s.`);
    setTimeout(load, seconds * 1000);
  } else if (error.status === 503 || error.status === 429) {
    const when = error.retryAfter === null ? "in a moment" : `in ${Math.ceil(error.retryAfter)} s`;
    tell(`The server is busy: ${error.message} Try again ${when}.`, submit);
  } else {
    tell(error.message, error instanceof ServerError ? (served.length ? submit : load) : null);
  }
}

// -- models ---------------------------------------------------------------------------------------------------------

function title({ id, recipe, model }) {
  if (!recipe) return id;
  const said = [recipe, model, `${model}:${recipe}`].includes(id);
  return said ? `${recipe} on ${model}` : `${id}: ${recipe} on ${model}`;
}

async function load() {
  try {
    served = await models(form.elements.key.value);
  } catch (error) {
    explain(error);
    return;
  }
  tell("");
  const named = served.map((model) => [model.id, title(model)]);
  form.elements.model.replaceChildren(...choices(named));
  form.elements.beside.replaceChildren(...choices([["", "nothing"], ...named]));
  find("beside-field").hidden = served.length < 2;
  form.elements.beside.value = served.length > 1 ? served[1].id : "";
  find("denoise").disabled = served.length === 0;
}

// -- responses ------------------------------------------------------------------------------------------------------

function begin(id, prompt, given) {
  const model = served.find((one) => one.id === id);
  return {
    version: 1,
    id,
    model: model.model ?? id,
    recipe: model.recipe ?? id,
    prompt,
    block_length: model.block_length ?? null,
    length: given.max_tokens ?? 0,
    steps: [],
    tokens: [],
    usage: null,
    seconds: null,
    elapsed: 0,
  };
}

/** Add to a run what a chunk tells of it. */
function take(run, chunk) {
  if (chunk.usage) run.usage = chunk.usage;
  for (const choice of chunk.choices) {
    (choice.token_ids ?? []).forEach((token, i) => {
      run.tokens.push({
        token,
        text: choice.tokens[i],
        step: choice.step_map[i],
        confidence: choice.confidence?.[i] ?? null,
      });
    });
    if (choice.draft) run.steps.push(choice.draft);
  }
}

async function stream(run, request, signal) {
  const began = performance.now();
  try {
    for await (const chunk of complete(request, form.elements.key.value, signal)) {
      take(run, chunk);
      run.elapsed = (performance.now() - began) / 1000;
      viewer.update();
    }
  } finally {
    run.seconds = run.elapsed || (performance.now() - began) / 1000;
    viewer.update();
  }
}

async function submit() {
  running?.abort();
  const prompt = form.elements.prompt.value;
  if (!prompt.trim()) {
    tell("Write a prompt first.");
    form.elements.prompt.focus();
    return;
  }
  tell("");
  const mine = (running = new AbortController());
  const given = settings();
  const ids = [...new Set([form.elements.model.value, form.elements.beside.value].filter(Boolean))];
  const runs = ids.map((id) => begin(id, prompt, given));
  find("viewer").hidden = false;
  viewer.show(runs);
  find("stop").hidden = false;
  find("said").textContent = "Denoising.";
  const messages = [{ role: "user", content: prompt }];
  const ended = await Promise.allSettled(
    runs.map((run) => stream(run, { model: run.id, messages, ...given }, mine.signal)),
  );
  if (running !== mine) return;
  running = null;
  find("stop").hidden = true;
  const wrong = ended.find((one) => one.status === "rejected" && one.reason.name !== "AbortError");
  if (wrong) explain(wrong.reason);
  viewer.refresh();
  const seen = runs.filter((run) => run.steps.length || run.tokens.length);
  if (seen.length < runs.length) viewer.show(seen);
  find("viewer").hidden = seen.length === 0;
  const tokens = runs.map((run) => `${run.tokens.length} tokens from ${run.recipe}`).join(", ");
  find("said").textContent = mine.signal.aborted ? `Stopped: ${tokens}.` : `Done: ${tokens}.`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
form.elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
form.elements.key.addEventListener("change", load);
find("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "/" && !event.target.closest("input, textarea, select")) {
    event.preventDefault();
    form.elements.prompt.focus();
  }
});
load();
