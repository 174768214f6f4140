// One rollout in a dialog: its tokens, turns, reward, disposition and lineage.
let shown = null;
let neighbours = [];
let modeOfTokens = "sampler";

function openRollout(card, among) {
  shown = card;
  if (among) neighbours = among;
  const group = state.groupOf.get(card.group_id);
  byId("r-title").textContent = `Round ${card.round} · ${group.example} · sample ${card.index} of ${group.size}`;
  byId("r-body").replaceChildren(...rolloutParts(card, group));
  byId("r-body").scrollTop = 0;
  const at = neighbours.indexOf(card);
  byId("r-back").disabled = at <= 0;
  byId("r-next").disabled = at < 0 || at >= neighbours.length - 1;
  const dialog = byId("rollout");
  if (!dialog.open) dialog.showModal();
  const pressed = document.activeElement;
  if (pressed.disabled || !["r-back", "r-next"].includes(pressed.id)) byId("r-title").focus();
  history.replaceState(null, "", `#rollout=${encodeURIComponent(card.rollout_id)}`);
}

function stepRollout(by) {
  const next = neighbours[neighbours.indexOf(shown) + by];
  if (next) openRollout(next);
}

// Left and right step through rollouts, except in inputs, where these keys have a meaning of their own.
function stepByKey(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select, input")) return;
  event.preventDefault();
  stepRollout(by);
}

function closeRollout(target) {
  byId("rollout").close();
  if (!target) return;
  location.hash = target;
  const title = byId(`${target}-title`);
  title.tabIndex = -1;
  title.focus({ preventScroll: true });
}

function rolloutParts(card, group) {
  return [
    rolloutFacts(card, group),
    ...(isDialogue(card) ? dialogueParts(card) : [...tokenParts(card), make("h3", {}, "Turns"), ...card.turns.flatMap(turnParts)]),
    ...(card.error ? [make("h3", {}, "Error"), make("pre", { class: "said" }, card.error)] : []),
    ...rewardParts(card, group),
    make("h3", {}, "Lineage"), lineageOf(card),
    ...siblingParts(card, group),
  ];
}

function rolloutFacts(card, group) {
  const list = make("dl", { class: "facts" });
  const policy = [...new Set([card.policy_version_min, card.policy_version_max])].join(" to ");
  fillFacts(list, [
    ["reward", show(card.reward)], ["advantage", show(card.fate.advantage)], ["fate", fateText(card.fate)],
    ["status", card.finish_reason ? `${card.status} (${card.finish_reason})` : card.status],
    ["tokens", `${show(card.n_prompt_tokens)} + ${show(card.n_completion_tokens)}`], ["policy version", policy],
    ["seconds of its group", show(card.timing.group_s, 2)], ["sampling", group.sampling],
    ["seconds of the model", modelSeconds(card)],
    ...(card.timing.environment_s === null ? [] : [["seconds of the environment", show(card.timing.environment_s, 2)]]),
    ...(isDialogue(card) ? [["turns of the model", show(card.n_turns)]] : []),
    ...(card.tools.length ? [["tools", card.tools.join(", ")]] : []),
  ]);
  return list;
}

function modelSeconds(card) {
  const { queue_s: queue, prefill_s: prefill, decode_s: decode } = card.timing;
  if ([queue, prefill, decode].includes(null)) return "not reported";
  return `${show(queue + prefill + decode, 2)} (queue ${show(queue, 2)}, prefill ${show(prefill, 2)}, decode ${show(decode, 2)})`;
}

// Makes a list of modes; `draw` is called now, and whenever another mode is chosen.
function modeSelect(draw) {
  const select = make("select", { "aria-label": "Colour tokens by" });
  fillModes(select);
  select.value = modeOfTokens;
  select.addEventListener("change", () => { modeOfTokens = select.value; draw(); });
  draw();
  return select;
}

function tokenParts(card) {
  const home = make("div");
  const select = modeSelect(() => home.replaceChildren(legend(card.tokens, modeOfTokens), tokenText(card.tokens, modeOfTokens)));
  return [make("h3", {}, "Tokens, coloured by ", select), home, tableOf(card)];
}

const tableOf = (card) => lazyDetails("Tokens as a table", () => tokenTable(card.tokens));

