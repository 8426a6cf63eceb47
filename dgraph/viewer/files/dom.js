/** Makes elements. Text is set as text, so that nothing a model says is ever read as markup. */

/**
 * @param {string} tag
 * @param {Object} given attributes by name; a function is a listener of the event so named; null leaves one out
 * @param {...(Node|string)} children
 */
export function element(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Options of a `select`: pairs of value and text. */
export function choices(pairs) {
  return pairs.map(([value, text]) => element("option", { value }, text));
}
