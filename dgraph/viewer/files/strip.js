/** A whole run at a glance: a column for each step, a line for each position. Masks that a step left out are gaps. */

import { element } from "./dom.js";
import { SHADES } from "./film.js";

const LINE = 3; // pixels of a position, where there is room
const LEAST = 40;
const MOST = 120;

export class Strip {
  /** @param {function(number)} pick called with the index of the frame that was clicked */
  constructor(pick) {
    this.element = element("canvas", {
      class: "film",
      "aria-hidden": "true",
      title: "Each column is a step, each line a position",
      pointerdown: (event) => this.#pick(event, pick),
      pointermove: (event) => event.buttons && this.#pick(event, pick),
    });
    this.columns = 1;
  }

  #pick(event, pick) {
    const box = this.element.getBoundingClientRect();
    pick(Math.max(0, Math.min(this.columns - 1, Math.floor(((event.clientX - box.left) / box.width) * this.columns))));
  }

  /** Draw a film in so many columns, with a mark at a frame. */
  show(film, index, by, columns) {
    this.columns = columns;
    const width = this.element.clientWidth;
    const height = Math.max(LEAST, Math.min(MOST, film.positions * LINE));
    const scale = window.devicePixelRatio || 1;
    this.element.style.height = `${height}px`;
    this.element.width = width * scale;
    this.element.height = height * scale;
    const pen = this.element.getContext("2d");
    const look = getComputedStyle(this.element);
    const colour = (name) => look.getPropertyValue(name);
    const shades = Array.from({ length: SHADES }, (_, i) => colour(`--step-${i}`));
    pen.scale((width * scale) / columns, (height * scale) / Math.max(1, film.positions));
    const tall = height >= LINE * film.positions ? 0.8 : 1;
    const block = (x, y, wide, fill, alpha) => {
      pen.fillStyle = fill;
      pen.globalAlpha = alpha;
      pen.fillRect(x, y, wide, tall);
    };
    const frames = film.frames.length;
    for (let position = 0; position < film.positions; position++) {
      const held = film.held(position);
      block(0, position, held.find((cell) => cell.token >= 0)?.index ?? frames, colour("--mask"), 0.45);
      held.forEach((cell, place) => {
        if (cell.token < 0) return;
        const until = held[place + 1]?.index ?? frames;
        const shade = film.shade(position, cell, by);
        const fill = position >= film.end ? colour("--line") : shades[shade] ?? colour("--faint");
        block(cell.index, position, until - cell.index, fill, 0.5);
        block(cell.index, position, 1, fill, 1);
      });
    }
    film.frames.forEach((frame, at) => {
      for (let column = 0; column < frame.width; column++) {
        const position = frame.offset + column;
        const state = film.state(position, at);
        if (state === "mask") block(at, position, 1, colour("--mask"), 1);
        if (state === "evicted") pen.clearRect(at, position, 1, 1);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--ink");
    const thin = columns / Math.max(1, width);
    pen.fillRect(index + 0.5 - thin, 0, 2 * thin, film.positions);
  }
}