// A fold whose content is made when it is opened first.
function lazyDetails(title, content) {
  const fold = make("details", {}, make("summary", {}, title));
  fold.addEventListener("toggle", () => { if (fold.open && fold.children.length === 1) fold.append(content()); });
  return fold;
}

const speaker = (turn) => (turn.tool_name ? `${turn.role} (${turn.tool_name})` : turn.role);

function turnParts(turn) {
  const title = speaker(turn) + (turn.reward === null ? "" : ` · ${turnReward(turn)}`);
  return [make("div", { class: "note" }, title), turnText(turn)];
}

function turnReward(turn) {
  const parts = (turn.rewards ?? []).map(({ name, value }) => `${name} ${show(value)}`).join(", ");
  return `reward ${show(turn.reward)}` + (parts ? ` (${parts})` : "");
}

function turnText(turn) {
  return make("div", { class: "said text" }, visible(turn.content), turn.left_out ? ` … ${show(turn.left_out)} characters are left out` : "");
}

// A dialogue: several turns of the model, or tools. Its turns carry the colours of their tokens.
const isDialogue = (card) => card.n_turns > 1 || card.tools.length > 0 || card.turns.some((turn) => turn.tool_calls.length);

function dialogueParts(card) {
  const home = make("div", { class: "dialogue" });
  const draw = () => home.replaceChildren(legend(card.tokens, modeOfTokens), ...card.turns.flatMap((turn, i) => [...segmentHead(card, i), dialogueTurn(card, turn, i)].map((part) => indented(part, card, i))));
  const select = modeSelect(draw);
  const all = lazyDetails("All tokens, as the model read them", () => tokenText(card.tokens, modeOfTokens));
  return [make("h3", {}, "Dialogue, coloured by ", select), home, all, tableOf(card)];
}

const segmentHead = (card, place) => card.segments.filter((segment) => segment.turn === place + 1).map((segment) => make("h4", {}, segment.about));

// A segment that goes back to a turn stands below and to the right of that turn's.
const DEPTH_MAX = 8;
const segmentOf = (card, place) => card.segments.findLast((segment) => segment.turn <= place + 1);
const depthOf = (card, segment) => (segment?.parent ? 1 + depthOf(card, segmentOf(card, segment.parent - 1)) : 0);

function indented(part, card, place) {
  part.style.marginLeft = `${1.5 * Math.min(DEPTH_MAX, depthOf(card, segmentOf(card, place)))}rem`;
  return part;
}

function dialogueTurn(card, turn, place) {
  const seconds = [["model", turn.model_s], ["environment", turn.environment_s]].map(([who, value]) => (value === null ? "" : `${who} ${show(value, 2)} s`));
  const facts = [turn.start === null ? "" : `${show(turn.end - turn.start)} tokens`, turn.finish_reason, ...seconds].filter(Boolean).map((fact) => ` · ${fact}`);
  const name = speaker(turn);
  const reward = turn.reward === null ? null : make("strong", { class: "reward" }, turnReward(turn));
  const head = make("header", {}, make("span", { class: "note" }, `${place + 1} `), make("strong", {}, name), make("span", { class: "note" }, ...facts), reward);
  return make("section", { class: `turn ${turn.sampled ? "own" : turn.role}`, "aria-label": `Turn ${place + 1}, ${name}` }, head, ...dialogueTexts(card, turn));
}

function dialogueTexts(card, turn) {
  if (turn.role === "tool") return [folded(`Result of ${turn.tool_name || "a tool"}${turn.tool_call_id ? `, call ${turn.tool_call_id}` : ""}${turn.cut ? ", cut at the limit" : ""}: ${clip(turn.content)}`, turnText(turn))];
  const calls = turn.tool_calls.map(({ name, arguments: given, id }) => folded(`Calls ${name}${id ? `, call ${id}` : ""}`, make("pre", { class: "said" }, visible(given))));
  const texts = ownTokensOf(card, turn);
  return [texts ?? (turn.content || !calls.length ? turnText(turn) : null), ...calls].filter(Boolean);
}

const folded = (title, ...content) => make("details", {}, make("summary", {}, visible(title)), ...content);

