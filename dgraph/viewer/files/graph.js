/** Opens and closes the boxes of a graph's page, all at once or from one to the next. */

import { element } from "./dom.js";

const boxes = [...document.querySelectorAll("details")];

function all(open) {
  boxes.forEach((box) => (box.open = open));
}

/** Go to the box after or before the one that has the focus. */
function move(by) {
  const at = boxes.findIndex((box) => box.contains(document.activeElement));
  const next = boxes[at < 0 ? 0 : Math.max(0, Math.min(boxes.length - 1, at + by))];
  next?.querySelector("summary").focus();
}

const keys = { o: () => all(true), c: () => all(false), j: () => move(1), k: () => move(-1) };
if (boxes.length) {
  document.getElementById("boxes").before(
    element(
      "div",
      { class: "bar quiet" },
      element("button", { type: "button", click: keys.o }, "Open all ", element("kbd", {}, "o")),
      element("button", { type: "button", click: keys.c }, "Close all ", element("kbd", {}, "c")),
      element("span", {}, element("kbd", {}, "j"), " ", element("kbd", {}, "k"), " next or previous box"),
    ),
  );
}
document.addEventListener("keydown", (event) => {
  if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey) return;
  keys[event.key]();
});
