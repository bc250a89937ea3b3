// The words of Metal that exchange.metal uses, for a C++ compiler and one thread.
#pragma once
#include <cstring>

#define kernel
#define device
#define constant const
#define coherent(scope)

namespace metal {
using uint = unsigned;
struct float4 {
    float all[4];
    float& operator[](uint k) { return all[k]; }
    void operator+=(const float4& other) {
        for (uint k = 0; k < 4; k++) { all[k] += other.all[k]; }
    }
};
struct uint4 {
    uint all[4];
    uint& operator[](uint k) { return all[k]; }
};
template <typename To, typename From> To as_type(const From& from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
enum class mem_flags { mem_device };
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_device = 2 };
struct atomic_uint {
    uint value;
};
inline uint atomic_load_explicit(const atomic_uint* of, memory_order) { return of->value; }
inline void atomic_store_explicit(atomic_uint* to, uint value, memory_order) { to->value = value; }
inline void atomic_thread_fence(mem_flags, memory_order, thread_scope) {}
}  // namespace metal
