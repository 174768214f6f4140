// The table of rollouts (DataTables) and its filters. Cells are made of text nodes only.
let table = null;

const MIDDLE = 100;

const COLUMNS = [
  { title: "Open", label: "", value: (card) => card.round * 1e6 + card.index, cell: openButton, orderable: false },
  { title: "Round", label: "round", value: (card) => card.round, cell: (card) => card.round, number: true },
  { title: "Prompt and completion", label: "", value: (card) => completionOf(card), cell: texts },
  { title: "Reward", label: "reward", value: (card) => card.reward ?? -Infinity, cell: (card) => show(card.reward), number: true },
  { title: "Advantage", label: "advantage", value: (card) => card.fate.advantage ?? -Infinity, cell: (card) => show(card.fate.advantage), number: true },
  { title: "In its group", label: "in its group", value: (card) => card.place, cell: placeTag },
  { title: "Fate", label: "fate", value: (card) => card.fate.kind, cell: (card) => fateText(card.fate) },
  { title: "Status", label: "status", value: (card) => card.status, cell: statusText },
  { title: "Turns", label: "turns", value: (card) => card.n_turns, cell: (card) => show(card.n_turns), number: true },
  { title: "Tokens", label: "tokens", value: (card) => card.n_completion_tokens, cell: (card) => show(card.n_completion_tokens), number: true },
  { title: "Mean logprob", label: "mean logprob", value: meanLogprob, cell: (card) => show(meanLogprob(card)), number: true },
];

function openButton(card) {
  const name = `Open round ${card.round}, sample ${card.index} of ${state.groupOf.get(card.group_id).example}`;
  return make("button", { type: "button", class: "open", "aria-label": name, "data-id": card.rollout_id }, "Open");
}

function texts(card) {
  return make("div", {}, make("span", { class: "text dim" }, clip(promptOf(card))), make("span", { class: "text" }, clip(completionOf(card))));
}

const clip = (text) => (text.length > 2 * MIDDLE ? `${text.slice(0, MIDDLE)} … ${text.slice(-MIDDLE)}` : text);

function placeTag(card) {
  return card.place ? make("span", { class: `tag ${card.place}` }, card.place) : "";
}

