"""Runs model traces for the tests: one process imports vLLM on the simulated XPU and forks for each job (scripts/model_table.py).

usage: python traced_models.py JOBS.json RESULTS.json, where JOBS is {name: {"model": folder, "args": […], "options": {…}, "fault": name}}
"""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def half_bias() -> Iterator[None]:
    """Linear attention whose ``dt_bias`` is float16 whatever the model's dtype."""
    import torch
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as Layer

    plain = Layer.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.dt_bias = torch.nn.Parameter(self.dt_bias.detach().to(torch.float16), requires_grad=False)

    Layer.__init__ = make
    yield
    Layer.__init__ = plain


@contextmanager
def half_work_buffer() -> Iterator[None]:
    """Linear attention with work buffers in float16 whatever the model's dtype, as in a public report."""
    import torch
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as Layer

    plain = Layer.forward_xpu

    def forward(self: Any, hidden_states: Any) -> Any:
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        shape = (hidden_states.size(0), self.num_v_heads // self.tp_size, self.head_v_dim)
        out = torch.zeros(shape, dtype=torch.float16, device=hidden_states.device)
        z = torch.empty_like(out)
        torch.ops.vllm.gdn_attention_core_xpu(out, z, qkvz, ba, self.prefix)
        return self._output_projection(out.to(hidden_states.dtype), z.to(hidden_states.dtype))

    Layer.forward_xpu = forward
    yield
    Layer.forward_xpu = plain


FAULTS: dict[str, Callable[[], Any]] = {"": nullcontext, "half_bias": half_bias, "half_work_buffer": half_work_buffer}

if __name__ == "__main__":
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    spec = importlib.util.spec_from_file_location("model_table", ROOT / "scripts" / "model_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    table.warm("sim:arc-pro-b60")
    answers = {}
    for name, job in json.loads(jobs.read_text()).items():
        log = results.parent / f"{name}.log"
        with FAULTS[job.get("fault", "")]():
            answers[name] = table.trace(Path(job["model"]), job["args"], "sim:arc-pro-b60", log, job.get("options"))
    results.write_text(json.dumps(answers))
