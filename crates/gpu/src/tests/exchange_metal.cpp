
// Runs the kernels above. Ends with the line of the first check that fails.
#include <cstdio>
#include <vector>

#define CHECK(what) \
    if (!(what)) { \
        std::printf("line %d: %s\n", __LINE__, #what); \
        return 1; \
    }

int main() {
    const uint groups = 2, threads = groups * 1024u;
    // More vectors than threads, from vector 3 on, in a slot of the mailboxes.
    const Args args = {3u, threads + 5u, 7u, 41u, 3u, groups};
    const uint vectors = args.count + 10u;
    std::vector<float4> x(vectors), to(vectors, float4{{1.f, 1.f, 1.f, 1.f}});
    for (uint i = 0u; i < vectors; i++) { x[i] = float4{{1.f * i, 2.f * i, 3.f * i, 0.5f}}; }
    std::vector<uint> outbox(4u * (args.slot + vectors), 9u), inbox(outbox.size(), ABSENT);
    atomic_uint state = {0u};
    uint answered = 0u;
    const auto take_all = [&] {
        for (uint i = 0u; i < threads; i++) { take(args, outbox.data(), &state, inbox.data(), to.data(), i); }
    };

    for (uint i = 0u; i < threads; i++) { leave(args, x.data(), outbox.data(), &state, i); }
    for (uint i = 0u; i < outbox.size(); i++) {
        const uint vector = i / 4u - args.slot;
        const bool is_sent = i / 4u >= args.slot && vector < args.count;
        const uint sent = is_sent ? as_type<uint4>(x[args.first + vector])[i % 4u] : 9u;
        CHECK(outbox[i] == sent);
    }

    answered = args.number;
    for (uint i = 0u; i < 32u; i++) { await_answer(args, outbox.data(), &state, &answered, i); }
    CHECK(state.value == 0u);
    for (uint i = 0u; i < 4u * args.count; i++) { inbox[4u * args.slot + i] = as_type<uint>(0.25f * i); }
    take_all();
    for (uint i = 0u; i < vectors; i++) {
        const bool is_taken = i >= args.first && i < args.first + args.count;
        for (uint k = 0u; k < 4u; k++) {
            const float sum = 0.25f * (4u * (i - args.first) + k);
            CHECK(to[i][k] == (is_taken ? ($ADDS ? 1.f + sum : sum) : 1.f));
        }
    }
    CHECK(state.value == 0u && outbox[0] == 9u);

    // An answer with a word that is not there.
    inbox[4u * args.slot + 21u] = ABSENT;
    take_all();
    CHECK(state.value == TORN && outbox[0] == args.number && outbox[1] == TORN);
    // A poisoned device does nothing.
    outbox[0] = 9u;
    answered = ENDED;
    await_answer(args, outbox.data(), &state, &answered, 0u);
    CHECK(state.value == TORN && outbox[0] == 9u);
    // Another exchange's answer, and the host's word that it gave up.
    for (const uint seen : {args.number - 1u, ENDED}) {
        state.value = 0u;
        answered = seen;
        await_answer(args, outbox.data(), &state, &answered, 0u);
        CHECK(state.value == (seen == ENDED ? TOLD : LATE) && outbox[1] == state.value);
    }
    return 0;
}
