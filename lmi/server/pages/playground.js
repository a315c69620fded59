// The playground: a form that writes a body of OpenAI's API, and the answer to it, token by token.
import { $, ask, make, read, start, texts } from "./page.js";
import { SNIPPETS } from "./snippets.js";

const KINDS = {
  chat: { path: "v1/chat/completions", schema: "OpenAIChatRequest", placeholder: "Message (Enter sends, Shift+Enter is a new line)" },
  completion: { path: "v1/completions", schema: "OpenAITextRequest", placeholder: "Text to continue (Ctrl+Enter sends)" },
};
const PARAMETERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"];
const NUM_TOKENS = 256;

let schemas, cards;
let messages = []; // of the chat so far
let running; // the AbortController of the answer that comes

const kind = () => $("[name=kind]:checked").value;

function body() {
  const fields = { model: $("#model").value };
  if (kind() === "chat") {
    const system = $("#system").value ? [{ role: "system", content: $("#system").value }] : [];
    const said = $("#said").value || !messages.length ? [...messages, { role: "user", content: $("#said").value }] : messages.slice(0, -1);
    fields.messages = [...system, ...said];
  } else {
    fields.prompt = $("#said").value;
  }
  for (const input of $("#parameters").querySelectorAll("input")) {
    if (input.value !== "") fields[input.name] = input.type === "number" ? input.valueAsNumber : input.value;
  }
  if ($("#logprobs").checked) {
    const wanted = $("#alternatives-wanted").valueAsNumber;
    Object.assign(fields, kind() === "chat" ? { logprobs: true, top_logprobs: wanted } : { logprobs: wanted });
  }
  if ($("#stream").checked) Object.assign(fields, { stream: true, stream_options: { include_usage: true } });
  return { ...fields, ...moreFields() };
}

function moreFields() {
  let fields = {};
  try {
    fields = JSON.parse($("#more").value || "{}");
    $("#more").setCustomValidity(fields?.constructor === Object ? "" : "An object is needed.");
  } catch (error) {
    $("#more").setCustomValidity(error.message);
  }
  return fields;
}

// Settings

function parameter(name, schema) {
  const isNumber = [schema.type].flat().some((type) => type === "number" || type === "integer");
  const bounds = isNumber ? Object.entries({ min: schema.minimum, max: schema.maximum }).filter(([, bound]) => Math.abs(bound) < 2 ** 53) : [];
  const words = bounds.length === 2 ? `${schema.minimum} to ${schema.maximum}` : bounds.length ? `from ${schema.minimum}` : "";
  const input = make("input", [], {
    name, form: "ask", type: isNumber ? "number" : "text", placeholder: words, title: schema.description || "",
    ...Object.fromEntries(bounds), ...(isNumber && { step: [schema.type].flat().includes("integer") ? 1 : "any" }),
  });
  if (name === "max_tokens") input.value = NUM_TOKENS;
  return make("label", [name, input], { class: `field${isNumber ? "" : " wide"}` });
}

function chooseKind() {
  const card = cards.find((each) => each.id === $("#model").value);
  const canChat = card.has_chat_template;
  $("#no-chat").hidden = canChat;
  $("[value=chat]").disabled = !canChat;
  if (!canChat) $("[value=completion]").checked = true;
  const { schema, placeholder } = KINDS[kind()];
  const fields = schemas[schema].properties;
  const given = new Map([...$("#parameters").querySelectorAll("input")].map((input) => [input.name, input.value]));
  $("#parameters").replaceChildren(...PARAMETERS.filter((name) => name in fields).map((name) => parameter(name, fields[name])));
  for (const input of $("#parameters").querySelectorAll("input")) input.value = given.get(input.name) ?? input.value;
  $("#alternatives-wanted").max = (fields.top_logprobs || fields.logprobs).maximum;
  $("#system-field").hidden = kind() !== "chat";
  $("#said").placeholder = placeholder;
  $("#said").setAttribute("aria-label", kind() === "chat" ? "Message" : "Text to continue");
  $("#empty b").textContent = kind() === "chat" ? `Chat with ${card.id}` : `Write a text that ${card.id} continues`;
  showCode();
}

function showCode() {
  const url = new URL(KINDS[kind()].path, document.baseURI).href;
  $("#code code").textContent = SNIPPETS[$("[name=language]:checked").value](url, body(), Boolean($("#key").value));
}

