    if (thread == 0u) {
        let before = atomicLoad(&state[0]);
        verdict = select(before, WAITING, before == 0u);
    }
    // Threads look in turn, as Mesa's llvmpipe ends all loops of a thread after 65,535 rounds.
    for (var turn = 0u; turn < TURNS; turn++) {
        if (workgroupUniformLoad(&verdict) != WAITING) { break; }
        if (thread == turn * 8u) {
            // One load in the text: drivers may take a second one for a repetition of the first.
            var looks = 0u;
            var seen = 0u;
            loop {
                if (looks >= args.looks || seen == args.number || seen == ENDED) { break; }
                $LOOK
                looks++;
            }
            if (seen == args.number) {
                verdict = 0u;
            } else if (seen == ENDED || turn == TURNS - 1u) {
                let why = select(LATE, TOLD, seen == ENDED);
                poison(why);
                verdict = why;
            }
        }
    }
    let reason = workgroupUniformLoad(&verdict);
    // Nobody may read the answer before it is there.
    storageBarrier();
