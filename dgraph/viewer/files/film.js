/**
 * A run, step by step: what stands at each position after each step. Runs are as `dgraph.viewer.Run` describes them;
 * one that still grows has no `seconds` yet, and may say by `length` how many positions it asked for.
 */

export const SHADES = 8;

export class Film {
  #history = []; // of each position, the cells that it held: {index, token, text, step, confidence}; token -1: a mask
  #blocks = []; // of each position that a step showed, the offset of its block
  #first = new Map(); // of each block, by offset, its first step

  constructor(run) {
    this.run = run;
    this.over = run.seconds !== null && run.seconds !== undefined;
    const drafts = new Map(run.steps.map((draft) => [draft.step, draft]));
    const committed = new Map();
    run.tokens.forEach((token, position) => {
      committed.set(token.step, [...(committed.get(token.step) ?? []), [position, token]]);
    });
    const steps = new Set([0, ...drafts.keys(), ...committed.keys()]);
    /** Per step, and before the first: {step, offset, kept, width}. */
    this.frames = [...steps].sort((a, b) => a - b).map((step, index) => {
      for (const [position, token] of committed.get(step) ?? []) {
        this.#write(position, index, token);
      }
      return this.#frame(index, step, drafts.get(step));
    });
    /** Steps that the shades are spread over: of a block, from its first to the last that committed; and of the run. */
    this.scale = { block: 1, run: Math.max(1, this.frames[this.last].step - 1) };
    this.positions = Math.max(this.#history.length, this.over ? 0 : run.length ?? 0);
    this.#measure();
  }

  /** Index of the last frame. */
  get last() {
    return this.frames.length - 1;
  }

  /** Whether any step left a row out. */
  get evicts() {
    return this.frames.some((frame) => frame.kept.includes(false));
  }

  /** How many positions the response has; all of them while it is not known. */
  get end() {
    return this.over ? this.run.tokens.length : Infinity;
  }

  #write(position, index, cell) {
    const held = (this.#history[position] ??= []);
    if (held.at(-1)?.index === index) held.pop();
    held.push({ index, ...cell });
  }

  #frame(index, step, draft) {
    if (!draft) return { step, offset: 0, kept: [], width: 0 };
    draft.token_ids.forEach((token, column) => {
      const position = draft.offset + column;
      this.#blocks[position] = draft.offset;
      if (this.cell(position, index)?.token !== token) {
        const text = draft.tokens?.[column] ?? "";
        this.#write(position, index, { token, text, step, confidence: draft.confidence?.[column] ?? null });
      }
    });
    if (!this.#first.has(draft.offset)) this.#first.set(draft.offset, step);
    return { step, offset: draft.offset, kept: draft.kept ?? [], width: draft.token_ids.length };
  }

  #measure() {
    for (let position = 0; position < this.#history.length; position++) {
      const block = this.block(position);
      for (const { step, token } of this.#history[position] ?? []) {
        if (token < 0 || step === 0) continue;
        this.#first.set(block, Math.min(this.#first.get(block) ?? step, step));
        this.scale.block = Math.max(this.scale.block, step - this.#first.get(block));
      }
    }
  }

  /** Position of the first token of the block that a position lies in. */
  block(position) {
    const length = this.run.block_length || this.positions || 1;
    return this.#blocks[position] ?? Math.floor(position / length) * length;
  }

  /** What a position holds after a step; undefined where no step has shown it yet. */
  cell(position, index) {
    return this.#history[position]?.findLast((cell) => cell.index <= index);
  }

  /** What a position holds in the end. */
  final(position) {
    return this.#history[position]?.at(-1);
  }

  /** The cells that a position has held, in order. */
  held(position) {
    return this.#history[position] ?? [];
  }

  /**
   * How a position looks after a step: "token"; "beyond", a token after the end of the response; "mask", a mask of the
   * block that the step decoded; "evicted", one whose row it left out; or "ahead", a mask of another block.
   */
  state(position, index) {
    const cell = this.cell(position, index);
    if (cell && cell.token >= 0) return position < this.end ? "token" : "beyond";
    const { offset, width, kept } = this.frames[index];
    if (position < offset || position >= offset + width) return "ahead";
    return kept[position - offset] === false ? "evicted" : "mask";
  }

  /** How many steps of its block a cell waited, from 1. */
  turn(position, cell) {
    return cell.step - (this.#first.get(this.block(position)) ?? cell.step) + 1;
  }

  /** The shade of a token: 0 to 7, or "given" where it was fixed from the beginning. */
  shade(position, cell, by) {
    if (cell.step === 0) return "given";
    const share = {
      block: () => (this.turn(position, cell) - 1) / this.scale.block,
      run: () => (cell.step - 1) / this.scale.run,
      confidence: () => cell.confidence ?? 0,
    }[by]();
    return Math.min(SHADES - 1, Math.max(0, Math.floor(share * SHADES)));
  }

  /**
   * Counts after a step: tokens of the response, those of them that were not given, positions decoded (after its end,
   * too), positions that the step committed, masks that it left out.
   */
  counts(index) {
    const found = { tokens: 0, made: 0, decoded: 0, fresh: 0, evicted: 0 };
    for (let position = 0; position < this.positions; position++) {
      const state = this.state(position, index);
      found.evicted += state === "evicted";
      if (state !== "token" && state !== "beyond") continue;
      found.tokens += state === "token";
      found.made += state === "token" && this.cell(position, index).step > 0;
      found.decoded += 1;
      found.fresh += index > 0 && this.cell(position, index).index === index;
    }
    return found;
  }
}