async function copy() {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText($("#code code").textContent);
  } else { // a page that came by HTTP from another machine has none
    getSelection().selectAllChildren($("#code code"));
    document.execCommand("copy");
  }
  $("#copy").textContent = "Copied";
  setTimeout(() => { $("#copy").textContent = "Copy"; }, 1500);
}

// The answer

// The objects of an answer: each event of a stream, or the only one.
async function* records(answer) {
  if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) {
    yield await answer.json();
    return;
  }
  let rest = "";
  for await (const text of texts(answer)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// The tokens of a choice in one form; completions have lists where chat has objects.
function tokensOf(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs.map((each) => [each.token, each.logprob]) }));
  }
  return (logprobs?.tokens || []).map((token, n) => ({ token, logprob: logprobs.token_logprobs[n], top: Object.entries(logprobs.top_logprobs?.[n] || {}) }));
}

function turn(role, name, children) {
  $("#empty").hidden = true;
  const article = make("article", [make("h2", name), ...children], { class: `turn ${role}` });
  $("#turns").append(article);
  follow();
  return article;
}

// How much of the talk's end lies behind the box below it, or under the window's edge. Negative: room is left.
function hiddenHeight() {
  const end = $("#turns").lastElementChild.getBoundingClientRect().bottom;
  return end - $("#ask").getBoundingClientRect().top;
}

function follow() {
  const hidden = hiddenHeight();
  if (hidden > 0) scrollBy(0, hidden);
}

