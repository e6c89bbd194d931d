"""Bring a model up to the point where it could be called: configuration, ranks, construction, weight processing. No weights.

Everything here is vLLM's own code; what it would ask of a device or of other processes is answered without either.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from probes.model_facts import ParallelFact

SETTINGS = {
    "VLLM_USE_AOT_COMPILE": "0",  # the ahead-of-time path saves and loads artifacts; tracing needs neither
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_USE_BYTECODE_HOOK": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Environment of a trace. None of it changes what is selected or traced."""


def prepare_environment() -> None:
    """Set the trace's environment before vLLM is imported; the plugins of this project stay loadable under VLLM_PLUGINS."""
    for name, value in SETTINGS.items():
        os.environ[name] = value
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        ours = ["xpufp8", "xpufp8_sim", "xpufp8_sim_general"]
        os.environ["VLLM_PLUGINS"] = ",".join([*filter(None, allowed.split(",")), *ours])


def engine_config(model: str, vllm_args: list[str]) -> Any:
    """VLLM's configuration for ``vllm serve MODEL ARGS…``, made by its own parser. Options of the HTTP front end are left aside.

    Raises:
        Exception: whatever vLLM raises, and ValueError where its parser refuses an option.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = parse(vllm_args)
    arguments.model = model
    arguments.load_format = "dummy"
    folder = Path(model)
    if folder.is_dir() and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        arguments.skip_tokenizer_init = True
    engine = AsyncEngineArgs.from_cli_args(arguments)
    config = engine.create_engine_config()
    check = getattr(_platform(), "check_if_supports_dtype", None)
    if check is not None:
        with contextlib.suppress(NotImplementedError):  # a platform that does not answer (CPU) does not refuse
            check(config.model_config.dtype)  # what the worker asks first when it takes its device
    return config


def parse(vllm_args: list[str]) -> Any:
    """Options of ``vllm serve`` as vLLM's parser understands them.

    Raises:
        ValueError: the parser refuses them, in its own words.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser.error = refuse
    return parser.parse_known_args(list(vllm_args))[0]


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


def start_ranks(config: Any, rank: int) -> ParallelFact:
    """Initialise vLLM's parallel state as rank ``rank`` of the command's world, with torch's fake process group.

    Raises:
        ValueError: the world has no such rank.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    replica = parallel.world_size
    data = getattr(parallel, "data_parallel_size", 1)
    world = replica * data
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a world of {world}")
    if data > 1:
        parallel.data_parallel_rank = rank // replica
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def no_queue(*args: Any, **kwargs: Any) -> None:
        return None

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
    torch.distributed.new_group = fake_group
    MessageQueue.create_from_process_group = no_queue
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(replica, rank % replica, "fake://", 0, "fake")
        parallel_state.ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    parallel.rank = rank % replica
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device(_platform().device_type))
    return ParallelFact(
        rank=rank,
        world_size=world,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=data,
        expert_parallel=bool(getattr(parallel, "enable_expert_parallel", False)),
    )


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Torch's default dtype for the length of a block, as vLLM's loaders set it."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def movable_modules() -> Iterator[None]:
    """Let ``Module.to`` work on fake parameters, which torch cannot swap: each gets a new one instead.

    A module sent to ``meta`` is one that vLLM drops; its tensors are marked and count for nothing.
    """
    import torch

    plain = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        moved: dict[int, Any] = {}

        def move(tensor: Any) -> Any:
            if id(tensor) not in moved:
                new = tensor.detach()
                if dtype is not None and new.is_floating_point():
                    new = new.to(dtype)
                if device is not None and device.type == "meta":
                    new = torch.empty_like(new, device="meta")
                if isinstance(tensor, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=False)
                    new.__dict__.update(tensor.__dict__)
                if device is not None and device.type == "meta":
                    new.dropped_by_model = True
                moved[id(tensor)] = new
            return moved[id(tensor)]

        for module in self.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = move(tensor)
        return self

    torch.nn.Module.to = to
    try:
        yield
    finally:
        torch.nn.Module.to = plain


def construct(config: Any, fake_mode: Any) -> Any:
    """The real model class, its parameters fake tensors on cpu.

    Raises:
        Exception: whatever the model's constructor raises.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(config), fake_mode, torch.device("cpu"), default_dtype(config.model_config.dtype):
        fake_mode.islands = True  # expert maps and the like are worked out from values
        try:
            with movable_modules():
                return initialize_model(vllm_config=config)
        finally:
            fake_mode.islands = False


def process(config: Any, model: Any, fake_mode: Any) -> None:
    """Run vLLM's weight processing on the fake parameters.

    Raises:
        Exception: whatever the quantization methods raise.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(config), fake_mode, torch.device("cpu"), default_dtype(config.model_config.dtype):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        model.eval()


def timed(work: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
    """Result, exception and seconds of a call; an exception never gets out."""
    import time

    start = time.monotonic()
    try:
        return work(), None, time.monotonic() - start
    except Exception as exc:  # noqa: BLE001 - every way in which a stage ends is a fact
        return None, exc, time.monotonic() - start
