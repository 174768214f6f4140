// Groups side by side (best against worst), and the slots of a round.
let followsLatest = true;
const lastContent = new Map();

// True if a part of the page changes: unchanged parts are not redrawn, and keep focus and open details.
function isNews(part, ...content) {
  const text = JSON.stringify(content);
  if (lastContent.get(part) === text) return false;
  lastContent.set(part, text);
  return true;
}

function fillRounds() {
  const withGroups = [...new Set(state.page.groups.map((group) => group.round))];
  fillSelect(byId("g-round"), withGroups);
  if (followsLatest && withGroups.length) byId("g-round").value = String(withGroups.at(-1));
  fillSelect(byId("l-round"), state.page.rounds.map((item) => item.round));
  if (followsLatest && state.page.rounds.length) byId("l-round").value = String(state.page.rounds.at(-1).round);
}

function drawGroups() {
  const select = byId("g-round");
  byId("g-back").disabled = select.selectedIndex <= 0;
  byId("g-next").disabled = select.selectedIndex < 0 || select.selectedIndex >= select.options.length - 1;
  const chosen = state.page.groups.filter((group) => String(group.round) === select.value);
  if (isNews("groups", byId("g-mode").value, chosen)) byId("g-list").replaceChildren(...chosen.map(groupBox));
}

function groupBox(group) {
  const mode = byId("g-mode").value;
  const two = group.cards.filter((card) => card.place);
  const shownCards = two.length ? two.sort((a, b) => (a.place < b.place ? -1 : 1)) : group.cards.slice(0, 2);
  const head = make("header", {}, make("h3", {}, group.example), make("span", { class: "tag" }, group.why),
    make("span", {}, `mean reward ${show(group.mean)} of ${group.rewards.length}`), rewardBars(group));
  const asked = shownCards.length ? make("div", { class: "said text" }, clip(promptOf(shownCards[0]))) : null;
  const answer = group.answer ? make("p", { class: "note" }, "reference answer: ", make("span", { class: "text" }, clip(group.answer))) : null;
  return make("article", { class: "group" }, head, asked, answer,
    make("div", { class: "sides" }, ...shownCards.map((card) => side(card, mode))));
}

function rewardBars(group) {
  const known = group.rewards.filter((reward) => reward !== null);
  const low = Math.min(0, ...known);
  const span = Math.max(1e-9, Math.max(...known, 0) - low);
  const bars = group.rewards.map((reward) => {
    const bar = make("i", { class: reward === null ? "none" : null, title: show(reward) });
    if (reward !== null) bar.style.height = `${8 + 92 * ((reward - low) / span)}%`;
    return bar;
  });
  return make("span", { class: "rewards", role: "img", "aria-label": `rewards: ${group.rewards.map((r) => show(r)).join(", ")}` }, ...bars);
}

function side(card, mode) {
  const head = make("header", {}, placeTag(card), make("strong", {}, show(card.reward)),
    make("span", { class: "note" }, `advantage ${show(card.fate.advantage)} · ${card.status} · ${show(card.n_completion_tokens)} tokens`),
    make("button", { type: "button", class: "open", "aria-label": `Open sample ${card.index}`,
      onclick: () => openRollout(card, state.groupOf.get(card.group_id).cards) }, "Open"));
  return make("div", { class: "side" }, head, card.error ? make("pre", { class: "said" }, clip(card.error)) : tokenText(ownTokens(card.tokens), mode));
}

// Without the prompt, which the group shows once.
function ownTokens(tokens) {
  const first = tokens.trained.indexOf(1);
  return first <= 0 ? tokens : { ...sliceTokens(tokens, first), left_out: 0 };
}

function watchGroups() {
  const select = byId("g-round");
  fillModes(byId("g-mode"));
  const choose = (by) => { followsLatest = false; select.selectedIndex += by; drawGroups(); };
  byId("g-back").addEventListener("click", () => choose(-1));
  byId("g-next").addEventListener("click", () => choose(1));
  select.addEventListener("change", () => choose(0));
  byId("g-mode").addEventListener("change", drawGroups);
  byId("l-round").addEventListener("change", () => { followsLatest = false; drawLineage(); });
}

function chooseLineage(round) {
  followsLatest = false;
  byId("l-round").value = String(round);
  drawLineage();
}

function drawLineage() {
  const slots = state.slotsOf.get(Number(byId("l-round").value)) ?? [];
  if (isNews("slots", byId("l-round").value, slots)) byId("l-list").replaceChildren(...slots.map(slotItem));
}

function slotItem(slot) {
  const parents = slot.parents.map(([name, digest]) => make("div", {}, "from ", make("span", { class: "mono" }, name), " ", make("span", { class: "hash" }, digest)));
  const parts = slot.parts.map(([name, digest]) => make("tr", {}, make("td", {}, name), make("td", { class: "hash" }, digest)));
  const counted = slot.parts.length < slot.n_parts ? `${slot.parts.length} of ${slot.n_parts}` : slot.n_parts;
  return make("li", {},
    make("div", { class: "what" }, slot.title),
    make("div", {}, make("span", { class: "mono" }, slot.name), ` · ${bytes(slot.bytes)}${slot.rows === null ? "" : ` · ${show(slot.rows)} rows`} · ${slot.created_at}`),
    make("div", { class: "hash" }, slot.sha256),
    slot.digest ? make("div", {}, "parameters ", make("span", { class: "hash" }, slot.digest)) : null,
    ...parents,
    parts.length ? make("details", {}, make("summary", {}, `Parts (${counted}), attempt ${slot.attempt}`), make("table", { class: "plain" }, make("tbody", {}, ...parts))) : null);
}