class Answer {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.said = make("div", [], { class: "said" });
    this.article = turn("assistant", $("#model").value, [this.said]);
    this.startedAt = performance.now();
  }

  add({ choices: [choice] = [], usage, error }) {
    if (error) throw new Error(error.message ?? error);
    if (usage) this.numTokens = usage.completion_tokens;
    if (!choice) return;
    const part = choice.delta ?? choice.message ?? { content: choice.text };
    const text = (part.content ?? "") + (part.tool_calls ?? []).map(({ function: call }) => (call.name ? `\n${call.name} ` : "") + call.arguments).join("");
    this.firstAt ??= text || part.reasoning_content ? performance.now() : undefined;
    if (part.reasoning_content) this.think(part.reasoning_content);
    const tokens = tokensOf(choice.logprobs);
    if (tokens.length) this.mark(tokens);
    else if (!this.tokens.length) this.said.append(text);
    this.text += text;
    this.reason = choice.finish_reason ?? this.reason;
  }

  think(text) {
    this.thought ??= this.article.insertBefore(make("div", [], { class: "said thought" }), this.said);
    this.thought.append(text);
  }

  mark(tokens) {
    if (!this.tokens.length) {
      for (const [name, value] of Object.entries({ role: "listbox", "aria-label": "Tokens, with alternatives by the arrow keys", "aria-orientation": "horizontal", tabindex: "0" })) this.said.setAttribute(name, value);
      this.said.classList.add("tokens");
      this.said.addEventListener("keydown", (event) => this.move(event));
      this.said.addEventListener("focus", () => this.point(this.current ?? 0));
      this.said.addEventListener("blur", () => this.point());
      this.said.addEventListener("pointerover", ({ target }) => target !== this.said && this.point(Number(target.dataset.n)));
      this.said.addEventListener("pointerleave", () => this.point());
    }
    for (const each of tokens) {
      const n = this.tokens.push(each) - 1;
      const span = make("span", each.token, { role: "option", id: `token-${Math.round(this.startedAt)}-${n}`, "data-n": n, "aria-selected": "false", "aria-label": `${each.token} ${percent(each.logprob)}` });
      span.style.setProperty("--p", Math.exp(each.logprob ?? 0));
      this.said.append(span);
    }
  }

  move(event) {
    const last = this.tokens.length - 1;
    const places = { ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: last, Escape: undefined };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.point(places[event.key] === undefined ? undefined : Math.min(Math.max(places[event.key], 0), last));
  }

  // Show the alternatives to a token beside it, or none.
  point(n) {
    this.said.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    if (n === undefined) return $("#alternatives").replaceChildren();
    this.current = n;
    const { token, logprob, top } = this.tokens[n];
    const span = this.said.children[n];
    span.setAttribute("aria-selected", "true");
    this.said.setAttribute("aria-activedescendant", span.id);
    const ranked = [[token, logprob], ...top.filter(([other]) => other !== token)].sort((one, other) => other[1] - one[1]);
    $("#alternatives").replaceChildren(...ranked.map(([each, p]) => {
      const line = make("div", [make("code", JSON.stringify(each)), make("span", percent(p))], each === token ? { class: "drawn" } : {});
      line.style.setProperty("--p", Math.exp(p ?? 0));
      return line;
    }));
    span.scrollIntoView({ block: "nearest" });
    const { left, top: y, bottom } = span.getClientRects()[0];
    const { offsetWidth, offsetHeight } = $("#alternatives");
    $("#alternatives").style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8))}px`;
    $("#alternatives").style.top = `${bottom + 8 + offsetHeight < innerHeight ? bottom + 8 : y - 8 - offsetHeight}px`;
  }

  summary() {
    if (this.firstAt === undefined) return "No text.";
    const seconds = (performance.now() - this.firstAt) / 1000;
    const numTokens = this.numTokens ?? this.tokens.length;
    return [
      numTokens && `${numTokens} tokens`,
      `first after ${((this.firstAt - this.startedAt) / 1000).toFixed(2)} s`,
      numTokens > 1 && $("#stream").checked && `${((numTokens - 1) / seconds).toFixed(0)} tokens/s`,
      `ended by ${this.reason ?? "you"}`,
    ].filter(Boolean).join(", ");
  }
}

// A reader who has scrolled up by more reads something else, and is left there.
const SCROLLED_UP_PX = 80;

const percent = (logprob) => (logprob === null ? "" : `${(100 * Math.exp(logprob)).toFixed(1)} %`);

async function send(event) {
  event.preventDefault();
  if (running) return;
  const said = $("#said").value;
  const asked = body();
  if (kind() === "chat") $("#said").value = "";
  if (kind() === "completion") $("#turns").replaceChildren($("#empty"));
  turn("user", "You", [make("div", said, { class: "said" })]);
  const answer = new Answer();
  let isFollowed = true;
  running = new AbortController();
  busy(true, "Waiting for the first token …");
  try {
    const response = await ask("POST", KINDS[kind()].path, JSON.stringify(asked), running.signal);
    for await (const record of records(response)) {
      isFollowed = hiddenHeight() < SCROLLED_UP_PX;
      answer.add(record);
      $("#status").textContent = "Writing …";
      if (isFollowed) follow();
    }
    $("#status").textContent = answer.summary();
  } catch (error) {
    if (error.name === "AbortError") {
      $("#status").textContent = answer.summary();
    } else {
      $("#status").textContent = `Failed: ${error.message}`;
      answer.article.append(make("p", error.message, { class: "bad" }));
    }
  }
  if (kind() === "chat" && answer.text) messages.push({ role: "user", content: said }, { role: "assistant", content: answer.text });
  else if (!$("#said").value) $("#said").value = said;
  running = undefined;
  busy(false, $("#status").textContent);
  showCode();
  // the line about the answer may have made the box higher
  if (isFollowed) follow();
}

function busy(isBusy, status) {
  $("#turns").setAttribute("aria-busy", isBusy);
  $("#stop").hidden = !isBusy;
  $("#send").hidden = isBusy;
  for (const input of document.querySelectorAll("[name=kind], #model, #clear")) input.disabled = isBusy || (input.value === "chat" && !$("#no-chat").hidden);
  (isBusy ? $("#stop") : $("#said")).focus({ preventScroll: true });
  $("#status").textContent = status;
}

function clear() {
  messages = [];
  $("#turns").replaceChildren($("#empty"));
  $("#empty").hidden = false;
  $("#status").textContent = "";
  $("#said").focus();
  showCode();
}

async function show(spec) {
  schemas = spec.components.schemas;
  if (!schemas.OpenAIChatRequest) throw new Error("its model is user code, which takes requests of its own. The docs can send them.");
  cards = (await read("v1/models")).data;
  if (!cards.length) throw Object.assign(new Error("no model is loaded yet."), { status: 503 });
  $("#model").replaceChildren(...cards.map(({ id }) => make("option", id)));
  $("main").hidden = false;
  chooseKind();
  $("#said").focus();
}

$("#ask").addEventListener("submit", send);
$("#stop").addEventListener("click", () => running?.abort());
$("#clear").addEventListener("click", clear);
$("#copy").addEventListener("click", copy);
$("#said").addEventListener("keydown", (event) => {
  const isSent = kind() === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key !== "Enter" || event.isComposing || !isSent) return;
  event.preventDefault();
  $("#ask").requestSubmit();
});
document.addEventListener("input", ({ target }) => {
  if ($("main").hidden) return;
  if (target.name === "kind" || target.id === "model") chooseKind();
  else showCode();
});
start(show);