function meanLogprob(card) {
  const known = card.tokens.sampler.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// With the reason that it stopped, unless that is the usual one.
function statusText(card) {
  return card.finish_reason && card.finish_reason !== "stop" ? `${card.status} (${card.finish_reason})` : card.status;
}

function columnOf(column) {
  return {
    title: column.title, orderable: column.orderable ?? true, className: column.number ? "dt-right" : "dt-left",
    type: column.number ? "num" : "string", data: null,
    render: (card, type) => (type === "display" ? "" : column.value(card)),
    createdCell: (cell, _, card) => { cell.replaceChildren(asNode(column.cell(card))); cell.dataset.label = column.label; },
  };
}

// Turns are a column only where some rollout has several.
function showTurns(cards) {
  const place = COLUMNS.findIndex((column) => column.title === "Turns");
  const wanted = cards.some((card) => card.n_turns > 1);
  if (table.column(place).visible() !== wanted) table.column(place).visible(wanted);
}

function drawTable(cards) {
  if (table) {
    showTurns(cards);
    const focused = document.activeElement.closest("#table tbody") ? document.activeElement.dataset.id : null;
    table.clear().rows.add(cards).draw(false);
    if (focused) focusCard(focused);
    return;
  }
  table = new DataTable("#table", {
    data: cards, columns: COLUMNS.map(columnOf), order: [[1, "desc"], [3, "desc"]], deferRender: true,
    pageLength: 15, autoWidth: false, searching: true, lengthChange: false,
    layout: { topStart: null, topEnd: null, bottomStart: "info", bottomEnd: "paging" },
    createdRow: (row, card) => row.addEventListener("click", () => openRollout(card, visibleCards())),
    language: { emptyTable: "No rollouts are committed yet.", zeroRecords: "No rollout passes these filters." },
    drawCallback: () => showCount(),
  });
  showTurns(cards);
  table.search.fixed("filters", (_, card) => passes(card));
  table.draw();
}

const openButtons = () => [...document.querySelectorAll("#table tbody button.open")];

function focusCard(id) {
  openButtons().find((button) => button.dataset.id === id)?.focus();
}

// Arrows go from row to row and over the edge of a page; Home, End, PageUp and PageDown as in a list.
function moveByKey(event) {
  const buttons = openButtons();
  const at = buttons.indexOf(event.target);
  if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const last = buttons.length - 1;
  const row = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
  const turned = row === undefined ? { PageDown: "next", PageUp: "previous" }[event.key] : row > last ? "next" : row < 0 ? "previous" : null;
  if (row === undefined && !turned) return;
  event.preventDefault();
  if (!turned) { buttons[row].focus(); return; }
  const { page, pages } = table.page.info();
  if (turned === "next" ? page + 1 >= pages : page === 0) return;
  table.page(turned).draw("page");
  const there = openButtons();
  there[{ ArrowDown: 0, ArrowUp: there.length - 1 }[event.key] ?? Math.min(at, there.length - 1)].focus();
}

const visibleCards = () => table.rows({ search: "applied", order: "applied" }).data().toArray();

function showCount() {
  if (!table) return;
  const passing = table.rows({ search: "applied" }).count();
  byId("count").textContent = `${show(passing)} of ${show(state.cards.length)} rollouts`;
}

const numberIn = (id) => (byId(id).value === "" ? null : Number(byId(id).value));

function passes(card) {
  const { text, from, to, low, high, least, most, fate, status, stop, environment, tool, place } = state.filters;
  if (from !== null && card.round < from) return false;
  if (to !== null && card.round > to) return false;
  if (low !== null && !(card.reward >= low)) return false;
  if (high !== null && (card.reward === null || card.reward > high)) return false;
  if (least !== null && card.n_turns < least) return false;
  if (most !== null && card.n_turns > most) return false;
  if (tool && !card.tools.includes(tool)) return false;
  if (fate && card.fate.kind !== fate) return false;
  if (status && card.status !== status) return false;
  if (stop && card.finish_reason !== stop) return false;
  if (place && card.place !== place) return false;
  const group = state.groupOf.get(card.group_id);
  if (environment && group.environment !== environment) return false;
  return !text || haystack(card, group).includes(text);
}

function haystack(card, group) {
  card.hay ??= [card.rollout_id, group.example, group.answer, card.error, ...card.tools, ...card.turns.map((turn) => turn.content)].join("\n").toLowerCase();
  return card.hay;
}

function readFilters() {
  state.filters = {
    text: byId("f-text").value.trim().toLowerCase(), from: numberIn("f-from"), to: numberIn("f-to"),
    low: numberIn("f-low"), high: numberIn("f-high"), least: numberIn("f-least"), most: numberIn("f-most"), fate: byId("f-fate").value,
    status: byId("f-status").value, stop: byId("f-stop").value, environment: byId("f-environment").value,
    tool: byId("f-tool").value, place: byId("f-place").value,
  };
}

function fillFilters(cards, groups) {
  const distinct = (values) => [...new Set(values)].sort();
  fillSelect(byId("f-fate"), distinct(cards.map((card) => card.fate.kind)), "any");
  fillSelect(byId("f-status"), distinct(cards.map((card) => card.status)), "any");
  fillSelect(byId("f-stop"), distinct(cards.map((card) => card.finish_reason).filter(Boolean)), "any");
  fillSelect(byId("f-environment"), distinct(groups.map((group) => group.environment)), "any");
  const tools = distinct(cards.flatMap((card) => card.tools));
  fillSelect(byId("f-tool"), tools, "any");
  byId("f-tool-label").hidden = !tools.length;
  byId("f-turns").hidden = !cards.some((card) => card.n_turns > 1);
  readFilters();
}

function watchFilters() {
  const form = byId("filters");
  const apply = () => { readFilters(); table.draw(); };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  byId("table").addEventListener("keydown", moveByKey);
}
