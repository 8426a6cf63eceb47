/** Shows runs side by side and replays them step by step; a run may still grow while it is shown. */

import { Canvas } from "./canvas.js";
import { choices, element } from "./dom.js";
import { Film, SHADES } from "./film.js";
import { Strip } from "./strip.js";

const SPEEDS = [2, 4, 8, 16, 32];
const KEYS = [
  [["space"], "play or pause"],
  [["\u2190", "\u2192"], "a step back or on"],
  [["home", "end"], "first or last step"],
  [["tab"], "to the tokens, then arrows move over them"],
];

/** One run: its counters, its canvas, its film. */
class Panel {
  #counters = element("dl", { class: "counters" });
  #prompt = element("p", { class: "prompt" });
  #title = element("h2");
  #model = element("span", { class: "quiet" });
  #response = element("p", { class: "unseen" });
  #canvas = new Canvas();
  #strip;

  constructor(pick, withPrompt) {
    this.#strip = new Strip(pick);
    this.#prompt.hidden = !withPrompt;
    this.element = element(
      "section",
      { class: "panel" },
      element("header", {}, this.#title, this.#model),
      this.#prompt,
      this.#counters,
      this.#canvas.element,
      this.#response,
      this.#canvas.told,
      this.#strip.element,
    );
  }

  set run(run) {
    this.film = new Film(run);
    this.#title.textContent = run.recipe;
    this.#model.textContent = run.model;
    this.#prompt.textContent = run.prompt;
    this.element.setAttribute("aria-label", `${run.recipe} on ${run.model}`);
    this.element.setAttribute("aria-busy", String(!this.film.over));
    this.#response.textContent = this.film.over ? `Response: ${run.tokens.map((token) => token.text).join("")}` : "";
  }

  show(index, by, columns) {
    const at = Math.min(index, this.film.last);
    this.#canvas.show(this.film, at, by);
    this.#strip.show(this.film, at, by, columns);
    const items = this.#count(at).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    );
    this.#counters.replaceChildren(...items);
  }

  #count(at) {
    const { film } = this;
    const { run } = film;
    const { tokens, made, fresh, evicted } = film.counts(at);
    const step = film.frames[at].step;
    const seconds = run.seconds ?? run.elapsed;
    const known = run.usage?.completion_tokens || run.tokens.length;
    const rows = (run.usage?.rows ?? 0) / Math.max(1, film.counts(film.last).decoded);
    const found = [
      ["tokens", String(tokens)],
      ["this step", `+${fresh}`],
      ["tokens/step", step ? (made / step).toFixed(2) : "\u2013"],
    ];
    if (film.evicts) found.push(["left out", String(evicted)]);
    if (rows > 0) found.push(["rows/token", rows.toFixed(1)]);
    if (seconds > 0 && known > 0) found.push(["tok/s", (known / seconds).toFixed(known / seconds < 10 ? 1 : 0)]);
    return found;
  }
}

export class Viewer {
  #panels = [];
  #host = element("div", { class: "panels" });
  #slider = element("input", {
    type: "range",
    min: "0",
    max: "0",
    value: "0",
    "aria-label": "Step",
    input: () => this.seek(Number(this.#slider.value)),
  });
  #place = element("output");
  #play = element("button", { type: "button", class: "play", click: () => this.toggle() }, "Play");
  #speed = element("select", { "aria-label": "Steps per second" }, ...choices(SPEEDS.map((n) => [n, `${n} a second`])));
  #by = element(
    "select",
    { "aria-label": "Colour by", change: () => this.#draw() },
    ...choices([["block", "step of block"], ["run", "step of run"], ["confidence", "confidence"]]),
  );
  #legend = element("ul", { class: "legend", "aria-label": "Legend" });
  #timer = null;
  #index = 0;
  #last = 0;
  #pending = false;

