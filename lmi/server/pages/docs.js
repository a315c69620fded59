// The page that shows openapi.json and sends the requests that it describes.
import { $, ask, make, start, texts } from "./page.js";

let spec;

function resolve(schema = {}) {
  return schema.$ref ? schema.$ref.split("/").slice(1).reduce((value, name) => value[name], spec) : schema;
}

// The code marks of CommonMark, the only ones that descriptions have.
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? make("code", part) : part));
}

// What a value may be, in a few words.
function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const type = [schema.type || "anything"].flat().join(" or ");
  return schema.items ? `${type} of ${kind(schema.items)}` : type;
}

function rules(schema) {
  const words = {
    minimum: "at least", exclusiveMinimum: "over", maximum: "at most", minLength: "length at least",
    maxLength: "length at most", maxItems: "items at most",
  };
  const found = Object.keys(words).filter((name) => name in schema && Math.abs(schema[name]) < 2 ** 62);
  return found.map((name) => `, ${words[name]} ${schema[name]}`).join("");
}

// One row for each field, the fields of an object within directly below it.
function rows(schema, prefix = "") {
  const fields = [schema, ...(schema.allOf || []).map(resolve)].flatMap((part) => Object.entries(part.properties || {}));
  return fields.flatMap(([name, field]) => {
    const needed = (schema.required || []).includes(name) ? "Required. " : "";
    const cells = [make("td", make("code", prefix + name)), make("td", kind(field) + rules(field)), make("td", prose(needed + (field.description || "")))];
    return [make("tr", cells), ...rows(field, `${prefix}${name}.`)];
  });
}

function table(schema) {
  if (!rows(schema).length) return make("p", kind(schema));
  const heads = ["field", "value", "meaning"].map((text) => make("th", text, { scope: "col" }));
  return make("div", make("table", [make("thead", make("tr", heads)), make("tbody", rows(schema))]), { class: "wide", tabindex: "0", role: "region", "aria-label": "fields" });
}

// The schema of a body, by media type; that of a record where a stream is one.
function bodies(content = {}) {
  const seen = new Map();
  for (const [media, { schema = {}, "x-itemSchema": itemSchema }] of Object.entries(content)) {
    const data = itemSchema?.properties?.data;
    const what = data?.contentSchema || data?.anyOf?.at(-1).contentSchema || itemSchema || schema;
    const key = JSON.stringify(what);
    seen.set(key, { what, media: [...(seen.get(key)?.media || []), itemSchema ? `${media}, each record` : media] });
  }
  return [...seen.values()].flatMap(({ what, media }) => [
    make("p", make("code", media.join("; "))),
    ...(what.anyOf || [what]).flatMap((each) => [make("p", each.$ref ? kind(each) : ""), table(resolve(each))]),
  ]);
}

// The example of each body that an operation takes, by the body's name.
function examples(content) {
  const schema = content?.["application/json"]?.schema;
  const found = (schema?.anyOf || [schema]).map((each) => [each && kind(each), resolve(each).examples?.[0]]);
  return new Map(found.filter(([, example]) => example));
}

function curl(path, method, example) {
  const data = example ? ` -d '${JSON.stringify(example).replaceAll("'", "'\\''")}'` : "";
  const url = new URL(filled(path, (each) => each.schema.enum?.[0] ?? each.name, method), document.baseURI);
  return make("pre", make("code", `curl${method === "get" || data ? "" : ` -X ${method.toUpperCase()}`}${data} ${url}`), { tabindex: "0", "aria-label": "as curl" });
}

// A path with the values of its parameters, relative to this page.
function filled(path, valueOf, method) {
  const places = (spec.paths[path][method].parameters || []).filter((each) => each.in === "path");
  return places.reduce((url, each) => url.replace(`{${each.name}}`, encodeURIComponent(valueOf(each))), `.${path}`);
}

