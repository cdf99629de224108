"""vLLM alone, in a process of its own: plays conversations whose lengths another program recorded.

Invariant: the engine has the arguments of a shipped inference server, without its statistics; each prompt is the last
one, this engine's own reply and the recorded new ids. Started by benchmarks/inference.py; reads one JSON line for each
round ([[new ids of each turn], ...] and the reply length) and answers with {"seconds", "num_tokens", "cpu_s"}.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.inference_config import DType, ServerConfig


async def main(model: Path, config: ServerConfig) -> None:
    """Answers rounds until its input ends."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**config.resolved_engine_args(model)))
    _say({"ready": True})
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            began, cpu_s = time.perf_counter(), time.process_time()
            conversations = enumerate(asked["conversations"])
            counts = await asyncio.gather(
                *(_play(llm, turns, asked["reply_tokens"], f"{asked['seed']}-{k}") for k, turns in conversations)
            )
            seconds = time.perf_counter() - began
            _say({"seconds": seconds, "num_tokens": sum(counts), "cpu_s": time.process_time() - cpu_s})
    finally:
        llm.shutdown()


async def _play(llm: Any, turns: Sequence[Sequence[int]], reply_tokens: int, name: str) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        max_tokens=reply_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids: list[int] = []
    num_tokens = 0
    for turn, new_ids in enumerate(turns):
        ids += new_ids
        async for output in llm.generate({"prompt_token_ids": list(ids)}, params, request_id=f"{name}-{turn}"):
            ids += output.outputs[0].token_ids
            num_tokens += len(output.outputs[0].logprobs)
    return num_tokens


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=ANSWERS, flush=True)


if __name__ == "__main__":
    # vLLM prints on standard output, which carries the answers: those get a descriptor of their own.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    model = Path(given.pop("model"))
    asyncio.run(main(model, ServerConfig(**given | {"dtype": DType(given["dtype"])})))
