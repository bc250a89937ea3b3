"""Times mlx.core.distributed.all_sum over MLX's ring as `comm` does: rank 0's median and p99, one JSON object a line.

Arguments: f32 | bf16, milliseconds per size, sizes in bytes. Started with MLX_RANK and MLX_HOSTFILE set.
"""

import json
import sys
import time

import mlx.core as mx

kind, milliseconds, sizes = sys.argv[1], float(sys.argv[2]), [int(size) for size in sys.argv[3:]]
dtype, width = (mx.bfloat16, 2) if kind == "bf16" else (mx.float32, 4)
group = mx.distributed.init(strict=True, backend="ring")
mx.set_default_device(mx.cpu)

for size in sizes:
    data = mx.zeros((max(size // width, 1),), dtype=dtype)
    mx.eval(data)

    def call():
        start = time.perf_counter()
        mx.eval(mx.distributed.all_sum(data))
        return (time.perf_counter() - start) * 1e6

    first = sorted(call() for _ in range(5))[2]
    # All ranks must make the same number of calls: rank 0's number is summed with the others'
    # zeros.
    wish = min(max(milliseconds * 1e3 / first, 5), 2000) if group.rank() == 0 else 0
    calls = int(mx.distributed.all_sum(mx.array(float(int(wish)))).item())
    times = sorted(call() for _ in range(calls))
    if group.rank() == 0:
        at = lambda share: round(times[int((calls - 1) * share)], 3)
        row = {"bytes": size, "median_us": at(0.5), "p99_us": at(0.99), "min_us": at(0)}
        print(json.dumps(row), flush=True)
