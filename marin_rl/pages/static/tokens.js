// Tokens as text, coloured by a number each: probability, difference of logprobs, or entropy.
const MODES = {
  sampler: { name: "probability when sampled", ramp: "--unlikely" },
  difference: { name: "trainer against sampler", ramp: "--more" },
  entropies: { name: "entropy", ramp: "--undecided" },
};

function fillModes(select) {
  if (select.options.length) return;
  for (const [key, mode] of Object.entries(MODES)) select.append(make("option", { value: key }, mode.name));
}

function paintOf(tokens, mode) {
  const { sampler, trainer, entropies } = tokens;
  if (mode === "sampler") return { of: (i) => 1 - Math.exp(Math.min(0, sampler[i])), start: "certain", end: "improbable" };
  if (!trainer) return null;
  const values = sampler.map((value, i) => {
    if (value === null || trainer[i] === null) return null;
    return mode === "difference" ? trainer[i] - value : entropies[i];
  });
  const most = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0)));
  return { of: (i) => (values[i] ?? 0) / most, start: "0", end: `${show(most, 4)} nats` };
}

function tokenText(tokens, mode) {
  const box = make("div", { class: "tokens text", tabindex: "0", role: "group", "aria-label": "Tokens of the rollout" });
  if (tokens.left_out) box.append(make("span", { class: "prompt" }, `… ${show(tokens.left_out)} tokens before these are left out …\n`));
  return fillTokens(box, tokens, mode);
}

function fillTokens(box, tokens, mode, paint = paintOf(tokens, mode)) {
  let run = [];
  const flush = () => { if (run.length) box.append(make("span", { class: "prompt" }, run.join(""))); run = []; };
  tokens.texts.forEach((text, i) => {
    if (!tokens.trained[i]) { run.push(visible(text)); return; }
    flush();
    box.append(token(tokens, i, text, paint, mode));
  });
  flush();
  return box;
}

// Characters that are invisible or change the direction of text; they are shown by their codes.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

function visible(text) {
  return text.replace(UNSEEN, (sign) => `⟨${sign.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
}

function token(tokens, i, text, paint, mode) {
  const seen = text === "" ? "·" : visible(text).replaceAll("\n", "↵\n");
  const clipped = tokens.clipped?.[i];
  const node = make("span", { class: clipped ? "t cut" : "t", title: aboutToken(tokens, i, text) }, seen);
  const strength = paint ? paint.of(i) : 0;
  if (strength) {
    const ramp = mode === "difference" && strength < 0 ? "--less" : MODES[mode].ramp;
    node.style.background = `color-mix(in srgb, var(${ramp}) ${Math.round(75 * Math.abs(strength))}%, transparent)`;
  }
  return node;
}

function aboutToken(tokens, i, text) {
  const sampler = tokens.sampler[i];
  const lines = [`${JSON.stringify(text)} · token ${tokens.ids[i]} · position ${tokens.left_out + i}`];
  if (sampler !== null) lines.push(`sampled with probability ${show(Math.exp(sampler))} (logprob ${show(sampler, 4)})`);
  if (tokens.trainer?.[i] !== undefined && tokens.trainer[i] !== null) {
    lines.push(`trainer's logprob ${show(tokens.trainer[i], 4)}, entropy ${show(tokens.entropies[i], 4)}`);
    if (tokens.clipped[i]) lines.push("clipped: gave no gradient");
  }
  return lines.join("\n");
}

function legend(tokens, mode) {
  const paint = paintOf(tokens, mode);
  if (!paint) return make("p", { class: "legend" }, "The trainer has no scores of this rollout (yet).");
  const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
  ramp.style.background = `linear-gradient(to right, transparent, color-mix(in srgb, var(${MODES[mode].ramp}) 75%, transparent))`;
  return make("p", { class: "legend" }, paint.start, ramp, paint.end,
    mode === "difference" ? " (red: less probable for the trainer)" : "", " · grey: not trained");
}

function tokenTable(tokens) {
  const names = ["position", "token", "id", "sampler", "trainer", "entropy", "clipped"];
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const rows = tokens.texts.map((text, i) => {
    if (!tokens.trained[i]) return null;
    const cells = [tokens.left_out + i, JSON.stringify(text), tokens.ids[i], show(tokens.sampler[i], 4),
      show(tokens.trainer?.[i], 4), show(tokens.entropies?.[i], 4), tokens.clipped?.[i] ? "yes" : ""];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  });
  return make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function completionOf(card) {
  const turns = card.turns.filter((turn) => turn.role === "assistant");
  return turns.length ? turns.map((turn) => turn.content).join(" ⏎ ") : card.error;
}

// The first prompt: what stands before the model's first turn.
function promptOf(card) {
  const first = card.turns.findIndex((turn) => turn.sampled);
  const before = first < 0 ? card.turns : card.turns.slice(0, first);
  const asked = before.filter((turn) => turn.role === "user" || turn.role === "system");
  return asked.map((turn) => turn.content).join(" ⏎ ");
}

// The tokens from `first` to `last` of the list that is shown.
function sliceTokens(tokens, first, last) {
  const cut = (list) => list?.slice(first, last) ?? null;
  return { left_out: tokens.left_out + first, ids: cut(tokens.ids), texts: cut(tokens.texts), trained: cut(tokens.trained),
    sampler: cut(tokens.sampler), trainer: cut(tokens.trainer), entropies: cut(tokens.entropies), clipped: cut(tokens.clipped) };
}
