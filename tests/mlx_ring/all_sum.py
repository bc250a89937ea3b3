"""An MLX program: sums over MLX's ring, checked on every rank."""

import sys
import time

import mlx.core as mx

group = mx.distributed.init(strict=True, backend="ring")
rank, size = group.rank(), group.size()
expected_size = int(sys.argv[1])
assert size == expected_size, f"{size} ranks found each other, {expected_size} were started"

for count in (1, 1000, 1 << 20):
    values = mx.arange(count, dtype=mx.float32) % 100 + rank
    total = mx.distributed.all_sum(values, group=group)
    expected = size * (mx.arange(count, dtype=mx.float32) % 100) + size * (size - 1) / 2
    assert mx.array_equal(total, expected).item(), f"rank {rank}: wrong sum of {count} values"

# Twenty sums of 8 KiB: the ring works more than once.
values = mx.ones((2048,), dtype=mx.float32)
began = time.perf_counter()
for _ in range(20):
    mx.eval(mx.distributed.all_sum(values, group=group))
mean_us = (time.perf_counter() - began) / 20 * 1e6
print(f"rank {rank} of {size}: sums are right, 8 KiB in {mean_us:.0f} us", flush=True)
