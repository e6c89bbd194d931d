"""A child program: serve models one after another in this process and write what they answer.

``python offline.py JOBS RESULTS`` reads a JSON list of ``{"name", "model", "args"}`` and writes a JSON object of name to
``{"outputs": …}`` or ``{"error": …}``. One process for many models, because importing vLLM costs more than serving a tiny one.
A job with ``"score": {"prompts", "tokens", "top"}`` also gets ``"scored"``: what ``xpufp8 verify --save`` would keep of such a server.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("Hello world", "The quick brown fox jumps over the lazy dog. 12345", "a")
TOKENS = 16


def score(llm: Any, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations of prompts, and the likeliest tokens at each position of prompt and continuation."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": llm.get_tokenizer().encode(text)} for text in asked["prompts"]]
    tokens = [
        [*prompt["prompt_token_ids"], *request.outputs[0].token_ids]
        for prompt, request in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True)
    ]
    once = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=asked["top"])
    scored = [
        [{str(t): one.logprob for t, one in step.items() if one.rank <= asked["top"]} for step in request.prompt_logprobs[1:]]
        for request in llm.generate([{"prompt_token_ids": ids} for ids in tokens], once, use_tqdm=False)
    ]
    return {"model": model, "tokens": tokens, "scored": scored}


def serve(model: str, args: dict[str, Any], asked: dict[str, Any] | None) -> dict[str, Any]:
    """Greedy tokens, and log probabilities of the five likeliest at each step, for each prompt."""
    from vllm import LLM, SamplingParams

    settings = {"gpu_memory_utilization": 0.2, "max_model_len": 128, "max_num_seqs": 4, "seed": 0, "enforce_eager": True, **args}
    if settings.get("tensor_parallel_size", 1) == 1:
        settings["distributed_executor_backend"] = "uni"
    llm = LLM(model=model, **settings)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
        answers = [request.outputs[0] for request in llm.generate(list(PROMPTS), sampling, use_tqdm=False)]
        scored = {"scored": score(llm, model, asked)} if asked else {}
    finally:
        llm.llm_engine.engine_core.shutdown()
    outputs = [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [{str(token): item.logprob for token, item in step.items()} for step in answer.logprobs or []],
        }
        for answer in answers
    ]
    return {"outputs": outputs, **scored}


def clean_up() -> None:
    """Give back what the last engine holds, so that the next one starts as in a fresh process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    """Run every job; one that fails does not end the others."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    for job in jobs:
        print(f"== {job['name']}", flush=True)
        try:
            results[job["name"]] = serve(job["model"], job["args"], job.get("score"))
        except Exception as error:  # noqa: BLE001 - how a model fails is a result
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
        clean_up()
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    if "--workers" not in sys.argv:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
