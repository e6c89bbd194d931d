"""FP8 linear layers: every way there is, against the floor that the device's memory and matrix units set.

    python benchmarks/fp8_linear.py                         one table on this device (CUDA, XPU, or the CPU)
    python benchmarks/fp8_linear.py --sweep --json out.json every configuration of the Triton kernels too
    python benchmarks/fp8_linear.py --shapes 4096x4096 --rows 1,16,512

The floor of few rows is the weight's bytes over the measured copy bandwidth; that of many rows the operations over twice the measured
bfloat16 rate (FP8 matrix units have twice). Weights are rotated so that none is in a cache when it is read. On a GPU calls are
replayed from a graph; products of many rows are timed after the device has been busy with them for a while, because its clock falls.
Each row's error is relative by norm, against float64 and the same quantized operands.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.fp8_ways import our_ways, torch_ways, vllm_way  # noqa: E402 - found by the path above
from xpufp8.runtime.triton_kernels.space import SMALL as FEW  # noqa: E402 - found by the path above

SHAPES = "28672x8192,8192x8192,5120x17408"


@dataclass
class Row:
    """One measured way."""

    n: int
    k: int
    m: int
    way: str
    microseconds: float | None
    share: float | None
    """Floor over time."""
    error: float | None = None
    ratio: float | None = None
    """Error over that of dequantize-then-matmul with the same operands."""
    repeats: bool | None = None
    """Bitwise equal when run again."""
    note: str = ""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def once(self, run: Callable[[int], Any], copies: int, calls: int) -> Callable[[], float]:
        """A function that runs ``calls`` calls and returns seconds a call; on CUDA it replays a graph."""
        import torch

        if self.device.type == "cpu":

            def cpu() -> float:
                start = time.perf_counter()
                for i in range(calls):
                    run(i % copies)
                return (time.perf_counter() - start) / calls

            return cpu
        module = getattr(torch, self.device.type)
        play: Callable[[], Any]
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(calls):
                    run(i % copies)
            play = graph.replay
        else:

            def play() -> None:
                for i in range(calls):
                    run(i % copies)

        def gpu() -> float:
            start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            start.record()
            play()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / calls

        return gpu

    def median(self, run: Callable[[int], Any], copies: int, *, busy: float = 0.0, calls: int | None = None) -> float:
        """Median seconds a call; the device is kept busy with it for ``busy`` seconds before and while it is timed."""
        for i in range(min(2, copies)):
            run(i)
        one = self.once(run, copies, calls or 2 * copies)
        for _ in range(2):
            one()
        until = time.monotonic() + busy
        while time.monotonic() < until:
            one()
        until = time.monotonic() + busy
        times = [one() for _ in range(3 if self.device.type == "cpu" else 15)]
        while time.monotonic() < until:
            times.append(one())
        return statistics.median(times)


def ceilings(clock: Clock) -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), and operations a second of a large bfloat16 product."""
    import torch

    device = clock.device
    small = device.type == "cpu"
    a = torch.randn(2**24 if small else 2**29, device=device)
    b = torch.empty_like(a)

    def copy(_: int) -> None:
        # A kernel that reads and writes; a plain copy in a graph would be done by a copy engine.
        torch.add(a, 1.0, out=b)

    bandwidth = 2 * a.numel() * 4 / clock.median(copy, 1, calls=2)
    n = 1024 if small else 8192
    x, y = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * n**3 / clock.median(lambda _: x @ y, 1, calls=4, busy=0.0 if small else 1.0)
    return bandwidth, rate


@dataclass
class Case:
    """One shape's tensors, weights several times over."""

    n: int
    k: int
    weights: list[Any]
    scale: Any
    exact: Any
    """float64 rows of the first weight, dequantized, for the columns that are compared."""
    columns: Any
    rounded: dict[str, Any] = field(default_factory=dict)
    """float64 of the activations that were measured last, by how they were rounded; none on a CPU."""
    quantized: tuple[Any, ...] = ()
    """Those activations and their scales in groups, and by rows."""

    @property
    def copies(self) -> int:
        return len(self.weights)


