// The steps of an exchange in Metal's own language: exchange.wgsl says what they do. Accesses to
// `SHARED` memory are those that the host sees, and that see the host's, while a kernel runs.
#include <metal_stdlib>
#pragma METAL internals : enable
using namespace metal;

#define SHARED volatile coherent(system) device
// What newer headers call thread_scope_system.
constexpr constant thread_scope SYSTEM = static_cast<thread_scope>(3);

struct Args {
    uint first, count, slot, number, looks, groups;
};
constant uint ABSENT = 0x7fc0deadu;
constant uint ENDED = 0xffffffffu;
constant uint LATE = 1u;
constant uint TOLD = 2u;
constant uint TORN = 3u;
constant uint TURNS = 128u;

inline void fence() { atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, SYSTEM); }

inline bool is_poisoned(device atomic_uint* state) {
    return atomic_load_explicit(state, memory_order_relaxed) != 0u;
}

inline void poison(uint reason, uint number, SHARED uint* outbox, device atomic_uint* state) {
    atomic_store_explicit(state, reason, memory_order_relaxed);
    outbox[0] = number;
    fence();
    outbox[1] = reason;
    fence();
}

kernel void leave(
    constant Args& args [[buffer(0)]],
    device const float4* x [[buffer(1)]],
    SHARED uint* outbox [[buffer(2)]],
    device atomic_uint* state [[buffer(3)]],
    uint thread_index [[thread_position_in_grid]]
) {
    if (is_poisoned(state)) { return; }
    for (uint i = thread_index; i < args.count; i += args.groups * 1024u) {
        uint4 words = as_type<uint4>(x[args.first + i]);
        for (uint k = 0u; k < 4u; k++) { outbox[4u * (args.slot + i) + k] = words[k]; }
    }
    fence();
}

kernel void await_answer(
    constant Args& args [[buffer(0)]],
    SHARED uint* outbox [[buffer(1)]],
    device atomic_uint* state [[buffer(2)]],
    SHARED uint* answered [[buffer(3)]],
    uint thread_index [[thread_position_in_grid]]
) {
    if (thread_index != 0u || is_poisoned(state)) { return; }
    uint seen = 0u;
    bool is_done = false;
    for (uint turn = 0u; turn < TURNS && !is_done; turn++) {
        for (uint look = 0u; look < args.looks && !is_done; look++) {
            fence();
            seen = answered[0];
            is_done = seen == args.number || seen == ENDED;
        }
    }
    if (seen != args.number) { poison(seen == ENDED ? TOLD : LATE, args.number, outbox, state); }
}

kernel void take(
    constant Args& args [[buffer(0)]],
    SHARED uint* outbox [[buffer(1)]],
    device atomic_uint* state [[buffer(2)]],
    SHARED uint* inbox [[buffer(3)]],
    device float4* to [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]
) {
    if (is_poisoned(state)) { return; }
    fence();
    bool torn = false;
    for (uint i = thread_index; i < args.count; i += args.groups * 1024u) {
        uint4 words;
        for (uint k = 0u; k < 4u; k++) {
            words[k] = inbox[4u * (args.slot + i) + k];
            torn = torn || words[k] == ABSENT;
        }
        to[args.first + i] $SETS as_type<float4>(words);
    }
    if (torn) { poison(TORN, args.number, outbox, state); }
}
