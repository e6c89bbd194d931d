"""A child program: serve models one after another in this process and write what they answer.

``python offline.py JOBS RESULTS`` reads a JSON list of ``{"name", "model", "args"}`` and writes a JSON object of name to
``{"outputs": …}`` or ``{"error": …}``. One process for many models, because importing vLLM costs more than serving a tiny one.
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


def serve(model: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """Return greedy tokens, and log probabilities of the five likeliest at each step, for each prompt."""
    from vllm import LLM, SamplingParams

    settings = {"gpu_memory_utilization": 0.2, "max_model_len": 128, "max_num_seqs": 4, "seed": 0, "enforce_eager": True, **args}
    if settings.get("tensor_parallel_size", 1) == 1:
        settings["distributed_executor_backend"] = "uni"
    llm = LLM(model=model, **settings)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
        answers = [request.outputs[0] for request in llm.generate(list(PROMPTS), sampling, use_tqdm=False)]
    finally:
        llm.llm_engine.engine_core.shutdown()
    return [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [{str(token): item.logprob for token, item in step.items()} for step in answer.logprobs or []],
        }
        for answer in answers
    ]


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
            results[job["name"]] = {"outputs": serve(job["model"], job["args"])}
        except Exception as error:  # noqa: BLE001 - how a model fails is a result
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
        clean_up()
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    if "--workers" not in sys.argv:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
