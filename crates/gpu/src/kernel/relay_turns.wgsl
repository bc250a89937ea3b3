    // Mesa's llvmpipe ends all loops of a thread after 65,535 rounds, so threads look in turn, for
    // the last vector of the workgroup: other ranks leave it last.
    if (thread == 0u) { is_there = !alive; }
    let last = min(args.words - 1u, (id.x + 1u) * $THREADS * 3u - 1u) / 3u;
    for (var turn = 0u; turn < $THREADS / 8u; turn++) {
        if (workgroupUniformLoad(&is_there)) { break; }
        if (thread == turn * 8u) {
            var looks = 0u;
            var told = 0u;
            var has = false;
            loop {
                if (has || told == ENDED || looks >= args.looks) { break; }
                let i = last;
$SEEN
                has = $ARE_WHOLE;
                $LOOK
                looks++;
            }
            if (has || told == ENDED) { is_there = true; }
        }
    }
