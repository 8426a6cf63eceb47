/** Talks to a server: its models, and completions as they stream. */

const LOST = "The connection was lost before the response was complete.";

export class ServerError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** What went wrong, from an answer that is no success. */
async function refusal(answer) {
  const told = await answer.json().catch(() => ({}));
  const message = told.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`.trim();
  const seconds = Number.parseFloat(answer.headers.get("Retry-After") ?? "");
  return new ServerError(message, { status: answer.status, retryAfter: Number.isNaN(seconds) ? null : seconds });
}

async function ask(path, key, given = {}) {
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...given.headers };
  let answer;
  try {
    answer = await fetch(path, { ...given, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

/** The models of the server. */
export async function models(key) {
  return (await (await ask("v1/models", key)).json()).data;
}

/** Chunks of a chat completion as they come. */
export async function* complete(request, key, signal) {
  const answer = await ask("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      stream_mode: "draft",
      return_step_map: true,
      ...request,
    }),
    signal,
  });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: Number(chunk.error.code) || 500 });
    yield chunk;
  }
  throw new ServerError(LOST);
}

/** The data of each event of a stream; comments are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const piece = await reader.read();
      if (piece.done) return;
      const parts = (rest + piece.value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(LOST);
  } finally {
    reader.cancel().catch(() => {}); // or the server would go on for nobody
  }
}
