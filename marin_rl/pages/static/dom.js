// Making elements. Everything that comes from a run is set as text: nothing here takes HTML.
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

function show(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(digits);
}

function fillFacts(list, pairs) {
  list.replaceChildren(...pairs.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, facts(value)))));
}

function facts(value) {
  const text = value === null || value === undefined || value === "" ? "–" : value;
  return typeof text === "string" && text.includes("\n") ? make("pre", {}, text) : text;
}

function fillSelect(select, values, any) {
  const chosen = select.value;
  const options = values.map((value) => make("option", { value }, value));
  if (any) options.unshift(make("option", { value: "" }, any));
  const same = options.length === select.options.length && options.every((option, i) => option.value === select.options[i].value);
  if (same) return; // a list that is open stays open
  select.replaceChildren(...options);
  if (values.map(String).includes(chosen)) select.value = chosen;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) { count /= 1000; power += 1; }
  return `${power ? count.toFixed(1) : count} ${units[power]}`;
}