// The tokens of a sampled turn as text; null where the page has not all of them. The scale is the rollout's.
function ownTokensOf(card, turn) {
  const { tokens } = card;
  if (!turn.sampled || turn.start === null || turn.start < tokens.left_out) return null;
  const first = turn.start - tokens.left_out;
  const paint = paintOf(tokens, modeOfTokens);
  const here = paint && { ...paint, of: (i) => paint.of(first + i) };
  return fillTokens(make("div", { class: "tokens text" }), sliceTokens(tokens, first, turn.end - tokens.left_out), modeOfTokens, here);
}

function rewardParts(card, group) {
  const rows = card.reward_components.map(({ name, value, weight }) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...[value, weight, value * weight].map((cell) => make("td", { class: "number" }, show(cell)))));
  const head = make("tr", {}, ...["component", "value", "weight", "counts"].map((cell, i) => make("th", { scope: "col", class: i ? "number" : null }, cell)));
  return [
    make("h3", {}, "Reward"),
    group.answer ? make("p", {}, "reference answer: ", make("span", { class: "text" }, group.answer)) : null,
    rows.length ? make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...rows)) : make("p", { class: "note" }, "No components."),
    make("details", {}, make("summary", {}, "The example's metadata"), make("pre", { class: "said" }, group.metadata)),
  ].filter(Boolean);
}

function lineageOf(card) {
  const slots = state.slotsOf.get(card.round) ?? [];
  const named = (name) => slots.find((slot) => slot.name === name);
  const rollouts = slots.find((slot) => slot.title === "rollouts");
  const sampled = slots.find((slot) => slot.title === "policy that sampled");
  const part = rollouts?.parts.find(([name]) => name === card.shard);
  const facts = state.page.facts;
  const [player, , settings] = facts.shared.find(([, through]) => card.round < through) ?? [facts.run_id, null, facts.content_digest];
  const same = sampled?.digest && sampled.digest === card.policy_digest;
  const steps = [
    ["This rollout", card.rollout_id, null],
    ["stands in the shard", `${rollouts?.name ?? ""}/${card.shard}`, part?.[1]],
    batchStep(card.fate, named),
    trainedStep(card.fate),
    ["It was sampled by the parameters", card.model, card.policy_digest],
    sampled ? [same ? "which are those of the checkpoint" : "The checkpoint of its round", sampled.name, sampled.sha256] : null,
    ["under the configuration", `run.json of ${player}`, settings],
  ].filter(Boolean);
  const list = make("ol", { class: "chain" }, ...steps.map(([what, name, digest]) => make("li", {},
    make("div", { class: "what" }, what), make("div", { class: "mono" }, name), digest ? make("div", { class: "hash" }, digest) : null)));
  return make("div", {}, list, make("div", { class: "buttons" },
    make("button", { type: "button", onclick: () => { chooseLineage(card.round); closeRollout("lineage"); } }, `Slots of round ${card.round}`),
    make("button", { type: "button", onclick: () => closeRollout("configuration") }, "Configuration")));
}

function batchStep(fate, named) {
  if (fate.round === null) return ["No batches have it yet", "undecided", null];
  const slot = `batches/round-${String(fate.round).padStart(5, "0")}`;
  const place = fate.kind === "consumed" ? `step ${fate.step}, row ${fate.row}, segment ${fate.segment}` : fateText(fate);
  return [fate.kind === "consumed" ? "was trained on at" : "was not trained on", `${slot}: ${place}`, named(slot)?.sha256];
}

function trainedStep(fate) {
  if (fate.kind !== "consumed") return null;
  const after = `checkpoints/round-${String(fate.round + 1).padStart(5, "0")}`;
  const slot = (state.slotsOf.get(fate.round) ?? []).find((item) => item.name === after);
  return slot ? ["which made the checkpoint", after, slot.sha256] : ["which is still being trained", after, null];
}

function siblingParts(card, group) {
  const others = group.cards.filter((other) => other !== card);
  if (!others.length) return [];
  const sides = make("div", { class: "sides" }, ...others.map((other) => side(other, modeOfTokens)));
  return [make("h3", {}, `Others of its group (${group.cards.length} of ${group.size} shown)`), sides];
}

const fateText = (fate) => (fate.reason ? `${fate.kind}: ${fate.reason}` : fate.kind);