  /**
   * @param {Element} host
   * @param {{prompts: boolean, keys: Array}} given whether panels show their prompts; further keys, for `shortcut`
   */
  constructor(host, { prompts = true, keys = [] } = {}) {
    this.prompts = prompts;
    this.#speed.value = "8";
    host.append(
      this.#host,
      element(
        "div",
        { class: "replay", role: "group", "aria-label": "Replay" },
        this.#play,
        this.#slider,
        this.#place,
        element("label", {}, element("span", {}, "speed"), this.#speed),
        element("label", {}, element("span", {}, "colour"), this.#by),
      ),
      this.#legend,
      element("ul", { class: "shortcuts", "aria-label": "Keys" }, ...[...KEYS, ...keys].map(shortcut)),
    );
    document.addEventListener("keydown", (event) => this.#key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(this.#host);
  }

  /** Show other runs, at their last step. */
  show(runs) {
    this.stop();
    this.runs = runs;
    this.#panels = runs.map(() => new Panel((index) => this.seek(index), this.prompts));
    this.#host.replaceChildren(...this.#panels.map((panel) => panel.element));
    this.#last = this.#index = 0;
    this.refresh();
  }

  /** Some of the runs have grown: look at them again before the next frame of the screen. */
  update() {
    if (this.#pending) return;
    this.#pending = true;
    requestAnimationFrame(() => {
      this.#pending = false;
      this.refresh();
    });
  }

  /** Look at the runs again now. */
  refresh() {
    const follows = this.#index === this.#last;
    this.#panels.forEach((panel, place) => (panel.run = this.runs[place]));
    if (!this.#panels.length) return;
    const films = this.#panels.map((panel) => panel.film);
    const most = (name) => Math.max(...films.map((film) => film.scale[name]));
    const scale = { block: most("block"), run: most("run") };
    films.forEach((film) => (film.scale = scale)); // one legend, one meaning
    this.#last = Math.max(0, ...films.map((film) => film.last));
    if (follows) this.#index = this.#last;
    this.#draw();
  }

  /** Show a step, by its index. */
  seek(index) {
    this.#index = Math.max(0, Math.min(this.#last, index));
    this.#draw();
  }

  /** Play from here, or from the beginning where this is the end; or stop. */
  toggle() {
    if (this.#timer !== null) {
      this.stop();
      return;
    }
    if (this.#index >= this.#last) this.seek(0);
    this.#play.textContent = "Pause";
    this.#next();
  }

  #next() {
    this.#timer = setTimeout(() => {
      this.seek(this.#index + 1);
      if (this.#index < this.#last) this.#next();
      else this.stop();
    }, 1000 / Number(this.#speed.value));
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#play.textContent = "Play";
  }

  #draw() {
    if (!this.#panels.length) return;
    const by = this.#by.value;
    this.#panels.forEach((panel) => panel.show(this.#index, by, this.#last + 1));
    this.#slider.max = String(this.#last);
    this.#slider.value = String(this.#index);
    const longest = this.#panels.reduce((a, b) => (b.film.last > a.film.last ? b : a)).film;
    const text = `step ${longest.frames[this.#index].step} of ${longest.frames[longest.last].step}`;
    this.#slider.setAttribute("aria-valuetext", text);
    this.#place.textContent = text;
    this.#explain(by);
  }

  #explain(by) {
    const given = this.#panels.some(({ film }) => film.run.tokens.some((token) => token.step === 0));
    const evicts = this.#panels.some(({ film }) => film.evicts);
    const ends = {
      block: ["first step of its block", "last"],
      run: ["first step", "last"],
      confidence: ["unsure", "sure"],
    };
    const sample = (state, more = {}) => element("span", { class: "cell", "data-state": state, ...more }, "a");
    const shades = Array.from({ length: SHADES }, (_, i) => sample("token", { "data-shade": i }));
    const items = [
      [ends[by][0], element("span", { class: "scale" }, ...shades), ends[by][1]],
      [sample("token", { class: "cell fresh" }), "committed in this step"],
      [sample("mask"), "mask"],
      [sample("ahead"), "mask of another block"],
    ];
    if (evicts) items.push([sample("evicted"), "mask left out of this step"]);
    if (given) items.push([sample("token", { "data-shade": "given" }), "given"]);
    this.#legend.replaceChildren(...items.map((parts) => element("li", {}, ...parts)));
  }

  #key(event) {
    const typed = event.target.closest?.("input:not([type=range]), textarea, select, button, summary");
    if (typed || event.altKey || event.ctrlKey || event.metaKey || !this.#panels.length) return;
    const moves = {
      " ": () => this.toggle(),
      ArrowRight: () => this.seek(this.#index + 1),
      ArrowLeft: () => this.seek(this.#index - 1),
      Home: () => this.seek(0),
      End: () => this.seek(this.#last),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  }
}

/** Keys by name, and what they do. */
function shortcut([names, what]) {
  return element("li", {}, ...names.flatMap((name) => [element("kbd", {}, name), " "]), what);
}
