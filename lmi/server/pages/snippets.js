// A request as a program that sends it.

const OF_OPENAI = new Set( // that the functions of its client take; others go into extra_body
  "model messages prompt max_tokens max_completion_tokens temperature top_p n seed stop presence_penalty frequency_penalty logprobs top_logprobs logit_bias stream stream_options response_format tools tool_choice parallel_tool_calls reasoning_effort user echo best_of suffix".split(" "),
);

// A value of JSON as Python writes it.
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${python(name)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function curl(url, body, hasKey) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = hasKey ? ` -H "Authorization: Bearer $LMI_API_KEY" \\\n ` : "";
  return `curl -N ${url} \\\n  -H 'Content-Type: application/json' \\\n ${key} -d '${data}'`;
}

function openai(url, body, hasKey) {
  const isChat = "messages" in body;
  const own = Object.entries(body).filter(([name]) => OF_OPENAI.has(name)).map(([name, value]) => `${name}=${python(value)}`);
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OF_OPENAI.has(name)));
  if (Object.keys(others).length) own.push(`extra_body=${python(others)}`);
  const [part, whole] = isChat ? ["delta.content", "message.content"] : ["text", "text"];
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${new URL(isChat ? ".." : ".", url).href.replace(/\/$/, "")}", api_key=${hasKey ? 'os.environ["LMI_API_KEY"]' : '"none"'})
answer = client.${isChat ? "chat.completions" : "completions"}.create(
${own.map((each) => `    ${each},\n`).join("")})
${body.stream ? `for chunk in answer:
    for choice in chunk.choices:
        print(choice.${part} or "", end="", flush=True)` : `print(answer.choices[0].${whole})`}`;
}

function boto3(url, body) {
  const call = body.stream ? "invoke_endpoint_with_response_stream" : "invoke_endpoint";
  return `import json
import sys

import boto3

# With endpoint_url= it reaches a server of yours behind \`lmi gateway\`.
client = boto3.client("sagemaker-runtime")
answer = client.${call}(
    EndpointName="my-endpoint",
    ContentType="application/json",
    Body=json.dumps(${python(body)}),
)
${body.stream ? `for event in answer["Body"]:
    sys.stdout.buffer.write(event["PayloadPart"]["Bytes"])` : `print(json.load(answer["Body"]))`}`;
}

export const SNIPPETS = { curl, python: openai, boto3 };
