"""The bare vLLM engine in this process, token ids in and out. No server around it can be faster.

Its input is one JSON object with the arguments of `main`. Each line of the output is one round as
JSON.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from handlers.lmi_vllm.process_setup import hide_foreign_builds


def run_round(engine: Any, prompts: list[list[int]], num_users: int, num_tokens: int) -> Any:
    """Run one round. As in `load`, each user asks again as soon as it has its answer."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from scripts.benchmarks.load import Meter, Round

    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=num_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    inputs = [tokens_input(prompt) for prompt in prompts]
    num_asked = 0

    def ask_next() -> None:
        nonlocal num_asked
        engine.add_request(str(num_asked), inputs[num_asked], params)
        num_asked += 1

    meter = Meter({os.getpid(): "core"})
    start_s = time.perf_counter()
    for _ in range(num_users):
        ask_next()

    num_tokens_made = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens_made += sum(len(completion.token_ids) for completion in output.outputs)
            if output.finished and num_asked < len(inputs):
                ask_next()

    seconds = time.perf_counter() - start_s
    cpu_s, foreign = meter.stop()
    return Round(
        num_tokens=num_tokens_made,
        num_records=num_tokens_made,
        seconds=seconds,
        first_s=(),
        gaps_s=(),
        cpu_s=cpu_s,
        foreign=foreign,
    )


def main(model: str, num_users: int, num_tokens: int, rounds: list[list[str]]) -> None:
    """`rounds` has the prompts of each round. The first round is a warm-up and is not printed."""
    from tokenizers import Tokenizer
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
    engine = LLMEngine.from_engine_args(EngineArgs(model=model))
    for number, texts in enumerate(rounds):
        prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        done = run_round(engine, prompts, num_users, num_tokens)
        if number > 0:
            print(json.dumps(dataclasses.asdict(done)), flush=True)


if __name__ == "__main__":
    hide_foreign_builds()
    main(**json.load(sys.stdin))