def make_case(n: int, k: int, device: Any, budget: float) -> Case:
    import torch

    copies = max(2 if device.type == "cpu" else 3, int(budget // (n * k)))
    weights = []
    for _ in range(copies):
        wide = (torch.randn(n, k, device=device, dtype=torch.bfloat16) * 100).clamp(-448, 448)
        weights.append(wide.to(torch.float8_e4m3fn))
    scale = torch.rand(-(-n // 128), -(-k // 128), device=device) * 1e-3 + 1e-4
    columns = torch.linspace(0, n - 1, min(n, 2048), dtype=torch.float64).long().to(device)
    rows = weights[0].view(torch.uint8)[columns].view(torch.float8_e4m3fn).double()
    exact = rows * scale.double()[columns // 128].repeat_interleave(128, 1)[:, :k]
    return Case(n, k, weights, scale, exact, columns)


def relative(out: Any, wanted: Any) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


def measure_case(case: Case, m: int, clock: Clock, limits: tuple[float, float], args: argparse.Namespace) -> list[Row]:
    """Every way at one shape and number of rows."""
    import torch

    bandwidth, rate = limits
    x = torch.randn(m, case.k, device=clock.device, dtype=torch.bfloat16)
    seconds = case.n * case.k / bandwidth if m <= FEW else 2 * m * case.n * case.k / (2 * rate)
    busy = 0.0 if m <= FEW or clock.device.type == "cpu" else args.busy
    ways = torch_ways(case, x, args)
    theirs, word = vllm_way(case, x, args.vllm)
    sample = slice(0, min(m, 256))
    wanted = {"16": x.double()[sample] @ case.exact.t()}
    for kind, rounded in case.rounded.items():
        wanted[kind] = rounded[sample] @ case.exact.t()
    # The yardstick of each kind of operand: widen them to bfloat16 and multiply.
    yard = {}
    for kind, value in wanted.items():
        operand = x[sample] if kind == "16" else case.rounded[kind][sample].to(torch.bfloat16)
        yard[kind] = relative(operand @ case.exact.to(torch.bfloat16).t(), value)
    rows = [Row(case.n, case.k, m, "floor", seconds * 1e6, 1.0)]
    if word:
        rows.append(Row(case.n, case.k, m, word, None, None))
    for name, run, kind in [*ways, *theirs, *our_ways(case, x, sweep=args.sweep)]:
        row = Row(case.n, case.k, m, name, None, None)
        try:
            out = run(0)
            if kind in wanted:
                row.error = relative(out[sample][:, case.columns], wanted[kind])
                row.ratio = row.error / yard[kind]
            row.repeats = bool(torch.equal(out, run(0)))
            time_each = clock.median(run, case.copies, busy=busy)
            row.microseconds, row.share = time_each * 1e6, seconds / time_each
        except Exception as error:  # noqa: BLE001 - one way that this device lacks does not end the table
            row.note = str(error).splitlines()[0][:90] if str(error) else type(error).__name__
        rows.append(row)
        print(line(row), flush=True)
    return rows


def outliers(case: Case, device: Any) -> list[str]:
    """Errors with activations far outside fp16's range, with tiny ones, and with a row of zeros."""
    import torch

    from xpufp8.runtime.triton_kernels import linear

    layer = linear.Layer("block", 128, 128, quantize=False, careful=False)
    said = []
    for m in (1, 16, 64, 512):
        for title, size, spike in (("1e6 outliers", 1.0, 1e6), ("all 1e8", 1e8, None), ("all 1e-8", 1e-8, None)):
            x = torch.randn(m, case.k, device=device, dtype=torch.bfloat16) * size
            if spike:
                x[:, :: case.k // 7] = spike
            if m > 1:
                x[1] = 0
            got = linear.forward(layer, x, case.weights[0], case.scale, None)[:, case.columns]
            wanted = x.double() @ case.exact.t()
            plain = relative(x @ case.exact.to(torch.bfloat16).t(), wanted)
            said.append(f"M={m} {title}: error {relative(got, wanted):.2e}, dequantize-then-matmul {plain:.2e}")
    return said


def line(row: Row) -> str:
    """One row of text."""
    if row.microseconds is None:
        return f"  {row.way}: {row.note}".rstrip(": ")
    error = f"error {row.error:.2e} ({row.ratio:.2f}x)" if row.error is not None and row.ratio is not None else ""
    again = "" if row.repeats is not False else "  NOT REPEATABLE"
    return f"  {row.share:6.3f}  {row.microseconds:10.2f} us  {row.way:72s} {error}{again}"


def describe(device: Any) -> dict[str, str]:
    """Date, card and versions, which belong to every figure."""
    import torch

    name = platform.processor() or platform.machine() if device.type == "cpu" else getattr(torch, device.type).get_device_name()
    if device.type == "cpu":
        name = f"{name}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    facts = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "device": name, "torch": torch.__version__}
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "none"
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="torch device; the first of cuda, xpu, cpu that is there")
    parser.add_argument("--shapes", default=None, help=f"NxK,… ({SHAPES}; smaller on a CPU)")
    parser.add_argument("--rows", default=None, help="activation rows (1,16,4096; 1,16 on a CPU)")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of the Triton kernels")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the dequantizing product too")
    parser.add_argument("--vllm", type=Path, help="vllm package to take its kernel from (the installed one)")
    parser.add_argument(
        "--busy", type=float, default=0.4, help="seconds of load before and while a product of many rows is timed"
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    args = parser.parse_args()
    import torch

    kind = args.device or next((d for d in ("cuda", "xpu") if hasattr(torch, d) and getattr(torch, d).is_available()), "cpu")
    device = torch.device(kind)
    torch.manual_seed(0)
    clock = Clock(device)
    facts = describe(device)
    limits = ceilings(clock)
    facts["copy"] = f"{limits[0] / 1e12:.3f} TB/s"
    facts["bf16"] = f"{limits[1] / 1e12:.4g} TFLOP/s"
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    shapes = args.shapes or ("4096x4096,11008x4096" if kind == "cpu" else SHAPES)
    rows: list[Row] = []
    remarks: list[str] = []
    for text in shapes.split(","):
        n, k = (int(part) for part in text.split("x"))
        case = make_case(n, k, device, 1e8 if kind == "cpu" else 6e8)
        for m in (int(part) for part in (args.rows or ("1,16" if kind == "cpu" else "1,16,4096")).split(",")):
            print(f"N {n} K {k} M {m}", flush=True)
            rows += measure_case(case, m, clock, limits, args)
        if kind != "cpu" and not remarks:
            remarks = outliers(case, device)
            print("\n".join(remarks), flush=True)
        del case
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, "remarks": remarks, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