// A form that sends a request and shows what comes back, as it comes.
function attempt(path, method, content) {
  const bodies = examples(content);
  const shown = (example) => JSON.stringify(example, null, 2);
  const inputs = new Map((spec.paths[path][method].parameters || []).filter((each) => each.in !== "header").map((each) => [each, make("input", [], { value: each.schema.enum?.[0] ?? "" })]));
  const body = make("textarea", shown(bodies.values().next().value) ?? "", { class: "code", spellcheck: "false" });
  const choice = make("select", [...bodies.keys()].map((name) => make("option", name)));
  choice.addEventListener("change", () => { body.value = shown(bodies.get(choice.value)); });
  const send = make("button", "Send", { class: "main" });
  const stop = make("button", "Stop", { type: "button", hidden: "" });
  const status = make("span", [], { class: "faint", role: "status" });
  const headers = make("details", make("summary", "Headers"), { class: "faint", hidden: "" });
  const answer = make("pre", [], { tabindex: "0", "aria-label": "answer", hidden: "" });
  const form = make("form", [
    ...[...inputs].map(([each, input]) => make("label", [each.name, input])),
    ...(bodies.size > 1 ? [make("label", ["Example", choice])] : []),
    ...(content ? [make("label", ["Body", body])] : []),
    make("div", [send, stop, status], { class: "row" }), headers, answer,
  ], { "aria-label": `try ${method.toUpperCase()} ${path}` });
  let running;
  stop.addEventListener("click", () => running.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    stop.hidden = false;
    answer.replaceChildren();
    status.textContent = "Sent …";
    try {
      const values = new Map([...inputs].map(([each, input]) => [each, input.value]));
      const query = new URLSearchParams([...values].filter(([each, value]) => each.in === "query" && value).map(([each, value]) => [each.name, value]));
      const response = await ask(method.toUpperCase(), `${filled(path, (each) => values.get(each), method)}${query.size ? `?${query}` : ""}`, content && body.value, running.signal);
      status.textContent = `${response.status} ${response.statusText}`;
      headers.replaceChildren(headers.firstChild, make("pre", [...response.headers].map((pair) => pair.join(": ")).join("\n"), { tabindex: "0", "aria-label": "headers" }));
      headers.hidden = answer.hidden = false;
      for await (const text of texts(response)) answer.append(text);
    } catch (error) {
      status.textContent += error.name === "AbortError" ? ", stopped" : ` ${error.message}`;
    }
    running = undefined;
    stop.hidden = true;
  });
  return form;
}

function operation(path, method, described) {
  const head = make("summary", [make("b", method.toUpperCase()), " ", make("code", path), ` ${described.summary}`]);
  const content = described.requestBody?.content;
  const statuses = Object.entries(described.responses).map(([status, answer]) => [status, resolve(answer)]);
  const failures = statuses.filter(([status]) => status !== "200");
  const failed = failures.map(([status, { description }]) => make("tr", [make("td", make("code", status)), make("td", prose(description))]));
  const details = make("details", head, { id: `${method}${path}` });
  details.addEventListener("toggle", () => details.append(
    curl(path, method, examples(content).values().next().value),
    make("h3", "Try it"), attempt(path, method, content),
    ...(content ? [make("h3", "Request"), ...bodies(content)] : []),
    make("h3", "Answer"), ...bodies(described.responses["200"]?.content),
    make("h3", "Other statuses"), make("div", make("table", make("tbody", failed)), { class: "wide" }), ...bodies(failures[0]?.[1].content),
  ), { once: true });
  return details;
}

function show(read) {
  spec = read;
  const main = $("main");
  document.title = $("h1").textContent = spec.info.title;
  $("#about").replaceChildren(`${spec.info.description} Version ${spec.info.version}. `, make("a", "openapi.json", { href: "openapi.json" }));
  for (const tag of spec.tags) {
    $("main > nav").append(make("a", tag.name, { href: `#${tag.name}` }));
    main.append(make("h2", tag.name, { id: tag.name }), make("p", prose(tag.description)));
    for (const [path, methods] of Object.entries(spec.paths)) {
      for (const [method, described] of Object.entries(methods)) {
        if (described.tags.includes(tag.name)) main.append(operation(path, method, described));
      }
    }
  }
}

start(show);
