//! Bad GGUF files and the errors that they must give, and random files, which must not panic or
//! exhaust memory.

mod files;
mod format;
mod kinds;
mod mixture;
mod newer;

use thunder_testing::allocations::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
