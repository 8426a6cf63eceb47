/** The positions of a response as a text of cells: each shows its token once that is committed. */

import { element } from "./dom.js";

const MOST_MOVING = 600; // cells that fade from one look to the next; more of them would take a browser seconds
const UNKNOWN = "\u00a0\u00a0\u00a0"; // as wide as a mask is while nobody knows what it hides

/**
 * A token's text in three: spaces before its cell, what the cell shows, and line breaks after it with the indentation
 * of the next line, so that the text of all of them flows and wraps as it would without cells.
 */
function parts(text) {
  const [, before, word, after] = /^( *)(.*?)((?:\n *)*)$/s.exec(text);
  const inner = (word + after.replaceAll(" ", "")).replaceAll("\n", "\u21b5").replaceAll("\t", "\u2192   ");
  if (inner) return [before, inner, after];
  return before ? ["", "\u00a0".repeat(before.length), ""] : ["", "\u00b7", ""];
}

export class Canvas {
  #cells = [];
  #gaps = []; // of each cell, the texts before and after it
  #keys = []; // of each cell, all that its looks follow from, so that only what has changed is touched
  #film = null;
  #index = 0;
  #pointed = null;

  constructor() {
    this.element = element("div", {
      class: "canvas",
      role: "listbox",
      "aria-label": "Response, a position for each token",
      keydown: (event) => this.#key(event),
      pointerover: (event) => this.#point(event.target),
      pointerleave: () => this.#point(document.activeElement),
      focusin: (event) => this.#point(event.target),
    });
    this.told = element("p", { class: "told" });
    this.#tell();
  }

  show(film, index, by) {
    this.#film = film;
    this.#index = index;
    while (this.#cells.length > film.positions) {
      [this.#cells.pop(), ...this.#gaps.pop()].forEach((node) => node.remove());
      this.#keys.pop();
    }
    while (this.#cells.length < film.positions) {
      const cell = element("span", { class: "cell", role: "option", tabindex: "-1" });
      const gaps = [new Text(""), new Text("")];
      this.#cells.push(cell);
      this.#gaps.push(gaps);
      this.element.append(gaps[0], cell, gaps[1]);
    }
    this.element.classList.toggle("still", film.positions > MOST_MOVING);
    this.#cells.forEach((cell, position) => this.#paint(cell, position, by));
    if (!this.element.querySelector('[tabindex="0"]')) this.#cells[0]?.setAttribute("tabindex", "0");
    this.#tell();
  }

  #paint(cell, position, by) {
    const film = this.#film;
    const held = film.cell(position, this.#index);
    const state = film.state(position, this.#index);
    const token = state === "token" || state === "beyond";
    // Once the run is over its masks are as wide as what comes in their place, so that a replay moves nothing.
    const final = film.over ? film.final(position)?.text ?? "" : null;
    const [before, text, after] = token ? parts(held.text) : final === null ? ["", UNKNOWN, ""] : parts(final);
    const shade = state === "token" ? film.shade(position, held, by) : null;
    const fresh = state === "token" && this.#index > 0 && held.index === this.#index;
    const begins = position > 0 && film.block(position) === position;
    const label = this.#label(position, held, state, token);
    const key = [state, before, text, after, shade, fresh, begins, label].join("\u0000");
    if (this.#keys[position] === key) return;
    this.#keys[position] = key;
    cell.textContent = text;
    this.#gaps[position][0].data = before;
    this.#gaps[position][1].data = after;
    cell.dataset.state = state;
    if (shade === null) delete cell.dataset.shade;
    else cell.dataset.shade = shade;
    cell.classList.toggle("fresh", fresh);
    cell.classList.toggle("begins", begins);
    cell.setAttribute("aria-label", label);
  }

  #label(position, held, state, token) {
    if (!token) {
      const what = { mask: "mask", evicted: "mask, left out of this step", ahead: "mask, not decoded yet" }[state];
      return `position ${position + 1}: ${what}`;
    }
    const beyond = state === "beyond" ? ", after the end" : "";
    return `position ${position + 1}: ${JSON.stringify(held.text)}, ${this.#origin(position, held)}${beyond}`;
  }

  #origin(position, held) {
    if (held.step === 0) return "given";
    const turn = this.#film.turn(position, held);
    const sure = held.confidence === null ? "" : `, confidence ${Number(held.confidence).toFixed(3)}`;
    return `step ${held.step} (number ${turn} of its block)${sure}`;
  }

  // -- pointing at a cell ---------------------------------------------------------------------------------------------

  #point(target) {
    const cell = this.#cells.includes(target) ? target : null;
    if (cell === this.#pointed) return;
    this.#pointed?.classList.remove("pointed");
    cell?.classList.add("pointed");
    this.#pointed = cell;
    this.#tell();
  }

  /** Say below the canvas what is pointed at. */
  #tell() {
    const position = this.#cells.indexOf(this.#pointed);
    if (position < 0) {
      this.told.replaceChildren("Point at a token, or move over them with the arrow keys.");
      return;
    }
    const held = this.#film.cell(position, this.#index);
    if (held && held.token >= 0) {
      const about = `position ${position + 1}, token ${held.token}, ${this.#origin(position, held)}`;
      this.told.replaceChildren(element("b", {}, parts(held.text)[1]), about);
    } else {
      this.told.replaceChildren(this.#cells[position].getAttribute("aria-label"));
    }
  }

  #key(event) {
    const at = this.#cells.indexOf(document.activeElement);
    const moves = {
      ArrowRight: () => at + 1,
      ArrowLeft: () => at - 1,
      ArrowDown: () => this.#beside(at, 1),
      ArrowUp: () => this.#beside(at, -1),
      Home: () => 0,
      End: () => this.#cells.length - 1,
    };
    if (at < 0 || !(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.#cells[moves[event.key]()];
    if (!next) return;
    this.#cells[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  /** The cell above or below another: of the nearest line in that direction, the nearest one. */
  #beside(at, direction) {
    const from = this.#cells[at].getBoundingClientRect();
    let best = at;
    let least = Infinity;
    this.#cells.forEach((cell, position) => {
      const box = cell.getBoundingClientRect();
      const away = (box.top - from.top) * direction;
      if (away < from.height / 2) return;
      const far = away * 1000 + Math.abs(box.left - from.left);
      if (far < least) [best, least] = [position, far];
    });
    return best;
  }
}
