/** A whole run at a glance: a column for each step, a line for each position. Masks that a step left out are gaps. */

import { element } from "./dom.js";
import { SHADES } from "./film.js";

const LINE = 3; // pixels of a position, where there is room
const LEAST = 40;
const MOST = 120;

export class Strip {
  #drawn = ""; // what the picture shows, and how
  #film = null;
  #columns = 1;
  #picture = element("canvas", {});
  #mark = element("div", { class: "mark" });

  /** @param {function(number)} pick called with the index of the frame that was clicked */
  constructor(pick) {
    this.element = element(
      "div",
      {
        class: "film",
        "aria-hidden": "true",
        title: "Each column is a step, each line a position",
        pointerdown: (event) => this.#pick(event, pick),
        pointermove: (event) => event.buttons && this.#pick(event, pick),
      },
      this.#picture,
      this.#mark,
    );
  }

  #pick(event, pick) {
    const box = this.element.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * this.#columns);
    pick(Math.max(0, Math.min(this.#columns - 1, at)));
  }

  /** Show a film in so many columns, with a mark at a frame. */
  show(film, index, by, columns) {
    const look = getComputedStyle(this.element);
    const width = this.element.clientWidth;
    const drawn = [by, columns, width, look.getPropertyValue("--paper")].join();
    if (this.#film !== film || this.#drawn !== drawn) this.#draw(film, by, columns, width, look);
    [this.#film, this.#drawn, this.#columns] = [film, drawn, columns];
    this.#mark.style.left = `${((index + 0.5) / columns) * 100}%`;
  }

  #draw(film, by, columns, width, look) {
    const height = Math.max(LEAST, Math.min(MOST, film.positions * LINE));
    const scale = window.devicePixelRatio || 1;
    this.#picture.style.height = `${height}px`;
    this.#picture.width = width * scale;
    this.#picture.height = height * scale;
    const pen = this.#picture.getContext("2d");
    pen.scale((width * scale) / columns, (height * scale) / Math.max(1, film.positions));
    const [mask, line, faint] = ["--mask", "--line", "--faint"].map((name) => look.getPropertyValue(name));
    const shades = Array.from({ length: SHADES }, (_, i) => look.getPropertyValue(`--step-${i}`));
    const tall = height >= LINE * film.positions ? 0.8 : 1;
    const block = (x, y, wide, fill, alpha) => {
      pen.fillStyle = fill;
      pen.globalAlpha = alpha;
      pen.fillRect(x, y, wide, tall);
    };
    const frames = film.frames.length;
    for (let position = 0; position < film.positions; position++) {
      const held = film.held(position);
      block(0, position, held.find((cell) => cell.token >= 0)?.index ?? frames, mask, 0.45);
      held.forEach((cell, place) => {
        if (cell.token < 0) return;
        const until = held[place + 1]?.index ?? frames;
        const fill = position >= film.end ? line : shades[film.shade(position, cell, by)] ?? faint;
        block(cell.index, position, until - cell.index, fill, 0.5);
        block(cell.index, position, 1, fill, 1);
      });
    }
    film.frames.forEach((frame, at) => {
      for (let position = frame.offset; position < frame.offset + frame.width; position++) {
        const state = film.state(position, at);
        if (state === "mask") block(at, position, 1, mask, 1);
        if (state === "evicted") pen.clearRect(at, position, 1, 1);
      }
    });
  }
}
