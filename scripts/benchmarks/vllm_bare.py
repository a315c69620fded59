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

    waiting = [(str(number), tokens_input(prompt)) for number, prompt in enumerate(prompts)]
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=num_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    meter = Meter({os.getpid(): "core"})
    start_s = time.perf_counter()
    num_made = 0
    for _ in range(num_users):
        engine.add_request(*waiting.pop(0), params)

    while engine.has_unfinished_requests():
        for output in engine.step():
            num_made += sum(len(completion.token_ids) for completion in output.outputs)
            if output.finished and waiting:
                engine.add_request(*waiting.pop(0), params)

    seconds = time.perf_counter() - start_s
    cpu_s, foreign = meter.stop()
    return Round(num_made, num_made, seconds, (), (), cpu_s, foreign)


def main(model: str, num_users: int, num_tokens: int, rounds: list[list[str]]) -> None:
    """`rounds` has the prompts of each round. The first round is a warm-up and is not printed."""
    from tokenizers import Tokenizer
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
    engine = LLMEngine.from_engine_args(EngineArgs(model=model))
    for number, texts in enumerate(rounds):
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        done = run_round(engine, ids, num_users, num_tokens)
        if number:
            print(json.dumps(dataclasses.asdict(done)), flush=True)


if __name__ == "__main__":
    hide_foreign_builds()
    main(**json.load(sys.stdin))
