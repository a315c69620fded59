// What both pages use: elements, the description of the server, and requests with the key, which only the field holds.

export const $ = (selector) => document.querySelector(selector);

// An element with text, elements or nothing in it. Text is never read as HTML.
export function make(tag, children = [], attributes = {}) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...[children].flat());
  return element;
}

export function ask(method, path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if ($("#key").value) headers.Authorization = `Bearer ${$("#key").value}`;
  return fetch(path, { method, headers, body, signal, cache: "no-store" });
}

// The text of an answer, as it comes.
export async function* texts(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

export async function read(path) {
  const answer = await ask("GET", path);
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  return answer.json();
}

// Show a page when its server can be read: once a key is there where it wants one, once the model is there.
export async function start(show) {
  try {
    await show(await read("openapi.json"));
    $("#notice").textContent = "";
    $("#key").onchange = null;
  } catch (error) {
    $("#notice").textContent = error.status === 401 ? "This server wants an API key." : `The server cannot be read: ${error.message}`;
    if (error.status === 503) setTimeout(start, 2000, show);
    $("#key").onchange = () => start(show);
    if (error.status === 401) $("#key").focus();
  }
}
