    if (atomicLoad(&state[0]) == 0u) {
        for (var i = start; i < args.count; i += stride) {
            outbox[args.slot + i] = bitcast<vec4<u32>>(x[args.first + i]);
        }
    }
