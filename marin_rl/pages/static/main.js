// Fills the page, follows a running run where a server serves it, and applies the theme.
const state = { page: null, cards: [], groupOf: new Map(), slotsOf: new Map(), filters: {} };
const LOOK_EVERY_MS = 2000;
const live = document.body.dataset.live === "yes";

function showPage(page) {
  state.page = page;
  state.cards = page.groups.flatMap((group) => group.cards);
  state.groupOf = new Map(page.groups.map((group) => [group.id, group]));
  const slots = (item) => item.slots.map(([title, name]) => ({ ...page.slots[name], title }));
  state.slotsOf = new Map(page.rounds.map((item) => [item.round, slots(item)]));
  byId("headline").textContent = page.facts.headline;
  fillFacts(byId("facts"), [...page.facts.lines, ...(page.stage ? [["in progress", page.stage]] : []), ["root", page.facts.root]]);
  drawCharts(page.charts);
  byId("absent").textContent = page.absent.length ? `This run has no data for: ${page.absent.join(", ")}.` : "";
  drawAnswers(page.held_out);
  byId("notes").textContent = page.notes.join(" ");
  fillFilters(state.cards, page.groups);
  drawTable(state.cards);
  fillRounds();
  drawGroups();
  drawLineage();
  fillFacts(byId("environment"), page.facts.environment);
  fillFacts(byId("code"), page.facts.code);
  fillFacts(byId("libraries"), page.facts.libraries);
  byId("config").textContent = page.facts.config;
  byId("made").textContent = `Made ${page.made_at} by marin-rl from committed files alone; configuration ${page.facts.content_digest}.`;
}

function drawAnswers(compared) {
  byId("answers").hidden = !compared;
  if (!compared) return;
  const said = ({ turns, reward }, begin) => make("td", {},
    ...turns.slice(begin).map(([own, text]) => make(own ? "strong" : "span", { class: "text" }, `${text} `)),
    reward === null ? "no reward" : `reward ${show(reward)}`);
  const head = ["Prompt", "Answer", ...compared.rounds.map((round) => `Round ${round}`)];
  const rows = compared.pairs.map(([answer, before, after]) => {
    const own = before.turns.findIndex(([sampled]) => sampled);
    const begin = own < 0 ? before.turns.length : own;
    const prompt = before.turns.slice(0, begin).map(([, text]) => text).join(" ");
    return make("tr", {}, make("td", { class: "text" }, prompt), make("td", { class: "text" }, answer), said(before, begin), said(after, begin));
  });
  byId("held-out").replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
}

function openFromAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("rollout");
  const card = wanted && state.cards.find((item) => item.rollout_id === wanted);
  if (card) openRollout(card, visibleCards());
}

async function look(tag) {
  const asked = fetch("/data.json", { headers: tag ? { "if-none-match": tag } : {}, cache: "no-store" });
  const answer = await asked.catch(() => {
    throw new Error("marin-rl view does not answer. Below is its last answer; this page continues when it is started again.");
  });
  if (answer.status === 304) return tag;
  if (!answer.ok) throw new Error(await answer.text());
  showPage(await answer.json());
  return answer.headers.get("etag");
}

function setBadge(text, late) {
  const badge = byId("live");
  badge.hidden = false;
  if (badge.textContent !== text) badge.textContent = text;
  badge.classList.toggle("late", late);
}

async function follow() {
  let tag = null;
  for (;;) {
    try {
      if (!tag || !document.hidden) {
        const first = tag === null;
        tag = await look(tag);
        if (first) openFromAddress();
        setBadge(state.page.ended ? "complete" : "following", state.page.ended);
        byId("problem").hidden = true;
      }
    } catch (error) {
      setBadge("not reachable", true);
      byId("problem").textContent = String(error.message ?? error);
      byId("problem").hidden = false;
    }
    await new Promise((done) => setTimeout(done, LOOK_EVERY_MS));
  }
}

const THEMES = ["auto", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(theme) {
  const root = document.documentElement;
  if (theme === "auto") root.removeAttribute("data-theme");
  else root.dataset.theme = theme;
  root.classList.toggle("dark", theme === "dark" || (theme === "auto" && systemDark.matches));
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").dataset.value = theme;
  redrawCharts();
}

function watchTheme() {
  byId("theme").addEventListener("click", () =>
    applyTheme(THEMES[(THEMES.indexOf(byId("theme").dataset.value) + 1) % THEMES.length]));
  systemDark.addEventListener("change", () => applyTheme(byId("theme").dataset.value));
  applyTheme("auto");
}

function watchDialog() {
  byId("r-close").addEventListener("click", () => closeRollout());
  byId("r-back").addEventListener("click", () => stepRollout(-1));
  byId("r-next").addEventListener("click", () => stepRollout(1));
  byId("rollout").addEventListener("keydown", stepByKey);
  byId("rollout").addEventListener("close", () => {
    if (document.activeElement === document.body) focusCard(shown.rollout_id); // its button was redrawn meanwhile
    if (location.hash.startsWith("#rollout=")) history.replaceState(null, "", location.pathname + location.search);
  });
  byId("rollout").addEventListener("click", (event) => { if (event.target === byId("rollout")) closeRollout(); });
  window.addEventListener("hashchange", openFromAddress);
}

watchTheme();
watchDialog();
watchFilters();
watchGroups();
if (live) follow();
else { showPage(JSON.parse(byId("data").textContent)); openFromAddress(); }
document.body.dataset.ready = "yes";
